"""The log of what a rank calls: a file mapped by both sides, written by the rank and read by the
parent, so that the wire stays clean and a dead rank's last calls can still be read.
"""

import mmap
import os
import struct
import threading
import time

from dplab.spawn.calls import Call
from dplab.spawn.sources import learner_line

_SLOT = 512
_SLOTS = 2048
_HEADER = 64
LOG_BYTES = _HEADER + _SLOT * _SLOTS


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
        file, line = learner_line()
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


def create_log(path):
    """The log's memory: an existing file is mapped, a missing one is made first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, LOG_BYTES) if hasattr(os, "posix_fallocate") else (
            os.ftruncate(descriptor, LOG_BYTES))
        return mmap.mmap(descriptor, LOG_BYTES)
    finally:
        os.close(descriptor)
