"""Exercise 6.3: attribute the loss."""

import json
import statistics

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.desk import course
from dplab.exercises.exposed_time import whole_step
from dplab.measure.split import split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

CAUSES = ("data", "kernels", "straggler", "exposed")


def lost_gpus(alone, ranks):
    def computes(spans):
        return sum(span.end - span.start for span in spans if span.lane == "compute")

    def waits_for_data(spans):
        return sum(span.end - span.start for span in spans
                   if span.lane == "stalled" and span.name == "data")

    computing = [computes(spans) for spans in ranks]
    slowest = computing.index(max(computing))
    typical = statistics.median(computing)
    # What the slowest rank's timeline has, and that of one GPU has not.
    added = {"data": waits_for_data(ranks[slowest]) - waits_for_data(alone),
             "kernels": typical - computes(alone),
             "straggler": computing[slowest] - typical,
             "exposed": split_time(ranks)[slowest]["exposed"]}
    ends = [span.end for spans in ranks for span in spans]
    step = max(ends) - min(span.start for spans in ranks for span in spans)
    return {cause: len(ranks) * each / step for cause, each in added.items()}


def length(ranks):
    return whole_step(ranks)[0].end - whole_step(ranks)[0].start


def by_the_split(alone, ranks):
    n = len(ranks)
    split = split_time(ranks)
    [one] = split_time([alone])
    computing = [kinds["computing"] for kinds in split]
    slow = max(range(n), key=lambda rank: computing[rank])
    typical = statistics.median(computing)
    data = [sum(span.end - span.start for span in spans if span.name == "data") for spans in ranks]
    own_data = sum(span.end - span.start for span in alone if span.name == "data")
    step = sum(split[0].values())
    lost = {}
    lost["data"] = data[slow] - own_data
    lost["kernels"] = typical - one["computing"]
    lost["straggler"] = computing[slow] - typical
    lost["exposed"] = split[slow]["exposed"]
    for cause in lost:
        lost[cause] = n * lost[cause] / step
    return lost

_EXPOSED_OF_FASTER = ("You took the exposed time of a rank that computes faster. It is done "
                      "earlier, and is exposed that long because the slow one is late: that is the "
                      "straggler's cost, and you count it twice.")

_MEAN_EXPOSED = ("You took the mean of the exposed times, and so those of ranks that "
                 "compute faster. They are done earlier, and are exposed that long because the "
                 "slow one is late: that is the straggler's cost, and you count it twice.")

_AND_WAITING = ("You count waiting as exposed communication. While a rank waits for another one, a "
                "faster link would help nobody.")

# The values of the four causes in the two answers.
EXPOSED = ('split_time(ranks)[slowest]["exposed"]', 'split[slow]["exposed"]')

KERNELS = ("typical - computes(alone)", 'typical - one["computing"]')

STRAGGLER = ("computing[slowest] - typical", "computing[slow] - typical")

DATA = ("waits_for_data(ranks[slowest]) - waits_for_data(alone)", "data[slow] - own_data")


def of(places, *values):
    """Each value in place of the right one; SPLIT, SLOW and the like as the answers call them."""
    names = ({"SPLIT": "split_time(ranks)", "SLOW": "slowest", "N": "len(ranks)",
              "ONE": "computes(alone)", "OWN_DATA": "waits_for_data(alone)",
              "EVERY_DATA": "[waits_for_data(spans) for spans in ranks]"},
             {"SPLIT": "split", "SLOW": "slow", "N": "n", "ONE": 'one["computing"]',
              "OWN_DATA": "own_data", "EVERY_DATA": "data"})
    for value in values:
        for place, words in zip(places, names, strict=True):
            new = value
            for word in sorted(words, key=len, reverse=True):
                new = new.replace(word, words[word])
            yield {place: new}

LINK = ("split_time([[span for span in spans if span.lane == 'communication'] for spans in ranks])"
        "[0]['exposed']")

CALLS = "sum(span.end - span.start for span in {} if span.lane == 'communication')"

IN_GPUS, IN_LOST = "len(ranks) * each / step", "n * lost[cause] / step"

