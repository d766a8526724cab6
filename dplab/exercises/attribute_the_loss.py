"""What the time of lost GPUs went to, read off the spans of a step."""

import json
import statistics

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.desk import course
from dplab.measure.split import split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span


def lost_gpus(alone, ranks):
    def computes(spans):
        return sum(span.end - span.start for span in spans if span.lane == "compute")

    def waits_for_data(spans):
        return sum(span.end - span.start for span in spans
                   if span.lane == "stalled" and span.name == "data")

    computing = [computes(spans) for spans in ranks]
    data = [waits_for_data(spans) for spans in ranks]
    split = split_time(ranks)
    slowest = computing.index(max(computing))
    typical = statistics.median(computing)
    # What the slowest rank's timeline has, and that of one GPU has not.
    added = {"data": data[slowest] - waits_for_data(alone),
             "kernels": typical - computes(alone),
             "straggler": computing[slowest] - typical,
             "exposed": split[slowest]["exposed"]}
    begin = min(span.start for spans in ranks for span in spans)
    step = max(span.end for spans in ranks for span in spans) - begin
    return {cause: len(ranks) * each / step for cause, each in added.items()}


IN_WORDS = {"data": "data", "kernels": "slower kernels", "straggler": "the straggler",
            "exposed": "exposed communication"}


def job(slow, data, differ, *, bucket, kernels=0.005, straggler=0.008, late=None, layers=3):
    """A job with known faults, by arithmetic: one GPU's step, and that of all ranks.

    ``data``: each rank's wait for data. ``differ``: by rank, how much longer it computes than a
    typical one. ``kernels``, ``straggler``: what a kernel takes longer on all ranks, and on the
    slow one. ``late``: a rank that pauses, so that it launches last, by 2 ms.
    """
    def steps_of(rank):
        """The seconds of each forward and backward, on a rank or (None) on one GPU."""
        more = 0.0 if rank is None else (
            kernels + straggler * (rank == slow) + differ.get(rank, 0.0) / (2 * layers))
        return [("forward", 0.0173 + more)] * layers + [("backward", 0.0361 + more)] * layers

    def timeline(wait, kernels, pause=0.0):
        spans = [Span("data", STALLED, BEGIN, BEGIN + wait)]
        for number, (name, seconds) in enumerate(kernels, start=1):
            begin = spans[-1].end
            if pause and number == len(kernels):
                spans.append(Span("collects garbage", STALLED, begin, begin := begin + pause))
            spans.append(Span(name, COMPUTE, begin, begin + seconds))
        return spans

    own = [timeline(wait, steps_of(rank)) for rank, wait in enumerate(data)]
    if late is not None:
        pause = own[slow][-1].end - own[late][-1].end + 0.002
        own[late] = timeline(data[late], steps_of(late), pause)
    free, launches = 0.0, [[span.end for span in spans if span.name == "backward"]
                           for spans in own]
    for together in zip(*launches, strict=True):
        free = max(free, *together) + bucket
        for spans, launch in zip(own, together, strict=True):
            spans.append(Span("all_reduce", COMMUNICATION, launch, free))
    for spans, (*_, last) in zip(own, launches, strict=True):
        spans += [Span("wait", STALLED, last, free), Span("optimizer", COMPUTE, free, free + 0.012)]
    alone = timeline(0.0061, steps_of(None))
    alone.append(Span("optimizer", COMPUTE, alone[-1].end, alone[-1].end + 0.012))
    return alone, [sorted(spans, key=lambda span: (span.start, span.end)) for spans in own]


BEGIN = 7.3  # on the clock of the ranks

# By name, in each of them another rank is slow, and others differ from a typical one.
JOBS = {
    "a job on 5 GPUs": job(
        1, (0.0122, 0.0211, 0.0094, 0.0153, 0.0117), {0: -0.012, 3: 0.012}, bucket=0.0042),
    "a job on 6 GPUs with a slow link": job(
        4, (0.0321, 0.0274, 0.0352, 0.0293, 0.0212, 0.0335), {0: 0.018, 5: -0.018}, bucket=0.0193),
    "a job on 5 GPUs of which one pauses": job(
        0, (0.0281, 0.0214, 0.0163, 0.0252, 0.0236), {4: 0.015, 1: -0.015}, bucket=0.0061,
        kernels=0.0033, straggler=0.0113, late=2),
    "a job on 7 GPUs": job(
        6, (0.0174, 0.0302, 0.0223, 0.0271, 0.0335, 0.0116, 0.0257),
        {1: 0.023, 2: -0.003, 3: 0.027, 4: -0.002}, bucket=0.0117, kernels=0.007),
    "a job on 4 GPUs": job(
        2, (0.0292, 0.0181, 0.0233, 0.0304), {}, bucket=0.0084, kernels=0.0042, straggler=0.013),
    "a job on 3 GPUs": job(
        2, (0.0092, 0.0231, 0.0163), {}, bucket=0.0152, straggler=0.0095),
}

