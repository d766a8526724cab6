"""The order in which units gather, compute and reduce."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dplab import run
from dplab.measure import UnitCalls


def noted(reshard):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    calls = UnitCalls(model)
    output = model(torch.randn(4, 3, requires_grad=True))
    calls.notes.append("|")
    output.clone().sum().backward()
    gradient = model[0].weight.grad.full_tensor()
    return str(calls), gradient.abs().sum().item()


@pytest.mark.parametrize(("reshard", "order"), [
    (None, "Gr G0 F0 G1 F1 | G1 B1 G0 R1 B0 R0 Rr"), (False, "Gr G0 F0 G1 F1 | B1 R1 B0 R0 Rr")])
def test_units_are_noted_in_their_order_and_torch_still_reduces(reshard, order):
    ranks = run(noted, 3, reshard, backend="gloo")
    assert [said for said, _ in ranks] == [order] * 3
    assert ranks[0][1] > 0 and len({total for _, total in ranks}) == 1
