"""Exact shards: what does not divide, and padding."""

import pytest

from dplab.predict import catalogue, shards
from dplab.predict.memory import Precision, States, states

UNITS = [[(5, 3), (5,)], [(2, 5), (2,)]]  # 15 + 5 + 10 + 2 elements


@pytest.mark.parametrize(("implementation", "parameters", "gradients", "optimizer"), [
    ("DDP", [32] * 3, [32] * 3, [(32, 4)] * 3),
    ("ZeroRedundancyOptimizer", [32] * 3, [32] * 3, [(15, 1), (10, 1), (7, 2)]),
    # rows of 5, 5, 2, 2 in pieces of 2, 2, 1, 1: the last rank has none of the last two
    ("fully_shard", [14] * 3, [14] * 3, [(14, 4), (14, 4), (4, 4)]),
])
def test_shards_that_do_not_divide(implementation, parameters, gradients, optimizer):
    expected = [States(4 * p, 4 * g, 8 * elements + 4 * tensors) for p, g, (elements, tensors)
                in zip(parameters, gradients, optimizer, strict=True)]
    assert shards.real_states(implementation, "fp32", 3, UNITS) == expected
    momentum = shards.real_states(implementation, "fp32, SGD with momentum", 3, UNITS)
    assert [each.optimizer for each in momentum] == [4 * elements for elements, _ in optimizer]


def test_shards_that_divide_are_those_of_the_formula():
    model = catalogue.MODELS["Llama-3 8B"]
    free = Precision("no counters", 2, 2, 12, per_tensor=0)
    for implementation, stage in {"DDP": "DDP", "fully_shard": "ZeRO-3"}.items():
        formula = states(stage, free, 8, model.parameters)
        assert shards.real_states(implementation, free, 8, model.units) == [formula] * 8


def test_padding_is_what_n_equal_shards_need_more():
    assert shards.padded_parameters("fully_shard", 3, UNITS) == 42
    assert shards.padded_parameters("FullyShardedModel", 3, UNITS) == 33
    assert shards.padded_parameters("ShardedOptimizer", 5, UNITS) == 35
    assert shards.padded_parameters("FullyShardedModel", 5, UNITS) == 20 + 15
    assert shards.padded_parameters("fully_shard", 1, UNITS) == 32


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: shards.real_states("FSDP", "fp32", 2, UNITS), ValueError, "no implementation 'FSDP'"),
    (lambda: shards.real_states("DDP", "fp32", 2, []), ValueError, "at least one tensor"),
    (lambda: shards.real_states("DDP", "fp32", 2, [[()]]), ValueError, "without dimensions"),
    (lambda: shards.real_states("DDP", "fp32", 2, [[(3, 0)]]), ValueError, "at least 1, not 0"),
    (lambda: shards.real_states("DDP", "fp32", 0, UNITS), ValueError, "world size"),
])
def test_shards_that_cannot_be_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
