"""What one rank's memory holds over a step, storage by storage.

A dispatch mode sees each operation of torch, in backward too, and so each storage that it takes or
returns; a weak reference to the storage tells when it is freed. A storage counts once, with its
size in bytes, whatever views of it there are. Not seen: what a kernel allocates for itself, what
libraries such as gloo or NCCL hold, and the allocator's rounding and fragmentation.
"""

import functools
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dplab.predict.memory import States

CATEGORIES = ("parameters", "optimizer", "gathered", "gradients", "communication", "activations",
              "other")
"""A storage that is several of these at different times is counted as the first of them."""

_ORDER = {category: place for place, category in enumerate(CATEGORIES)}


@dataclass(frozen=True)
class Sample:
    """What is held after a change. ``op``: how many operations of torch the block has run;
    ``seconds``: since it began; ``bytes``: each of `CATEGORIES` to bytes.
    """

    op: int
    seconds: float
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Phase:
    """A named part of the step, from the count of operations ``start`` to ``end``."""

    name: str
    start: int
    end: int


class MemoryTimeline:
    """Follows what this rank holds during a ``with`` block, on CPU and GPU alike.

    ``model`` and ``optimizer`` tell what a storage is:

    - parameters: the model's and the optimizer's as the block begins (the shards, if sharded)
    - optimizer: its state, and that of an optimizer inside it
    - gathered: what takes a parameter's place during the block, or fills its empty storage
    - gradients: what is some parameter's ``grad`` at some time, whole or a shard
    - communication: what a collective takes, and is none of these: buckets, flat buffers
    - activations: made while autograd records, in forward or by recomputation
    - other: buffers of modules, inputs, what backward and the optimizer need in passing

    What was there before and belongs to none of them, such as the batch, counts from where it is
    first used; DDP's buckets, which its C++ code made, from the begin, if the block has a backward.
    ``device``, such as "cuda", counts that type alone. Each operation takes some microseconds
    longer, and another for each parameter.

    Afterwards: ``peak`` in bytes, ``at_peak`` by category, ``samples`` (a `Sample` for each change)
    and ``phases``. Raises RuntimeError for a block inside another one.
    """

    _active = False

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *,
                 device: str | None = None):
        self._optimizers = _with_inner(optimizer)  # the given one first
        self._model, self._device = model, device
        self._events: list[tuple[int, float, int, int]] = []  # op, seconds, storage, its new size
        self._categories: list[int] = []  # of each storage, by its number
        self._live = {}  # address: (number, weak reference)
        self._sizes: list[int] = []
        self._strangers: set[int] = set()  # numbers of storages that no operation returned
        self._op = 0
        self.samples: list[Sample] = []
        self.phases: list[Phase] = []

    def __enter__(self):
        if MemoryTimeline._active:
            raise RuntimeError("a MemoryTimeline is active already: end its block first")
        self._start = None
        self._places = [module._parameters for module in self._model.modules()]
        parameters, _, optimizer = _at_rest(self._model, self._optimizers)
        self._mark(parameters, "parameters")
        self._mark(optimizer, "optimizer")
        self._mark(_storages(self._model.buffers()), "other")
        self._look()
        self._start = time.perf_counter()
        with ExitStack() as stack:
            MemoryTimeline._active = True
            stack.callback(setattr, MemoryTimeline, "_active", False)
            # FSDP frees and fills storages past any dispatch, and the course's ring runs in a
            # thread of its own, where this mode is not.
            stack.enter_context(_replaced(torch.UntypedStorage, "resize_", self._resizing))
            for name in ("send", "recv"):
                stack.enter_context(_replaced(dist.ProcessGroup, name, self._passing))
            stack.enter_context(_Mode(self._ran))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.__exit__(*error)
        self._look()
        self._mark(_at_rest(self._model, self._optimizers)[2], "optimizer")
        self._live.clear()
        self._replay()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a part of the step, such as "forward", for ``phases``."""
        start = self._op
        try:
            yield
        finally:
            self.phases.append(Phase(name, start, self._op))

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return self._highest.total

    @property
    def at_peak(self) -> dict[str, int]:
        """What was held then: each of `CATEGORIES` to bytes."""
        return self._highest.bytes

    @property
    def _highest(self):
        return max(self.samples, key=lambda sample: sample.total)

    def _number(self, storage, *, made=False):
        """The storage's number, after noting one that is unknown."""
        address = storage._cdata
        if address not in self._live:
            def freed(_):
                number, _ = self._live.pop(address)
                self._note(number, 0)

            number = len(self._categories)
            self._live[address] = number, weakref.ref(storage, freed)
            self._categories.append(_ORDER["other"])
            self._sizes.append(0)
            if not made and self._start is not None:
                self._strangers.add(number)
            self._note(number, self._size(storage))
        return self._live[address][0]

    def _size(self, storage):
        return storage.nbytes() if self._device in (None, storage.device.type) else 0

    def _note(self, number, size):
        if size != self._sizes[number]:
            self._sizes[number] = size
            passed = 0.0 if self._start is None else time.perf_counter() - self._start
            self._events.append((self._op, passed, number, size))

    def _mark(self, storages, category):
        for storage in storages:
            number = self._number(storage)
            self._categories[number] = min(self._categories[number], _ORDER[category])

    def _look(self):
        """Notes what stands in the parameters' places now, and the gradients."""
        there = [parameter for place in self._places for parameter in place.values()
                 if parameter is not None]
        self._mark(_storages(there), "gathered")
        self._mark(_storages(_gradients(there + _grouped(self._optimizers))), "gradients")

    def _ran(self, func, inputs, outputs):
        if func.namespace == "profiler":
            self._look()
            return
        self._op += 1
        inputs = list(_storages(tree_leaves(inputs)))
        for storage in inputs:
            self._note(self._number(storage), self._size(storage))
        made = "activations" if torch.is_grad_enabled() else "other"
        outputs = list(_storages(tree_leaves(outputs)))
        for storage in outputs:
            if storage._cdata not in self._live:
                self._number(storage, made=True)
                self._mark([storage], made)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._mark(inputs + outputs, "communication")
        self._look()

    def _resizing(self, original):
        def resize_(storage, size):
            number = self._number(storage)
            if storage.nbytes() == 0:
                self._mark([storage], "gathered")
            original(storage, size)
            self._note(number, self._size(storage))
            return storage

        return resize_

    def _passing(self, original):
        @functools.wraps(original)
        def send_or_recv(group, tensors, *args, **kwargs):
            self._mark(_storages(tree_leaves(tensors)), "communication")
            return original(group, tensors, *args, **kwargs)

        return send_or_recv

    def _replay(self):
        """Makes the samples, now that each storage's category is known."""
        has_ddp = any(isinstance(each, DistributedDataParallel) for each in self._model.modules())
        buckets = {number for number in self._strangers if has_ddp
                   and CATEGORIES[self._categories[number]] == "communication"}
        events = []
        for op, seconds, number, size in self._events:
            if number in buckets:  # DDP made it before the block
                buckets.remove(number)
                op, seconds = 0, 0.0
            events.append((op, seconds, number, size))
        events.sort(key=lambda event: event[1])
        held, sizes = dict.fromkeys(CATEGORIES, 0), [0] * len(self._sizes)
        self.samples = [Sample(0, 0.0, dict(held))]
        for op, seconds, number, size in events:
            held[CATEGORIES[self._categories[number]]] += size - sizes[number]
            sizes[number] = size
            if seconds == 0:
                self.samples.clear()
            self.samples.append(Sample(op, seconds, dict(held)))


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> States:
    """The bytes of model states that this rank holds now, each storage counted once.

    Parameters are the model's and those in the optimizer's groups; an optimizer inside the
    optimizer is part of its state. DDP's buckets are in no tensor that Python sees, unless with
    ``gradient_as_bucket_view=True``, where they are the gradients. Comparable, by ``==``, with
    `dplab.predict.shards.real_states`.
    """
    parts = _at_rest(model, _with_inner(optimizer))
    return States(*(sum(storage.nbytes() for storage in part) for part in parts))


