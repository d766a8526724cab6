"""What each rank called: a log in shared memory, written by the rank and read by the parent.

A mismatch is no error to gloo: different dtypes, or SUM against MAX, give garbage, and different
shapes abort a rank. Only a comparison of what the ranks called finds them. The log is a file mapped
by both sides, so that the wire stays clean and a dead rank's last calls can still be read.
"""

import functools
import math
import mmap
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass

_SLOT = 512
_SLOTS = 2048
_HEADER = 64
LOG_BYTES = _HEADER + _SLOT * _SLOTS

# Method of torch's ProcessGroup: (the field's name, position of the argument that holds this
# rank's own contribution).
COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
}
POINT_TO_POINT = {"send": ("send", 0), "recv": ("recv", 0), "recv_anysource": ("recv", 0)}
_UNEQUAL_SIZES_ALLOWED = {"all_to_all", "barrier", "send", "recv"}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}

DEFAULT_GROUP = "0"


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    ``number`` counts this rank's collectives in ``group`` from 1 (sends and receives on their own).
    ``shape`` is that of this rank's contribution, of its part for reduce-scatter and scatter, and
    ``bytes`` its size; ``peer`` is the root of a rooted collective, or the other end of a send or
    receive, else -1. ``time`` is `time.monotonic` at launch, in seconds, comparable between ranks.
    """

    operation: str
    number: int
    group: str
    group_size: int
    shape: tuple[int, ...]
    dtype: str
    reduce_operation: str
    bytes: int
    peer: int
    time: float
    file: str
    line: int

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in ("send", "recv")

    def __str__(self):
        text = self.operation
        if self.dtype:
            text += f" of {self.dtype}{list(self.shape)}"
        if self.reduce_operation:
            text += f", {self.reduce_operation}"
        if self.operation in _ROOTED:
            text += f", root {self.peer}"
        if self.is_point_to_point:
            text += f" {'to' if self.operation == 'send' else 'from'} rank {self.peer}"
        return text

    def disagrees_with(self, other: "Call") -> str:
        """What two ranks' calls at the same place in a group differ in, or an empty string."""
        if self.operation != other.operation:
            return "operation"
        if self.dtype != other.dtype:
            return "dtype"
        if self.reduce_operation != other.reduce_operation:
            return "reduce operation"
        if self.operation in _ROOTED and self.peer != other.peer:
            return "root"
        if (self.operation not in _UNEQUAL_SIZES_ALLOWED
                and math.prod(self.shape) != math.prod(other.shape)):
            return "shape"
        return ""


class CallRecorder:
    """Writes this rank's calls into ``memory`` (`LOG_BYTES` of it), and to every listener.

    A listener takes the call before it is launched, a work listener the call and its work after.
    """

    def __init__(self, memory):
        self.listeners = []
        self.work_listeners = []
        self._memory = memory
        self._count = 0
        self._numbers = {}
        self._lock = threading.Lock()

    def record(self, group, operation, tensors, reduce_operation, peer):
        kind = (group.group_name, operation in ("send", "recv"))
        first = tensors[0] if tensors else None
        file, line = _learner_line()
        with self._lock:
            number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
            call = Call(
                operation, number, kind[0], group.size(),
                tuple(first.shape) if first is not None else (),
                str(first.dtype).removeprefix("torch.") if first is not None else "",
                reduce_operation,
                sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                peer, time.monotonic(), file, line)
            self._write(call)
        for listener in self.listeners:
            listener(call)
        return call

    def _write(self, call):
        text = "\t".join((
            call.operation, str(call.number), call.group[-40:], str(call.group_size),
            "x".join(map(str, call.shape[:8])), call.dtype, call.reduce_operation,
            str(call.bytes), str(call.peer), repr(call.time), str(call.line),
            call.file.encode(errors="replace")[-160:].decode(errors="ignore")))
        raw = text.encode(errors="replace")[: _SLOT - 2]
        at = _HEADER + (self._count % _SLOTS) * _SLOT
        self._memory[at : at + 2 + len(raw)] = struct.pack("H", len(raw)) + raw
        self._count += 1
        self._memory[:8] = struct.pack("Q", self._count)