CALLS = "sum(span.end - span.start for span in {} if span.lane == 'communication')"


def in_place_of(right, *wrong):
    """The edits that put each of these there."""
    return [{right: each} for each in wrong]


class AttributeTheLoss(Calculation):
    number = "6.3"
    title = "Attribute the loss"
    minutes = 12
    tolerance = 0.06  # of each number: the committed job's times were measured
    solution = staticmethod(lost_gpus)

    def prepare(self):
        """By name, jobs as (spans of one GPU, spans of the ranks)."""
        folder = course.folder()
        if folder and (path := folder / "data" / "eight_ranks.json").exists():
            return JOBS | {"the eight ranks' job": recorded_job(path)}
        return JOBS

    def trial(self, attempt):
        facts = {}
        for name, (alone, ranks) in self.given.items():
            lost = attempt(list(alone), [list(spans) for spans in ranks])
            facts |= {_fact(cause, name): float(lost[cause]) for cause in IN_WORDS}
        return facts

    def expected(self, world_size):
        return self.trial(lost_gpus)

    def terms(self):
        found = {f"the GPUs lost by {words}": {} for words in IN_WORDS.values()}
        for name, (alone, ranks) in JOBS.items():
            times = times_of(alone, ranks)
            for cause, words in IN_WORDS.items():
                found[f"the GPUs lost by {words}"][_fact(cause, name)] = {
                    time: len(ranks) * seconds / length(ranks)
                    for time, seconds in times[cause].items()}
        return found

    hints = (
        "Lay the step of one GPU beside that of the slowest rank. Which seconds does the second "
        "one have that the first one lacks? Every one of the N GPUs loses them.",
        "Computing has two causes. What a typical rank (the median) takes longer than one GPU "
        "alone happens to all ranks. What the slowest one takes beyond that is its own.",
        "A cause with s of the S seconds of a step takes the time of N · s / S GPUs. Take data and "
        "the exposed time (your split) of the rank that computes longest: the others are "
        "done earlier, and are exposed while it still computes.",
    )
    slips = (
        Slip("You look at rank 0 only. It need not be the slow one: which rank does the step wait "
             "for?", {"computing.index(max(computing))": "0"},
             *({"computing[slowest] - typical": straggler, "split[slowest]": "split[0]"}
               for straggler in ("computing[0] - typical", "max(0, computing[0] - typical)"))),
        Slip("You take the rank that computes least for the slow one. The step waits for the rank "
             "that computes longest.", {"index(max(": "index(min("}),
        # Data.
        Slip("You count all time for data. One GPU alone waits for some of it too: only what "
             "comes on top is lost.", {" - waits_for_data(alone)": ""}),
        Slip("You took the wait for data of another rank. The step's length is that of the "
             "slowest rank's timeline: take its own wait.",
             *in_place_of("data[slowest]", "max(data)", "min(data)", "statistics.median(data)",
                          "statistics.mean(data)", "data[0]", "data[-1]")),
        Slip("You count all stalled or idle time as time for data. A rank stands still for other "
             "reasons, too: take the spans with the name \"data\".",
             {' and span.name == "data"': ""},
             {"data[slowest] - waits_for_data(alone)":
              'split[slowest]["idle"] - split_time([alone])[0]["idle"]'}),
        # Computing.
        Slip("You count all computing of a typical rank. One GPU alone computes for most of that "
             "time too: only what comes on top is lost.", {" - computes(alone)": ""}),
        Slip("Your slower kernels contain the straggler's own delay, which you count twice. What "
             "happens to all ranks shows on a typical one.",
             {"typical - computes": "computing[slowest] - computes"}),
        Slip("Slower kernels and the straggler have changed places. What happens to all ranks "
             "shows on a typical one.",
             {'"kernels"': '"moved"', '"straggler"': '"kernels"', '"moved"': '"straggler"'}),
        Slip("The ranks differ a little, and you took one of them for a typical one. The median "
             "of all is the better choice.",
             *in_place_of("statistics.median(computing)", "min(computing)", "computing[0]",
                          "computing[1]", "computing[2]", "computing[-1]",
                          "sorted(computing)[-2]")),
        Slip("You took the slowest rank for a typical one, and nothing is left for the straggler. "
             "The median is that of a typical rank.",
             {"statistics.median(computing)": "max(computing)"}),
        Slip("You took the mean of the computing times, in which the straggler itself has a part. "
             "The median is that of a typical rank.", {"statistics.median": "statistics.mean"}),
        # The straggler.
        Slip("You compare the straggler with one GPU alone. Its kernels are slower for the reason "
             "of all ranks too: compare it with a typical rank.",
             {"computing[slowest] - typical": "computing[slowest] - computes(alone)"}),
        Slip("You count all computing of the straggler. Only what it takes beyond a typical rank "
             "is its own delay.", {"[slowest] - typical": "[slowest]"}),
        Slip("You compare the straggler with the fastest rank. Ranks differ a little: a typical "
             "one (the median) is the better choice.",
             {"[slowest] - typical": "[slowest] - min(computing)"}),
        Slip("You count the straggler's delay on one GPU only. All the others wait for it "
             "meanwhile, so every GPU loses that time.",
             {"computing[slowest] - typical": "(computing[slowest] - typical) / len(ranks)"}),
        Slip("The straggler's cost is (N - 1)/N of what it should be: you left out the GPU of the "
             "straggler itself. Count all N GPUs.",
             {"computing[slowest] - typical":
              "(computing[slowest] - typical) * (len(ranks) - 1) / len(ranks)"}),
        Slip("You compare the straggler with the mean, in which it has a part. Compare it with a "
             "typical rank (the median).",
             {"[slowest] - typical": "[slowest] - statistics.mean(computing)"}),
        Slip("You took the waiting of the fast ranks for the straggler's cost. While they wait "
             "for it the link may be busy, so part of its cost looks like exposed communication. "
             "Compare computing times.",
             *in_place_of("computing[slowest] - typical", 'split[0]["waiting"]',
                          *(f'{of}(kinds["waiting"] for kinds in split)'
                            for of in ("max", "statistics.mean", "statistics.median")))),
        Slip("You took the slow rank's own waiting for the straggler's cost. It is the others "
             "that wait for it. Compare computing times.",
             {"computing[slowest] - typical": 'split[slowest]["waiting"]'}),
        # Exposed communication.
        Slip("You took the exposed time of a rank that computes faster. It is done earlier, and "
             "is exposed while the slow one still computes: you count that time twice.",
             *in_place_of('split[slowest]["exposed"]', 'split[0]["exposed"]',
                          'split[-1]["exposed"]', 'max(kinds["exposed"] for kinds in split)',
                          'statistics.median(kinds["exposed"] for kinds in split)',
                          'split[computing.index(min(computing))]["exposed"]',
                          'split[computing.index(statistics.median_low(computing))]["exposed"]')),
        Slip("You took the mean of the exposed times, and so those of ranks that compute faster. "
             "They are done earlier, and are exposed while the slow one still computes: you count "
             "that time twice.",
             {'split[slowest]["exposed"]': 'statistics.mean(kinds["exposed"] for kinds in split)'}),
        Slip("You count waiting as exposed communication. While a rank waits for another one, a "
             "faster link would help nobody.",
             *in_place_of('split[slowest]["exposed"]', *(
                 f'split[{rank}]["exposed"] + split[{rank}]["waiting"]' for rank in (0, "slowest")),
                 *(f'{of}(kinds["exposed"] + kinds["waiting"] for kinds in split)'
                   for of in ("max", "statistics.mean", "statistics.median")))),
        Slip("You count all the time in which the link works. What computing hides is computing "
             "already in the slowest rank's timeline: count it once.",
             {'split[slowest]["exposed"]': "split_time([[span for span in spans if span.lane "
              "== 'communication'] for spans in ranks])[0]['exposed']"}),
        Slip("You add up the collectives' spans. They overlap each other, computing hides some, "
             "and some is waiting.",
             *in_place_of('split[slowest]["exposed"]', CALLS.format("ranks[slowest]"),
                          CALLS.format("ranks[0]"), *(
                 f"{of}({CALLS.format('spans')} for spans in ranks)"
                 for of in ("max", "statistics.mean")))),
        # GPUs.
        Slip("You add up the time of all ranks, and count that for each of the N GPUs. Each GPU "
             "loses the slowest rank's time once.",
             {'split[slowest]["exposed"]': 'sum(kinds["exposed"] for kinds in split)'},
             *in_place_of("data[slowest] - waits_for_data(alone)", "sum(data)",
                          "sum(data) - waits_for_data(alone)",
                          "sum(data) - len(ranks) * waits_for_data(alone)")),
        Slip("The difference is the wrong way round: what the ranks take beyond one GPU, and the "
             "slow rank beyond a typical one, is lost.",
             {"data[slowest] - waits_for_data(alone)": "waits_for_data(alone) - data[slowest]"},
             {"typical - computes(alone)": "computes(alone) - typical"},
             {"computing[slowest] - typical": "typical - computing[slowest]"}),
        Slip("Your step begins at 0 on the clock. It begins with the first span of any rank.",
             {"begin = min(span.start for spans in ranks for span in spans)": "begin = 0.0"}),
        Slip("You divide by the step of one GPU. The N GPUs work for the length of *their* step, "
             "and lose a part of that.", {"for spans in ranks for span in spans)":
                                          "for span in alone)"}),
        Slip("These are seconds. Asked for is how many of the N GPUs they cost.",
             {"len(ranks) * each / step": "each"}),
        Slip("These are seconds of all N GPUs together. Asked for is how many of the GPUs they "
             "cost: divide by the seconds of the step.", {"each / step": "each"}),
        Slip("These are shares of the step. Each of the N GPUs loses that share of its time, so "
             "multiply by N.", {"len(ranks) * each": "each"}),
        Slip("These are percents of the step. Each of the N GPUs loses that share of its time: N "
             "times the share is asked for.", {"len(ranks) * each": "100 * each"}),
        Slip("These are shares of the loss, which add up to 1. Asked for are GPUs, which add up "
             "to N minus the speed-up.",
             {"len(ranks) * each / step": "each / sum(added.values())"}),
        Slip("You multiply by N - 1. All N GPUs lose that time.",
             {"len(ranks) * each": "(len(ranks) - 1) * each"}),
    )


