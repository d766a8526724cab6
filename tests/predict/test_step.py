"""The time of a step: schedules by hand, the exercises' answers, jobs on clusters of any size."""

import math
from dataclasses import replace

import pytest

from dplab.exercises import predict_sharded_step, predict_step
from dplab.exercises.ring_seconds import ring_seconds
from dplab.predict import cluster, cost, kernels, step, traffic
from dplab.predict.catalogue import GPUS, LINKS, MATMUL_SHARE, MODELS
from dplab.predict.cluster import Cluster, Job, collective_seconds, predict
from dplab.predict.cost import Link
from dplab.predict.job import SIMULATED_STRATEGIES
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Layer, Span
from dplab.predict.transformer_config import TransformerConfig

MB = 1e6
LINK = Link("chosen", bandwidth=1e9, latency=1e-3)  # a ring of 2: 2 ms and M / (1 GB/s)
THREE = [Layer(0.001, 0.004, 3 * MB, "0"), Layer(0.002, 0.006, 5 * MB, "1"),
         Layer(0.003, 0.008, 1 * MB, "2")]

H100 = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
SMALL = TransformerConfig(3, 64, 4, 256, 512, 128, name="small")
LLAMA = Job(MODELS["Llama-3 8B"], 1, 8192)


def times(spans, unit=1.0):
    """(start, end) of each span by its name."""
    found = {}
    for span in spans:
        found.setdefault(span.name, []).append(
            (round(span.start / unit, 6), round(span.end / unit, 6)))
    return found


# One rank's schedule


def test_data_parallel_by_hand():
    spans = step.ddp_spans(THREE, 2, LINK, bucket_bytes=4 * MB, optimizer_seconds=0.002)
    assert times(spans, 1e-3) == {
        "forward": [(0, 6)],
        "backward 2": [(6, 14)], "backward 1": [(14, 20)], "backward 0": [(20, 24)],
        "all-reduce 0": [(20, 28)],  # layers 2 and 1: 6 MB
        "all-reduce 1": [(28, 33)],  # layer 0 is ready at 24, the link at 28
        "optimizer": [(33, 35)]}
    assert step.step_seconds(spans) == pytest.approx(0.035)
    assert step.exposed_seconds(spans) == pytest.approx(0.009)
    waiting = step.ddp_spans(THREE, 2, LINK, bucket_bytes=4 * MB, overlap=False)
    assert times(waiting, 1e-3)["all-reduce 0"] + times(waiting, 1e-3)["all-reduce 1"] == [
        (24, 32), (32, 37)]


@pytest.mark.parametrize("case", [case for case in predict_step.CASES if len(case) == 6],
                         ids=lambda case: case[0])  # those whose buckets all close at one size
def test_a_step_is_that_of_the_exercise(case):
    _, layers, bucket_bytes, ranks, *link = case
    spans = step.ddp_spans(layers, ranks, Link("any", *link), bucket_bytes=bucket_bytes)
    assert (step.step_seconds(spans), step.exposed_seconds(spans)) == pytest.approx(
        predict_step.bucket_by_bucket(layers, bucket_bytes, ranks, *link))


@pytest.mark.parametrize("case", predict_sharded_step.CASES, ids=lambda case: case[0])
def test_a_sharded_step_is_that_of_the_exercise(case):
    _, layers, *link, ahead = case
    spans = step.sharded_spans(layers, lambda nbytes: ring_seconds(nbytes, *link) / 2, ahead=ahead)
    assert step.step_seconds(spans) == pytest.approx(
        predict_sharded_step.by_two_lists(layers, *link, ahead))


def test_what_is_exposed_of_spans_that_overlap():
    spans = [Span("a", COMPUTE, 0, 10), Span("b", COMPUTE, 8, 12), Span("w", STALLED, 12, 20),
             Span("c", COMMUNICATION, 9, 15), Span("d", COMMUNICATION, 14, 16, queued=1),
             Span("e", COMMUNICATION, 18, 19)]
    assert step.exposed_seconds(spans) == pytest.approx(16 - 12 + 1)
    assert step.step_seconds(spans) == 20
    assert [spans[4].cut(*ends).queued for ends in ((14, 16), (14.5, 16), (15.5, 16))] == [
        1, 0.5, 0]


@pytest.mark.parametrize(("seconds", "end"), [(1, 3), (2, 5), (3, 7), (4, 8), (4.5, 9), (7, 12)])
def test_computing_beside_sending_takes_longer(seconds, end):
    """Alone from 2 to 3, at half speed to 7, alone to 8, at half speed to 10, alone again."""
    sending = [Span("a", COMMUNICATION, 0, 1), Span("b", COMMUNICATION, 3, 7),
               Span("c", COMMUNICATION, 8, 10)]
    assert step.end_beside(sending, 2, seconds, 2) == end
    assert step.end_beside(sending, 2, seconds, 1) == 2 + seconds