_MISTAKEN = (
    Slip("You look at rank 0 only. It need not be the slow one: which rank does the step wait "
         "for?",
         {STRAGGLER[0]: "max(0.0, computing[0] - typical)",
          EXPOSED[0]: 'split_time(ranks)[0]["exposed"]'},
         {"computing.index(max(computing))": "0"},
         {"max(range(n), key=lambda rank: computing[rank])": "0"},
         {STRAGGLER[1]: "max(0.0, computing[0] - typical)", EXPOSED[1]: 'split[0]["exposed"]'},
         {STRAGGLER[1]: "computing[0] - typical", EXPOSED[1]: 'split[0]["exposed"]'}),
    Slip("You take the rank that computes least for the slow one. The step waits for the rank "
         "that computes longest.", {"index(max(": "index(min("},
         {"max(range(n)": "min(range(n)"}),
    Slip(_EXPOSED_OF_FASTER, *of(EXPOSED,
         'SPLIT[0]["exposed"]', 'statistics.median(kinds["exposed"] for kinds in SPLIT)',
         'max(kinds["exposed"] for kinds in SPLIT)', 'SPLIT[-1]["exposed"]',
         'SPLIT[computing.index(min(computing))]["exposed"]')),
    Slip(_MEAN_EXPOSED, *of(EXPOSED,
         'statistics.mean(kinds["exposed"] for kinds in SPLIT)',
         'sum(kinds["exposed"] for kinds in SPLIT) / N')),
    Slip("You add up the exposed time of all ranks, and count that for each of the N GPUs. "
         "Each GPU loses the slowest rank's time once.", *of(EXPOSED, 'sum(kinds["exposed"] '
                                                                      'for kinds in SPLIT)')),
    Slip(_AND_WAITING, *of(EXPOSED,
         'statistics.mean(kinds["exposed"] + kinds["waiting"] for kinds in SPLIT)',
         'SPLIT[0]["exposed"] + SPLIT[0]["waiting"]',
         'max(kinds["exposed"] + kinds["waiting"] for kinds in SPLIT)',
         'statistics.median(kinds["exposed"] + kinds["waiting"] for kinds in SPLIT)')),
    Slip("You count all the time in which the link works. What computing hides is computing "
         "already in the slowest rank's timeline: count it once.", *of(EXPOSED, LINK)),
    Slip("You add up the collectives' spans. They overlap each other, computing hides some, and "
         "some is waiting.", *of(EXPOSED, f"max({CALLS.format('spans')} for spans in ranks)",
                                 CALLS.format("ranks[SLOW]"), CALLS.format("ranks[0]"),
                                 f"statistics.mean({CALLS.format('spans')} for spans in "
                                 f"ranks)")),
    Slip("You count all computing of a typical rank. One GPU alone computes for most of that "
         "time too: only what comes on top is lost.", *of(KERNELS, "typical")),
    Slip("Your slower kernels contain the straggler's own delay, which you count twice. What "
         "happens to all ranks shows on a typical one.", *of(KERNELS, "computing[SLOW] - ONE")),
    Slip("Slower kernels and the straggler have changed places. What happens to all ranks shows "
         "on a typical one.",
         {KERNELS[0]: STRAGGLER[0], STRAGGLER[0] + ",": KERNELS[0] + ","},
         {'["kernels"]': '["moved"]', '["straggler"]': '["kernels"]',
          '["moved"]': '["straggler"]'}),
    Slip("The ranks differ a little, and you took one of them for a typical one. The median of "
         "all is the better choice.",
         *({"statistics.median(computing)": value} for value in (
             "min(computing)", "computing[0]", "computing[1]", "sorted(computing)[-2]",
             "sorted(computing)[0]"))),
    Slip("You took the slowest rank for a typical one, and nothing is left for the straggler. "
         "The median is that of a typical rank.",
         {"statistics.median(computing)": "max(computing)"}),
    Slip("You took the mean of the computing times, in which the straggler itself has a part. "
         "The median is that of a typical rank.",
         {"statistics.median(computing)": "statistics.mean(computing)"},
         {"statistics.median(computing)": "sum(computing) / len(computing)"}),
    Slip("You compare the straggler with one GPU alone. Its kernels are slower for the reason "
         "of all ranks too: compare it with a typical rank.",
         *of(STRAGGLER, "computing[SLOW] - ONE")),
    Slip("You count all computing of the straggler. Only what it takes beyond a typical rank is "
         "its own delay.", *of(STRAGGLER, "computing[SLOW]")),
    Slip("You compare the straggler with the fastest rank. Ranks differ a little: a typical one "
         "(the median) is the better choice.", *of(STRAGGLER, "computing[SLOW] - "
                                                              "min(computing)")),
    Slip("You count the straggler's delay on one GPU only. All the others wait for it "
         "meanwhile, so every GPU loses that time.", *of(STRAGGLER, "(computing[SLOW] - "
                                                                    "typical) / N")),
    Slip("The straggler's cost is (N - 1)/N of what it should be: you left out the GPU of the "
         "straggler itself, or compared it with the mean, in which it has a part. Compare it "
         "with "
         "a typical rank (the median), and count all N GPUs.",
         *of(STRAGGLER, "(computing[SLOW] - typical) * (N - 1) / N",
             "computing[SLOW] - statistics.mean(computing)")),
    Slip("You took the waiting of the fast ranks for the straggler's cost. While they wait for "
         "it the link may be busy, so part of its cost looks like exposed communication. "
         "Compare computing times.", *of(STRAGGLER,
         'max(kinds["waiting"] for kinds in SPLIT)', 'SPLIT[0]["waiting"]',
         'statistics.mean(kinds["waiting"] for kinds in SPLIT)',
         'statistics.median(kinds["waiting"] for kinds in SPLIT)')),
    Slip("You took the slow rank's own waiting for the straggler's cost. It is the others that "
         "wait for it. Compare computing times.", *of(STRAGGLER, 'SPLIT[SLOW]["waiting"]')),
    Slip("You count all time for data. One GPU alone waits for some of it too: only what comes "
         "on top is lost.", *of(DATA, "EVERY_DATA[SLOW]")),
    Slip("You took the wait for data of another rank. The step's length is that of the slowest "
         "rank's timeline: take its own wait.",
         *of(DATA, "max(EVERY_DATA) - OWN_DATA", "min(EVERY_DATA) - OWN_DATA",
             "statistics.median(EVERY_DATA) - OWN_DATA", "statistics.mean(EVERY_DATA) - "
                                                         "OWN_DATA",
             "EVERY_DATA[0] - OWN_DATA", "EVERY_DATA[-1] - OWN_DATA")),
    Slip("You took the wait for data of another rank, and all of it. Take that of the slowest "
         "rank, and only what comes on top of one GPU's.",
         *of(DATA, "max(EVERY_DATA)", "EVERY_DATA[0]", "statistics.mean(EVERY_DATA)")),
    Slip("You add up the wait for data of all ranks, and count that for each of the N GPUs. "
         "Each GPU loses the slowest rank's time once.", *of(
             DATA, "sum(EVERY_DATA) - N * OWN_DATA", "sum(EVERY_DATA) - OWN_DATA",
             "sum(EVERY_DATA)")),
    Slip("You count all idle time as time for data. A rank stands still for other reasons, too: "
         "take the spans with the name \"data\".",
         *of(DATA, 'SPLIT[SLOW]["idle"] - split_time([alone])[0]["idle"]')),
    Slip("These are shares of the step. Each of the N GPUs loses that share of its time, so "
         "multiply by N.", {IN_GPUS: "each / step"}, {IN_LOST: "lost[cause] / step"}),
    Slip("You divide by the step of one GPU. The N GPUs work for the length of *their* step, "
         "and lose a part of that.",
         {"for spans in ranks for span in spans]\n    step = max(ends) - min(span.start for "
          "spans in ranks for span in spans)":
          "for span in alone]\nstep = max(ends) - min(span.start for span in alone)"},
         {"step = sum(split[0].values())": "step = sum(one.values())"}),
    Slip("These are seconds. Asked for is how many of the N GPUs they cost.",
         {IN_GPUS: "each"}, {IN_LOST: "lost[cause]"}),
    Slip("These are seconds of all N GPUs together. Asked for is how many of the GPUs they cost: "
         "divide by the seconds of the step.", {IN_GPUS: "len(ranks) * each"},
         {IN_LOST: "n * lost[cause]"}),
    Slip("These are shares of the loss, which add up to 1. Asked for are GPUs, which add up to N "
         "minus the speed-up.", {IN_GPUS: "each / sum(added.values())"},
         {"lost[cause] = n * lost[cause] / step": "pass",
          "return lost": "return {cause: each / sum(lost.values()) for cause, each in "
                         "lost.items()}"}),
    Slip("You multiply by N - 1. All N GPUs lose that time.",
         {IN_GPUS: "(len(ranks) - 1) * each / step"}, {IN_LOST: "(n - 1) * lost[cause] / step"}),
    Slip("These are percents of the step. Each of the N GPUs loses that share of its time: N "
         "times the share is asked for.", {IN_GPUS: "100 * each / step"},
         {IN_LOST: "100 * lost[cause] / step"}),
    Slip("The difference is the wrong way round: what the ranks take beyond one GPU is lost.",
         *of(KERNELS, "ONE - typical")),
    Slip("The difference is the wrong way round: what the slow rank takes beyond a typical one is "
         "lost.", *of(STRAGGLER, "typical - computing[SLOW]")),
)


