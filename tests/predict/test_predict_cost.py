"""The α–β model and the catalogue, against simulated messages and published numbers."""

import math

import pytest

from dplab.predict import catalogue, cost
from dplab.predict.cost import Link
from dplab.spawn.between import calls

M = 12_000_000  # bytes


def simulated(world_size, program):
    """Runs a message-passing program in rounds of unit time: a rank sends one message and receives
    one at a time. ``program(rank)`` yields ("send", to) or ("recv", source), or both as a tuple of
    two such pairs. Returns (the rounds, the messages that each rank sends).
    """
    programs = [program(rank) for rank in range(world_size)]
    now = [next(each, None) for each in programs]
    rounds, sent = 0, [0] * world_size
    while any(step is not None for step in now):
        ready = []
        for rank, step in enumerate(now):
            for kind, peer in step or ():
                if kind == "send" and now[peer] and ("recv", rank) in now[peer]:
                    ready.append((rank, peer))
        assert ready, "deadlock"
        rounds += 1
        done = {rank: [] for rank in range(world_size)}
        for source, to in ready:
            sent[source] += 1
            done[source].append(("send", to))
            done[to].append(("recv", source))
        for rank, steps in done.items():
            if steps:
                left = tuple(step for step in now[rank] if step not in steps)
                now[rank] = left or next(programs[rank], None)
    return rounds, sent


def naive(world_size):
    def program(rank):
        for far in range(1, world_size):
            yield (("send", (rank + far) % world_size), ("recv", (rank - far) % world_size))
    return program


