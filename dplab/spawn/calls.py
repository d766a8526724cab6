"""What a rank calls, and whether the ranks' calls agree.

A mismatch is no error to gloo: different dtypes, or SUM against MAX, give garbage, and different
shapes abort a rank. Only a comparison of what the ranks called finds them.
"""

import math
from dataclasses import dataclass

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
