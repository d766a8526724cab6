"""The first parts of the files of ZeRO train as one process does, with the memory of an owner."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dplab import run
from dplab.parallel.fully_sharded_model import ZeRO3Layer
from dplab.parallel.sharded_gradients import ZeRO2
from dplab.parallel.sharded_optimizer import ZeRO1

ELEMENTS = [5 * 7 + 7, 7 * 3]


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.1)


def made(ranks):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7).double(), nn.Linear(7, 3, bias=False).double()]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1]), layers, torch.randn(3, 4 * ranks, 5)


def alone(ranks):
    model, _, batches = made(ranks)
    optimizer = adam(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        model(batch.double()).square().mean().backward()
        optimizer.step()
    return model(batches[0].double()).detach()


def by(stage):
    """What the model says after three steps, and the elements that stay on this rank."""
    ranks = dist.get_world_size()
    model, layers, batches = made(ranks)
    parameters = list(model.parameters())
    if stage == 1:
        step = ZeRO1(parameters, adam)
        owned = [step.own]
    elif stage == 2:
        step = ZeRO2([list(layer.parameters()) for layer in reversed(layers)], adam)
        owned = step.own
    else:
        units = [ZeRO3Layer(layer) for layer in layers]
        owned = [unit.chunk for unit in units]
        step = adam(owned)
    for batch in batches:
        for tensor in (*parameters, *owned):
            tensor.grad = None
        model(batch.chunk(ranks)[dist.get_rank()].double()).square().mean().backward()
        if stage == 2:
            assert all(parameter.grad is None for parameter in parameters)
        if stage == 3:
            assert all(unit.whole.untyped_storage().nbytes() == 0 for unit in units)
        step.step()
    return model(batches[0].double()).detach(), sum(each.numel() for each in owned)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_idea_trains_as_one_process_does(ranks, stage):
    for output, elements in run(by, ranks, stage, backend="gloo"):
        torch.testing.assert_close(output, alone(ranks), rtol=0, atol=1e-12)
        assert elements < sum(ELEMENTS) / ranks + len(ELEMENTS)
