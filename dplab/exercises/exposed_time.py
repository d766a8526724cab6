"""Exercise 6.1: split the time of a step."""

import math
import statistics

from dplab.checks.exercise import Calculation, Mistake
from dplab.measure.split import split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

KINDS = ("computing", "exposed", "waiting", "idle")


def in_lane(spans, lane):
    """The spans of one lane, as (start, end)."""
    return [(span.start, span.end) for span in spans if span.lane == lane]


def seconds_of(intervals):
    return sum(end - start for start, end in intervals)


def collectives(ranks):
    """Each collective as it is on all ranks."""
    return list(zip(*([span for span in spans if span.lane == COMMUNICATION]
                      for spans in ranks), strict=True))


# The solution, `split_time`, stands in `dplab.measure.split`, since the drills use it too.

def split_with(ranks, carried, computes=lambda spans: in_lane(spans, COMPUTE)):
    """The split, where somebody thinks that the link carries (or a rank computes) in these spans.

    ``carried`` has intervals for each rank.
    """
    as_computing = [[Span("", COMPUTE, *each) for each in computes(spans)] for spans in ranks]
    split = []
    for rank, (spans, busy) in enumerate(zip(ranks, as_computing, strict=True)):
        link = [Span("", COMMUNICATION, *each) for each in carried[rank]]
        [seconds] = split_time([busy + link + whole_step(ranks)])
        waits = covered(in_lane(spans, COMMUNICATION), in_lane(busy, COMPUTE) + carried[rank])
        split.append(seconds | {"waiting": waits, "idle": seconds["idle"] - waits})
    return split


def covered(intervals, holes):
    """How long one of the intervals goes on, and none of the holes."""
    [seconds] = split_time([[Span("", COMPUTE, *each) for each in holes]
                            + [Span("", COMMUNICATION, *each) for each in intervals]])
    return seconds["exposed"]


def whole_step(ranks):
    moments = [moment for spans in ranks for span in spans for moment in (span.start, span.end)]
    return [Span("", STALLED, min(moments), max(moments))]


def under_way(ranks):
    return [(max(call.start for call in same), same[0].end) for same in collectives(ranks)]


def from_its_own_launch(ranks):
    return split_with(ranks, [in_lane(spans, COMMUNICATION) for spans in ranks])


def from_the_first_launch(ranks):
    carried = [(min(call.start for call in same), same[0].end) for same in collectives(ranks)]
    return split_with(ranks, [carried] * len(ranks))


def only_the_last_collective(ranks):
    return split_with(ranks, [under_way(ranks)[-1:]] * len(ranks))


def by_name(ranks):
    launches, ends = {}, {}
    for spans in ranks:
        for span in spans:
            if span.lane == COMMUNICATION:
                launches[span.name] = max(span.start, launches.get(span.name, 0))
                ends[span.name] = span.end
    carried = [(launches[name], ends[name]) for name in launches]
    return split_with(ranks, [carried] * len(ranks))


def in_one_piece(ranks):
    carried = under_way(ranks)
    whole = [(min(start for start, _ in carried), max(end for _, end in carried))]
    return split_with(ranks, [whole] * len(ranks))


def stalls_compute(ranks):
    def computes(spans):
        return in_lane(spans, COMPUTE) + in_lane(spans, STALLED)

    return split_with(ranks, [under_way(ranks)] * len(ranks), computes)


def computes_in_one_piece(ranks):
    def computes(spans):
        own = in_lane(spans, COMPUTE)
        return [(own[0][0], own[-1][1])]

    return split_with(ranks, [under_way(ranks)] * len(ranks), computes)


def lane_of_stalls(ranks):
    split = split_time(ranks)
    for seconds, spans in zip(split, ranks, strict=True):
        waits = seconds_of(in_lane(spans, STALLED))
        seconds["idle"] += seconds["waiting"] - waits
        seconds["waiting"] = waits
    return split


