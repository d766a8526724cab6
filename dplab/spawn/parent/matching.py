"""Whether the ranks' calls fit together: collectives that differ, sends that nobody receives.

A mismatch is no error to gloo: different dtypes, or SUM against MAX, give garbage, and different
shapes abort a rank. Only a comparison of what the ranks called finds them.

Of sends and receives the parent knows from the logs which meets which. A rank that waits, and has a
send or receive without a counterpart, needs another rank to come; where that one has returned, or
waits in the same way, nobody comes.
"""

from ..between.calls import DEFAULT_GROUP, Call
from ..rank.recording import WAIT


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


class Meetings:
    """Sends and receives of the default group, each struck out when its counterpart comes."""

    def __init__(self):
        self._open = {}  # (sender, receiver): calls without a counterpart, in order
        self._numbers = {}
        self._certain = True

    def add(self, rank: int, calls: list[Call]) -> None:
        for call in calls:
            if not call.is_point_to_point or call.group != DEFAULT_GROUP:
                continue
            self._certain &= call.number == self._numbers.get(rank, 0) + 1 and call.peer >= 0
            self._numbers[rank] = call.number
            pair = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
            waiting = self._open.setdefault(pair, [])
            if waiting and waiting[0].operation != call.operation:
                waiting.pop(0)
            else:
                waiting.append(call)

    def unmet(self, rank: int) -> list[Call]:
        """The calls of a rank without a counterpart; none if the logs do not tell."""
        if not self._certain:
            return []
        return [call for (sender, receiver), calls in self._open.items() for call in calls
                if rank == (sender if call.operation == "send" else receiver)]

    @property
    def any_unmet(self) -> bool:
        return self._certain and any(self._open.values())


def waits_without_end(states) -> dict[int, set[int]]:
    """For each rank that can never go on, the ranks that it waits for; empty if there is none."""
    waits = {state.rank: _awaited(state, states) for state in states if not state.finished}
    waits = {rank: peers for rank, peers in waits.items() if peers}
    busy = {state.rank for state in states if not state.finished}
    while saved := [rank for rank, peers in waits.items() if peers & (busy - waits.keys())]:
        for rank in saved:
            del waits[rank]
    return waits if any(states[rank].unmet for rank in waits) else {}


def is_waiting(state) -> bool:
    return bool(state.where and state.where.frames and any(
        frame.function == WAIT for frame in state.where.frames[-3:]))


def _awaited(state, states):
    """The ranks without which this one cannot go on, as far as its calls tell."""
    if not is_waiting(state):
        return set()
    peers = {call.peer for call in state.unmet}
    for call in state.where.waiting:
        peers |= {other.rank for other in states
                  if other is not state and call.is_collective_of_all
                  and call.number > getattr(other.answer or other.where, "launched", call.number)}
    return peers
