"""Collectives over two kinds of link: an ideal ring by hand, NCCL against what was published."""

import itertools
import json
import math
import statistics
from dataclasses import replace
from importlib import resources

import pytest

from dplab.predict import cluster, cost, network
from dplab.predict.catalogue import GPUS, LINKS
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.cost import Link
from dplab.predict.job import SIMULATED_STRATEGIES
from dplab.predict.network import collective_seconds, nccl_candidates
from dplab.predict.pace import PACES
from dplab.predict.step import COMMUNICATION, COMPUTE, Span, end_beside
from dplab.predict.transformer_config import TransformerConfig

H100 = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
MIB, GB, US = 2**20, 1e9, 1e-6


def test_what_is_no_collective_is_refused():
    with pytest.raises(ValueError, match="no pace 'hasty'"):
        replace(H100, pace="hasty")
    with pytest.raises(ValueError, match="no collective 'all_reduce'"):
        collective_seconds(H100, "all_reduce", 1)
    with pytest.raises(ValueError, match="do not fit this cluster"):
        collective_seconds(H100, "all-gather", 1, ranks=16)
    with pytest.raises(ValueError, match="no link like 'mine'"):
        collective_seconds(replace(H100, inside=Link("mine", 1e9)), "all-gather", 1)


# What was published

PUBLISHED = json.loads(resources.files("dplab.predict").joinpath("collectives.json").read_text())
TABLES = PUBLISHED["tables"]
POINTS = [{**point, "name": "point", "rows": [[point["bytes"], None, point["bus"]]]}
          for point in PUBLISHED["points"]]

def factor(table):
    return cost.bus_factor(table["collective"].replace("-", "_"),
                           table["nodes"] * table["per_node"])


def test_the_figures_of_a_row_agree_and_none_is_above_what_the_links_allow():
    """A ring's limit; an all-reduce passes it where a switch adds, or as a tree on two nodes."""
    for table in (*TABLES, *POINTS):
        sizes = [size for size, _, _ in table["rows"]]
        assert all(small < large for small, large in itertools.pairwise([0, *sizes]))
        limit = LINKS[table["inside"]].bandwidth
        if table["nodes"] > 1:
            limit = min(limit, table["nics"] * LINKS[table["between"]].bandwidth)
        added = table["collective"] == "all-reduce" and (
            table["gpu"] != "A100" or table["nodes"] == 2)
        for size, micros, bus in table["rows"]:
            assert (micros or bus) and (micros is None or micros > 0) and (bus is None or bus >= 0)
            reached = 1e9 * bus if bus else factor(table) * size / (1e-6 * micros)
            assert reached <= (2 if added else 1) * limit
            if micros and bus is not None:
                assert factor(table) * size / micros / 1e3 == pytest.approx(
                    bus, rel=0.02, abs=0.0051)


# NCCL

def errors(tables, least, most):
    """(prediction over measurement, whether slow to fast holds it), of rows of these sizes."""
    found = []
    for table in tables:
        for nbytes, seconds in network.table_rows(table):
            if least <= nbytes <= most:
                slow, typical, fast = (collective_seconds(
                    network.table_cluster(table, pace), table["collective"], nbytes)
                    for pace in PACES)
                found.append((typical / seconds, fast <= seconds <= slow))
    return found


@pytest.mark.parametrize(("least", "most", "bound", "coverage"), [
    (64 * MIB, math.inf, 0.12, 0.5), (MIB, 64 * MIB, 0.35, 0.4), (0, MIB, 1.0, 0.25)])
def test_tables_that_gave_no_rate_are_predicted(least, most, bound, coverage):
    found = errors([table for table in TABLES if table["held_out"]], least, most)
    assert len(found) >= 30
    assert statistics.median(abs(ratio - 1) for ratio, _ in found) < bound
    assert statistics.mean(held for _, held in found) > coverage


def test_no_held_out_table_gives_a_rate(monkeypatch):
    def rates():
        for function in (network._training, network._ring_shares, network._switch_shares,
                         network._network_shares, network._overheads):
            function.cache_clear()
        return [collective_seconds(replace(H100.of(ranks), pace=pace), collective, 1e8)
                for ranks in (8, 64) for pace in PACES for collective in network.COLLECTIVES]

    before = rates()
    without = {**PUBLISHED, "tables": [table for table in TABLES if not table["held_out"]]}
    monkeypatch.setattr(network, "_published", lambda: without)
    assert rates() == before
    monkeypatch.setattr(network, "_published", lambda: PUBLISHED)
    rates()


