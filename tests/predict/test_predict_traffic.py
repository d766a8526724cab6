"""Bytes per step: against formulas and measurements of real implementations, and counted calls."""

import math
import sys

import cloudpickle
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import UNITS, WIDTHS, layers

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import FullyShardedModel, ShardedOptimizer
from dplab.predict import catalogue, cost
from dplab.predict.traffic import bytes_per_step, collectives

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEEPING = "fully_shard, reshard_after_forward=False"
SHARDED = "ShardedOptimizer, reduce_gradients=True"
P = 7 * 10**9
ONE = [[(P,)]]  # a tensor of a single unit, the root


@pytest.mark.parametrize(("strategy", "gathers", "reduces"), [
    # in units of pΨf and gΨf, where a reduce-scatter is 1 and an all-reduce 2
    ("DDP", 0, 2), ("ZeroRedundancyOptimizer", 1, 2), (SHARDED, 1, 1),
    ("FullyShardedModel", 2, 1), ("fully_shard", 1, 1), (KEEPING, 1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_step_costs_what_the_formula_says(strategy, gathers, reduces, ranks):
    f = (ranks - 1) / ranks
    assert bytes_per_step(strategy, ranks, ONE, parameter_bytes=2, gradient_bytes=4) == (
        pytest.approx((2 * gathers + 4 * reduces) * P * f))
    over_gloo = reduces + strategy.startswith("fully_shard")  # whose reduce-scatter is a reduce
    assert bytes_per_step(strategy, ranks, ONE, gloo=True) == (
        pytest.approx(2 * (gathers + over_gloo) * P * f))


def test_hybrid_sharding_inside_and_across_hosts():
    size, shard, copies = 10**9, 8, 16
    found = collectives("HSDP", shard * copies, [[(size,)]], shard_ranks=shard, gradient_bytes=4)
    inside = sum(each.bytes_sent for each in found if each.world_size == shard)
    across = sum(each.bytes_sent for each in found if each.world_size == copies)
    assert inside == pytest.approx((2 * 2 + 4) * size * (shard - 1) / shard)
    assert across == pytest.approx(2 * 4 * size / shard * (copies - 1) / copies)


def test_by_default_the_root_is_gathered_once():
    units = catalogue.MODELS["Llama-3 8B"].units
    root = sum(map(math.prod, units[-1]))
    whole = catalogue.MODELS["Llama-3 8B"].parameters
    expected = (2 * 2 * (whole - root) + 2 * root + 2 * whole) * 7 / 8
    assert bytes_per_step("fully_shard", 8, units) == pytest.approx(expected)
    assert bytes_per_step(KEEPING, 8, units) < expected


# What follows counts the calls of real ranks.

def prepared(strategy):
    model, _, option = layers(WIDTHS), *strategy.partition(", ")[1:]
    if strategy == "HSDP" or strategy.startswith("fully_shard"):
        options = {"reshard_after_forward": option.endswith("True")} if option else {}
        if strategy == "HSDP":
            options = {"reshard_after_forward": True,
                       "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))}
        for layer in model[:-1]:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    elif strategy == "ZeroRedundancyOptimizer":
        model = DistributedDataParallel(model)
    if strategy == "FullyShardedModel":
        model = FullyShardedModel(model)
    if strategy == "ZeroRedundancyOptimizer":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if strategy == SHARDED:
        return model, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1,
                                       reduce_gradients=True)
    return model, torch.optim.SGD(model.parameters(), 0.1)


STRATEGIES = ["ZeroRedundancyOptimizer", SHARDED, "FullyShardedModel", "fully_shard", KEEPING]


def calls_of_a_step(strategies):
    """For each strategy, for each operation: its calls' number and this rank's bytes in all."""
    found = []
    for strategy in strategies:
        model, optimizer = prepared(strategy)
        for _ in range(2):
            with CallLog() as log:
                model(torch.randn(4, WIDTHS[0])).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        found.append({each: (log.count(each), log.bytes(each)) for each in (
            "all_gather", "reduce_scatter", "broadcast", "all_reduce", "send")})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_and_bytes_are_those_of_real_implementations(ranks):
    measured = run(calls_of_a_step, ranks, STRATEGIES, backend="gloo")
    for number, strategy in enumerate(STRATEGIES):
        predicted = collectives(strategy, ranks, UNITS, parameter_bytes=4, gradient_bytes=4)
        expected = {}
        for each in predicted:
            key = cost.ALGORITHMS[each.algorithm].collective
            count, size = expected.get(key, (0, 0))
            expected[key] = count + (each.count or 0), size + each.tensor_bytes
        for rank in measured:
            found = rank[number]
            for key, calls in expected.items():
                if key == "all_reduce":
                    continue  # DDP's are launched from C++
                if key == "reduce_scatter" and not strategy.startswith("fully_shard"):
                    continue  # the course's own ring: below
                count, size = found[key]
                whole = size * (1 if key == "broadcast" else ranks)
                assert (count, whole) == calls, (strategy, key)
        if strategy in (SHARDED, "FullyShardedModel"):
            sent = sum(rank[number]["send"][1] for rank in measured)
            [scatter] = [each for each in predicted if each.of == "gradients"]
            assert sent == ranks * scatter.bytes_sent, strategy


def test_calls_of_hybrid_sharding():
    measured = run(calls_of_a_step, 4, ["HSDP"], backend="gloo")
    predicted = collectives("HSDP", 4, UNITS, parameter_bytes=4, gradient_bytes=4,
                            shard_ranks=2)
    gathers = [each for each in predicted if each.of == "parameters"]
    [across] = [each for each in predicted if each.world_size == 2 and each.of[:6] == "shards"]
    for [found] in measured:
        count, size = found["all_gather"]
        assert count == sum(each.count for each in gathers)
        assert 2 * size == sum(each.tensor_bytes for each in gathers)
        assert found["all_reduce"] == (across.count, across.tensor_bytes)


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"strategy": "ZeRO-4"}, ValueError, "no strategy 'ZeRO-4'; there are 'DDP'"),
    ({"units": []}, ValueError, "at least one tensor"),
    ({"strategy": "HSDP"}, TypeError, "shard_ranks is an integer"),
    ({"strategy": "HSDP", "shard_ranks": 3}, ValueError, "3 ranks to a copy do not divide 8"),
])
def test_what_cannot_be_is_refused_in_words(options, error, says):
    with pytest.raises(error, match=says):
        bytes_per_step(**{"strategy": "DDP", "world_size": 8, "units": [[(100,)]], **options})
