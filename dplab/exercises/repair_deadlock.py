"""Two ranks that swap must not begin with the same call, nor receive over what they have to send.

A swap that is right by luck is wrong: what becomes of a tensor between the start of its send or
receive and the `wait()` is watched, and not left to what arrives first.
"""

import contextlib
import time
from collections import Counter
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded, whole_numbers
from dplab.measure import CallLog


def swap(tensor):
    rank = dist.get_rank()
    partner = rank ^ 1  # 0 and 1, 2 and 3, …
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        if rank % 2 == 0:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        else:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)
        tensor.copy_(theirs)


def swap_broken(tensor):
    rank = dist.get_rank()
    partner = rank ^ 1  # 0 and 1, 2 and 3, …
    if partner < dist.get_world_size():
        dist.send(tensor, partner)
        dist.recv(tensor, partner)


def both_started(tensor):
    """The same, in any order: no rank waits before both calls have been made."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1
    if partner < ranks:
        theirs = torch.empty_like(tensor)
        receiving = dist.irecv(theirs, partner)
        sending = dist.isend(tensor, partner)
        receiving.wait()
        sending.wait()
        tensor.copy_(theirs)


FIRST = "`tensor` after the first swap (even ranks are late)"
SECOND = "`tensor` after the second swap (odd ranks are late)"
LATE = 0.05  # seconds: so that the other rank is already waiting
OF_ALL = "the number of collectives of all ranks"
BOTH_WAYS = "the number of sends and receives in two swaps"
SENDS_OPEN = "the number of sends without a `wait()`"
RECEIVES_OPEN = "the number of receives without a `wait()`"
SHARED = "the number of receives into a tensor while it is being sent"
CHANGED = "the number of tensors that are written to before the `wait()` of their send"
OWN = "that a rank sends its own numbers"

NONE_BECAUSE = {
    SENDS_OPEN: "until the `wait()` of its handle has returned, some of the numbers may not have "
                "left yet. Keep the handle, and wait before the function ends",
    RECEIVES_OPEN: "until the `wait()` of its handle has returned, the partner's numbers may not "
                   "have come yet. Keep the handle, and wait before you use them",
    SHARED: "what arrives may overwrite what has yet to leave, and which comes first is luck. "
            "Receive into another tensor, wait for the send, and copy at the end",
    CHANGED: "some of the old numbers may not have left yet. Wait for the send first, then copy",
}


def floats_of(rank):
    """Large on odd ranks, so that nobody gets a partner's by a sum and a difference."""
    return seeded(f"tensor of rank {rank}", 5) * (1e4 if rank % 2 else 1)


def integers_of(rank):
    return whole_numbers(f"tensor of rank {rank}", 2, 3)


class RepairDeadlock(Exercise):
    number = "0.3"
    title = "Repair the swap"
    minutes = 9
    solution = staticmethod(swap)
    stub = staticmethod(swap_broken)
    also_right = (both_started,)
    too_long = ("The tensor that you receive into has less room than what arrives, and gloo aborts "
                "the process. `torch.empty_like(tensor)` has the shape and the dtype of `tensor`.")

    def trial(self, attempt):
        rank, facts = dist.get_rank(), {}
        swaps = (FIRST, 0, floats_of(rank)), (SECOND, 1, integers_of(rank))
        with CallLog() as log, InFlight() as flight:
            for swapped, late, tensor in swaps:
                flight.own = tensor.flatten().double()
                if rank % 2 == late:
                    time.sleep(LATE)
                attempt(tensor)
                facts[swapped] = tensor
            changed = flight.changed()
            left_open = flight.end_what_is_open()
        among_all = sum(not call.is_point_to_point for call in log.calls)
        return {**facts, OF_ALL: among_all, BOTH_WAYS: log.count() - among_all,
                SENDS_OPEN: left_open["send"], RECEIVES_OPEN: left_open["recv"],
                SHARED: flight.shared, CHANGED: changed, OWN: not flight.sent_other}

    def expected(self, world_size):
        none = {fact: AtMost(0, why) for fact, why in NONE_BECAUSE.items()}
        of_all = AtMost(0, "only partners talk to each other. The last of three ranks has none, "
                           "and would have to join a collective or a barrier of all")
        partners = [rank ^ 1 if rank ^ 1 < world_size else rank for rank in range(world_size)]
        return [{**none, OWN: True, FIRST: floats_of(partner), SECOND: integers_of(partner),
                 **({OF_ALL: of_all} if world_size > 1 else {}),
                 BOTH_WAYS: 0 if partner == rank else 4}
                for rank, partner in enumerate(partners)]

    def parts(self, world_size, rank):
        names = {each: "this rank's own numbers" if each == rank else f"rank {each}'s numbers"
                 for each in range(world_size)}
        return {FIRST: {name: floats_of(each) for each, name in names.items()},
                SECOND: {name: integers_of(each) for each, name in names.items()}}

    hints = (
        "In the report, in which call does each rank wait? What would its partner have to do so "
        "that this call ends?",
        "Both ranks run the same lines, so both begin with a send. A rank knows its number: let "
        "one of the two begin with the other call. And what will be in `tensor` after a receive?",
        "Make `theirs = torch.empty_like(tensor)`. Even ranks send `tensor`, then receive into "
        "`theirs`. Odd ranks do it in the other order. Then all copy `theirs` into `tensor`.",
    )
    slips = (
        Slip("A rank sends its partner's own numbers back: it has received into `tensor` before it "
             "sent what was there, or it sends the tensor that it received into. Receive into "
             "another tensor, send `tensor`, and copy at the end.",
             {"dist.recv(theirs, partner)": "dist.recv(tensor, partner)",
              "tensor.copy_(theirs)": ""},
             {"dist.recv(theirs, partner)": "dist.recv(tensor, partner)",
              "tensor.copy_(theirs)": "",
              "rank % 2 == 0": "rank % 2 == 1"}),
        Slip("Even ranks send and odd ranks receive, and that is half of a swap. The numbers of "
             "the odd ranks have to come back.",
             {"dist.send(tensor, partner)\n            dist.recv(theirs, partner)":
              "dist.send(tensor, partner)\ntheirs = tensor",
              "dist.recv(theirs, partner)\n            dist.send(tensor, partner)":
              "dist.recv(theirs, partner)"}),
        Slip("The partner's numbers have come, but `tensor` still holds this rank's own. Write "
             "them into it with `tensor.copy_(…)`: an assignment `tensor = …` only gives the name "
             "to another tensor.",
             {"tensor.copy_(theirs)": "tensor = theirs"},
             *({"tensor.copy_(theirs)": f"if rank % 2 == {parity}:\n    tensor.copy_(theirs)"}
               for parity in (0, 1))),
        Slip("You send to the next rank and receive from the one before, round in a circle. Here "
             "ranks swap in pairs: 0 with 1, 2 with 3.",
             {"partner < ranks": "ranks > 1", "rank ^ 1": "(rank + 1) % ranks",
              "irecv(theirs, partner)": "irecv(theirs, (rank - 1) % ranks)"}),
        Slip("With an odd number of ranks, the last has no partner. It sends nothing and keeps its "
             "own tensor.",
             {"partner < dist.get_world_size()": "True"}, {"partner < ranks": "True"}),
        Slip("Both ranks of a pair still begin with a send, and wait for a receive. A barrier, a "
             "pause or `isend` with `wait()` right after it changes nothing about that: one of the "
             "two has to receive while the other sends.",
             {"rank % 2 == 0": "True"}, hangs=True),
        Slip("Now both ranks of a pair begin with a receive, and each waits for a send that the "
             "other has not reached. The two need different orders.",
             {"rank % 2 == 0": "False"}, hangs=True),
        Slip("You made an exception for rank 0, which mends the pair of ranks 0 and 1 alone. In "
             "every other pair, both ranks still begin with the same call.",
             {"rank % 2 == 0": "rank == 0"}, {"rank % 2 == 0": "rank != 0"}, hangs=True),
    )


