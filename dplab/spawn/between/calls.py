"""What a rank calls, and the log of it: memory that the rank writes and the parent reads.

The log is a file mapped by both sides, so that the wire stays clean and a dead rank's last calls
can still be read.
"""

import json
import math
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from types import FrameType

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

_SLOT, _SLOTS, _HEADER = 512, 2048, 64
LOG_BYTES = _HEADER + _SLOT * _SLOTS
_GROUP, _FILE = 40, 200  # characters, of their ends: what a slot has room for

PACKAGE = os.path.abspath(__file__)  # the folder of the package that this file belongs to
for _ in range(__name__.count(".")):
    PACKAGE = os.path.dirname(PACKAGE)
_LIBRARIES = tuple(os.path.join(folder, "") for folder in (PACKAGE, os.path.dirname(os.__file__)))
_TYPED_IN = ("<ipython-input", "<stdin>")  # the cells of a terminal's IPython, Python's own prompt


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    ``number`` counts this rank's collectives in ``group`` from 1 (sends and receives on their own).
    ``shape`` is that of this rank's contribution, of its part for reduce-scatter and scatter, and
    ``bytes`` its size; ``peer`` is the root of a rooted collective, or the other end of a send or
    receive, else -1. ``time`` is `time.monotonic` at launch, in seconds, comparable between ranks.
    ``file`` and ``line`` are the learner's.
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

    @property
    def tensor(self) -> str:
        """Dtype and shape, as in ``float32[2, 3]``; empty for a call without a tensor."""
        return f"{self.dtype}{list(self.shape)}" if self.dtype else ""

    def __str__(self):
        text = self.operation
        if self.dtype:
            text += f" of {self.tensor}"
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


def is_learners(file: str) -> bool:
    """Whether a source file is the learner's own: not this package's, torch's or Python's."""
    if file.startswith("<"):
        return file.startswith(_TYPED_IN)
    return not (file.startswith(_LIBRARIES) or "site-packages" in file)


def learner_line(depth: int) -> tuple[str, int]:
    """File and line of the learner's innermost frame, from ``depth`` callers up; else of that."""
    inner = sys._getframe(1 + depth)
    frame: FrameType | None = inner
    while frame is not None:
        if is_learners(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return inner.f_code.co_filename, inner.f_lineno


class CallWriter:
    """The rank's end of its log: a ring of slots in ``memory``, after a count of calls."""

    def __init__(self, memory):
        self._memory = memory
        self._count = 0

    def write(self, call: Call) -> None:
        file = call.file.encode(errors="replace")[-_FILE:].decode(errors="ignore")
        fields = vars(call) | {"group": call.group[-_GROUP:], "shape": call.shape[:8], "file": file}
        text = json.dumps(list(fields.values()), ensure_ascii=False)
        raw = text.encode(errors="replace")
        at = _HEADER + (self._count % _SLOTS) * _SLOT
        self._memory[at : at + 2 + len(raw)] = struct.pack("H", len(raw)) + raw
        self._count += 1
        self._memory[:8] = struct.pack("Q", self._count)


class CallReader:
    """The parent's end of one rank's log, which it makes. ``last``: the last call that it saw."""

    def __init__(self, path):
        self._memory = map_log(path)
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
        operation, number, group, size, shape, *rest = json.loads(slot[2 : 2 + length])
        return Call(operation, number, group, size, tuple(shape), *rest)


def map_log(path):
    """The memory of the log in this file, which is made where it is missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, LOG_BYTES) if hasattr(os, "posix_fallocate") else (
            os.ftruncate(descriptor, LOG_BYTES))
        return mmap.mmap(descriptor, LOG_BYTES)
    finally:
        os.close(descriptor)
