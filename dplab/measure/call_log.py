"""What this rank called: the collectives, sends and receives that Python code launched."""

import mmap

from dplab.spawn import calls
from dplab.spawn.calls import Call


class CallLog:
    """Collects this rank's calls during a ``with`` block, in order of launch.

    ``calls`` is a list of `dplab.spawn.calls.Call`: operation, number, shape, dtype, reduce
    operation, bytes and time of launch. Calls that C++ code makes on its own, such as the
    all-reduces of DistributedDataParallel, are not among them.
    """

    def __init__(self):
        self.calls: list[Call] = []

    def __enter__(self):
        if calls.recorder is None:  # under plain torchrun nobody records yet
            calls.record_into(mmap.mmap(-1, calls.LOG_BYTES))
        calls.recorder.listeners.append(self.calls.append)
        return self

    def __exit__(self, *_):
        calls.recorder.listeners.remove(self.calls.append)

    def count(self, operation: str | None = None) -> int:
        """How many calls there were, of one operation or of all."""
        return sum(operation in (None, call.operation) for call in self.calls)

    def bytes(self, operation: str | None = None) -> int:
        """The size of this rank's contributions, in bytes: what was handed over, not what moved."""
        return sum(call.bytes for call in self.calls if operation in (None, call.operation))

    def __str__(self):
        return "\n".join(f"{index:3d}  {call}" for index, call in enumerate(self.calls, 1))
