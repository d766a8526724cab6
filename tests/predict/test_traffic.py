"""Bytes of a step by strategy: against the formulas, and against what real ranks call."""

import sys

import cloudpickle
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from wrapped_models import OPTIMIZERS, UNITS, WIDTHS, layers, prepared

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import ShardedOptimizer
from dplab.predict import cost
from dplab.predict.traffic import collectives

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEEPING = "fully_shard, reshard_after_forward=False"
SHARDED = "ShardedOptimizer, reduce_gradients=True"
P = 7 * 10**9
ONE = [[(P,)]]  # a tensor of a single unit, the root


def bytes_per_step(*arguments, **options):
    return sum(each.bytes_sent for each in collectives(*arguments, **options))


@pytest.mark.parametrize(("strategy", "gathers", "reduces"), [
    # in units of pΨf and gΨf, where a reduce-scatter is 1 and an all-reduce 2
    ("DDP", 0, 2), ("ZeroRedundancyOptimizer", 1, 2), (SHARDED, 1, 1),
    ("FullyShardedModel", 2, 1), ("fully_shard", 1, 1), (KEEPING, 1, 1)])
def test_a_step_costs_what_the_formula_says(strategy, gathers, reduces):
    for ranks in (1, 2, 8):
        f = (ranks - 1) / ranks
        assert bytes_per_step(strategy, ranks, ONE, parameter_bytes=2, gradient_bytes=4) == (
            pytest.approx((2 * gathers + 4 * reduces) * P * f))
        over_gloo = reduces + strategy.startswith("fully_shard")  # whose reduce-scatter reduces all
        assert bytes_per_step(strategy, ranks, ONE, gloo=True) == (
            pytest.approx(2 * (gathers + over_gloo) * P * f))


def made(strategy):
    model = layers(WIDTHS)
    if strategy == "HSDP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
        for part in (*model[:-1], model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    if strategy == SHARDED:
        return model, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1,
                                       reduce_gradients=True)
    sgd = OPTIMIZERS["fp32, SGD"]
    return (model, sgd(model.parameters())) if strategy == "HSDP" else prepared(strategy, sgd)


def calls_of_a_step(strategies):
    """By strategy, of the second step: for each operation its calls, and this rank's bytes."""
    found = {}
    for strategy in strategies:
        model, optimizer = made(strategy)
        for _ in range(2):
            with CallLog() as log:
                model(torch.randn(4, WIDTHS[0])).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        found[strategy] = {each: (log.count(each), log.bytes(each)) for each in (
            "all_gather", "reduce_scatter", "broadcast", "all_reduce", "send")}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_and_bytes_are_those_of_real_implementations(ranks):
    """DDP's all-reduces are launched from C++, and the course's own ring sends by itself."""
    strategies = ["ZeroRedundancyOptimizer", SHARDED, "FullyShardedModel", "fully_shard", KEEPING]
    if ranks == 4:
        strategies.append("HSDP")
    measured = run(calls_of_a_step, ranks, strategies, backend="gloo")
    for strategy in strategies:
        predicted = collectives(strategy, ranks, UNITS, parameter_bytes=4, gradient_bytes=4,
                                shard_ranks=2 if strategy == "HSDP" else None)
        own = strategy in (SHARDED, "FullyShardedModel")
        expected = {}
        for each in predicted:
            operation = cost.ALGORITHMS[each.algorithm].collective
            if not (own and operation == "reduce_scatter") and each.count:
                group = 1 if operation in ("broadcast", "all_reduce") else each.world_size
                count, size = expected.get(operation, (0, 0))
                expected[operation] = count + each.count, size + each.tensor_bytes / group
        for rank in measured:
            assert {name: rank[strategy][name] for name in expected} == expected, strategy
        if own:
            [scatter] = [each for each in predicted if each.of == "gradients"]
            assert sum(rank[strategy]["send"][1] for rank in measured) == pytest.approx(
                ranks * scatter.bytes_sent), strategy
