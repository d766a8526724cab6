"""Exercises of chapter 06: where the time of a step goes, and how many tokens make it worth while.
"""

import json
import math
import statistics

from dplab.desk import course
from dplab.exercises.exercise import Calculation, Mistake
from dplab.exercises.mistakes import Slip
from dplab.exercises.trials import of_cases
from dplab.measure.split import split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

KINDS = ("computing", "exposed", "waiting", "idle")
CAUSES = ("data", "kernels", "straggler", "exposed")


def in_lane(spans, lane):
    """The spans of one lane, as (start, end)."""
    return [(span.start, span.end) for span in spans if span.lane == lane]


def seconds_of(intervals):
    return sum(end - start for start, end in intervals)


def collectives(ranks):
    """Each collective as it is on all ranks."""
    return list(zip(*([span for span in spans if span.lane == COMMUNICATION]
                      for spans in ranks), strict=True))


# --- 6.1: the time of a step, split --------------------------------------------------------------
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
    slug = "exposed-time"
    number = "6.1"
    title = "Split the time of a step"
    name = "split_time"
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


# --- 6.2: tokens between two synchronisations ----------------------------------------------------

def tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share):
    gradient_bytes = 2 * sum(parameters for parameters, _ in parts)
    all_reduce = 2 * (ranks - 1) / ranks * gradient_bytes / bandwidth
    forward = 2 * sum(parameters * uses for parameters, uses in parts) * tokens / flops
    backward = 2 * forward
    exposed = max(0.0, all_reduce - backward)  # only the last micro-batch's backward hides
    # exposed = share * (count * (forward + backward) + exposed), solved for the count
    count = exposed * (1 - share) / share / (forward + backward)
    return max(1, math.ceil(count)) * tokens


def with_exposed(exposed_of, count_of=lambda exposed, share, step: exposed * (1 - share) / share
                 / step, backward_per_forward=2.0):
    """A function with another idea of what is exposed, or of how many micro-batches that takes."""
    def attempt(parts, tokens, ranks, flops, bandwidth, share):
        all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
        forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
        backward = backward_per_forward * forward
        exposed = max(0.0, exposed_of(all_reduce, forward, backward))
        return max(1, math.ceil(count_of(exposed, share, forward + backward))) * tokens

    return attempt


def nothing_hides(all_reduce, forward, backward):
    return all_reduce


def forward_hides_too(all_reduce, forward, backward):
    return all_reduce - backward - forward


def backward_hides(all_reduce, forward, backward):
    return all_reduce - backward


def share_of_computing(exposed, share, step):
    return exposed / share / step


def share_of_backward(exposed, share, step):
    return exposed * (1 - share) / share / (2 / 3 * step)


def exposed_beside_backward(exposed, share, step):
    return exposed / share / (2 / 3 * step)


def all_reduce_beside(part_of_the_step):
    """A function that takes the ratio to a part of computing, and divides it by the share."""
    return with_exposed(nothing_hides, lambda all_reduce, share, step:
                        all_reduce / share / (part_of_the_step * step))


def part_by_part(parts, tokens, ranks, flops, bandwidth, share):
    exposed = computing = 0.0
    for parameters, uses in parts:
        all_reduce = 2 * (ranks - 1) / ranks * 2 * parameters / bandwidth
        backward = 4 * parameters * uses * tokens / flops
        exposed += max(0.0, all_reduce - backward)
        computing += 1.5 * backward
    return max(1, math.ceil(exposed * (1 - share) / share / computing)) * tokens


def mean_of_the_uses(parts, tokens, ranks, flops, bandwidth, share):
    uses = sum(each for _, each in parts) / len(parts)
    return tokens_between_syncs([(sum(each for each, _ in parts), uses)], tokens, ranks, flops,
                                bandwidth, share)


def all_reduce_in_the_step(parts, tokens, ranks, flops, bandwidth, share):
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
    exposed = max(0.0, all_reduce - 2 * forward)
    return max(1, math.ceil((exposed / share - all_reduce) / (3 * forward))) * tokens


def to_the_nearest(parts, tokens, ranks, flops, bandwidth, share):
    def count(exposed, share, step):
        return round(exposed * (1 - share) / share / step)

    return with_exposed(backward_hides, count)(parts, tokens, ranks, flops, bandwidth, share)