A, B, ROOT = Layer(2, 4, 6, "A"), Layer(3, 5, 6, "B"), Layer(1, 2, 2, "root")


def sharded(**options):
    return cluster.fsdp_spans([A, B], ROOT, gather=lambda n: n / 2, scatter=lambda n: n,
                              optimizer_seconds=1, **options)


def test_fully_sharded_by_hand():
    assert times(sharded()) == {
        "gather root": [(0, 1)], "gather A": [(1, 4), (14, 17)],
        "gather B": [(4, 7), (11, 14)],  # in backward while the root computes
        "forward A": [(4, 6)], "forward B": [(7, 10)], "forward root": [(10, 11)],
        "backward root": [(11, 13)], "backward B": [(14, 19)], "backward A": [(19, 23)],
        "reduce-scatter B": [(19, 25)], "reduce-scatter A": [(25, 31)],
        "reduce-scatter root": [(31, 33)], "optimizer": [(33, 34)]}
    kept = times(sharded(reshard=False))
    assert kept["gather A"] == [(1, 4)]
    assert (kept["backward B"], kept["optimizer"]) == ([(13, 18)], [(32, 33)])
    hybrid = times(sharded(reduce=lambda n: n, shard_ranks=2))
    assert [hybrid[f"all-reduce {name}"] for name in ("B", "A", "root")] == [
        [(25, 28)], [(31, 34)], [(34, 35)]]
    assert hybrid["optimizer"] == [(35, 36)]


def test_a_block_is_gathered_when_the_second_before_it_is_done():
    blocks = [Layer(1, 1, 1, f"block {number}") for number in range(5)]
    found = times(cluster.fsdp_spans(blocks, ROOT, gather=lambda n: 0.1, scatter=lambda n: 0.1))
    assert [found[f"gather block {number}"][0][0] for number in range(5)] == pytest.approx(
        [0.1, 0.2, 1.2, 2.2, 3.2])
    # In backward the next is gathered while the root computes, then each after a reduce-scatter.
    assert [found[f"gather block {number}"][-1][0] for number in (4, 3, 2, 1, 0)] == pytest.approx(
        [6.2, 8.2, 9.3, 10.3, 11.3])


def test_each_collective_slows_what_computes_beside_it():
    """At half speed: of A's 2 s, 1.5 are done while B is gathered, and so on."""
    found = times(sharded(slowdown=2, reduce=lambda n: n / 3, shard_ranks=1))
    assert found["forward A"] + found["forward B"] == [(4, 7.5), (7.5, 10.5)]
    assert found["gather B"][1] == (11.5, 14.5) and found["backward root"] == [(11.5, 15)]
    assert found["gather A"][1] == (15, 18) and found["backward B"] == [(15, 21.5)]
    # Beside it B's gradients are reduced among the shards, then among the copies.
    assert found["reduce-scatter B"] == [(21.5, 27.5)] and found["all-reduce B"] == [(27.5, 29.5)]
    assert found["backward A"] == [(21.5, 29.5)]


# A job on a cluster


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
    model = replace(SMALL, biases=False)  # all that is left divides by 32
    job = Job(model, 1, 128, gradient_bytes=4)
    root = cost.bytes_sent("ring all-gather", 8, 2 * sum(map(math.prod, model.units[-1])))
    for name, changes, more in (  # traffic's HSDP gathers the root a second time
            ("fully_shard", {}, 0),
            ("fully_shard, reshard_after_forward=False", {"reshard": False}, 0),
            ("DDP", {"strategy": "DDP"}, 0), ("HSDP", {"strategy": "HSDP"}, root)):
        expected = traffic.collectives(name, ranks, model.units, shard_ranks=8, gradient_bytes=4)
        assert sent(predict(replace(job, **changes), H100.of(ranks))) + more == pytest.approx(
            sum(each.bytes_sent for each in expected)), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_bucket_has_an_untied_head_and_the_last_the_embedding(tied):
    model = replace(SMALL, tied=tied, learned_positions=False)
    spans = predict(Job(model, 1, 128, "DDP", bucket_bytes=2 * SMALL.block_parameters), H100).spans
    sends = [span for span in spans if span.lane == COMMUNICATION]
    assert sends[0].start == next(span.end for span in spans if span.name == "backward block 2")
    assert sends[0].nbytes == 2 * SMALL.block_parameters + (0 if tied else 2 * 512 * 64)
    assert sum(send.nbytes for send in sends) == 2 * model.parameters


