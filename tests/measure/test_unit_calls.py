"""The order in which units gather, compute and reduce, as the exercise about it foretells."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dplab import run
from dplab.exercises.order_of_step import CASES, order_of_step
from dplab.measure import UnitCalls


def noted(blocks, kept, ahead):
    """What torch does where the last layer is left to the root; and the size of a gradient."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(blocks + 1)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = list(model)[:-1]
    for module in (*units, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if kept else None)
    for unit, following in itertools.pairwise(units):
        if ahead:
            unit.set_modules_to_forward_prefetch([following])
    calls = UnitCalls(model)
    output = model(torch.randn(3, 4, requires_grad=True))
    calls.notes.append("|")
    output.clone().sum().backward()
    return calls.notes, model[0].weight.grad.full_tensor().abs().sum().item()


def noted_in_all_cases():
    return [noted(*case[1:]) for case in CASES]


@pytest.mark.slow
def test_units_do_what_the_exercise_foretells_and_torch_still_reduces():
    for case, *ranks in zip(CASES, *run(noted_in_all_cases, 2, backend="gloo"), strict=True):
        assert [notes for notes, _ in ranks] == [order_of_step(*case[1:])] * 2, case
        assert ranks[0][1] > 0 and ranks[0][1] == ranks[1][1]
