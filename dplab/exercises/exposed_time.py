"""What each moment of a step is, on each rank, seen beside all ranks' timelines."""

from itertools import pairwise

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.measure.split import split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

# The right answer, `split_time`, stands in `dplab.measure.split`, since the drills use it too.

KINDS = ("computing", "exposed", "waiting", "idle")

# When the data is there, forward and backward end; and the optimizer's seconds. Rank 1 computes
# longest, and rank 2 is the last to come and to end, since it waits for data.
RANKS = ((0.0031, 0.0223, 0.0617, 0.0053), (0.0, 0.0332, 0.0879, 0.0071),
         (0.0418, 0.0622, 0.1034, 0.0124), (0.0022, 0.0267, 0.0714, 0.0038))

# When each bucket is ready, as a share of backward; and the seconds of its all-reduce.
BUCKETS = ((0.30, 0.0043), (0.45, 0.0092), (0.90, 0.0061), (1.00, 0.0134))

# Communication takes longer than computing, some of it goes on while a rank does nothing, and the
# last collective begins after all computing.
SLOW_LINK = [
    [Span("broadcast", COMMUNICATION, start, 0.013), Span("forward", COMPUTE, *forward),
     Span("all_reduce", COMMUNICATION, launches[0], 0.050),
     Span("all_reduce", COMMUNICATION, launches[1], 0.080), Span("backward", COMPUTE, *backward),
     Span("wait", STALLED, backward[1], 0.080), Span("optimizer", COMPUTE, 0.081, end),
     Span("all_reduce", COMMUNICATION, last, 0.112)]
    for start, forward, launches, backward, end, last in (
        (0.000, (0.002, 0.010), (0.020, 0.030), (0.014, 0.034), 0.087, 0.088),
        (0.001, (0.003, 0.012), (0.022, 0.033), (0.015, 0.037), 0.086, 0.089))]


def recordings():
    """By name: the spans of all ranks of a step."""
    steps = {f"a step on {size} rank{'s' * (size > 1)}": recording(size) for size in (1, 2, 3, 4)}
    return steps | {"a step on 2 ranks with a slow link": [list(spans) for spans in SLOW_LINK],
                    "a step on 3 ranks that note an end at different times":
                        recording(3, (0.0004, 0.0, 0.0007))}


def recording(world_size, late=(0.0,) * 4):
    """The spans of all ranks; all-reduces follow one another on the link.

    late: by rank, how long after the link is done with a collective it notes the end.
    """
    ranks, free = [[] for _ in range(world_size)], 0.0
    for share, seconds in BUCKETS:
        launches = [forward + share * (backward - forward)
                    for _, forward, backward, _ in RANKS[:world_size]]
        free = max(free, *launches) + seconds
        for spans, launch, later in zip(ranks, launches, late, strict=False):
            spans.append(Span("all_reduce", COMMUNICATION, launch, free + later, 2**20))
    for spans, (data, forward, backward, optimizer) in zip(ranks, RANKS, strict=False):
        spans += [Span("data", STALLED, 0.0, data),
                  Span("forward", COMPUTE, data, forward),
                  Span("backward", COMPUTE, forward, backward),
                  Span("wait", STALLED, backward, free),
                  Span("optimizer", COMPUTE, free + 0.001, free + 0.001 + optimizer)]
        spans.sort(key=lambda span: (span.start, span.end))
    return ranks


# Ways to count all the time of the link: two that go on at the same time once, or twice.
LINK = ("sum(end - start for start, end in pairwise(moments) if is_in(carried, start))",
        "sum(end - start for start, end in carried)")


