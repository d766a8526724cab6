"""The bytes of model states that a rank holds, to the byte."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn
from wrapped_models import OPTIMIZERS, UNITS, WIDTHS, prepared

from dplab import run
from dplab.measure import state_bytes
from dplab.predict import shards
from dplab.predict.memory import States

cloudpickle.register_pickle_by_value(sys.modules[__name__])


CASES = [(implementation, precision) for implementation, precisions in {
    "plain": OPTIMIZERS, "DDP": ["fp32"], "ZeroRedundancyOptimizer": ["fp32"],
    "fully_shard": OPTIMIZERS,
}.items() for precision in precisions]


def states_after_steps():
    found = []
    for implementation, precision in CASES:
        model, optimizer = prepared(implementation, OPTIMIZERS[precision])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTHS[0])).square().mean().backward()
            optimizer.step()
        found.append(state_bytes(model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_states_are_those_predicted_to_the_byte(ranks):
    measured = run(states_after_steps, ranks, backend="gloo")
    for case, (implementation, precision) in enumerate(CASES):
        way = "DDP" if implementation == "plain" else implementation
        expected = shards.real_states(way, precision, ranks, UNITS)
        assert [rank[case] for rank in measured] == expected, (implementation, precision)


def test_parameters_that_are_tied_frozen_or_unused_count_as_they_are():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False),
                           "frozen": nn.Linear(2, 2), "norm": nn.BatchNorm1d(3)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    model["a"](model["b"](torch.ones(1, 3))).sum().backward()
    assert state_bytes(model) == States(4 * (9 + 6 + 6), 4 * 9, 0)