def test_ddps_pieces_are_of_a_buckets_size():
    found = predict(Job(MODELS["GPT-2 XL"], 1, 1024, "DDP"), H100.of(64))
    sends = [span.nbytes for span in found.spans if span.lane == COMMUNICATION]
    assert sum(sends) == pytest.approx(2 * MODELS["GPT-2 XL"].parameters) and len(sends) > 50
    assert max(sends) <= 2 * 25 * 2**20


def test_the_groups_of_hybrid_sharding():
    """A group of shards is a node, a group of copies takes the first, second, … of each."""
    machine, block = H100.of(16), 2 * SMALL.block_parameters
    found = {span.name: span for span in predict(Job(SMALL, 1, 128, "HSDP"), machine).spans}
    assert found["gather block 1"].seconds == pytest.approx(
        collective_seconds(machine, "all-gather", block, ranks=8, local=8))
    reduce = found["all-reduce block 1"]
    assert reduce.nbytes == block / 8 and reduce.seconds == pytest.approx(
        collective_seconds(machine, "all-reduce", block / 8, ranks=2, local=1))
    alone = predict(Job(SMALL, 1, 128, "HSDP"), H100).spans
    assert not any(span.name.startswith("all-reduce") for span in alone)


def test_a_step_that_only_computes_has_the_mfu_of_its_kernels():
    alone = H100.of(1)
    blocks, root = kernels.unit_costs(LLAMA, alone)
    computing = sum(each.forward_seconds + each.backward_seconds for each in [*blocks, root])
    found = predict(LLAMA, alone)
    matrices = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # no lookup, no norms
    flops = 8192 * (6 * matrices + 12 * 32 * 4096 * 8192)
    assert found.seconds == pytest.approx(computing + found.spans[-1].seconds)
    assert found.exposed_seconds == pytest.approx(0)
    assert found.mfu == pytest.approx(flops / found.seconds / 989e12)
    assert found.mfu < MATMUL_SHARE["H100"]
    assert found.tokens_per_second == pytest.approx(8192 / found.seconds)


@pytest.mark.parametrize("strategy", SIMULATED_STRATEGIES)
def test_micro_batches_send_once_or_each_time(strategy):
    """Of DDP the sum goes once; FSDP sends for each; HSDP sends between nodes once."""
    machine = replace(H100, between=LINKS["25 Gb/s"]).of(16)
    job = Job(MODELS["GPT-2 medium"], 1, 1024, strategy)
    one, four = (predict(replace(job, accumulation=count), machine) for count in (1, 4))
    update = one.spans[-1].seconds
    inside = predict(replace(job, strategy="FSDP"), machine.of(8))
    further = {"DDP": one.compute_seconds - update, "FSDP": one.seconds - update,
               "HSDP": inside.seconds - inside.spans[-1].seconds}[strategy]
    assert four.seconds == pytest.approx(one.seconds + 3 * further)
    assert four.mfu == pytest.approx(4 * one.mfu * one.seconds / four.seconds)
    assert four.exposed_seconds + four.compute_seconds == pytest.approx(four.seconds)


@pytest.mark.parametrize(("change", "ranks", "bound"), [
    ({"between": replace(LINKS["400 Gb/s"], bandwidth=1e8)}, 16, "bandwidth between nodes"),
    ({"inside": replace(LINKS["NVLink 4"], bandwidth=1e8)}, 8, "bandwidth inside nodes"),
    ({"between": replace(LINKS["400 Gb/s"], latency=1e-2)}, 4096, "latency"),
    ({"gpu": replace(GPUS["H100"], memory_bandwidth=1e10)}, 8, "memory bandwidth"),
    ({}, 8, "arithmetic")])
def test_the_bound_is_what_was_made_slow(change, ranks, bound):
    found = predict(replace(LLAMA, batch=2), replace(H100, **change).of(ranks))
    assert found.bound == bound and min(found.savings.values()) >= 0


def test_where_adding_ranks_stops_paying():
    curve = [(8, 80.0), (16, 152.0), (32, 240.0), (64, 360.0), (128, 340.0)]
    # each rank of 16 → 32 brings 5.5 of 10, of 32 → 64 only 3.75
    assert cluster.stops_paying(curve) == 32 and cluster.stops_paying(curve[:3]) is None
    # A step that does not pay, here from one node to two, is no end where later ones pay.
    curve = [(8, 80.0), (16, 104.0), (32, 200.0), (64, 232.0)]
    assert [cluster.stops_paying(curve[:points]) for points in (2, 3, 4)] == [8, None, 32]
