"""Collectives on a cluster, as NCCL was measured: its choice by hand, held-out tables, links."""

import math
import statistics
from dataclasses import replace

import pytest

from dplab.predict import cluster, cost, network
from dplab.predict.catalogue import GPUS, LINKS
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.cost import Link
from dplab.predict.job import SIMULATED_STRATEGIES
from dplab.predict.network import COLLECTIVES, collective_seconds, nccl_candidates
from dplab.predict.pace import PACES
from dplab.predict.step import COMMUNICATION
from dplab.predict.transformer_config import TransformerConfig

H100 = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
A100 = Cluster(GPUS["A100"], 1, LINKS["NVLink 3"], LINKS["200 Gb/s"])
PUBLISHED = network._published()
TABLES = PUBLISHED["tables"]
MIB = 2**20


# What was measured


@pytest.mark.parametrize(("least", "most", "error", "coverage"), [
    (64 * MIB, math.inf, 0.12, 0.5), (MIB, 64 * MIB, 0.35, 0.4), (0, MIB, 1.0, 0.25)])
def test_tables_that_gave_no_rate_are_predicted(least, most, error, coverage):
    ratios, held = [], []
    for table in (table for table in TABLES if table["held_out"]):
        for nbytes, seconds in network.table_rows(table):
            if least <= nbytes <= most:
                slow, typical, fast = (collective_seconds(
                    network.table_cluster(table, pace), table["collective"], nbytes)
                    for pace in PACES)
                ratios.append(typical / seconds)
                held.append(fast <= seconds <= slow)
    assert len(ratios) >= 30 and statistics.mean(held) > coverage
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < error


def test_no_held_out_table_gives_a_rate(monkeypatch):
    def rates():
        for function in (network._training, network._ring_shares, network._switch_shares,
                         network._network_shares, network._overheads):
            function.cache_clear()
        return [collective_seconds(replace(H100.of(ranks), pace=pace), collective, 1e8)
                for ranks in (8, 64) for pace in PACES for collective in COLLECTIVES]

    before = rates()
    without = {**PUBLISHED, "tables": [table for table in TABLES if not table["held_out"]]}
    monkeypatch.setattr(network, "_published", lambda: without)
    assert rates() == before
    monkeypatch.undo()
    rates()


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_slower_pace_and_more_bytes_take_longer_and_one_rank_sends_nothing(collective, ranks):
    before = 0
    for nbytes in (0, 1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e11):
        slow, typical, fast = (collective_seconds(replace(H100.of(ranks), pace=pace), collective,
                                                  nbytes) for pace in PACES)
        assert slow > typical > fast > 0 and typical >= before
        before = typical
    assert collective_seconds(H100.of(ranks), collective, 1e9, ranks=1) == 0


# What NCCL takes, and what that costs


@pytest.mark.parametrize(("machine", "collective", "nbytes", "taken"), [
    (H100, "all-reduce", 1e4, "ring LL"), (H100, "all-reduce", 1e9, "NVLS Simple"),
    (H100.of(4), "all-reduce", 1e9, "ring Simple"),  # on 4 GPUs the switch does not add
    (H100, "all-gather", 1e9, "ring Simple"), (A100, "all-reduce", 1e9, "ring Simple"),
    (A100.of(2048), "all-reduce", 1e6, "tree LL"), (H100.of(64), "all-gather", 4e8, "ring LL128")])
def test_the_fastest_pair_is_taken(machine, collective, nbytes, taken):
    candidates = nccl_candidates(machine, collective, nbytes)
    assert collective_seconds(machine, collective, nbytes) == min(candidates.values())
    assert min(candidates, key=candidates.get) == taken
    assert {name.split()[0] for name in candidates} <= (
        {"ring"} if collective != "all-reduce" else {"ring", "tree", "NVLS"})


def test_steps_grow_with_the_ranks_of_a_ring_and_with_the_doublings_of_a_tree():
    """NCCL's 2.7 µs over the network (a tree's: 5), and at least 1 µs inside a node, under LL."""
    small, large = (nccl_candidates(H100.of(ranks), "all-reduce", 0) for ranks in (512, 1024))
    gather = [nccl_candidates(H100.of(ranks), "all-gather", 0)["ring LL"] for ranks in (512, 1024)]
    ring = (64 * 2.7 + 64 * 7 * 1.0) * 1e-6
    assert gather[1] - gather[0] == pytest.approx(ring)
    assert large["ring LL"] - small["ring LL"] == pytest.approx(2 * ring)
    outer = PUBLISHED["tuner"]["hardware"]["network"]["tree"]
    for name, micros in zip(("tree LL", "tree LL128", "tree Simple"), outer, strict=True):
        assert large[name] - small[name] == pytest.approx(2 * 1e-6 * micros)
    alone = [nccl_candidates(H100.of(8 * ranks), "all-gather", 0, ranks=ranks, local=1)["ring LL"]
             for ranks in (2, 3)]
    assert alone[1] - alone[0] == pytest.approx(1e-6 * outer[0]), "nothing inside hides a step"