class ExposedTime(Calculation):
    number = "6.1"
    title = "Split the time of a step"
    minutes = 25
    solution = staticmethod(split_time)

    def trial(self, attempt):
        facts = {}
        for name, ranks in recordings().items():
            split = list(attempt(ranks))
            facts[f"the number of ranks in the split of {name}"] = len(split)
            for rank, seconds in enumerate(split):
                facts |= {_fact(kind, rank, name): round(float(seconds[kind]), 9)
                          for kind in KINDS}
        return facts

    def expected(self, world_size):
        return self.trial(split_time)

    def terms(self):
        found = {f"the {kind} seconds": {} for kind in KINDS}
        for name, ranks in recordings().items():
            for rank in range(len(ranks)):
                times = times_of(rank, ranks)
                for kind in KINDS:
                    found[f"the {kind} seconds"][_fact(kind, rank, name)] = times
        return found

    hints = (
        "Rank 1 launches an all-reduce 20 ms after rank 0. What can the link carry in these 20 ms?",
        "Collect all starts and ends, and sort them. Between two neighbours nothing begins or "
        "ends, so each such piece of time is of one kind on each rank.",
        "Of each collective, take the latest launch of all ranks: from there to its earliest end "
        "the link carries it. Then ask of each piece, in this order: does the rank compute? Does "
        "the link carry a collective? Is it before the rank's own end of one it has launched?",
    )
    slips = (
        # Computing.
        Slip("You count stalled spans as computing. Only those of the lane \"compute\" are work "
             "of this rank.", {'span.lane == "compute"': 'span.lane != "communication"'}),
        Slip("You take it that a rank computes from the start of its first computing span to the "
             "end of its last one. Look at each span by itself.",
             {"is_in(computes, start)": "computes[0][0] <= start < computes[-1][1]"}),
        # What the link carries.
        Slip("You take it that the link carries a collective from this rank's launch on. Before "
             "the last rank has launched it, no sum can be complete, and nothing is carried: the "
             "rank waits for another rank.", {"is_in(carried, start)": "is_in(launched, start)"}),
        Slip("You take it that the link carries a collective from the first rank's launch on. It "
             "needs the tensors of all ranks, the last one's too.",
             {"max(call.start": "min(call.start"}),
        Slip("You tell collectives apart by name, and several have the same: only one of each "
             "name is left. On all ranks they have the same *order*.",
             {"in zip(*calls, strict=True)]":
              "in {same[0].name: same for same in zip(*calls)}.values()]"}),
        Slip("You count the last collective only. Those before it may be exposed too.",
             {"in zip(*calls, strict=True)]": "in list(zip(*calls))[-1:]]"}),
        Slip("You take it that the link works from the first collective to the end of the last "
             "one. In between there are pauses in which it carries nothing.",
             {"is_in(carried, start)": "carried[0][0] <= start < carried[-1][1]"}),
        Slip("You take it that the link carries a collective until the last rank has noted its "
             "end. It was done at the earliest of these ends: the others woke later, and wait.",
             {"min(call.end": "max(call.end"}),
        Slip("You take it that the link carries a collective until this rank has noted its end. "
             "It was done at the earliest end of all ranks: who wakes later waits meanwhile.",
             {"is_in(carried, start)": "is_in([(last, call.end) for call, (last, _) in "
                                       "zip(own, carried)], start)"}),
        # What is exposed.
        Slip("You add up what is exposed of each collective. Where two go on at the same time, "
             "that time counts once.",
             {"+= end - start": "+= (end - start) * (1 if kind != 'exposed' else "
              "sum(first <= start < last for first, last in carried))"}),
        Slip("You count all the time of the link as exposed. While the rank computes, it does not "
             "wait for the link: that time is computing.",
             {'("computing" if': '("exposed" if is_in(carried, start) else "computing" if'},
             *({"split.append(seconds)": f"link = {link}\n{idle}seconds['exposed'] = link\n"
                "split.append(seconds)"} for link in LINK for idle in (
                "", "seconds['idle'] += seconds['exposed'] - link\n",
                "seconds['idle'] = max(0, seconds['idle'] + seconds['exposed'] - link)\n"))),
        Slip("You subtract computing from communication. They neither begin nor end together: "
             "look at pieces of time, one by one.",
             {"split.append(seconds)": f"exposed = max(0, {LINK[0]} - seconds['computing'])\n"
              "seconds['idle'] += seconds['exposed'] - exposed\n"
              "seconds['exposed'] = exposed\nsplit.append(seconds)"}),
        # Waiting.
        Slip("You took the lane \"stalled\" for what is asked for as \"waiting\". A rank stalls "
             "for its data, too, which is idle time. Waiting is time in a collective while "
             "the link carries none.",
             {"(call.start, call.end) for call in own]":
              "(span.start, span.end) for span in spans if span.lane == 'stalled']"},
             {"for call in own]": "for call in own]\nlaunched += [(span.start, span.end) "
              "for span in spans if span.lane == 'stalled']"},
             {"split.append(seconds)":
              "waits = sum(span.end - span.start for span in spans if span.lane == 'stalled')\n"
              "seconds['idle'] += seconds['waiting'] - waits\n"
              "seconds['waiting'] = waits\nsplit.append(seconds)"}),
        Slip("You count as waiting all the time in which the link does not carry this rank's "
             "collective. While the rank computes, it does not wait: that time is computing.",
             {'("computing" if': '("waiting" if is_in(launched, start) and not '
              'is_in(carried, start) else "computing" if'},
             *({"+= end - start": "+= end - start\nif (kind == 'computing' and "
                "is_in(launched, start) and not is_in(carried, start)):\n"
                f"    seconds['waiting'] += end - start{rest}"}
               for rest in ("", "\n    seconds['idle'] -= end - start"))),
        Slip("You count as waiting all the time from this rank's launch to the last rank's. Where "
             "the link carries an earlier collective meanwhile, that time is exposed.",
             {'"exposed" if': '"waiting" if is_in([(call.start, last) for call, (last, _) in '
              'zip(own, carried)], start) else "exposed" if'}),
        Slip("You count as waiting all the time of the rank's collectives in which it does not "
             "compute. While the link carries one of them, that time is exposed.",
             {'"exposed" if': '"waiting" if is_in(launched, start) else "exposed" if'}),
        Slip("You count as idle the time in which a rank is in a collective that is not carried "
             "yet. That is waiting: for another rank.",
             {'"waiting" if is_in(launched, start) else "idle"': '"idle"'}),
        Slip("Your waiting ends at the earliest end that a rank noted. That is where the link is "
             "done: a rank is in the collective until its own end.",
             {"[(call.start, call.end) for call in own]":
              "[(call.start, end) for call, (_, end) in zip(own, carried)]"}),
        # The rest.
        Slip("You count all that is left over as waiting. Outside of collectives a rank is idle: "
             "it may wait for data, for instance.", {'else "idle"': 'else "waiting"'}),
        Slip("You measure each rank's step from its own first start to its own last end. The step "
             "is that of all ranks, so who begins later or ends earlier is idle meanwhile.",
             {"seconds[kind] += end - start":
              "if min(span.start for span in spans) <= start < max(span.end for span in spans):\n"
              "    seconds[kind] += end - start"}),
        Slip("You cut the time at this rank's own starts and ends. In the middle of such a piece "
             "another rank may launch a collective, and the link begins to carry it: cut where "
             "anything begins or ends on any rank.",
             {"pairwise(moments)": "pairwise(sorted({moment for span in spans for moment in "
                                   "(span.start, span.end)}))"}),
        Slip("You return the split of rank 0 for each rank. They differ.",
             {"return split": "return split[:1] * len(ranks)"}),
        Slip("You average over the ranks. Then nobody sees which rank is the slow one: return the "
             "split of each rank.",
             {"return split": "return [{kind: sum(each[kind] for each in split) / len(split) "
                              "for kind in seconds}] * len(split)"}),
        Slip("The split is right, in milliseconds. Asked for are seconds.",
             {"+= end - start": "+= 1e3 * (end - start)"}),
    )