def _at_rest(model, optimizers):
    """The storages of parameters, gradients and optimizer state, none of them in two of these."""
    parameters = [*model.parameters(), *_grouped(optimizers[:1])]
    everywhere = parameters + _grouped(optimizers)
    state = [tensor for optimizer in optimizers for tensor in tree_leaves(dict(optimizer.state))
             if isinstance(tensor, torch.Tensor)]
    parts, seen = [], set()
    for tensors in (parameters, _gradients(everywhere), [*state, *everywhere]):
        found = {storage._cdata: storage for storage in _storages(tensors)}
        parts.append([storage for address, storage in found.items()
                      if address not in seen and storage.nbytes()])
        seen |= set(found)
    return parts


def _with_inner(optimizer):
    """The optimizer, and those that it keeps as attributes."""
    if optimizer is None:
        return []
    return [optimizer, *(each for value in vars(optimizer).values()
                         for each in (value if isinstance(value, list | tuple) else [value])
                         if isinstance(each, Optimizer))]


def _grouped(optimizers):
    return [parameter for optimizer in optimizers for group in optimizer.param_groups
            for parameter in group["params"]]


def _gradients(parameters):
    return [parameter.grad for parameter in parameters
            if parameter.is_leaf and parameter.grad is not None]


def _storages(values: Iterable) -> Iterator[torch.UntypedStorage]:
    """The storages of this rank's part of each value that is a tensor."""
    for value in values:
        if isinstance(value, DTensor):
            value = value._local_tensor
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            yield value.untyped_storage()


class _Mode(TorchDispatchMode):
    def __init__(self, ran):
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it takes itself apart, and its local operations come here
        outputs = func(*args, **(kwargs or {}))
        self._ran(func, (args, kwargs), outputs)
        return outputs


@contextmanager
def _replaced(owner, name, make):
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
