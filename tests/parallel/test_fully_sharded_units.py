"""FullyShardedModel's units: what is gathered when."""


import torch
from torch import nn

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import FullyShardedModel

# --- what is gathered, and when -----------------------------------------------------------------

class Noting(nn.Module):
    """Notes how many gathers have been launched when forward and backward pass by."""

    def forward(self, x):
        return Note.apply(x, self.note)


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        note()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


def order_of_gathers():
    """Elements of each gather and reduce-scatter, and how many gathers each layer has seen."""
    layers = [nn.Sequential(nn.Linear(size, 4, bias=False), Noting(), nn.Linear(4, size + 2))
              for size in (2, 4, 6)]
    model = FullyShardedModel(nn.Sequential(*layers, nn.ReLU()))
    seen = []
    with CallLog() as log:
        for layer in layers:
            layer[1].note = lambda: seen.append(log.count("all_gather"))
        model(torch.randn(2, 2)).sum().backward()
    gathers = [call.shape[0] for call in log.calls if call.operation == "all_gather"]
    return gathers, seen, log.bytes("send") // 4


def test_the_next_unit_is_on_its_way_while_one_computes():
    sizes = [(8 + 20) // 2, (16 + 30) // 2, (24 + 40) // 2]
    for gathers, seen, reduced in run(order_of_gathers, 2, backend="gloo"):
        assert gathers == [*sizes, *reversed(sizes)]
        assert seen == [2, 3, 3, 5, 6, 6]
        assert reduced == sum(sizes)
