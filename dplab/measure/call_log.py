"""What this rank called: the collectives, sends and receives that Python code launched."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

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


class Message(NamedTuple):
    """What a rank has sent: to which rank, as all ranks count, and a copy of the tensor."""

    to: int
    tensor: torch.Tensor


@contextlib.contextmanager
def sent_messages() -> Iterator[list[Message]]:
    """A list, to which each message is added that this rank sends during the ``with`` block.

    A `CallLog` has their sizes alone, and peers as their group counts. Collectives, and what is
    sent over an emulated link, are not among them.
    """
    sent, send = [], dist.ProcessGroup.send

    def keep(group, tensors, to, *arguments):
        sent.append(Message(dist.get_global_rank(group, to), tensors[0].clone()))
        return send(group, tensors, to, *arguments)

    with mock.patch.object(dist.ProcessGroup, "send", keep):
        yield sent


def sent_bytes(call: Call) -> float:
    """What a rank sends for the call, in bytes, on average over the ranks of its group.

    Collectives go as `predict.cost.USUAL` says: over rings. A receive sends nothing.
    """
    if call.is_point_to_point:
        return float(call.bytes) if call.operation == "send" else 0.0
    whole = cost.whole_bytes(call.operation, call.group_size, call.bytes)
    return cost.bytes_sent(cost.USUAL[call.operation], call.group_size, whole)
