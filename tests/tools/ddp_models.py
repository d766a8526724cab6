"""The models that the tests of the course's DDPs train, their batches, and the three DDPs.

The models start differently on every rank, and no two inputs are equal.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel import BucketedDDP, ManualDDP, OverlappedDDP

LOCAL_BATCH = 5
SMALL = 0.0005  # MiB, so that a small model has several buckets
WRAPPERS = {"manual": ManualDDP, "bucketed": functools.partial(BucketedDDP, bucket_mb=SMALL),
            "overlapped": functools.partial(OverlappedDDP, bucket_mb=SMALL)}
EACH = tuple(WRAPPERS.values())
each_wrapper = pytest.mark.parametrize("wrap", EACH, ids=WRAPPERS)


class Awkward(nn.Module):
    """Tied, frozen, non-contiguous and scalar parameters, without anything that mixes samples."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.encode = nn.Linear(7, 11, bias=False)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(13, 11).t())
        self.back = nn.Linear(13, 11)
        self.decode = nn.Linear(11, 7)
        self.again = nn.Linear(7, 11, bias=False)
        self.again.weight = self.encode.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.frozen(self.encode(x)))
        hidden = self.decode(torch.tanh(self.back(hidden @ self.turned)))
        return self.scale * self.again(hidden)


class Branches(nn.Module):
    """Rank r uses branch r, and nobody uses the last one."""

    def __init__(self, world_size, width=2):
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(7, 4)
        self.branches = nn.ModuleList([nn.Linear(4, width) for _ in range(world_size + 1)])

    def forward(self, x, branch):
        return self.branches[branch](self.shared(x))


class Normalised(nn.Sequential):
    """BatchNorm: float and int64 buffers that every training step changes."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(7, 13, bias=False), nn.BatchNorm1d(13), nn.ReLU(),
                         nn.Linear(13, 3))


def batch(step, samples, seed=5):
    """Inputs (samples, 7) and targets (samples, 11) in float64, different in every element."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return (torch.randn(samples, 7, generator=generator, dtype=torch.float64),
            torch.randn(samples, 11, generator=generator, dtype=torch.float64))


def assert_all_equal(states, expected, **tolerance):
    for rank, state in enumerate(states):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, **tolerance,
                                       msg=lambda m, r=rank, n=name: f"rank {r}, {n}: {m}")


def tensors_of(module):
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


def count_collectives(counts):
    """Makes this rank's torch.distributed count what is called on it, in ``counts``."""
    for name in ("all_reduce", "broadcast"):
        original = getattr(dist, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            counts[_name] = counts.get(_name, 0) + args[0].numel()
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
