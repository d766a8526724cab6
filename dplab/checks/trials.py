"""What trials of several chapters are made of: data, facts of gradients and cases, an optimizer."""

import contextlib
import zlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

_series = ""  # of seeded data: "" is the one that a check begins with


@contextlib.contextmanager
def other_data():
    """Within it, `seeded` draws other numbers for the same names."""
    global _series
    _series = ", other data"
    try:
        yield
    finally:
        _series = ""


def seeded(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers, the same wherever and whenever they are drawn for this name.

    What differs by rank has the rank in its name. No tensor is then a combination of others, as
    sines of shifted angles are: what is in a result says which ranks' parts made it, and how often.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{_series}".encode()))
    return torch.randn(shape, dtype=dtype, generator=generator)


def whole_numbers(name: str, *shape: int) -> torch.Tensor:
    """The same as odd integers, nearly all too large for a float32."""
    return seeded(name, *shape, dtype=torch.float64).mul(2**30).long() * 2 + 1


def gradients(model: nn.Module, when: str = "") -> dict[str, torch.Tensor | None]:
    """The gradients as facts; a copy of each, since the next step changes it."""
    return {f"the gradient of `{name}`{when}":
            None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()}


def of_cases(facts_of: Callable[[tuple, object], dict], cases: Iterable[tuple],
             function: Callable) -> dict:
    """What ``facts_of(case, answer)`` makes of the function's answer to each case, together."""
    facts: dict = {}
    for case in cases:
        facts |= facts_of(case, function(*case))
    return facts


def reduced(tensor: torch.Tensor, group=None, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """The same tensor, after an all-reduce of it in place."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def optimizer_for(model):
    """Adam with a large epsilon on purpose.

    It is not linear in the gradients, so that averaging weights in their place shows, nor blind to
    their scale, so that a forgotten division does.
    """
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=0.01)
