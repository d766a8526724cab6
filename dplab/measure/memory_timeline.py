"""What one rank's memory holds, storage by storage: model states now, and everything over a step.

A dispatch mode sees each operation of torch, in backward too, and so each storage that it takes or
returns; a weak reference to the storage tells when it is freed. A storage counts once, with its
size in bytes, whatever views of it there are. Not seen: what a kernel allocates for itself, what
libraries such as gloo or NCCL hold, and the allocator's rounding and fragmentation.

torch's own trackers (`torch.distributed._tools`) find the same peak, to the byte. They are not
used, since they know neither buckets nor parameters that the course's own code gathers, and have
the most that each module holds in place of what is held from operation to operation.
"""

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dplab.measure.storages import CATEGORIES, Storages, Watch, storages_of
from dplab.predict.memory import States


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> States:
    """The bytes of model states that this rank holds now, each storage counted once.

    Parameters are the model's and those in the optimizer's groups; an optimizer inside the
    optimizer is part of its state. DDP's buckets are in no tensor that Python sees, unless with
    ``gradient_as_bucket_view=True``, where they are the gradients. Comparable, by ``==``, with
    `dplab.predict.shards.real_states`.
    """
    parts = _at_rest(model, _with_inner(optimizer))
    return States(*(sum(storage.nbytes() for storage in part) for part in parts))


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

    def holds(self, sample: "Sample") -> bool:
        """Whether the sample is of this part."""
        return self.start < sample.op <= self.end


class Sampled:
    """What has ``samples``, and so a highest one."""

    samples: list[Sample]

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


class MemoryTimeline(Sampled):
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
    Each operation takes some microseconds longer, and another for each parameter.

    Afterwards: ``peak`` in bytes, ``at_peak`` by category, ``samples`` (a `Sample` for each change)
    and ``phases``.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None):
        self._model, self._optimizers = model, _with_inner(optimizer)  # the given one first
        # (op, seconds, what): of a change, what is (number of the storage, bytes)
        self._events: list[tuple[int, float, tuple]] = []
        self._storages = Storages(self._note)
        self._strangers: set[int] = set()  # numbers of storages that no operation returned
        self._op = 0
        self.samples: list[Sample] = []
        self.phases: list[Phase] = []

    def __enter__(self):
        self._start = None
        self._places = [module._parameters for module in self._model.modules()]
        self._in_groups = _grouped(self._optimizers)
        parameters, _, optimizer = _at_rest(self._model, self._optimizers)
        self._storages.mark(parameters, "parameters")
        self._storages.mark(optimizer, "optimizer")
        self._storages.mark(storages_of(self._model.buffers()), "other")
        self._look()
        self._start = time.perf_counter()
        with ExitStack() as stack:
            # FSDP frees and fills storages past any dispatch, and the course's ring runs in a
            # thread of its own, where this mode is not.
            for owner, name, instead in ((UntypedStorage, "resize_", self._resizing),
                                         (dist.ProcessGroup, "send", self._passing),
                                         (dist.ProcessGroup, "recv", self._passing)):
                stack.enter_context(mock.patch.object(owner, name, instead(getattr(owner, name))))
            stack.enter_context(Watch(self._ran))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.__exit__(*error)
        self._look()
        self._storages.mark(_at_rest(self._model, self._optimizers)[2], "optimizer")
        self._storages.forget()
        self._replay()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a part of the step, such as "forward", for ``phases``."""
        start = self._op
        try:
            yield
        finally:
            self.phases.append(Phase(name, start, self._op))

    def _note(self, *what):
        passed = 0.0 if self._start is None else time.perf_counter() - self._start
        self._events.append((self._op, passed, what))

    def _look(self):
        """Notes what stands in the parameters' places now, and the gradients."""
        there = [parameter for place in self._places for parameter in place.values()
                 if parameter is not None]
        self._storages.mark(storages_of(there), "gathered")
        self._storages.mark(storages_of(_gradients(there + self._in_groups)), "gradients")

    def _ran(self, func, inputs, outputs):
        if func.namespace == "profiler":
            self._look()
            return
        self._op += 1
        inputs = list(storages_of(tree_leaves(inputs)))
        for storage in inputs:
            if self._storages.known(storage) is None:
                self._strangers.add(self._storages.number(storage))
            self._storages.look_at(storage)
        made = "activations" if torch.is_grad_enabled() else "other"
        outputs = list(storages_of(tree_leaves(outputs)))
        for storage in outputs:
            self._storages.number(storage, made)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._storages.mark(inputs + outputs, "communication")
        self._look()

    def _resizing(self, original):
        def resize_(storage, size):
            self._storages.number(storage)
            if storage.nbytes() == 0:
                self._storages.mark([storage], "gathered")
            original(storage, size)
            self._storages.look_at(storage)
            return storage

        return resize_

    def _passing(self, original):
        @functools.wraps(original)
        def send_or_recv(group, tensors, *args, **kwargs):
            self._storages.mark(storages_of(tree_leaves(tensors)), "communication")
            return original(group, tensors, *args, **kwargs)

        return send_or_recv

    def _replay(self):
        """Makes the samples, now that each storage's category is known."""
        held = dict.fromkeys(CATEGORIES, 0)
        self.samples = [Sample(0, 0.0, dict(held))]
        for op, seconds, (number, change) in self._in_order():
            held[self._storages.category(number)] += change
            if seconds == 0:
                self.samples.clear()
            self.samples.append(Sample(op, seconds, dict(held)))

    def _in_order(self):
        """The events, those of DDP's buckets, which it made before the block, at its begin."""
        has_ddp = any(isinstance(each, DistributedDataParallel) for each in self._model.modules())
        buckets = {number for number in self._strangers if has_ddp and
                   self._storages.category(number) in ("communication", "gradients")}
        events = []
        for op, seconds, what in self._events:
            if what[0] in buckets:
                buckets.remove(what[0])
                op, seconds = 0, 0.0
            events.append((op, seconds, what))
        return sorted(events, key=lambda event: event[1])


def _at_rest(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[UntypedStorage]]:
    """The storages of parameters, gradients and optimizer state, none of them in two of these."""
    parameters = [*model.parameters(), *_grouped(optimizers[:1])]
    everywhere = parameters + _grouped(optimizers)
    state = [tensor for optimizer in optimizers for tensor in tree_leaves(dict(optimizer.state))
             if isinstance(tensor, torch.Tensor)]
    parts: list[list[UntypedStorage]] = []
    seen: dict[int, UntypedStorage] = {}
    for tensors in (parameters, _gradients(everywhere), [*state, *everywhere]):
        found = {storage._cdata: storage for storage in storages_of(tensors)}
        parts.append([storage for address, storage in found.items()
                      if address not in seen and storage.nbytes()])
        seen |= found
    return parts


def _with_inner(optimizer: Optimizer | None) -> list[Optimizer]:
    """The optimizer, and those that it keeps as attributes."""
    if optimizer is None:
        return []
    return [optimizer, *(each for each in vars(optimizer).values() if isinstance(each, Optimizer))]


def _grouped(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The parameters in their groups."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups
            for parameter in group["params"]]


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that the leaves among the parameters have."""
    return [parameter.grad for parameter in parameters
            if parameter.is_leaf and parameter.grad is not None]
