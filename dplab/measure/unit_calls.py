"""In which order the units of `fully_shard` gather, compute and reduce."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class UnitCalls:
    """Notes what each unit of a wrapped model does, on this rank, from now on.

    ``notes``, in order: "G3" where unit 3's parameters are gathered, "F3" where its forward begins,
    "B3" its backward, and "R3" where its gradients are reduced. Units are numbered in the order of
    `nn.Module.modules`, and "r" is the root, whose own computation is not noted. The collectives
    are torch's.
    """

    def __init__(self, model: nn.Module):
        self.notes: list[str] = []
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for number, unit in enumerate(units):
            name = "r" if number == 0 else str(number - 1)
            unit.set_custom_all_gather(_Gather(self.notes, f"G{name}"))
            unit.set_custom_reduce_scatter(_Reduce(self.notes, f"R{name}"))
            if number:
                unit.register_forward_pre_hook(partial(self._note, f"F{name}"))
                unit.register_full_backward_pre_hook(partial(self._note, f"B{name}"))

    def _note(self, note, *_):
        self.notes.append(note)

    def __str__(self):
        return " ".join(self.notes)


class _Noting:
    def __init__(self, notes, note):
        self.notes, self.note = notes, note

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Noting, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.notes.append(self.note)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_Noting, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.notes.append(self.note)
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group,
                                          async_op=async_op)