@pytest.mark.parametrize("collective", network.COLLECTIVES)
@pytest.mark.parametrize("ranks", [8, 1024])
def test_slow_takes_longer_than_typical_than_fast_and_more_bytes_take_longer(collective, ranks):
    before = 0
    for nbytes in (0, 1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e11):
        slow, typical, fast = (collective_seconds(replace(H100.of(ranks), pace=pace), collective,
                                                  nbytes) for pace in PACES)
        assert slow > typical > fast > 0 and typical >= before
        before = typical


def test_one_rank_sends_nothing():
    for collective in network.COLLECTIVES:
        assert collective_seconds(H100.of(1), collective, GB) == 0
        assert collective_seconds(H100.of(64), collective, GB, ranks=1) == 0


def taken(machine, collective, nbytes, **group):
    candidates = nccl_candidates(machine, collective, nbytes, **group)
    assert collective_seconds(machine, collective, nbytes, **group) == min(candidates.values())
    return min(candidates, key=candidates.get)


def test_nccl_takes_cheap_steps_for_small_tensors_and_the_switch_for_large_all_reduces():
    assert taken(H100, "all-reduce", 1e4) == "ring LL"
    assert taken(H100, "all-reduce", 1e9) == "NVLS Simple"
    assert taken(H100.of(4), "all-reduce", 1e9) == "ring Simple"  # on 4 GPUs it does not add
    assert taken(H100, "all-gather", 1e9) == "ring Simple"
    a100 = Cluster(GPUS["A100"], 1, LINKS["NVLink 3"], LINKS["200 Gb/s"])
    assert taken(a100, "all-reduce", 1e9) == "ring Simple"
    assert taken(a100.of(2048), "all-reduce", 1e6).startswith("tree")


def test_the_switch_adds_as_much_as_was_published():
    """8 GiB on 8 H200: a bus bandwidth of 473 GB/s, and 366 without NVLS."""
    size = 8 * 1024 * MIB
    for name, bus in (("NVLS Simple", 473.1), ("ring Simple", 365.6)):
        seconds = nccl_candidates(H100, "all-reduce", size)[name]
        assert cost.bus_bandwidth("all_reduce", 8, size, seconds) == pytest.approx(
            bus * 1e9, rel=0.03)


def test_a_gather_has_only_rings_whose_steps_grow_with_the_ranks():
    """NCCL's 2.7 µs over the network and at least 1 µs inside a node, of the protocol LL."""
    candidates = nccl_candidates(H100.of(1024), "all-gather", 0)
    assert {name.split()[0] for name in candidates} == {"ring"}
    fewer = nccl_candidates(H100.of(512), "all-gather", 0)
    assert candidates["ring LL"] - fewer["ring LL"] == pytest.approx(
        (64 * 2.7 + 64 * 7 * 1.0) * US)


@pytest.mark.parametrize(("ranks", "most"), [(8, 141e9), (16, 39e9), (24, 20.4e9), (2048, 20.4e9)])
def test_the_protocol_of_small_tensors_is_slow_for_large_ones(ranks, most):
    less, more = (nccl_candidates(H100.of(ranks), "all-gather", nbytes)["ring LL"]
                  for nbytes in (1e9, 3e9))
    assert (ranks - 1) / ranks * 2e9 / (more - less) == pytest.approx(most)


def test_like_groups_share_the_nics_of_nccl_too():
    seconds = [collective_seconds(H100.of(32), "all-gather", 1e15, ranks=4 * local, local=local)
               * 4 * local / (4 * local - 1) for local in (1, 2, 4)]
    assert seconds[0] == pytest.approx(2 * seconds[1]) == pytest.approx(4 * seconds[2])


def test_a_tree_sends_to_the_network_once_on_two_nodes_and_nearly_twice_on_many():
    """NCCL gives a tree 0.92 of a ring's bandwidth."""
    slow = replace(H100, nics=1)
    ring = nccl_candidates(slow.of(16), "all-reduce", 1e15)["ring Simple"]
    two, four, many = (nccl_candidates(slow.of(8 * nodes), "all-reduce", 1e15)["tree Simple"]
                       for nodes in (2, 4, 512))
    assert two == pytest.approx(ring / (2 * 15 / 16) / 0.92)
    assert four == pytest.approx(1.5 * two) and many == pytest.approx(2 * 511 / 512 * two)


