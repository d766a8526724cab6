"""Model states as a rank holds them now: parameters, gradients, optimizer state."""

from collections.abc import Iterable, Sequence

import torch
from torch import UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dplab.measure.storages import storages_of
from dplab.predict.memory import States


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> States:
    """The bytes of model states that this rank holds now, each storage counted once.

    Parameters are the model's and those in the optimizer's groups; an optimizer inside the
    optimizer is part of its state. DDP's buckets are in no tensor that Python sees, unless with
    ``gradient_as_bucket_view=True``, where they are the gradients. Comparable, by ``==``, with
    `dplab.predict.shards.real_states`.
    """
    parts = at_rest(model, with_inner(optimizer))
    return States(*(sum(storage.nbytes() for storage in part) for part in parts))


def at_rest(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[UntypedStorage]]:
    """The storages of parameters, gradients and optimizer state, none of them in two of these."""
    parameters = [*model.parameters(), *grouped(optimizers[:1])]
    everywhere = parameters + grouped(optimizers)
    state = [tensor for optimizer in optimizers for tensor in tree_leaves(dict(optimizer.state))
             if isinstance(tensor, torch.Tensor)]
    parts: list[list[UntypedStorage]] = []
    seen: set[int] = set()
    for tensors in (parameters, gradients(everywhere), [*state, *everywhere]):
        found = {storage._cdata: storage for storage in storages_of(tensors)}
        parts.append([storage for address, storage in found.items()
                      if address not in seen and storage.nbytes()])
        seen |= set(found)
    return parts


def with_inner(optimizer: Optimizer | None) -> list[Optimizer]:
    """The optimizer, and those that it keeps as attributes."""
    if optimizer is None:
        return []
    return [optimizer, *(each for value in vars(optimizer).values()
                         for each in (value if isinstance(value, list | tuple) else [value])
                         if isinstance(each, Optimizer))]


def grouped(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The parameters in their groups."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups
            for parameter in group["params"]]


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that the leaves among the parameters have."""
    return [parameter.grad for parameter in parameters
            if parameter.is_leaf and parameter.grad is not None]
