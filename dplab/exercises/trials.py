"""What trials of several chapters are made of: facts of gradients and cases, and an optimizer."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn


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