def test_a_link_of_a_near_family_says_so():
    inside, _ = network.basis(H100.of(16))
    assert inside == "NVLink 4: what H100, H200 reached over NVLink 4 (collectives.json)"
    assert network.basis(H100) == (inside,) and not network.basis(H100.of(16), stand_ins=True)
    old = replace(H100, inside=LINKS["NVLink 2"])
    for machine, said in ((old, "NVLink 2: what A100 reached over NVLink 3"),
                          (replace(H100, inside=LINKS["PCIe 5"]), "PCIe 5: what A100 reached"),
                          (replace(H100, between=LINKS["800 Gb/s"]).of(16), "800 Gb/s: what")):
        [taken] = network.basis(machine, stand_ins=True)
        assert taken.startswith(f"Nobody measured {said}")
    assert collective_seconds(old, "all-gather", GB) > collective_seconds(H100, "all-gather", GB)
    cloud = replace(H100, between=replace(H100.between, name="EFA 400 Gb/s")).of(16)
    assert collective_seconds(cloud, "all-gather", 1e7) > 2 * collective_seconds(
        H100.of(16), "all-gather", 1e7)
    assert "over EFA or TCPX" in network.basis(cloud)[1]


@pytest.mark.parametrize("collective", network.COLLECTIVES)
def test_ethernet_reaches_what_was_reported_of_tcp_and_says_what_is_taken(collective):
    reported = [row["bus"] / (row["nics"] * float(row["between"].split()[0]) / 8)
                for row in PUBLISHED["unsized"] if row["network"] == "TCP"]
    nodes = replace(H100, between=LINKS["25 Gb/s"], nics=1).of(64)
    line = LINKS["25 Gb/s"].bandwidth
    for pace in PACES:
        seconds = collective_seconds(replace(nodes, pace=pace), collective, 1e12)
        bus = cost.bus_bandwidth(collective.replace("-", "_"), 64, 1e12, seconds)
        assert min(reported) < bus / line < max(reported)
    [said] = network.basis(nodes, stand_ins=True)
    assert "Ethernet with TCP" in said and "the overhead of EFA or TCPX" in said


# Computing beside a collective

def test_computing_beside_a_collective_takes_longer():
    slow, typical, fast = (network.computing_slowdown(replace(H100, pace=pace)) for pace in PACES)
    assert 1.1 < fast < typical < slow < 1.4
    assert network.computing_slowdown(H100.of(1)) == 1


@pytest.mark.parametrize(("seconds", "end"), [
    (1, 3), (2, 5), (3, 7), (4, 8), (4.5, 9), (7, 12)])
def test_the_end_of_computing_beside_sending(seconds, end):
    """Alone from 2 to 3, at half speed to 7, alone to 8, at half speed to 10, alone again."""
    sending = [Span("a", COMMUNICATION, 0, 1), Span("b", COMMUNICATION, 3, 7),
               Span("c", COMMUNICATION, 8, 10)]
    assert end_beside(sending, 2, seconds, 2) == end
    assert end_beside(sending, 2, seconds, 1) == 2 + seconds


@pytest.mark.parametrize("strategy", SIMULATED_STRATEGIES)
def test_a_step_of_nccl_computes_longer_where_it_sends_beside(monkeypatch, strategy):
    job = Job(TransformerConfig(4, 1024, 8, 4096, 512, 4096), 2, 2048, strategy)
    beside = predict(job, H100.of(64))
    slowdown = network.computing_slowdown(H100.of(64))
    hidden = beside.compute_seconds
    monkeypatch.setattr(cluster, "computing_slowdown", lambda machine: 1.0)
    alone = predict(job, H100.of(64))
    assert 1.01 < beside.compute_seconds / alone.compute_seconds < slowdown
    hidden -= alone.compute_seconds
    sent = sum(span.seconds for span in beside.spans if span.lane == COMMUNICATION)
    assert hidden <= (1 - 1 / slowdown) * sent * (1 + 1e-9)
    assert {span.lane for span in beside.spans} == {COMPUTE, COMMUNICATION}
