"""What watches a dry run: `MemoryTimeline`, as on real ranks, here over tensors that are fake.

Beside the memory it notes where each part of the step begins, block by block, and what collectives
are called, all in one order: the trace of the step.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from dplab.dryrun.events import Begin, Events, Resized
from dplab.dryrun.findings import Collective
from dplab.measure.memory_timeline import MemoryTimeline
from dplab.measure.storages import CATEGORIES, storages_of
from dplab.predict import cost
from dplab.spawn.rank import recording


class StepTimeline(MemoryTimeline):
    """Follows one step of a model whose ``blocks`` begin with `begin`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer,
                 blocks: Sequence[nn.Module]):
        super().__init__(model, optimizer)
        self._blocks = blocks
        self._block_of: dict[int, int] = {}  # of a storage, by its number
        self._part: tuple[str, int | None] = "forward", None

    def __enter__(self):
        super().__enter__()
        self._everything = self._places, self._in_groups
        self._near = _near(self._places, self._blocks)
        if isinstance(self._model, DistributedDataParallel):
            # Nothing is gathered, and the gradients are those that remain: one that is copied into
            # its bucket was only there in passing.
            self._near = {block: [] for block in self._near}
        for block, module in enumerate(self._blocks):
            for parameter in module.parameters():
                state = self._optimizers[0].state.get(parameter, {}).values()
                for storage in storages_of([parameter, *state]):
                    self._block_of[self._storages.number(storage)] = block
        recording.recorder_here().listeners.append(self._called)
        return self

    def __exit__(self, *error):
        recording.recorder_here().listeners.remove(self._called)
        self._places, self._in_groups = self._everything
        super().__exit__(*error)

    def begin(self, phase: str, block: int | None = None) -> None:
        """A part of the step begins: "forward", "backward" or "optimizer", of a block or of all."""
        self._look()
        # Only these can change before the next part begins; to look at all takes minutes.
        self._places, self._in_groups = self._near[block], []
        self._part = phase, block
        self._note(Begin(phase, block))

    def trace(self) -> Events:
        """The step, with the category of each storage as it is known at the end."""
        held = dict.fromkeys(CATEGORIES, 0)
        by_block: dict[int, dict[str, int]] = {}
        events: list[tuple[int, Resized | Begin | Collective]] = []
        for op, seconds, what in self._in_order():
            if len(what) == 1:
                events.append((op, what[0]))
                continue
            number, change = what
            category = self._storages.category(number)
            if seconds > 0:
                events.append((op, Resized(category, change)))
                continue
            held[category] += change
            if number in self._block_of:
                part = by_block.setdefault(self._block_of[number], dict.fromkeys(CATEGORIES, 0))
                part[category] += change
        return Events(held, by_block, events)

    def _replay(self):
        """The samples come from the trace."""

    def _called(self, call):
        whole = cost.whole_bytes(call.operation, call.group_size, call.bytes)
        self._note(Collective(call.operation, int(whole), call.dtype, call.group_size))

    def _ran(self, func, inputs, outputs):
        first = next(storages_of(inputs[0][:1]), None)
        number = None if first is None else self._storages.known(first)
        block = self._block_of.get(number)
        if self._part[0] == "optimizer" and block not in (None, self._part[1]):
            self.begin("optimizer", block)
        super()._ran(func, inputs, outputs)
        if func is torch.ops.aten._to_copy.default and torch.is_grad_enabled() and (
                number is not None and self._storages.category(number) == "parameters"):
            # autocast's copy, which takes the parameter's place
            self._storages.mark(storages_of(tree_leaves(outputs)), "gathered")


def _near(places, blocks):
    """For each block, and for None, the places of its parameters and of those outside all."""
    inside = [[module._parameters for module in block.modules()] for block in blocks]
    in_blocks = {id(place) for block in inside for place in block}
    outside = [place for place in places if id(place) not in in_blocks]
    return {None: outside, **{block: place + outside for block, place in enumerate(inside)}}


class FakeTensors(FakeTensorMode):
    """A mode in which every new tensor has a shape and no data.

    With ``integers_are_real`` integers have data: DDP's reducer reads the numbers that it
    broadcasts to rebuild its buckets.
    """

    integers_are_real = False

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.integers_are_real and _makes_integers(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _makes_integers(func, args, kwargs):
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") == torch.int32
    return all(type(tensor) is torch.Tensor for tensor in tensors)