def lane_of_stalls_too(ranks):
    split = split_time(ranks)
    for seconds, spans in zip(split, ranks, strict=True):
        waits = in_lane(spans, COMMUNICATION) + in_lane(spans, STALLED)
        bare = covered(waits, in_lane(spans, COMPUTE) + under_way(ranks))
        seconds["idle"] += seconds["waiting"] - bare
        seconds["waiting"] = bare
    return split


def adds_up_exposed_parts(ranks):
    split = split_time(ranks)
    for seconds, spans in zip(split, ranks, strict=True):
        parts = [covered([each], in_lane(spans, COMPUTE)) for each in under_way(ranks)]
        seconds["exposed"] = sum(parts)
    return split


def all_of_communication(ranks):
    return with_exposed_for_all(ranks, covered(under_way(ranks), []), -math.inf)


def all_of_communication_and_no_debt(ranks):
    return with_exposed_for_all(ranks, covered(under_way(ranks), []), 0.0)


def all_collectives_added_up(ranks):
    return with_exposed_for_all(ranks, seconds_of(under_way(ranks)), -math.inf)


def all_collectives_added_up_and_no_debt(ranks):
    return with_exposed_for_all(ranks, seconds_of(under_way(ranks)), 0.0)


def all_of_communication_on_top(ranks):
    return with_exposed_for_all(ranks, covered(under_way(ranks), []), None)


def all_collectives_added_up_on_top(ranks):
    return with_exposed_for_all(ranks, seconds_of(under_way(ranks)), None)


def with_exposed_for_all(ranks, link, least):
    """The split with the same exposed seconds on all ranks; idle is what is left, or ``least``.

    ``least`` is None where somebody finds idle time by itself: then the kinds do not add up.
    """
    split = split_time(ranks)
    for seconds in split:
        if least is not None:
            seconds["idle"] = max(least, seconds["idle"] + seconds["exposed"] - link)
        seconds["exposed"] = link
    return split


def waits_while_it_computes(ranks):
    split = waits_while_it_computes_on_top(ranks)
    for seconds, right in zip(split, split_time(ranks), strict=True):
        seconds["idle"] += right["waiting"] - seconds["waiting"]
    return split


def waits_while_it_computes_on_top(ranks):
    split = split_time(ranks)
    for seconds, spans in zip(split, ranks, strict=True):
        seconds["waiting"] = covered(in_lane(spans, COMMUNICATION), under_way(ranks))
    return split


def waits_until_the_last_launch(ranks):
    split = split_time(ranks)
    for seconds, spans in zip(split, ranks, strict=True):
        until_the_last = [(own, last) for (own, _), (last, _) in zip(
            in_lane(spans, COMMUNICATION), under_way(ranks), strict=True)]
        waits = covered(until_the_last, in_lane(spans, COMPUTE))
        seconds["exposed"] += seconds["waiting"] - waits
        seconds["waiting"] = waits
    return split


def asks_for_the_link_first(ranks):
    split = split_time(ranks)
    for seconds in split:
        link = covered(under_way(ranks), [])
        seconds["computing"] -= link - seconds["exposed"]
        seconds["exposed"] = link
    return split


def subtracts_computing(ranks):
    split = split_time(ranks)
    for seconds in split:
        exposed = max(0.0, covered(under_way(ranks), []) - seconds["computing"])
        seconds["idle"] += seconds["exposed"] - exposed
        seconds["exposed"] = exposed
    return split


def hidden_for_exposed(ranks):
    split = split_time(ranks)
    for seconds in split:
        seconds["exposed"] = covered(under_way(ranks), []) - seconds["exposed"]
    return split


def no_idle_time(ranks):
    split = split_time(ranks)
    for seconds in split:
        seconds["waiting"] += seconds["idle"]
        seconds["idle"] = 0.0
    return split


def no_waiting_time(ranks):
    split = split_time(ranks)
    for seconds in split:
        seconds["idle"] += seconds["waiting"]
        seconds["waiting"] = 0.0
    return split