class AttributeTheLoss(Calculation):
    number = "6.3"
    title = "Attribute the loss"
    minutes = 30
    tolerance = 0.06  # of each number: the committed job's times were measured
    hints = (
        "Lay the step of one GPU beside that of the slowest rank. Which seconds does the second "
        "one have that the first one lacks? Every one of the N GPUs loses them.",
        "Computing has two causes. What a typical rank (the median) takes longer than one GPU "
        "alone happens to all ranks. What the slowest one takes beyond that is its own.",
        "A cause with s of the S seconds of a step takes the time of N · s / S GPUs. Take data and "
        "the exposed time (your split) of the rank that computes longest: the others are exposed "
        "longer only because they wait for it.",
    )
    solution = staticmethod(lost_gpus)
    also_right = (by_the_split,)
    slips = _MISTAKEN

    def prepare(self):
        """By name, jobs as (spans of one GPU, spans of the ranks)."""
        jobs = {"a job on 5 GPUs": job(5, 1, bucket=0.004, data=0.012,
                                       differ={0: -0.012, 3: 0.012}),
                "a job on 6 GPUs with a slow link": job(6, 4, bucket=0.019, data=0.032,
                                                        differ={0: 0.018, 3: -0.018})}
        folder = course.folder()
        if folder and (path := folder / "data" / "eight_ranks.json").exists():
            jobs["the eight ranks' job"] = recorded_job(path)
        return jobs

    def trial(self, attempt):
        return self._facts(attempt)

    def expected(self, world_size):
        return self._facts(lost_gpus)

    def _facts(self, function):
        facts = {}
        for name, (alone, ranks) in self.given.items():
            lost = function(list(alone), [list(spans) for spans in ranks])
            facts |= {f"the GPUs lost by {_IN_WORDS[cause]} in {name}": float(lost[cause])
                      for cause in CAUSES}
        return facts

