"""What `fully_shard` gathers at a time: a model's blocks, and the units that a policy makes."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from dplab.dryrun.setup import Setup

Wrapped = nn.Module | list[nn.Module]
POLICIES = ("blocks", "root")


class UnknownUnits(ValueError):
    """The model has no such units."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that the model repeats: what its outermost `nn.ModuleList`s hold, or else, of an
    `nn.Sequential`, the children with parameters.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {each for outer in lists for each in outer.modules() if each is not outer}
    blocks = [block for each in lists if each not in inner for block in each]
    if not blocks and isinstance(model, nn.Sequential):
        blocks = [child for child in model if next(child.parameters(), None) is not None]
    return blocks


def units_of(model: nn.Module, blocks: Sequence[nn.Module],
             policy: str | int | type | tuple[type, ...] | Callable) -> list[Wrapped]:
    """The units of a policy, inner ones before outer ones; the model itself is not among them.

    Raises UnknownUnits where there are none.
    """
    if policy == "root":
        return []
    units: list[Wrapped]
    if isinstance(policy, str | int):
        size = policy if isinstance(policy, int) else 1
        runs = [list(blocks[first:first + size]) for first in range(0, len(blocks), size)]
        units = [run if len(run) > 1 else run[0] for run in runs]
    elif isinstance(policy, type | tuple):
        units = [*reversed([module for module in model.modules() if isinstance(module, policy)])]
    else:
        units = list(policy(model))
    units = [unit for unit in units if unit is not model]
    if not units:
        raise UnknownUnits(f"{type(model).__name__} has no units for {policy!r}: give a class of "
                           "its modules, a function, or 'root' for the whole model")
    return units


def checkpointed(model: nn.Module, blocks: Sequence[nn.Module],
                 units: Sequence[Wrapped]) -> tuple[list[nn.Module], list[Wrapped]]:
    """Puts each block into a wrapper that keeps its input alone and computes it anew in backward.

    Returns blocks and units with the wrappers. Raises UnknownUnits for a model without blocks.
    """
    if not blocks:
        raise UnknownUnits(f"{type(model).__name__} has no blocks to be checkpointed: keep them in "
                           "an nn.ModuleList, or leave checkpointing out")
    wrapper_of = {block: checkpoint_wrapper(block, preserve_rng_state=False) for block in blocks}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in wrapper_of:
                parent._modules[name] = wrapper_of[child]
    return list(wrapper_of.values()), [
        [wrapper_of.get(module, module) for module in unit] if isinstance(unit, list)
        else wrapper_of.get(unit, unit) for unit in units]


def shard(model: nn.Module, units: Sequence[Wrapped], setup: Setup) -> None:
    """Wraps each unit, and then the model."""
    policy = fsdp.MixedPrecisionPolicy()
    if setup.precision == "mixed":
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (setup.world_size,))
    if setup.shard_ranks is not None:
        mesh = init_device_mesh("cpu", (setup.world_size // setup.shard_ranks, setup.shard_ranks),
                                mesh_dim_names=("replicate", "shard"))
    for unit in [*units, model]:
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy,
                         reshard_after_forward=setup.reshard_after_forward)
