"""What lies in a rank's memory after a step, and what forward keeps there for backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from dplab.measure.storages import storages_of


class Held(NamedTuple):
    """``others``: tensors that neither the model nor the optimizer leads to."""

    model: nn.Module
    optimizer: Adam
    others: list[torch.Tensor]


def after_a_step(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], *,
                 autocast: bool = False, ddp: bool = False,
                 gradient_as_bucket_view: bool = False) -> Held:
    """Takes one step with Adam and returns who holds memory then.

    ``loss`` computes the loss of a model. With ``ddp`` the model is wrapped in DDP, and ``others``
    has its buckets; this needs a process group. With ``autocast`` a second forward has run in bf16,
    and ``others`` has the copies of the parameters that its backward still needs.
    """
    others: list[torch.Tensor] = []
    if ddp:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
        wrapped.register_comm_hook(others, _average)
        model = wrapped
    optimizer = Adam(model.parameters())
    loss(model).backward()
    optimizer.step()
    if autocast:
        # Not through DDP: its second forward makes new buckets, and ``others`` has the first ones.
        others += _copies(model.module if ddp else model, loss)
    return Held(model, optimizer, others)


def saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """The bytes that autograd saves in ``model(*inputs)`` for backward, each storage once.

    Parameters do not count: they lie there anyway.
    """
    _, saved = _saved_in(lambda: model(*inputs))
    sizes = {memory.data_ptr(): memory.nbytes() for memory in storages_of(saved)}
    for memory in storages_of(model.parameters()):
        sizes.pop(memory.data_ptr(), None)
    return sum(sizes.values())


def _saved_in(forward):
    """What a forward returns, and the tensors that autograd saves in it for backward."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return forward(), saved


def _average(buckets, bucket):
    """A communication hook that averages as DDP does, and keeps each bucket's tensor."""
    buckets.append(bucket.buffer())
    return allreduce_hook(None, bucket)


def _copies(model, loss):
    """The copies of parameters that a forward under autocast leaves for backward."""
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        _, saved = _saved_in(lambda: loss(model))
    casts = [parameter.detach().bfloat16().flatten() for parameter in model.parameters()]
    return [tensor for tensor in saved
            if tensor.dtype == torch.bfloat16 and any(_is_in(tensor, cast) for cast in casts)]


def _is_in(tensor, numbers):
    """Whether these are the numbers in the tensor's storage: one may look at it transposed."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == numbers.nbytes and torch.equal(
        torch.empty_like(numbers).set_(storage, 0, numbers.shape), numbers)
