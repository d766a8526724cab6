"""What exercises of several chapters use: gradients by name, and a tensor reduced over ranks."""

import torch
import torch.distributed as dist
from torch import nn


def gradients(model: nn.Module, when: str = "") -> dict[str, torch.Tensor | None]:
    """The gradients as facts; a copy of each, since the next step changes it."""
    return {f"the gradient of `{name}`{when}":
            None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()}


def reduced(tensor: torch.Tensor, group=None, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """The same tensor, after an all-reduce of it in place."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor
