"""FullyShardedModel's units: what is gathered when, in which precision, clipping, who is away."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import mine, several, world_sizes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import FullyShardedModel, clip_grad_norm_

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


# --- mixed precision ----------------------------------------------------------------------------

class Mixed(nn.Module):
    """Odd sizes, a weight tied across two units, a frozen unit, and a buffer that stays float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.frozen, self.down = nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 7)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(7))
        self.register_buffer("positions", torch.randn(3, 7))

    def forward(self, tokens):
        x = self.scale * self.embedding(tokens) + self.positions  # in float32, so `up` casts it
        return self.head(self.down(torch.tanh(self.frozen(torch.tanh(self.up(x))))))


def by_torch(param_dtype, reduce_dtype):
    model = Mixed()
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
               "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype)}
    for unit in (model.up, model.frozen, model.down, model):
        fully_shard(unit, **options)
    return model


POLICIES = {  # dtypes of parameters and of sums: how far these may be off, by their rounding
    (torch.bfloat16, torch.float32): 1e-6, (torch.float16, None): 2**-9}


def two_micro_batches(model, stay_quiet):
    """Gradients add up on each rank during the first backward, and are reduced after the second."""
    tokens = torch.randint(11, (2, 12, 3), generator=torch.Generator().manual_seed(5))
    with stay_quiet:
        model(mine(tokens[0])).square().mean().backward()
    model(mine(tokens[1])).square().mean().backward()


def in_precision(param_dtype, reduce_dtype):
    """Whole gradients, by the course's class and by torch's; what was sent; kept dtypes."""
    model = FullyShardedModel(Mixed(), param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    with CallLog() as log:
        two_micro_batches(model, model.no_sync())
    kept = {tensor.dtype for p in model.parameters() for tensor in (p, p.grad)
            if tensor is not None}
    with torch.no_grad():
        for piece in model.parameters():
            if piece.requires_grad:
                piece.copy_(piece.grad)  # so that full_state_dict gathers the gradients
    reference = by_torch(param_dtype, reduce_dtype)
    reference.set_requires_gradient_sync(False)
    stay_quiet = contextlib.ExitStack()
    stay_quiet.callback(reference.set_requires_gradient_sync, True)
    two_micro_batches(reference, stay_quiet)
    expected = {name: p.grad.full_tensor() for name, p in reference.named_parameters()
                if p.requires_grad}
    return model.full_state_dict(), expected, log.calls, kept


def in_each_precision():
    return [in_precision(*policy) for policy in POLICIES]


@pytest.mark.slow
@world_sizes
def test_mixed_precision_is_that_of_torch(world_size):
    for rank in run(in_each_precision, world_size, backend="gloo"):
        for (policy, off), (gradients, expected, calls, kept) in zip(POLICIES.items(), rank,
                                                                     strict=True):
            gathered, reduced = (str(dtype or policy[0]).removeprefix("torch.") for dtype in policy)
            sent = {(call.operation, call.dtype) for call in calls}
            assert ("all_gather", gathered) in sent and kept == {torch.float32}
            assert {dtype for operation, dtype in sent if operation == "send"} == (
                {reduced} if world_size > 1 else set())
            assert len(expected) == 6
            for name, value in expected.items():
                torch.testing.assert_close(gradients[name], value, rtol=0,
                                           atol=off * value.abs().max().item())


# --- clipping -----------------------------------------------------------------------------------

def clip():
    """Norms before, and what is left, for pieces of which some ranks have none."""
    piece = nn.Parameter(torch.zeros(3 if dist.get_rank() == 1 else 0))
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    piece.grad, other.grad = torch.full_like(piece, 2.0), torch.full_like(other, 1.0)
    norms = [clip_grad_norm_([piece, other, nn.Parameter(torch.ones(1))], limit).item()
             for limit in (100.0, 1.0, 1.0)]
    return norms, clip_grad_norm_([], 1.0).item(), other.grad.tolist()


@several
def test_clipping_is_by_the_norm_over_all_ranks(world_size):
    whole = (3 * 4 + world_size * 2) ** 0.5
    for norms, of_nothing, left in run(clip, world_size, backend="gloo"):
        assert norms == pytest.approx([whole, whole, 1.0], rel=1e-5)
        assert of_nothing == 0.0
        assert left == pytest.approx([1 / whole] * 2, rel=1e-5)