class InFlight:
    """What becomes of tensors between the start of their send or receive and its ``wait()``.

    ``shared``: how often a tensor was given to a send while a receive into the same memory was not
    over, or to a receive while a send from it was not. Time decides nothing here: a call is over
    when its ``wait()`` has returned. ``sent_other``: whether anything but ``own`` was sent.
    """

    def __init__(self):
        self.shared = 0
        self.own, self.sent_other = None, False
        self._open = []  # [operation, tensor, its version after the start, work]
        self._changed = 0

    def __enter__(self):
        self._wait = dist.Work.wait

        def and_over(work, *args, **kwargs):
            result = self._wait(work, *args, **kwargs)
            self._over(work)
            return result

        # A call log knows no handles, and what is asked is when each call was waited for.
        patches = {name: self._started(name, getattr(dist.ProcessGroup, name))
                   for name in ("send", "recv", "recv_anysource")}
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.multiple(dist.ProcessGroup, **patches))
        self._patches.enter_context(mock.patch.object(dist.Work, "wait", and_over))
        return self

    def __exit__(self, *error):
        self._patches.close()

    def changed(self):
        """How many tensors were written to before their send was waited for."""
        return self._changed + sum(map(is_written_to, self._open))

    def end_what_is_open(self):
        """How many sends and receives nobody has waited for, which it then does.

        Without this, what becomes of them would be luck: a handle that nobody keeps takes its send
        with it, if the numbers have not left by then. This object keeps all handles.
        """
        still_open, self._open = self._open, []
        for *_, work in still_open:
            with contextlib.suppress(RuntimeError):  # there may be no partner
                self._wait(work, timedelta(seconds=1))
        return Counter(operation for operation, *_ in still_open)

    def _started(self, name, original):
        def call(group, tensors, *args, **kwargs):
            operation = "send" if name == "send" else "recv"
            self.sent_other |= operation == "send" and not all(
                torch.equal(tensor.flatten().double(), self.own) for tensor in tensors)
            self.shared += any(other[0] != operation and have_memory_in_common(other[1], tensor)
                               for other in self._open for tensor in tensors)
            work = original(group, tensors, *args, **kwargs)
            self._open += [[operation, tensor, tensor._version, work] for tensor in tensors]
            return work

        return call

    def _over(self, work):
        over = [each for each in self._open if each[3] is work]
        self._changed += sum(map(is_written_to, over))
        self._open = [each for each in self._open if each[3] is not work]


def is_written_to(started):
    operation, tensor, version, _ = started
    return operation == "send" and tensor._version != version


def have_memory_in_common(one, other):
    """Whether two tensors, each without gaps, have memory in common."""
    (begin, end), (start, stop) = ((each.data_ptr(), each.data_ptr() + each.nbytes)
                                   for each in (one, other))
    return begin < stop and start < end