def _fact(kind, rank, name):
    return f"the seconds {kind} of rank {rank} in {name}"


def times_of(rank, ranks):
    """Seconds of this rank, by name: of each kind, and of parts that may be taken for another."""
    calls = [[span for span in spans if span.lane == COMMUNICATION] for spans in ranks]
    carried = [Span("", "carried", max(call.start for call in same),
                    min(call.end for call in same))
               for same in zip(*calls, strict=True)]
    moments = sorted({moment for spans in ranks for span in spans
                      for moment in (span.start, span.end)})
    times = {}
    for start, end in pairwise(moments):
        lanes = [span.lane for span in ranks[rank] + carried if span.start <= start < span.end]
        computes, on_link = COMPUTE in lanes, lanes.count("carried")
        queued = lanes.count(COMMUNICATION) > on_link
        exposed = on_link > 0 and not computes
        idle = not (computes or on_link or queued)
        for name, often in {
                "computing time": computes,
                "computing time in which the link carries a collective": computes and on_link > 0,
                "computing time in a collective that the link does not carry":
                    computes and queued and not on_link,
                "exposed time": exposed,
                "exposed time in which the link carries two collectives": exposed and on_link > 1,
                "exposed time in which another collective is launched": exposed and queued,
                "waiting time": queued and not (computes or on_link),
                "idle time": idle,
                "idle time in stalled spans": idle and STALLED in lanes,
                "idle time before the rank's first span or after its last": not lanes,
                "time in stalled spans": STALLED in lanes,
                "time in collectives, added up": lanes.count(COMMUNICATION)}.items():
            times[name] = times.get(name, 0.0) + often * (end - start)
    return times