def tree(world_size):
    def program(rank):
        children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]
        for child in children:
            yield (("recv", child),)
        if rank:
            yield (("send", (rank - 1) // 2),)
            yield (("recv", (rank - 1) // 2),)
        for child in children:
            yield (("send", child),)
    return program


def ring(rounds):
    def make(world_size):
        def program(rank):
            for _ in range(rounds(world_size)):
                yield (("send", (rank + 1) % world_size), ("recv", (rank - 1) % world_size))
        return program
    return make


PROGRAMS = {  # the algorithm, and the part of M in each of its messages
    "naive all-reduce": (naive, lambda n: 1),
    "tree all-reduce": (tree, lambda n: 1),
    "ring all-reduce": (ring(lambda n: 2 * (n - 1)), lambda n: 1 / n),
    "ring reduce-scatter": (ring(lambda n: n - 1), lambda n: 1 / n),
    "ring all-gather": (ring(lambda n: n - 1), lambda n: 1 / n),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_messages_and_bytes_are_those_of_a_simulation(algorithm, world_size):
    make, part = PROGRAMS[algorithm]
    rounds, sent = simulated(world_size, make(world_size))
    assert cost.messages(algorithm, world_size) == rounds
    assert cost.bytes_sent(algorithm, world_size, M) == pytest.approx(
        sum(sent) * part(world_size) * M / world_size)
    link = Link("chosen", bandwidth=2e9, latency=3e-5)
    assert cost.seconds(algorithm, world_size, M, link) == pytest.approx(
        rounds * (3e-5 + part(world_size) * M / 2e9))


def test_the_usual_algorithm_is_one_for_that_collective():
    assert {each: cost.ALGORITHMS[name].collective for each, name in cost.USUAL.items()} == {
        each: each for each, _ in calls.COLLECTIVES.values()}


@pytest.mark.parametrize(("collective", "ranks", "factor"), [
    ("all_reduce", 8, 1.75), ("reduce_scatter", 8, 0.875), ("all_reduce", 64, 1.96875),
    ("all_gather", 8, 0.875), ("all_to_all", 4, 0.75),
    ("broadcast", 8, 1), ("reduce", 3, 1), ("gather", 4, 0.75),
    ("scatter", 4, 0.75),
])
def test_bus_factors_are_those_of_nccl_tests(collective, ranks, factor):
    assert cost.bus_factor(collective, ranks) == factor


def test_a_ring_without_latency_has_the_links_bus_bandwidth():
    seconds = cost.seconds("ring all-reduce", 3, M, Link("chosen", bandwidth=3e9))
    assert cost.bus_bandwidth("all_reduce", 3, M, seconds) == pytest.approx(3e9)


@pytest.mark.parametrize(("algorithm", "sent", "chain", "messages"), [
    # each of 4 ranks: by hand, in parts of M; what a rank sends on average, and the longest chain
    ("pipelined broadcast", 3 / 4, 1, 3), ("pipelined reduce", 3 / 4, 1, 3),
    ("direct gather", 3 / 16, 3 / 4, 3), ("direct scatter", 3 / 16, 3 / 4, 3),
    ("direct all-to-all", 3 / 4, 3 / 4, 3), ("tree barrier", 0, 0, 4)])
def test_other_collectives_of_four_ranks_by_hand(algorithm, sent, chain, messages):
    link = Link("chosen", bandwidth=2e9, latency=3e-5)
    assert cost.bytes_sent(algorithm, 4, M) == sent * M
    assert cost.messages(algorithm, 4) == messages
    assert cost.seconds(algorithm, 4, M, link) == pytest.approx(messages * 3e-5 + chain * M / 2e9)
    assert cost.bytes_sent(algorithm, 1, M) == cost.seconds(algorithm, 1, M, link) == 0
    assert cost.bytes_sent(algorithm, 4, 0) == 0


def test_the_whole_tensor_of_what_a_rank_hands_over():
    whole = {name: cost.whole_bytes(name, 4, 10) for name in cost.USUAL}
    parts = {"all_gather", "reduce_scatter", "gather", "scatter"}
    assert whole == {name: 40 if name in parts else 10 for name in cost.USUAL}


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: cost.bytes_sent("ring all-reduce", 0, M), ValueError, "at least 1"),
    (lambda: cost.messages("ring all-reduce", True), TypeError, "integer"),
    (lambda: cost.messages("ring all-reduce", 2.0), TypeError, "integer"),
    (lambda: cost.bytes_sent("ring all-reduce", 2, -0.5), ValueError, "0 bytes or more"),
    (lambda: cost.bytes_sent("ring all-reduce", 2, math.inf), ValueError, "0 bytes or more"),
    (lambda: cost.bytes_sent("ring all-reduce", 2, "1 MB"), TypeError, "number"),
    (lambda: cost.bytes_sent("ring all-reduce", 2, True), TypeError, "number"),
    (lambda: Link("none", 0.0), ValueError, "bandwidth above 0"),
    (lambda: Link("none", math.nan), ValueError, "bandwidth above 0"),
    (lambda: Link("none", 1.0, -1.0), ValueError, "latency is 0"),
    (lambda: Link("none", 1.0, math.inf), ValueError, "latency is 0"),
    (lambda: cost.bus_bandwidth("all_reduce", 2, M, 0), ValueError, "more than 0 s"),
    (lambda: cost.messages("ring", 2), ValueError, "ring all-reduce"),
    (lambda: cost.bus_factor("allreduce", 2), ValueError, "all_to_all"),
])
def test_what_cannot_be_is_refused_in_words(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_published_numbers_stand_in_their_units():
    links, gpus = catalogue.LINKS, catalogue.GPUS
    assert links["NVLink 4"].bandwidth == 450e9
    assert links["400 Gb/s"].bandwidth == 400e9 / 8
    assert gpus["H100"].memory_bytes == pytest.approx(85.5e9, rel=1e-3)  # 81,559 MiB
    sold = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}  # their GB have 2³⁰ bytes
    assert {name: math.ceil(gpu.memory_bytes / 2**30) for name, gpu in gpus.items()} == sold
    assert gpus["H100"].ridge_point == pytest.approx(989 / 3.35)
    assert gpus["A100"].ridge_point == pytest.approx(156)
    for entry in (*links.values(), *gpus.values()):
        assert len(entry.source) > 20, entry.name
    assert all(1e-6 < link.latency < 1e-4 for link in links.values())