def rounds_down(parts, tokens, ranks, flops, bandwidth, share):
    def count(exposed, share, step):
        return math.floor(exposed * (1 - share) / share / step)

    return with_exposed(backward_hides, count)(parts, tokens, ranks, flops, bandwidth, share)


def one_more(parts, tokens, ranks, flops, bandwidth, share):
    def count(exposed, share, step):
        return math.floor(exposed * (1 - share) / share / step) + 1 + (exposed > 0)

    return with_exposed(backward_hides, count)(parts, tokens, ranks, flops, bandwidth, share)


def every_backward_hides(parts, tokens, ranks, flops, bandwidth, share):
    count = 1
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
    while True:
        exposed = max(0.0, all_reduce - count * 2 * forward)
        if exposed <= share * (3 * count * forward + exposed):
            return count * tokens
        count += 1


def counts_micro_batches(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share) // tokens


def no_whole_micro_batches(parts, tokens, ranks, flops, bandwidth, share):
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
    exposed = max(0.0, all_reduce - 2 * forward)
    return max(tokens, math.ceil(exposed * (1 - share) / share / (3 * forward) * tokens))


def half_the_bytes(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, 2 * bandwidth, share)


def forgets_the_ranks(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, 10**12, flops, bandwidth, share)


def to_every_rank(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth * 2 / ranks, share)


def four_bytes(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth / 2, share)


def bits(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth / 8, share)


def multiplies_only(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, 2 * flops, bandwidth, share)


