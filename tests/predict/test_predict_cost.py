"""The α–β model and the catalogue, against simulated messages and published numbers."""

import math

import pytest

from dplab.predict import catalogue, cost
from dplab.predict.cost import Link, Measurement
from dplab.spawn.between import calls

M = 12_000_000  # bytes
ALL_REDUCES = ["naive all-reduce", "tree all-reduce", "ring all-reduce"]


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13, 16])
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


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
def test_one_rank_sends_nothing_in_no_time(algorithm):
    link = Link("slow", bandwidth=1.0, latency=9.0)
    assert cost.bytes_sent(algorithm, 1, M) == 0
    assert cost.messages(algorithm, 1) == 0
    assert cost.seconds(algorithm, 1, M, link) == 0


def test_the_usual_algorithm_is_one_for_that_collective():
    assert {each: cost.ALGORITHMS[name].collective for each, name in cost.USUAL.items()} == {
        each: each for each, _ in calls.COLLECTIVES.values()}


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 1024])
def test_no_algorithm_of_ranks_that_add_beats_the_bound(world_size):
    least = 2 * (world_size - 1) / world_size * M  # Patarasuk and Yuan, 2009
    sent = {name: cost.bytes_sent(name, world_size, M) for name in ALL_REDUCES}
    assert all(each >= least * (1 - 1e-12) for each in sent.values())
    assert sent["ring all-reduce"] == pytest.approx(least)


@pytest.mark.parametrize(("collective", "ranks", "factor"), [
    ("all_reduce", 8, 1.75), ("reduce_scatter", 8, 0.875), ("all_reduce", 64, 1.96875),
    ("reduce_scatter", 64, 0.984375), ("all_gather", 8, 0.875), ("all_to_all", 4, 0.75),
    ("broadcast", 8, 1), ("reduce", 3, 1), ("all_reduce", 1, 0),
])
def test_bus_factors_are_those_of_nccl_tests(collective, ranks, factor):
    assert cost.bus_factor(collective, ranks) == factor


@pytest.mark.parametrize("algorithm", ["ring all-reduce", "ring reduce-scatter", "ring all-gather"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_ring_without_latency_has_the_links_bus_bandwidth(algorithm, world_size):
    link = Link("chosen", bandwidth=3e9)
    seconds = cost.seconds(algorithm, world_size, M, link)
    collective = cost.ALGORITHMS[algorithm].collective
    assert cost.bus_bandwidth(collective, world_size, M, seconds) == pytest.approx(3e9)
    assert cost.algorithm_bandwidth(M, seconds) == pytest.approx(M / seconds)


def test_the_fit_finds_the_link_that_made_the_times():
    link = Link("hidden", bandwidth=7e8, latency=4e-5)
    times = [Measurement(name, ranks, size, cost.seconds(name, ranks, size, link))
             for name in ALL_REDUCES for ranks in (2, 3, 4) for size in (1e3, 2e5, 3e7)]
    fitted = cost.fit_link(times)
    assert fitted.latency == pytest.approx(4e-5)
    assert fitted.bandwidth == pytest.approx(7e8)


def test_the_fit_weighs_relative_errors():
    link = Link("hidden", bandwidth=1e9, latency=1e-4)
    sizes = [1e2, 1e3, 1e6, 1e8]
    noisy = [Measurement("ring all-reduce", 4, size, cost.seconds("ring all-reduce", 4, size, link)
                         * (1.2 if size == 1e8 else 1)) for size in sizes]
    fitted = cost.fit_link(noisy)
    assert abs(fitted.latency / link.latency - 1) < 0.05, "a large tensor's noise is not all"


def test_a_fit_finds_a_link_without_latency():
    times = [Measurement("ring all-reduce", 2, size, size * 1e-9) for size in (1e3, 1e6)]
    fitted = cost.fit_link(times)
    assert fitted.latency == pytest.approx(0, abs=1e-15)
    assert fitted.bandwidth == pytest.approx(1e9)


def test_a_fit_never_gives_a_negative_latency():
    times = [Measurement("ring all-reduce", 2, size, size**1.2 / 1e9) for size in (1e3, 1e5, 1e7)]
    fitted = cost.fit_link(times)
    assert fitted.latency == 0 and fitted.bandwidth > 0


@pytest.mark.parametrize("measurements", [
    [], [Measurement("ring all-reduce", 2, 1e6, 0.1)],
    [Measurement("ring all-reduce", 2, 1e6, 0.1)] * 3,
    [Measurement("ring all-reduce", 1, size, 0.1) for size in (1e3, 1e6)],
    [Measurement("ring all-reduce", 2, size, 1 / size) for size in (1e3, 1e6)],
])
def test_a_fit_without_enough_to_go_by_is_refused(measurements):
    with pytest.raises(ValueError, match=r"fit|tell|grow"):
        cost.fit_link(measurements)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_of_no_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match="at least 1"):
        cost.bytes_sent("ring all-reduce", world_size, M)


@pytest.mark.parametrize("world_size", [True, 2.0, "2", None])
def test_a_world_size_is_an_integer(world_size):
    with pytest.raises(TypeError, match="integer"):
        cost.messages("ring all-reduce", world_size)


@pytest.mark.parametrize("size", [-1, -0.5, math.inf, math.nan])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match="0 bytes or more"):
        cost.bytes_sent("ring all-reduce", 2, size)
    with pytest.raises(ValueError, match="0 bytes or more"):
        cost.algorithm_bandwidth(size, 1.0)


@pytest.mark.parametrize("size", ["1 MB", None, True])
def test_a_size_is_a_number(size):
    with pytest.raises(TypeError, match="number"):
        cost.seconds("ring all-reduce", 2, size, catalogue.LINKS["PCIe 4"])


@pytest.mark.parametrize("link", [
    {"bandwidth": 0.0}, {"bandwidth": -1.0}, {"bandwidth": math.nan},
    {"bandwidth": 1.0, "latency": -1.0}, {"bandwidth": 1.0, "latency": math.nan},
    {"bandwidth": 1.0, "latency": math.inf},
])
def test_impossible_links_are_refused(link):
    with pytest.raises(ValueError, match=r"bandwidth above 0|latency is 0"):
        Link("impossible", **link)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_a_bandwidth_needs_a_time(seconds):
    with pytest.raises(ValueError, match="more than 0 s"):
        cost.bus_bandwidth("all_reduce", 2, M, seconds)
    with pytest.raises(ValueError, match="more than 0 s"):
        Measurement("ring all-reduce", 2, M, seconds)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="ring all-reduce"):
        cost.messages("ring", 2)
    with pytest.raises(ValueError, match="all_to_all"):
        cost.bus_factor("allreduce", 2)


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


def test_the_ledgers_example_of_a_7b_gradient():
    fp16, fp32 = 2 * 7e9, 4 * 7e9
    assert cost.bytes_sent("ring all-reduce", 8, fp16) == pytest.approx(24.5e9)
    assert cost.bytes_sent("ring all-reduce", 8, fp32) == pytest.approx(49.0e9)
    assert cost.bytes_sent("ring all-reduce", 1024, fp16) == pytest.approx(27.9727e9, rel=1e-5)
