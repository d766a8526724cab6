"""The cost of collectives, against what ranks really send."""

import functools
import math

import pytest
import torch
import torch.distributed as dist

from dplab import parallel, run
from dplab.measure import CallLog
from dplab.predict import cost
from dplab.predict.cost import Link
from dplab.spawn.between import calls

REAL = {"naive all-reduce": parallel.naive_all_reduce, "tree all-reduce": parallel.tree_all_reduce,
        "ring all-reduce": parallel.ring_all_reduce,
        "ring reduce-scatter": parallel.ring_reduce_scatter,
        "ring all-gather": lambda tensor: parallel.ring_all_gather(
            tensor.tensor_split(dist.get_world_size())[dist.get_rank()].clone(), tensor)}
DIVIDES, DIVIDES_NOT = 840, 1003  # numbers, of 4 bytes each


def logged():
    """By algorithm and length, the calls of this rank."""
    found = {}
    for name, function in REAL.items():
        for length in (DIVIDES, DIVIDES_NOT):
            with CallLog() as log:
                function(torch.arange(length) * (dist.get_rank() + 1.0))
            found[name, length] = [(call.operation, call.peer, call.bytes) for call in log.calls]
    return found


@functools.cache
def calls_of(world_size):
    return run(logged, world_size, backend="gloo")


def simulated(ranks, latency, bandwidth):
    """When the last message has arrived. A rank sends one at a time and takes one at a time."""
    clock, sends = [0.0] * len(ranks), [0.0] * len(ranks)
    waiting, left = {}, [list(each) for each in ranks]
    while any(left):
        for rank, steps in enumerate(left):
            while steps:
                operation, peer, nbytes = steps[0]
                took = latency + nbytes / bandwidth
                if operation == "send":
                    start = max(clock[rank], sends[rank])
                    sends[rank] = start + took
                    waiting.setdefault((rank, peer), []).append(start)
                elif waiting.get((peer, rank)):
                    clock[rank] = max(clock[rank], waiting[peer, rank].pop(0)) + took
                else:
                    break  # it has not been sent yet
                steps.pop(0)
    return max(clock)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("algorithm", REAL)
def test_bytes_messages_and_seconds_are_those_of_real_calls(algorithm, world_size):
    for length in (DIVIDES, DIVIDES_NOT):
        ranks = [rank[algorithm, length] for rank in calls_of(world_size)]
        assert {operation for rank in ranks for operation, *_ in rank} <= {"send", "recv"}
        sent = sum(nbytes for rank in ranks for operation, _, nbytes in rank if operation == "send")
        assert cost.bytes_sent(algorithm, world_size, 4 * length) * world_size == (
            pytest.approx(sent))
    ranks = [rank[algorithm, DIVIDES] for rank in calls_of(world_size)]
    link = Link("chosen", bandwidth=2e9, latency=3e-5)
    assert cost.messages(algorithm, world_size) == simulated(ranks, 1, math.inf)
    assert cost.seconds(algorithm, world_size, 4 * DIVIDES, link) == pytest.approx(
        simulated(ranks, link.latency, link.bandwidth))


@pytest.mark.parametrize(("algorithm", "sent", "chain", "messages", "factor"), [
    # each of 4 ranks, by hand, in parts of M: sent on average, carried by the longest chain; what
    # nccl-tests multiplies by (doc/PERFORMANCE.md)
    ("ring all-reduce", 6 / 4, 6 / 4, 6, 1.5), ("ring reduce-scatter", 3 / 4, 3 / 4, 3, 0.75),
    ("ring all-gather", 3 / 4, 3 / 4, 3, 0.75),
    ("pipelined broadcast", 3 / 4, 1, 3, 1), ("pipelined reduce", 3 / 4, 1, 3, 1),
    ("direct gather", 3 / 16, 3 / 4, 3, 0.75), ("direct scatter", 3 / 16, 3 / 4, 3, 0.75),
    ("direct all-to-all", 3 / 4, 3 / 4, 3, 0.75), ("tree barrier", 0, 0, 4, 0)])
def test_the_usual_algorithms_by_hand(algorithm, sent, chain, messages, factor):
    size, link = 12_000_000, Link("chosen", bandwidth=2e9, latency=3e-5)
    seconds = messages * 3e-5 + chain * size / 2e9
    collective = cost.ALGORITHMS[algorithm].collective
    assert cost.USUAL[collective] == algorithm
    assert cost.bytes_sent(algorithm, 4, size) == sent * size
    assert cost.messages(algorithm, 4) == messages
    assert cost.seconds(algorithm, 4, size, link) == pytest.approx(seconds)
    assert cost.bytes_sent(algorithm, 1, size) == cost.seconds(algorithm, 1, size, link) == 0
    assert cost.bytes_sent(algorithm, 4, 0) == 0
    assert cost.bus_factor(collective, 4) == factor
    assert cost.bus_bandwidth(collective, 4, size, seconds) == pytest.approx(
        factor * size / seconds)
    gives_a_part = collective in ("all_gather", "reduce_scatter", "gather", "scatter")
    assert cost.whole_bytes(collective, 4, 10) == (40 if gives_a_part else 10)


def test_every_logged_collective_has_a_usual_algorithm():
    assert set(cost.USUAL) == {each for each, _ in calls.COLLECTIVES.values()}
    assert cost.messages("tree barrier", 5) == 2 * 3
    for collective in ("broadcast", "reduce"):
        assert [cost.bus_factor(collective, ranks) for ranks in (1, 2)] == [0, 1]


@pytest.mark.parametrize(("call", "says"), [
    (lambda: cost.messages("ring all-reduce", 0), "at least 1"),
    (lambda: cost.messages("ring", 2), "ring all-reduce"),
    (lambda: Link("none", 0.0), "bandwidth above 0"),
    (lambda: Link("none", 1.0, -1.0), "latency is 0")])
def test_what_cannot_be_is_refused_in_words(call, says):
    with pytest.raises(ValueError, match=says):
        call()