def all_used_once(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs([(each, 1) for each, _ in parts], tokens, ranks, flops, bandwidth,
                                share)


def sends_what_it_uses(parts, tokens, ranks, flops, bandwidth, share):
    used = sum(each * uses for each, uses in parts)
    return tokens_between_syncs([(used, 1)], tokens, ranks, flops, bandwidth, share)


def without_the_unused(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs([part for part in parts if part[1] > 0], tokens, ranks, flops,
                                bandwidth, share)


def zero_where_hidden(parts, tokens, ranks, flops, bandwidth, share):
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    if all_reduce <= 4 * sum(each * uses for each, uses in parts) * tokens / flops:
        return 0
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share)


class TokensBetweenSyncs(Calculation):
    slug = "tokens-between-syncs"
    number = "6.2"
    title = "Tokens between two synchronisations"
    name = "tokens_between_syncs"
    minutes = 20
    hints = (
        "Write down three times, for one micro-batch: its forward, its backward, the all-reduce. "
        "On which of the three do more micro-batches have no influence?",
        "With k micro-batches, the step is k forwards and backwards, and what is exposed. The "
        "gradient is complete in the last backward only: how much can that one hide?",
        "exposed = max(0, all-reduce − one backward). You need the smallest whole k of 1 or more "
        "with exposed ≤ share · (k · (forward + backward) + exposed).",
    )
    solution = staticmethod(tokens_between_syncs)
    mistakes = (
        Mistake(with_exposed(nothing_hides), "You count the whole all-reduce as exposed. The last "
                "micro-batch's backward hides some of it."),
        Mistake(with_exposed(forward_hides_too), "You let forward hide communication too. While "
                "forward runs there are no gradients to send yet."),
        Mistake(every_backward_hides, "You let the backward of every micro-batch hide. The "
                "gradient is complete in the last one only, so only that one hides."),
        Mistake(with_exposed(backward_hides, backward_per_forward=1.0), "Your backward takes as "
                "long as forward. It has two products for each of forward's: one for the gradient "
                "of the weights, one for that of the input."),
        Mistake(with_exposed(backward_hides, share_of_computing), "You compare what is exposed "
                "with computing alone. The share is that of the whole step, the exposed time "
                "included."),
        Mistake(with_exposed(backward_hides, share_of_backward), "Your step has no forward. The "
                "share is that of the whole step, and each micro-batch has a forward."),
        Mistake(with_exposed(backward_hides, exposed_beside_backward), "You compare what is "
                "exposed with backward alone. The share is that of the whole step: forward and "
                "the exposed time are parts of it too."),
        *(Mistake(all_reduce_beside(part), "You compare the whole all-reduce with computing. "
                  "Asked for is only what is *exposed*, as a share of the whole step, which has "
                  "forward, backward and the exposed time.") for part in (2 / 3, 1)),
        Mistake(all_reduce_in_the_step, "Your step contains the whole all-reduce. What backward "
                "hides adds no time to the step: only the exposed part does."),
        Mistake(part_by_part, "You compare sending with backward part by part. A backward can send "
                "from its first moment on, so the backward of one part hides another's sending "
                "too: add up both first."),
        Mistake(mean_of_the_uses, "You take the mean of the uses over the parts. A part with more "
                "parameters has more operations: add up parameters times uses."),
        Mistake(to_the_nearest, "You round to the nearest number. Where that is the lower one, the "
                "share is exceeded: take the next whole number of micro-batches."),
        Mistake(rounds_down, "You round down, so the share is exceeded. Take the next whole "
                "number of micro-batches."),
        Mistake(one_more, "That is one micro-batch more than it takes."),
        Mistake(counts_micro_batches, "You return how many micro-batches it takes. Asked for are "
                "tokens: multiply by those of a micro-batch."),
        Mistake(no_whole_micro_batches, "A rank runs whole micro-batches: round up to a multiple "
                "of `tokens`."),
        Mistake(half_the_bytes, "You have half the bytes. A number of the gradient has 2 bytes, "
                "and a ring sends 2(N−1)/N times the gradient. One of these factors of 2 is "
                "missing."),
        Mistake(forgets_the_ranks, "You left out the number of ranks: a ring sends 2(N−1)/N times "
                "the gradient, which is 0 on one rank."),
        Mistake(to_every_rank, "You let each rank send its gradient to each other one. A ring "
                "sends 2(N−1)/N times the gradient."),
        *(Mistake(attempt, "You have twice the ratio of bytes to operations. A number of the "
                  "gradient has 2 bytes here, and a multiplication and an addition are two "
                  "operations.") for attempt in (four_bytes, multiplies_only)),
        Mistake(bits, "You count 8 bits for each byte. The bandwidth is in bytes a second."),
        *(Mistake(attempt, "You take bytes and operations from one count. Each parameter has one "
                  "gradient to send, and each *use* of it for a token takes two operations.")
          for attempt in (all_used_once, sends_what_it_uses)),
        Mistake(without_the_unused, "You leave out the parameters that no token multiplies. They "
                "have gradients too, which are sent."),
        Mistake(zero_where_hidden, "Where all is hidden, one micro-batch is enough, but there must "
                "be one: return its tokens, not 0."),
    )
    CASES = (
        ([(7.5e9, 1), (0.5e9, 0)], 4096, 64, 4e14, 50e9, 0.05),  # dense, with an embedding
        ([(23.5e6, 170), (2e6, 1)], 32, 16, 5e13, 1.25e9, 0.08),  # convolutions
        ([(2e9, 1), (40e9, 0.25), (0.3e9, 0)], 2048, 8, 5e14, 45e9, 0.02),  # experts
        ([(6e8, 1)], 3000, 2, 1e14, 2e10, 0.3),
        ([(8e9, 1)], 65_536, 8, 4e14, 450e9, 0.01),  # hidden
        ([(7.5e9, 1), (0.5e9, 0)], 4096, 64, 8e14, 4e11, 0.01),  # hidden by the other part
        ([(8e9, 1)], 512, 1, 4e14, 1e9, 0.01),  # one rank
    )

    def trial(self, attempt):
        return of_cases(_tokens_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_tokens_facts, self.CASES, tokens_between_syncs)


def _tokens_facts(case, answer):
    parts, tokens, ranks, flops, bandwidth, share = case
    model = " and ".join(f"{each:g} parameters used {uses:g} times" for each, uses in parts)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return {f"the tokens for {model}, micro-batches of {tokens:,}, {ranks} ranks, {flops:g} "
            f"operations/s, {bandwidth:g} bytes/s and a share of {share:g}": answer}


# --- 6.3: the capstone ---------------------------------------------------------------------------

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
    slug = "attribute-the-loss"
    number = "6.3"
    title = "Attribute the loss"
    name = "lost_gpus"
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


EXERCISES = (ExposedTime, TokensBetweenSyncs, AttributeTheLoss)