@pytest.mark.parametrize(("ranks", "most"), [(8, 141e9), (16, 39e9), (24, 20.4e9), (2048, 20.4e9)])
def test_the_protocol_of_small_tensors_is_slow_for_large_ones(ranks, most):
    less, more = (nccl_candidates(H100.of(ranks), "all-gather", nbytes)["ring LL"]
                  for nbytes in (1e9, 3e9))
    assert (ranks - 1) / ranks * 2e9 / (more - less) == pytest.approx(most)


def test_the_network_is_shared_by_like_groups_and_a_tree_sends_up_and_down():
    """On two nodes once, on many nearly twice; NCCL gives a tree 0.92 of a ring's bandwidth."""
    seconds = [collective_seconds(H100.of(32), "all-gather", 1e15, ranks=4 * local, local=local)
               * 4 * local / (4 * local - 1) for local in (1, 2, 4)]
    assert seconds[0] == pytest.approx(2 * seconds[1]) == pytest.approx(4 * seconds[2])
    slow = replace(H100, nics=1)
    ring = nccl_candidates(slow.of(16), "all-reduce", 1e15)["ring Simple"]
    two, four, many = (nccl_candidates(slow.of(8 * nodes), "all-reduce", 1e15)["tree Simple"]
                       for nodes in (2, 4, 512))
    assert two == pytest.approx(ring / (2 * 15 / 16) / 0.92)
    assert four == pytest.approx(1.5 * two) and many == pytest.approx(2 * 511 / 512 * two)


# Links


def test_a_link_of_a_near_family_says_so():
    inside = ("NVLink 4: what H100, H200 reached over NVLink 4 (collectives.json)", True)
    assert network.basis(H100) == [inside] and network.basis(H100.of(16))[0] == inside
    old = replace(H100, inside=LINKS["NVLink 2"])
    for machine, said in ((old, "NVLink 2: what A100 reached over NVLink 3"),
                          (replace(H100, inside=LINKS["PCIe 5"]), "PCIe 5: what A100 reached"),
                          (replace(H100, between=LINKS["800 Gb/s"]).of(16), "800 Gb/s: what")):
        taken, measured = network.basis(machine)[-1]
        assert taken.startswith(f"Nobody measured {said}") and not measured
    assert collective_seconds(old, "all-gather", 1e9) > collective_seconds(H100, "all-gather", 1e9)
    cloud = replace(H100, between=replace(H100.between, name="EFA 400 Gb/s")).of(16)
    assert collective_seconds(cloud, "all-gather", 1e7) > 2 * collective_seconds(
        H100.of(16), "all-gather", 1e7)
    assert "over EFA or TCPX" in network.basis(cloud)[1][0]
    with pytest.raises(ValueError, match="no link like 'mine'"):
        collective_seconds(replace(H100, inside=Link("mine", 1e9)), "all-gather", 1)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ethernet_reaches_what_was_reported_of_tcp_and_says_what_is_taken(collective):
    reported = [row["bus"] / (row["nics"] * float(row["between"].split()[0]) / 8)
                for row in PUBLISHED["unsized"] if row["network"] == "TCP"]
    nodes = replace(H100, between=LINKS["25 Gb/s"], nics=1).of(64)
    for pace in PACES:
        seconds = collective_seconds(replace(nodes, pace=pace), collective, 1e12)
        bus = cost.bus_bandwidth(collective.replace("-", "_"), 64, 1e12, seconds)
        assert min(reported) < bus / nodes.between.bandwidth < max(reported)
    said, measured = network.basis(nodes)[1]
    assert not measured and "Ethernet with TCP" in said and "the overhead of EFA or TCPX" in said


# Computing beside a collective


@pytest.mark.parametrize("strategy", SIMULATED_STRATEGIES)
def test_computing_beside_a_collective_takes_longer(monkeypatch, strategy):
    slow, typical, fast = (network.computing_slowdown(replace(H100, pace=pace)) for pace in PACES)
    assert 1.1 < fast < typical < slow < 1.4 and network.computing_slowdown(H100.of(1)) == 1
    job = Job(TransformerConfig(4, 1024, 8, 4096, 512, 4096), 2, 2048, strategy)
    beside = predict(job, H100.of(64))
    longer = beside.compute_seconds
    monkeypatch.setattr(cluster, "computing_slowdown", lambda machine: 1.0)
    alone = predict(job, H100.of(64))
    assert 1.01 < longer / alone.compute_seconds < typical
    sent = sum(span.seconds for span in beside.spans if span.lane == COMMUNICATION)
    assert longer - alone.compute_seconds <= (1 - 1 / typical) * sent * (1 + 1e-9)