def _fact(cause, name):
    return f"the GPUs lost by {IN_WORDS[cause]} in {name}"


def times_of(alone, ranks):
    """By cause: seconds by name, of which an answer may be the sum."""
    def seconds_of(spans, lane, *names):
        return sum(span.seconds for span in spans
                   if span.lane == lane and (not names or span.name in names))

    def by_rank(seconds, what):
        return {f"the slowest rank's {what}": seconds[slow],
                f"the mean {what} of the ranks": statistics.mean(seconds),
                f"rank 0's {what}": seconds[0], f"the last rank's {what}": seconds[-1],
                f"the longest {what}": max(seconds), f"the shortest {what}": min(seconds),
                f"the {what} of all ranks, added up": sum(seconds)}

    split = split_time(ranks)
    data = [seconds_of(spans, STALLED, "data") for spans in ranks]
    computing = [kinds["computing"] for kinds in split]
    slow = computing.index(max(computing))
    waits = {"the slowest rank's waiting": split[slow]["waiting"],
             "the mean waiting of the ranks": statistics.mean(kinds["waiting"] for kinds in split)}
    computes = {"a typical rank's computing": statistics.median(computing),
                "one GPU's computing": seconds_of(alone, COMPUTE), **waits,
                **by_rank(computing, "computing")}
    return {"data": {"one GPU's wait for data": seconds_of(alone, STALLED),
                     "all stalled time of the slowest rank": seconds_of(ranks[slow], STALLED),
                     **by_rank(data, "wait for data")},
            "kernels": computes, "straggler": computes,
            "exposed": waits | by_rank([kinds["exposed"] for kinds in split], "exposed time")}


def length(ranks):
    return max(span.end for spans in ranks for span in spans) - min(
        span.start for spans in ranks for span in spans)


def recorded_job(path):
    """The committed job's median steps, of one GPU and of eight."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    alone, together = ([[[Span(*row) for row in spans] for spans in step] for step in
                        recorded[name]] for name in ("alone", "together"))
    return sorted(alone, key=length)[len(alone) // 2][0], \
        sorted(together, key=length)[len(together) // 2]
