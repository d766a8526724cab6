"""A step on a cluster against arithmetic by hand: its computing, its schedule, how it scales."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from dplab.predict import cluster, cost, kernels, step, traffic
from dplab.predict.catalogue import GPUS, LINKS, MATMUL_SHARE, MODELS
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.job import SIMULATED_STRATEGIES
from dplab.predict.step import COMMUNICATION, COMPUTE, Layer, end_beside
from dplab.predict.transformer_config import TransformerConfig

H100 = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
SMALL = TransformerConfig(3, 64, 4, 256, 512, 128, name="small")
POWER_OF_TWO = replace(SMALL, biases=False)


# Computing

def test_model_flops_are_six_a_parameter_and_attention():
    matrices = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # no lookup, no norms
    assert Job(MODELS["Llama-3 8B"], 2, 8192).model_flops == pytest.approx(
        2 * 8192 * (6 * matrices + 12 * 32 * 4096 * 8192))


# The schedule

A, B, ROOT = Layer(2, 4, 6, "A"), Layer(3, 5, 6, "B"), Layer(1, 2, 2, "root")


def scheduled(**options):
    spans = cluster.fsdp_spans([A, B], ROOT, gather=lambda n: n / 2, scatter=lambda n: n,
                                     optimizer_seconds=1, **options)
    found = {}
    for span in spans:
        found.setdefault(span.name, []).append((span.start, span.end))
    return found


def test_fully_sharded_by_hand():
    assert scheduled() == {
        "gather root": [(0, 1)], "gather A": [(1, 4), (14, 17)],
        "gather B": [(4, 7), (11, 14)],  # in backward while the root computes
        "forward A": [(4, 6)], "forward B": [(7, 10)], "forward root": [(10, 11)],
        "backward root": [(11, 13)], "backward B": [(14, 19)], "backward A": [(19, 23)],
        "reduce-scatter B": [(19, 25)], "reduce-scatter A": [(25, 31)],
        "reduce-scatter root": [(31, 33)], "optimizer": [(33, 34)]}


def test_without_resharding_backward_gathers_nothing():
    found = scheduled(reshard=False)
    assert found["gather A"] == [(1, 4)]
    assert (found["backward B"], found["optimizer"]) == ([(13, 18)], [(32, 33)])


def test_hybrid_sharding_reduces_shards_beside():
    found = scheduled(reduce=lambda n: n, shard_ranks=2)
    assert [found[f"all-reduce {name}"][0] for name in ("B", "A", "root")] == [
        (25, 28), (31, 34), (34, 35)]
    assert found["optimizer"] == [(35, 36)]


@pytest.mark.parametrize("seed", range(3))
def test_no_lane_does_two_things_and_nothing_starts_before_what_it_needs(seed):
    chance = random.Random(seed)
    blocks = [Layer(chance.random(), chance.random(), chance.random(), f"block {index}")
              for index in range(chance.randrange(1, 9))]
    spans = cluster.fsdp_spans(blocks, ROOT, gather=lambda n: n, scatter=lambda n: 2 * n)
    for lane in (COMPUTE, COMMUNICATION):
        for before, after in itertools.pairwise([span for span in spans if span.lane == lane]):
            assert before.end <= after.start
    for name in (layer.name for layer in blocks):
        gathers = [span for span in spans if span.name == f"gather {name}"]
        for gather, pass_ in zip(gathers, ("forward", "backward"), strict=True):
            compute = next(span for span in spans if span.name == f"{pass_} {name}")
            assert gather.end <= compute.start
            begun = [span for span in spans if span.name.startswith(f"{pass_} block")
                     and gather.start < span.start < compute.start]
            assert len(begun) <= 1, "gathered further ahead than there is room"
        assert compute.end <= next(span for span in spans
                                   if span.name == f"reduce-scatter {name}").start


def sent(prediction):
    """Bytes by the timeline's collectives, each by `cost`."""
    job, ranks = prediction.job, prediction.cluster.ranks
    shards = {"FSDP": ranks, "HSDP": 8, "DDP": 1}[job.strategy]
    kinds = {"gather": ("ring all-gather", shards), "reduce-scatter": (
        "ring reduce-scatter", shards), "all-reduce": ("ring all-reduce", ranks // shards)}
    return sum(cost.bytes_sent(*kinds[span.name.split()[0]], span.nbytes)
               for span in prediction.spans if span.lane == COMMUNICATION)


@pytest.mark.parametrize("ranks", [8, 32])
def test_a_step_sends_the_bytes_that_traffic_says(ranks):
    units, machine = POWER_OF_TWO.units, H100.of(ranks)
    job = Job(POWER_OF_TWO, 1, 128, gradient_bytes=4)
    options = {"parameter_bytes": 2, "gradient_bytes": 4}
    assert sent(predict(job, machine)) == pytest.approx(
        traffic.bytes_per_step("fully_shard", ranks, units, **options))
    assert sent(predict(replace(job, reshard=False), machine)) == pytest.approx(
        traffic.bytes_per_step("fully_shard, reshard_after_forward=False", ranks, units, **options))
    assert sent(predict(replace(job, strategy="DDP"), machine)) == pytest.approx(
        traffic.bytes_per_step("DDP", ranks, units, **options))
    # traffic's HSDP gathers the root a second time
    root = cost.bytes_sent("ring all-gather", 8, 2 * sum(map(math.prod, units[-1])))
    assert sent(predict(replace(job, strategy="HSDP"), machine)) == pytest.approx(
        traffic.bytes_per_step("HSDP", ranks, units, shard_ranks=8, **options) - root)


def test_ddp_on_one_node_is_the_timeline_of_step():
    job = Job(SMALL, 4, 128, "DDP", bucket_bytes=1e9)  # a block is in one piece
    blocks, root = kernels.unit_costs(job, H100)
    layers = [Layer(0, 0, root.gradient_bytes), *blocks, replace(root, gradient_bytes=0)]
    spans = step.ddp_spans(
        layers, 8, lambda nbytes: cluster.collective_seconds(H100, "all-reduce", nbytes),
        bucket_bytes=1e9, slowdown=cluster.computing_slowdown(H100))
    optimizer = kernels.optimizer_seconds(SMALL.parameters, H100.gpu, nbytes=2 * 12 + 2 + 2)
    assert predict(job, H100).seconds == pytest.approx(step.step_seconds(spans) + optimizer)


@pytest.mark.parametrize(("strategy", "ranks"), [("DDP", 1), ("FSDP", 32), ("HSDP", 8)])
def test_the_optimizer_works_on_what_a_rank_holds(strategy, ranks):
    last = predict(Job(SMALL, 1, 128, strategy, optimizer_bytes=8), H100.of(32)).spans[-1]
    assert last.name == "optimizer" and last.seconds == pytest.approx(kernels.optimizer_seconds(
        SMALL.parameters / ranks, H100.gpu, nbytes=8 + 8 + 4))


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_head_has_its_gradient_first_and_the_embedding_last(tied):
    model = replace(SMALL, tied=tied, learned_positions=False)
    spans = predict(Job(model, 1, 128, "DDP", bucket_bytes=2 * SMALL.block_parameters), H100).spans
    sends = [span for span in spans if span.lane == COMMUNICATION]
    backward = {span.name: span for span in spans if span.name.startswith("backward")}
    first_ready = backward["backward block 2"].end
    assert sends[0].start == pytest.approx(first_ready)
    # the first bucket takes block 2, and before it the head where that has gradients of its own
    head = 0 if tied else 2 * 512 * 64
    assert sends[0].nbytes == 2 * SMALL.block_parameters + head
    assert sum(send.nbytes for send in sends) == 2 * model.parameters


def test_the_groups_of_hybrid_sharding():
    """A group of shards is a node, a group of copies takes the first, second, … of each."""
    machine = H100.of(16)
    spans = predict(Job(SMALL, 1, 128, "HSDP"), machine).spans
    found = {span.name: span for span in spans}
    block = 2 * SMALL.block_parameters
    assert found["gather block 1"].seconds == pytest.approx(
        cluster.collective_seconds(machine, "all-gather", block, ranks=8, local=8))
    reduce = found["all-reduce block 1"]
    assert reduce.nbytes == block / 8 and reduce.seconds == pytest.approx(
        cluster.collective_seconds(machine, "all-reduce", block / 8, ranks=2, local=1))
    alone = predict(Job(SMALL, 1, 128, "HSDP"), H100).spans
    assert not any(span.name.startswith("all-reduce") for span in alone)


def test_ddp_pieces_neither_lose_time_nor_bytes(monkeypatch):
    model = MODELS["GPT-2 XL"]
    job = Job(model, 1, 1024, "DDP")
    monkeypatch.setattr(cluster, "computing_slowdown", lambda machine: 1.0)
    machine = cluster.without(H100, "latency").of(64)
    prediction = predict(job, machine)
    whole = predict(replace(job, bucket_bytes=1e12), machine)
    assert prediction.compute_seconds == pytest.approx(whole.compute_seconds)
    sends = [span.nbytes for span in prediction.spans if span.lane == COMMUNICATION]
    assert sum(sends) == pytest.approx(2 * model.parameters)
    assert max(sends) <= 2 * 25 * 2**20
    assert prediction.seconds < whole.seconds, "a single bucket hides nothing"


def test_what_is_no_job_or_cluster_is_refused_and_a_part_of_a_node_grows_within_it():
    for change in ({"parameter_bytes": 0}, {"bucket_bytes": 0}, {"strategy": "ZeRO-9"},
                   {"attention": "flash"}):
        with pytest.raises(ValueError, match=[*change][-1].split("_")[0]):
            replace(Job(SMALL, 1, 128), **change)
    with pytest.raises(ValueError, match="bf16_flops"):
        replace(GPUS["H100"], bf16_flops=0)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8"):
        H100.of(12)
    for ranks, nodes in ((8, 1), (16, 2)):
        assert (H100.of(3).of(ranks).nodes, H100.of(3).of(ranks).per_node) == (nodes, 8)


# Predictions

def test_a_step_that_only_computes_has_the_mfu_of_its_kernels():
    alone = H100.of(1)
    job = Job(MODELS["Llama-3 8B"], 1, 8192)
    blocks, root = kernels.unit_costs(job, alone)
    computing = sum(each.forward_seconds + each.backward_seconds for each in [*blocks, root])
    prediction = predict(job, alone)
    optimizer = prediction.spans[-1].seconds
    assert prediction.seconds == pytest.approx(computing + optimizer)
    assert prediction.exposed_seconds == pytest.approx(0)
    assert prediction.mfu == pytest.approx(job.model_flops / (computing + optimizer) / 989e12)
    assert prediction.mfu < MATMUL_SHARE["H100"]
    assert prediction.tokens_per_second == pytest.approx(8192 / prediction.seconds)


@pytest.mark.parametrize(("change", "ranks", "bound"), [
    ({"between": replace(LINKS["400 Gb/s"], bandwidth=1e8)}, 16, "bandwidth between nodes"),
    ({"inside": replace(LINKS["NVLink 4"], bandwidth=1e8)}, 8, "bandwidth inside nodes"),
    ({"between": replace(LINKS["400 Gb/s"], latency=1e-2)}, 4096, "latency"),
    ({"gpu": replace(GPUS["H100"], memory_bandwidth=1e10)}, 8, "memory bandwidth"),
    ({}, 8, "arithmetic")])
def test_the_bound_is_what_was_made_slow(change, ranks, bound):
    prediction = predict(Job(MODELS["Llama-3 8B"], 2, 8192), replace(H100, **change).of(ranks))
    assert prediction.bound == bound


# Scaling

def test_where_adding_ranks_stops_paying():
    curve = [(8, 80.0), (16, 152.0), (32, 240.0), (64, 360.0), (128, 340.0)]
    # each rank of 16 → 32 brings 5.5 of 10, of 32 → 64 only 3.75
    assert cluster.stops_paying(curve) == 32
    assert cluster.stops_paying(curve[:3]) is None
    # A step that does not pay, here from one node to two, is no end where later ones pay.
    curve = [(8, 80.0), (16, 104.0), (32, 200.0), (64, 232.0)]
    assert [cluster.stops_paying(curve[:points]) for points in (2, 3, 4)] == [8, None, 32]


@pytest.mark.parametrize("strategy", SIMULATED_STRATEGIES)
def test_many_ranks_are_as_many_spans_as_few(strategy):
    job = Job(MODELS["Llama-3.1 405B"], 1, 8192, strategy)
    few, many = predict(job, H100.of(1024)), predict(job, H100.of(100_000))
    assert len(few.spans) == len(many.spans) and 0 < many.mfu < few.mfu < 1


def test_what_was_not_measured_is_said():
    known = predict(Job(MODELS["Llama-3 8B"], 1, 8192), H100.of(16))
    assert set(known.stand_ins) < set(known.basis)
    other = replace(known, cluster=replace(known.cluster, between=LINKS["100 Gb/s"]))
    assert other.stand_ins[-1].startswith("Nobody measured 100 Gb/s")


def test_computing_is_slowed_by_each_collective_that_runs_beside_it():
    """Shards and copies have lanes of their own, so that several run beside one layer."""
    blocks = [Layer(2.0, 4.0, 10.0, f"block {number}") for number in range(5)]
    root = Layer(1.0, 2.0, 30.0, "root")
    spans = cluster.fsdp_spans(blocks, root, gather=lambda nbytes: 0.05 * nbytes,
                               scatter=lambda nbytes: 0.07 * nbytes, shard_ranks=4, slowdown=1.5,
                               reduce=lambda nbytes: 0.3 * nbytes)
    alone = {"forward root": 1.0, "backward root": 2.0}
    most = 0
    for place, span in enumerate(spans[:-1]):
        if span.lane != COMPUTE:
            continue
        seconds = alone.get(span.name, 2.0 if span.name.startswith("forward") else 4.0)
        sent = sorted((each for each in spans[:place] if each.lane == COMMUNICATION),
                      key=lambda each: each.start)
        assert span.end == end_beside([each for each in sent if each.end > span.start],
                                      span.start, seconds, 1.5)
        most = max(most, sum(each.end > span.start and each.start < span.end for each in sent))
    assert most > 2
