"""What this rank called: the collectives, sends and receives that Python code launched."""

from dplab.predict import cost
from dplab.spawn.between.calls import Call
from dplab.spawn.rank import recording


class CallLog:
    """Collects this rank's calls during a ``with`` block, in order of launch.

    ``calls`` is a list of `dplab.spawn.between.calls.Call`: operation, number, shape, dtype, reduce
    operation, bytes and time of launch. Calls that C++ code makes on its own, such as the
    all-reduces of DistributedDataParallel, are not among them.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __enter__(self):
        recording.recorder_here().listeners.append(self.calls.append)
        return self

    def __exit__(self, *_):
        recording.recorder.listeners.remove(self.calls.append)

    def count(self, operation: str | None = None) -> int:
        """How many calls there were, of one operation or of all."""
        return sum(operation in (None, call.operation) for call in self.calls)

    def bytes(self, operation: str | None = None) -> int:
        """The size of this rank's contributions, in bytes: what was handed over, not what moved."""
        return sum(call.bytes for call in self.calls if operation in (None, call.operation))

    def __str__(self):
        return "\n".join(f"{index:3d}  {call}" for index, call in enumerate(self.calls, 1))


def sent_bytes(call: Call) -> float:
    """What a rank sends for the call, in bytes, on average over the ranks of its group.

    Collectives go as `predict.cost.USUAL` says: over rings. A receive sends nothing.
    """
    if call.is_point_to_point:
        return float(call.bytes) if call.operation == "send" else 0.0
    whole = cost.whole_bytes(call.operation, call.group_size, call.bytes)
    return cost.bytes_sent(cost.USUAL[call.operation], call.group_size, whole)
