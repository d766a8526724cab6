"""Data-parallel training by hand: four steps around the loop of one device.

All ranks start with rank 0's weights, and each computes gradients from its own part of the batch.
An all-reduce turns the gradients into their mean over the ranks, and every rank takes the same
step with it. Equal weights, gradients and optimizers make equal weights again, so the ranks stay
equal for good.

The first part of this file is that idea alone. The second part makes of it a wrapper for any
model: frozen, tied and unused parameters, buffers, any strides, accumulation. PyTorch's
DistributedDataParallel does the same, in buckets and during backward (Li et al., 2020,
https://arxiv.org/abs/2006.15704); here each gradient travels by itself, after backward.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

# --- the idea ------------------------------------------------------------------------------------
#
#     for tensor in state of the model:    _take_rank_0s(tensor)           once
#     own = batch[rank::ranks]                                             in each step
#     loss(model(own)).backward()
#     for gradient in gradients:           _take_the_mean(gradient)
#     optimizer.step()


def _take_rank_0s(message):
    dist.broadcast(message, src=0)


def _take_the_mean(message):
    # Scaled before the sum, as in DDP: the sum of N large numbers could overflow.
    message.mul_(1 / dist.get_world_size())
    dist.all_reduce(message, op=dist.ReduceOp.SUM)


# --- what production needs -----------------------------------------------------------------------


def broadcast_module(module: nn.Module) -> None:
    """Overwrites all parameters (frozen ones too) and buffers, in place, with those of rank 0."""
    broadcast_tensors(module.parameters())
    broadcast_tensors(module.buffers())


def broadcast_tensors(tensors) -> None:
    """Overwrites each tensor, of any shape, dtype and strides, with that of rank 0."""
    for tensor in tensors:
        # `.data`, because autograd may have saved this buffer for a backward that is still to
        # come, and would take an ordinary in-place write for an error.
        message = tensor.data.contiguous()
        _take_rank_0s(message)
        tensor.data.copy_(message)


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Replaces each gradient by its mean over all ranks. Call it on every rank, after backward.

    A rank that has no gradient for a parameter, because it did not use it, counts as zeros and
    receives the mean too. Where no rank has one, it stays ``None``. This is what DDP does with
    ``find_unused_parameters=True``. Raises NotImplementedError if a gradient is sparse.
    """
    for name, parameter in module.named_parameters():
        refuse_sparse_gradient(name, parameter)
    # parameters() yields a tied parameter once, so it is reduced once.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    for parameter, is_used in zip(parameters, _used_on_any_rank(parameters), strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # The message is in row-major order on every rank, whatever the gradient's strides.
        message = parameter.grad.contiguous()
        _take_the_mean(message)
        parameter.grad.copy_(message)


def _used_on_any_rank(parameters: list[nn.Parameter]) -> list[bool]:
    """For each parameter, whether at least one rank has a gradient for it.

    Every rank must launch the same all-reduces. What one rank sees cannot decide which, so all
    ranks ask each other first.
    """
    if not parameters:
        return []
    return true_on_any_rank([parameter.grad is not None for parameter in parameters],
                            parameters[0].device)


def true_on_any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """For each flag, whether it is set on at least one rank. All ranks bring equally many."""
    told = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return [flag == 1 for flag in told.tolist()]


def refuse_sparse_gradient(name: str, parameter: nn.Parameter) -> None:
    """NotImplementedError for a gradient that an all-reduce of flat tensors cannot average."""
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise NotImplementedError(f"the gradient of {name!r} is sparse, and only dense ones can be "
                                  "averaged: build that layer with sparse=False")


class ManualDDP(nn.Module):
    """A replica of ``module`` on every rank, kept equal to the others by hand.

    ``module`` lies on this rank's device; its values on rank 0 are the ones that count. In
    training mode, each forward first takes over rank 0's buffers, such as BatchNorm's running
    statistics. Between ``backward()`` and ``optimizer.step()``, call ``finish_gradient_sync()``.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self._is_syncing = True
        broadcast_module(module)

    def forward(self, *args, **kwargs):
        if self.training and self._is_syncing:
            broadcast_tensors(self.module.buffers())
        return self.module(*args, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Averages the gradients over the ranks; does nothing inside ``no_sync()``."""
        if self._is_syncing:
            average_gradients(self.module)

    @contextmanager
    def no_sync(self):
        """Inside, nothing is communicated and gradients add up on each rank.

        The next ``finish_gradient_sync()`` outside averages what has accumulated.
        """
        was_syncing, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = was_syncing
