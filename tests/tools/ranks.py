"""What the tests on real ranks share: world sizes, a rank's part of a batch, bytes on the wire."""

import functools
from collections.abc import Callable, Hashable

import pytest
import torch
import torch.distributed as dist

from dplab import run
from dplab.measure import WireMeter

MIB = 2**20

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
several = pytest.mark.parametrize("world_size", [2, 3, 4])


@functools.cache
def run_each(function: Callable, cases: tuple[Hashable, ...], world_size: int, *arguments,
             backend: str | None = None):
    """By case, what each rank returned from ``function(case, *arguments)``: one run has them all.

    For tests of several cases where no case needs ranks that are fresh.
    """
    ranks = run(lambda: [function(case, *arguments) for case in cases], world_size,
                backend=backend)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


def least_on_the_wire(step: Callable) -> float:
    """Bytes that each rank sends in ``step``, which every rank runs three times: the least of them.

    Whatever else uses the loopback meanwhile only adds. Connections are made before, by the caller.
    """
    found = []
    for _ in range(3):
        with WireMeter() as wire:
            step()
        found.append(wire.bytes_per_rank)
    return min(found)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's contiguous part of a global batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def inputs(rows: int, seed: int = 5) -> torch.Tensor:
    """Inputs (rows, 6) in float64, different in every element."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64)
