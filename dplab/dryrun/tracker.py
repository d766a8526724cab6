"""Fake tensors whose storages are counted: what a rank would hold, and what it would send.

A storage counts from its creation until Python and autograd have dropped it, with its size in
bytes, whatever views of it there are. What operations take and return is seen, not what a kernel
needs for itself. Categories are those of `dplab.measure.MemoryTimeline`, which watches real ranks.
"""

import weakref
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from dplab.dryrun.report import Collective
from dplab.dryrun.trace import Begin, Change, Trace
from dplab.measure.memory import CATEGORIES

_ORDER = {category: place for place, category in enumerate(CATEGORIES)}

# Operation of torch.ops.c10d: (the field's name, position of the argument with the whole tensor).
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
}


class Tracker(FakeTensorMode):
    """A mode in which every new tensor is fake, and the fate of its storage is noted."""

    def __init__(self, on_begin=lambda phase, block: None):
        super().__init__(allow_non_fake_inputs=True)
        self._on_begin = on_begin
        self._live = {}  # address of a storage: its number, and a weak reference
        self._sizes, self._categories, self._blocks = [], [], []  # by number
        self._held = []  # sizes by number as the step began
        self._events = []  # (operation's number, what; of a change (storage's number, bytes))
        self._op = self._depth = 0
        self._part = None
        self._integers_are_real = False

    @contextmanager
    def tracking(self):
        """The mode, and with it the storages that FSDP frees and fills past any dispatch."""
        original = torch.UntypedStorage.resize_

        def resize_(storage, size):
            number = self._number(storage)
            original(storage, size)
            self._note(number, storage.nbytes())
            return storage

        torch.UntypedStorage.resize_ = resize_
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = original

    @contextmanager
    def real_integers(self):
        """For DDP's reducer, which reads the numbers that it broadcasts to rebuild its buckets."""
        self._integers_are_real = True
        try:
            yield
        finally:
            self._integers_are_real = False

    def mark(self, tensors, category, block=None):
        """Says what the tensors' storages are; of several categories, the first counts."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            number = self._number(tensor.untyped_storage())
            self._categories[number] = min(self._categories[number], _ORDER[category])
            if block is not None:
                self._blocks[number] = block

    def begin_step(self):
        """From now on it is the step: what happened before only left what is held now."""
        self._held, self._events, self._op = list(self._sizes), [], 0

    def begin(self, phase, block=None):
        self._part = phase, block
        self._events.append((self._op, Begin(phase, block)))
        self._on_begin(phase, block)

    def trace(self) -> Trace:
        """The step so far, with the category of each storage as it is known now."""
        held, by_block = dict.fromkeys(CATEGORIES, 0), {}
        for number, nbytes in enumerate(self._held):
            category, block = CATEGORIES[self._categories[number]], self._blocks[number]
            held[category] += nbytes
            if block is not None:
                part = by_block.setdefault(block, dict.fromkeys(CATEGORIES, 0))
                part[category] += nbytes
        events = [(op, Change(CATEGORIES[self._categories[what[0]]], what[1])
                   if isinstance(what, tuple) else what) for op, what in self._events]
        return Trace(held, by_block, events)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._integers_are_real and _makes_integers(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        self._depth += 1
        try:
            outputs = super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        # an operation within an operation is this mode's way to find shapes, and no memory
        if self._depth == 0 and outputs is not NotImplemented and func.namespace != "prim":
            self._ran(func, args, outputs)
        return outputs

    def _ran(self, func, args, outputs):
        self._op += 1
        if self._part is not None and self._part[0] == "optimizer":
            self._follow(args)
        made = "activations" if torch.is_grad_enabled() else "other"
        if made == "activations" and func is torch.ops.aten._to_copy.default and (
                self._is(args[0], "parameters")):
            made = "gathered"  # autocast's copy, which takes the parameter's place
        for tensor in _tensors(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._categories[self._number(storage)] = _ORDER[made]
        if func.namespace == "c10d":
            self.mark(_tensors(args), "communication")
            operation, place = _COLLECTIVES.get(func.overloadpacket.__name__, (None, None))
            if operation:
                self._events.append((self._op, _collective(operation, args[place])))

    def _follow(self, args):
        """In the optimizer, the first operation on a block's parameter or state begins it."""
        if args and isinstance(args[0], torch.Tensor):
            number, _ = self._live.get(args[0].untyped_storage()._cdata, (None, None))
            block = None if number is None else self._blocks[number]
            if block is not None and self._part[1] != block:
                self.begin("optimizer", block)

    def _is(self, tensor, category):
        number, _ = self._live.get(tensor.untyped_storage()._cdata, (None, None))
        return number is not None and self._categories[number] == _ORDER[category]

    def _number(self, storage):
        address = storage._cdata
        if address not in self._live:
            def freed(_):
                self._note(self._live.pop(address)[0], 0)

            number = len(self._sizes)
            self._live[address] = number, weakref.ref(storage, freed)
            self._sizes.append(0)
            self._categories.append(_ORDER["other"])
            self._blocks.append(None)
            self._note(number, storage.nbytes())
        return self._live[address][0]

    def _note(self, number, nbytes):
        change, self._sizes[number] = nbytes - self._sizes[number], nbytes
        if change:
            self._events.append((self._op, (number, change)))


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for part in tree for tensor in _tensors(part)]
    return []


def _collective(operation, whole):
    tensors = _tensors(whole)
    return Collective(operation, sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                      str(tensors[0].dtype).removeprefix("torch."))


def _makes_integers(func, args, kwargs):
    tensors = _tensors(args)
    if not tensors:
        return func is torch.ops.aten.empty.memory_format and (
            kwargs or {}).get("dtype") == torch.int32
    return all(type(tensor) is torch.Tensor for tensor in tensors)
