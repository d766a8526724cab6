"""ZeRO-3: a layer's parameters are whole only while the layer computes.

Each rank keeps 1/N of the parameters, of their gradients and of the optimizer's state. Before a
layer's forward, an all-gather fetches its parameters; after it, they are freed. Before the layer's
backward they are gathered again, and the gradient that comes out goes through a reduce-scatter, so
that each rank is left with the mean for its own part. While one layer computes, the next one's
parameters are already on their way.

Chapter 09 builds that idea alone, for one layer. Here is what production needs beside it: the next
gather ahead, what belongs to no layer, accumulation, the whole state dict.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5.3 and 7.2.2; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", 2023, sections 3 and 4.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dplab.parallel.gathered_parameters import Unit, divide, places_of
from dplab.parallel.manual_ddp import broadcast_tensors
from dplab.parallel.ownership import current_backward


class FullyShardedModel(nn.Module):
    """``module`` with 1/N of its parameters on each rank, gathered one unit at a time.

    module: lies on this rank's device, whole; its values on rank 0 are the ones that count. From
        now on each of its parameters is this rank's piece of it, of one dimension, often empty;
        only in forward and backward is it whole for a while. Any torch optimizer that treats each
        element by itself takes ``parameters()``; group them by their names, which stay. torch's
        `clip_grad_norm_` would find the norm of this rank's pieces alone. Buffers stay whole.
    units: the submodules that are gathered one at a time, in the order in which forward calls
        them; by default the children that own parameters, where those of a ModuleList count one
        by one. What belongs to none, or is tied across several, is gathered for the whole of
        forward and of backward. Every rank runs the same units in the same order.

    A step moves 3(N−1)/N·M bytes: two all-gathers and a reduce-scatter. Every backward adds the
    mean of its gradients to the pieces' ``grad``, where a parameter that backward did not reach
    counts as zeros. ValueError for a unit that is not part of ``module``, or is part of another.
    """

    def __init__(self, module: nn.Module, units=None):
        super().__init__()
        units = _children_with_parameters(module) if units is None else list(units)
        _check(units, module)
        self.module = module
        broadcast_tensors(module.buffers())
        # The first one is of what belongs to no unit: forward and backward both begin with it.
        places = places_of(module)
        self._units = [Unit(parameters, places) for parameters in divide(places, units)]
        for index, unit in enumerate(units, start=1):
            unit.register_forward_pre_hook(partial(self._before_forward, index), prepend=True)
            unit.register_forward_hook(partial(self._after_forward, index))
        self._running = None
        self._reducing = None
        self._backward = None
        self._is_syncing = True

    def forward(self, *args, **kwargs):
        if current_backward() == -1:
            self._reducing = None
            self._take_all_out()
        self._before_forward(0)
        output = self.module(*args, **kwargs)
        self._after_forward(0, None, None, output)
        return output

    def _before_forward(self, index, _module=None, _inputs=None):
        self._units[index].put_in(self._take_gradient)
        if current_backward() == -1 and index + 1 < len(self._units):
            self._units[index + 1].launch_gather()

    def _after_forward(self, index, _module, _inputs, output):
        if current_backward() != -1:  # activation checkpointing runs forward again, for backward
            return
        if index == 0:
            self._take_all_out()  # with those that were on their way, and then did not run
        else:
            self._units[index].take_out()
        outputs = [leaf for leaf in tree_leaves(output)
                   if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs:
            torch.autograd.graph.register_multi_grad_hook(
                outputs, lambda _: self._before_backward(index), mode="any")

    def _before_backward(self, index):
        """Autograd calls this when it has the gradient of the unit's output."""
        if self._backward != current_backward():
            self._backward = current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self._put_in_for_backward(0)
        if index in (0, self._running):
            return
        if self._running is not None:  # whose backward is over when this one's begins
            self._units[self._running].take_out()
        self._running = index
        self._put_in_for_backward(index)

    def _put_in_for_backward(self, index):
        with torch.enable_grad():  # activation checkpointing will run forward again
            self._units[index].put_in(self._take_gradient)
        self._units[index - 1].launch_gather()  # before number 0 stands the last one

    @torch.no_grad()
    def _take_gradient(self, shard, gradient):
        shard.keep(gradient)
        if self._is_syncing:
            self._launch_reduce(shard)

    def _launch_reduce(self, shard):
        """Sends a gradient to its owners, as soon as the one before has arrived."""
        self._finish_reducing()
        shard.launch_reduce()
        self._reducing = shard

    def _finish_reducing(self):
        if self._reducing is not None:
            self._reducing.finish_reduce()
            self._reducing = None

    @torch.no_grad()
    def _end_of_backward(self):
        for shard in self._shards() if self._is_syncing else ():
            if shard.unsent is not None:  # from within no_sync(), and not used since
                self._launch_reduce(shard)
        self._finish_reducing()
        self._take_all_out()

    def _take_all_out(self):
        """Between steps there is nothing to do, unless one failed half-way."""
        for unit in self._units:
            unit.take_out()
        self._running = None

    @contextmanager
    def no_sync(self):
        """Inside, gradients are not reduced, and whole ones add up on each rank, M bytes in all.

        The next backward outside takes them along. Without it, accumulation needs no more memory,
        and every backward has its reduce-scatter.
        """
        was_syncing, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = was_syncing

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state dict of ``module``, as it was before: on every rank, copies.

        Every rank calls it, and needs the memory for the whole model.
        """
        self._take_all_out()
        whole: dict[nn.Parameter, torch.Tensor] = {}
        for shard in self._shards():
            whole.update(zip(shard.pieces, shard.gather_copies(), strict=True))
        state = self.module.state_dict(keep_vars=True)
        return {name: whole[tensor] if tensor in whole else tensor.detach().clone()
                for name, tensor in state.items()}

    def _shards(self):
        return [shard for unit in self._units for shard in unit.shards]


def _children_with_parameters(module) -> list[nn.Module]:
    """The children that own parameters; a list's or dict's own children in place of itself."""
    units = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # which nobody calls
            units += _children_with_parameters(child)
        elif any(True for _ in child.parameters()):
            units.append(child)
    return units


def _check(units, module) -> None:
    for unit in units:
        if unit is module or unit not in set(module.modules()):
            raise ValueError(f"this unit is not a submodule of the module: {unit}")
        if not set(units).isdisjoint(set(unit.modules()) - {unit}):
            raise ValueError(f"a unit may not be part of another; this one holds one: {unit}")
        if units.count(unit) > 1:
            raise ValueError(f"this unit is given twice: {unit}")