_IN_WORDS = {"data": "data", "kernels": "slower kernels", "straggler": "the straggler",
             "exposed": "exposed communication"}


def recorded_job(path):
    """The committed job's median steps, of one GPU and of eight."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    alone, together = ([[[Span(*row) for row in spans] for spans in step] for step in
                        recorded[name]] for name in ("alone", "together"))
    return sorted(alone, key=length)[len(alone) // 2][0], \
        sorted(together, key=length)[len(together) // 2]


def job(ranks, slow, *, bucket, data, differ, layers=5, forward=0.010, backward=0.022,
        optimizer=0.012):
    """A job with known faults, by arithmetic: one GPU's step, and that of all ranks.

    ``data``: seconds that the ranks but the slow one wait for data. ``differ``: by rank, how much
    longer it computes than a typical one.
    """
    kernels, straggler = 0.003, 0.005  # seconds of each kernel
    alone = [Span("data", STALLED, 0.0, 0.006)]
    own = [[Span("data", STALLED, 0.0, 0.021 if rank == slow else data)] for rank in range(ranks)]
    launches = [[] for _ in range(ranks)]
    for rank, spans in enumerate([*own, alone]):
        for name, seconds in [("forward", forward)] * layers + [("backward", backward)] * layers:
            if spans is not alone:
                seconds += kernels + straggler * (rank == slow)
                seconds += differ.get(rank, 0.0) / (2 * layers)
            spans.append(Span(name, COMPUTE, spans[-1].end, spans[-1].end + seconds))
            if name == "backward" and spans is not alone:
                launches[rank].append(spans[-1].end)
    free = 0.0
    for together in zip(*launches, strict=True):
        free = max(free, *together) + bucket
        for spans, launch in zip(own, together, strict=True):
            spans.append(Span("all_reduce", COMMUNICATION, launch, free))
    for spans in own:
        spans.append(Span("optimizer", COMPUTE, free, free + optimizer))
    alone.append(Span("optimizer", COMPUTE, alone[-1].end, alone[-1].end + optimizer))
    return alone, [sorted(spans, key=lambda span: (span.start, span.end)) for spans in own]