def own_steps(ranks):
    split = split_time(ranks)
    for seconds, spans in zip(split, ranks, strict=True):
        step = max(span.end for span in spans) - min(span.start for span in spans)
        seconds["idle"] = step - seconds["computing"] - seconds["exposed"] - seconds["waiting"]
    return split


def rank_0_for_all(ranks):
    return [split_time(ranks)[0]] * len(ranks)


def averages(ranks):
    split = split_time(ranks)
    return [{kind: statistics.mean(each[kind] for each in split) for kind in KINDS}] * len(ranks)


def milliseconds(ranks):
    return [{kind: 1e3 * seconds for kind, seconds in each.items()} for each in split_time(ranks)]


class ExposedTime(Calculation):
    number = "6.1"
    title = "Split the time of a step"
    minutes = 25
    hints = (
        "Rank 1 launches an all-reduce 20 ms after rank 0. What can the link carry in these 20 ms?",
        "Collect all starts and ends, and sort them. Between two neighbours nothing begins or "
        "ends, so each such piece of time is of one kind on each rank.",
        "Of each collective, take the latest launch of all ranks: from there to its end the link "
        "carries it. Then ask of each piece, in this order: does the rank compute? Does the link "
        "carry a collective? Is one of the rank's own collectives going on?",
    )
    solution = staticmethod(split_time)
    mistakes = (
        Mistake(from_its_own_launch, "You take it that the link carries a collective from this "
                "rank's launch on. Before the last rank has launched it, no sum can be complete, "
                "and nothing is carried: the rank waits for another rank."),
        Mistake(from_the_first_launch, "You take it that the link carries a collective from the "
                "first rank's launch on. It needs the tensors of all ranks, the last one's too."),
        Mistake(by_name, "You tell collectives apart by name, and several have the same: only one "
                "of each name is left. On all ranks they have the same *order*."),
        Mistake(only_the_last_collective, "You count the last collective only. Those before it "
                "may be exposed too."),
        Mistake(in_one_piece, "You take it that the link works from the first collective to the "
                "end of the last one. In between there are pauses in which it carries nothing."),
        Mistake(stalls_compute, "You count stalled spans as computing. Only those of the "
                'lane "compute" are work of this rank.'),
        Mistake(computes_in_one_piece, "You take it that a rank computes from the start of its "
                "first computing span to the end of its last one. Look at each span by itself."),
        *(Mistake(attempt, 'You took the lane "stalled" for what is asked for as "waiting". A rank '
                  "stalls for its data, too, which is idle time. Asked for is the time in a "
                  "collective that the link does not carry yet.")
          for attempt in (lane_of_stalls, lane_of_stalls_too)),
        Mistake(adds_up_exposed_parts, "You add up what is exposed of each collective. Where two "
                "go on at the same time, that time counts once."),
        *(Mistake(attempt, "You count all the time of the link as exposed. While the rank "
                  "computes, it does not wait for the link: that time is computing.")
          for attempt in (all_of_communication, all_of_communication_and_no_debt,
                          all_of_communication_on_top, all_collectives_added_up,
                          all_collectives_added_up_and_no_debt, all_collectives_added_up_on_top,
                          asks_for_the_link_first)),
        *(Mistake(attempt, "You count as waiting all the time in which the link does not carry "
                  "this rank's collective. While the rank computes, it does not wait: that time "
                  "is computing.")
          for attempt in (waits_while_it_computes, waits_while_it_computes_on_top)),
        Mistake(waits_until_the_last_launch, "You count as waiting all the time from this rank's "
                "launch to the last rank's. Where the link carries an earlier collective "
                "meanwhile, that time is exposed."),
        Mistake(subtracts_computing, "You subtract computing from communication. They neither "
                "begin nor end together: look at pieces of time, one by one."),
        Mistake(hidden_for_exposed, "You return what is hidden, communication while the rank "
                "computes. Exposed is the rest of it."),
        Mistake(no_idle_time, "You count all that is left over as waiting. Outside of collectives "
                "a rank is idle: it may wait for data, for instance."),
        Mistake(no_waiting_time, "You count as idle the time in which a rank is in a collective "
                "that is not carried yet. That is waiting: for another rank."),
        Mistake(own_steps, "You measure each rank's step from its own first start to its own last "
                "end. The step is that of all ranks, so who begins later or ends earlier is idle "
                "meanwhile."),
        Mistake(rank_0_for_all, "You return the split of rank 0 for each rank. They differ."),
        Mistake(averages, "You average over the ranks. Then nobody sees which rank is the slow "
                "one: return the split of each rank."),
        Mistake(milliseconds, "The split is right, in milliseconds. Asked for are seconds."),
    )

    def trial(self, attempt):
        return self._facts(attempt)

    def expected(self, world_size):
        return self._facts(split_time)

    def _facts(self, function):
        facts = {}
        for name, recording in recordings().items():
            split = list(function(recording))
            facts[f"the number of ranks in the split of {name}"] = len(split)
            for rank, seconds in enumerate(split):
                facts |= {f"the seconds {kind} of rank {rank} in {name}":
                          round(float(seconds[kind]), 9) for kind in KINDS}
        return facts