class CallReader:
    """The parent's view of one rank's log."""

    def __init__(self, path):
        self._memory = create_log(path)
        self._read = 0
        self.last = None

    def close(self):
        self._memory.close()

    def new_calls(self) -> list[Call]:
        """The calls since the last time (of a burst, the last 2048)."""
        count = self._count()
        slots = [self._slot(index) for index in range(max(self._read, count - _SLOTS + 1), count)]
        calls = [call for call in slots if call is not None]
        self._read = count
        if calls:
            self.last = calls[-1]
        return calls

    def _count(self):
        return struct.unpack("Q", self._memory[:8])[0]

    def _slot(self, index):
        at = _HEADER + (index % _SLOTS) * _SLOT
        slot = self._memory[at : at + _SLOT]
        if index <= self._count() - _SLOTS:  # the rank was faster, and writes another call there
            return None
        (length,) = struct.unpack("H", slot[:2])
        text = slot[2 : 2 + length].decode(errors="replace")
        (operation, number, group, size, shape, dtype, reduce_operation, nbytes, peer, when, line,
         file) = text.split("\t", 11)
        return Call(operation, int(number), group, int(size),
                    tuple(int(n) for n in shape.split("x") if n), dtype, reduce_operation,
                    int(nbytes), int(peer), float(when), file, int(line))


class CallComparison:
    """Compares the ranks' collectives, place by place, as they come in."""

    def __init__(self):
        self._places = {}

    def add(self, rank: int, calls: list[Call]):
        """A first mismatch as ``(what differs, {rank: call})``, or None."""
        found = None
        for call in calls:
            if call.is_point_to_point:
                continue
            place = self._places.setdefault((call.group, call.number), {})
            place[rank] = call
            what = call.disagrees_with(next(iter(place.values())))
            if what:
                found = found or (what, place)
            elif len(place) == call.group_size:
                del self._places[call.group, call.number]
        return found


def create_log(path):
    """The log's memory: an existing file is mapped, a missing one is made first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, LOG_BYTES) if hasattr(os, "posix_fallocate") else (
            os.ftruncate(descriptor, LOG_BYTES))
        return mmap.mmap(descriptor, LOG_BYTES)
    finally:
        os.close(descriptor)


WAIT = "wait_for_others"

recorder: CallRecorder | None = None


def record_into(memory) -> None:
    """From now on, this process's calls are recorded there."""
    global recorder
    recorder = CallRecorder(memory)
    install()


@functools.cache
def install() -> None:
    """Puts the recording in front of torch's ProcessGroup and Work, once per process."""
    import torch.distributed as dist

    for method, (operation, own) in {**COLLECTIVES, **POINT_TO_POINT}.items():
        if hasattr(dist.ProcessGroup, method):
            original = getattr(dist.ProcessGroup, method)
            setattr(dist.ProcessGroup, method, recorded(original, operation, own))

    wait = dist.Work.wait

    # a frame by which a stack shows that the rank waits for others
    def wait_for_others(work, *args, **kwargs):
        return wait(work, *args, **kwargs)

    dist.Work.wait = wait_for_others


def recorded(original, operation, own):
    """A method of ProcessGroup, recorded; ``own`` as in `COLLECTIVES`."""

    @functools.wraps(original)
    def call(group, *args, **kwargs):
        if recorder is None:
            return original(group, *args, **kwargs)
        options = args[-1] if args else kwargs.get("opts")
        point_to_point = operation in ("send", "recv")
        if point_to_point:
            _refuse_absent_peer(group, args)
        noted = recorder.record(
            group, operation,
            tensors_in(args[own]) if own is not None and len(args) > own else [],
            "" if point_to_point else _reduce_name(options),
            _peer(args) if point_to_point else getattr(options, "rootRank", -1))
        work = original(group, *args, **kwargs)
        for listener in recorder.work_listeners:
            listener(noted, work)
        return work

    return call


def tensors_in(value):
    """The tensors of a call's argument, which may be one tensor or lists of lists."""
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value]


def _reduce_name(options):
    operation = getattr(options, "reduceOp", None)
    if operation is None:
        return ""
    return _reduce_names().get(operation.op if hasattr(operation, "op") else operation, "custom")


@functools.cache
def _reduce_names():
    from torch.distributed import ReduceOp

    return {value: name for name, value in ReduceOp.RedOpType.__members__.items()}


def _peer(args):
    return args[1] if len(args) > 2 else -1  # -1: recv from any rank


def _refuse_absent_peer(group, args):
    """gloo would hang, or take the process with it."""
    if len(args) > 2 and args[1] not in range(group.size()):
        raise ValueError(f"there is no rank {args[1]} to send to or to receive from: the ranks of "
                         f"this group are 0 to {group.size() - 1}")


_LIBRARIES = tuple(os.path.join(folder, "") for folder in (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.__file__)))
_TYPED_IN = ("<ipython-input", "<stdin>")  # the cells of a terminal's IPython, Python's own prompt


def is_learners(file: str) -> bool:
    """Whether a source file is the learner's own: not dplab's, torch's or Python's."""
    if file.startswith("<"):
        return file.startswith(_TYPED_IN)
    return not (file.startswith(_LIBRARIES) or "site-packages" in file)


def _learner_line():
    frame = sys._getframe(3)
    inner = frame
    while frame is not None:
        if is_learners(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return inner.f_code.co_filename, inner.f_lineno