# When the data is there, forward and backward end; and the optimizer's seconds. Rank 1 computes
# longest, and rank 2 is the last to come and to end, since it waits for data.
RANKS = ((0.003, 0.022, 0.062, 0.005), (0.0, 0.033, 0.088, 0.007), (0.042, 0.062, 0.103, 0.012),
         (0.002, 0.027, 0.071, 0.004))

# When each bucket is ready, as a share of backward; and the seconds of its all-reduce.
BUCKETS = ((0.30, 0.004), (0.45, 0.009), (0.90, 0.006), (1.00, 0.013))

# Communication takes longer than computing, some of it goes on while a rank does nothing, and the
# last collective begins after all computing.
SLOW_LINK = tuple(
    (Span("broadcast", COMMUNICATION, start, 0.013), Span("forward", COMPUTE, *forward),
     Span("all_reduce", COMMUNICATION, launches[0], 0.050),
     Span("all_reduce", COMMUNICATION, launches[1], 0.080), Span("backward", COMPUTE, *backward),
     Span("wait", STALLED, backward[1], 0.080), Span("optimizer", COMPUTE, 0.081, end),
     Span("all_reduce", COMMUNICATION, last, 0.112))
    for start, forward, launches, backward, end, last in (
        (0.000, (0.002, 0.010), (0.020, 0.030), (0.014, 0.034), 0.087, 0.088),
        (0.001, (0.003, 0.012), (0.022, 0.033), (0.015, 0.037), 0.086, 0.089)))


def recordings():
    """By name: the spans of all ranks of a step."""
    steps = {f"a step on {size} rank{'s' * (size > 1)}": recording(size) for size in (1, 2, 3, 4)}
    return steps | {"a step on 2 ranks with a slow link": list(map(list, SLOW_LINK))}


def recording(world_size):
    """The spans of all ranks; all-reduces follow one another on the link."""
    ranks, free = [[] for _ in range(world_size)], 0.0
    for share, seconds in BUCKETS:
        launches = [forward + share * (backward - forward)
                    for _, forward, backward, _ in RANKS[:world_size]]
        free = max(free, *launches) + seconds
        for spans, launch in zip(ranks, launches, strict=True):
            spans.append(Span("all_reduce", COMMUNICATION, launch, free, 2**20))
    for spans, (data, forward, backward, optimizer) in zip(ranks, RANKS, strict=False):
        spans += [Span("data", STALLED, 0.0, data),
                  Span("forward", COMPUTE, data, forward),
                  Span("backward", COMPUTE, forward, backward),
                  Span("wait", STALLED, backward, free),
                  Span("optimizer", COMPUTE, free + 0.001, free + 0.001 + optimizer)]
        spans.sort(key=lambda span: (span.start, span.end))
    return ranks
