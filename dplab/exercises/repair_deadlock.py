"""Exercise 0.3: repair the swap."""

import contextlib
import dis
import math
import re
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dplab import RankError
from dplab.checks.compare import AtMost, agree
from dplab.checks.exercise import AT_LEAST, Exercise, Mistake
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


def _partner():
    """The partner's rank, or None."""
    partner = dist.get_rank() ^ 1
    return partner if partner < dist.get_world_size() else None


def both_receive_first(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        dist.recv(theirs, partner)
        dist.send(tensor, partner)
        tensor.copy_(theirs)


def barrier_and_swap(tensor):
    dist.barrier()
    swap(tensor)


def barrier_first(tensor):
    dist.barrier()
    if (partner := _partner()) is not None:
        dist.send(tensor, partner)
        dist.recv(tensor, partner)


def rank_0_sends_first(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        if dist.get_rank() == 0:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        else:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)
        tensor.copy_(theirs)


def rank_0_receives_first(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        if dist.get_rank() == 0:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)
        else:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        tensor.copy_(theirs)


def odd_ranks_overwrite(tensor):
    if (partner := _partner()) is not None:
        if dist.get_rank() % 2 == 0:
            dist.send(tensor, partner)
            dist.recv(tensor, partner)
        else:
            dist.recv(tensor, partner)
            dist.send(tensor, partner)


def even_ranks_overwrite(tensor):
    if (partner := _partner()) is not None:
        if dist.get_rank() % 2 == 1:
            dist.send(tensor, partner)
            dist.recv(tensor, partner)
        else:
            dist.recv(tensor, partner)
            dist.send(tensor, partner)


def received_while_sending(tensor):
    if (partner := _partner()) is not None:
        sending = dist.isend(tensor, partner)
        dist.recv(tensor, partner)
        sending.wait()


def received_and_sent_at_once(tensor):
    if (partner := _partner()) is not None:
        receiving = dist.irecv(tensor, partner)
        sending = dist.isend(tensor, partner)
        receiving.wait()
        sending.wait()


def sent_while_receiving(tensor):
    if (partner := _partner()) is not None:
        receiving = dist.irecv(tensor, partner)
        dist.send(tensor, partner)
        receiving.wait()


def copied_before_the_wait(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        sending = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        tensor.copy_(theirs)
        sending.wait()


def sent_without_a_wait(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        dist.isend(tensor, partner)
        receiving = dist.irecv(theirs, partner)
        receiving.wait()
        tensor.copy_(theirs)


def received_without_a_wait(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.zeros_like(tensor)
        dist.irecv(theirs, partner)
        sending = dist.isend(tensor, partner)
        sending.wait()
        tensor.copy_(theirs)


def one_way(tensor):
    if (partner := _partner()) is not None:
        if dist.get_rank() % 2 == 0:
            dist.send(tensor, partner)
        else:
            dist.recv(tensor, partner)


def in_a_new_tensor(tensor):
    theirs = tensor.clone()
    swap(theirs)
    return theirs


def without_asking_for_a_partner(tensor):
    partner = dist.get_rank() ^ 1
    theirs = torch.empty_like(tensor)
    sending = dist.isend(tensor, partner)
    dist.recv(theirs, partner)
    sending.wait()
    tensor.copy_(theirs)


def with_the_next_rank(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        theirs = torch.empty_like(tensor)
        sending = dist.isend(tensor, (rank + 1) % world_size)
        dist.recv(theirs, (rank - 1) % world_size)
        sending.wait()
        tensor.copy_(theirs)


def among_all(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    if (partner := _partner()) is not None:
        tensor.copy_(everything[partner])

_OVERWRITES = ("A rank receives into `tensor` before it has sent what was there, so it sends its "
               "partner's own numbers back. Receive into another tensor, and copy at the end.")

_SHARED = ("You receive into `tensor` while it is still being sent. What arrives may overwrite "
           "what has yet to leave: which comes first is luck. Receive into another tensor, wait "
           "for the send, and copy at the end.")

_CHANGED = ("You write into `tensor` before the `wait()` of its send: some of the old numbers may "
            "not have left yet. Wait for the send first, then copy.")

_SEND_OPEN = ("You start a send, and never call `wait()` on its handle. Until that `wait()` has "
              "returned, some of the numbers may not have left yet. Keep the handle, and wait "
              "before the function ends and before you write into what you send.")

_RECEIVE_OPEN = ("You start a receive, and never call `wait()` on its handle. Until that `wait()` "
                 "has returned, the partner's numbers may not have come yet. Keep the handle, and "
                 "wait before you use what you receive into.")

_GATHERED = ("On 2 ranks the result is right, but you call a collective of all ranks. The last of "
             "three ranks has no partner, and would have to call it too; and it sends each tensor "
             "to ranks that do not need it. Use sends and receives between partners alone.")

_MET = ("On 2 ranks the result is right, and it is right without the barrier too. A barrier is a "
        "call of all ranks. The last of three ranks has no partner, and would have to call it too; "
        "and partners wait for ranks that have nothing to do with their swap.")

_REBOUND = ("The partner's numbers have come, but `tensor` still holds this rank's own. Write them "
            "into it with `tensor.copy_(…)`: an assignment `tensor = …` only gives the name to "
            "another tensor.")

_TOO_SMALL = ("The tensor that you receive into is smaller than `tensor`. gloo aborts a process "
              "that gets more bytes than its tensor has room for. `torch.empty_like(tensor)` makes "
              "one that fits.")

_OTHER_DTYPE = ("The tensor that you receive into is float32, and `tensor` has another dtype here. "
                "gloo aborts a process that gets more bytes than its tensor has room for. "
                "`torch.empty_like(tensor)` makes one that fits.")

_ONE_PAIR = ("You made an exception for rank 0, which mends the pair of ranks 0 and 1 alone. In "
             "every other pair, both ranks still begin with the same call.")


class RepairDeadlock(Exercise):
    number = "0.3"
    title = "Repair the swap"
    minutes = 9
    hints = (
        "In the report, in which call does each rank wait? What would its partner have to do so "
        "that this call ends?",
        "Both ranks run the same lines, so both begin with a send. A rank knows its number: let "
        "one of the two begin with the other call. And what will be in `tensor` after a receive?",
        "Make `theirs = torch.empty_like(tensor)`. Even ranks send `tensor`, then receive into "
        "`theirs`. Odd ranks do it in the other order. Then all copy `theirs` into `tensor`.",
    )
    solution = staticmethod(swap)
    stub = staticmethod(swap_broken)
    mistakes = (
        Mistake(odd_ranks_overwrite, _OVERWRITES),
        Mistake(even_ranks_overwrite, _OVERWRITES),
        Mistake(received_while_sending, _SHARED),
        Mistake(received_and_sent_at_once, _SHARED),
        Mistake(sent_while_receiving, _SHARED),
        Mistake(copied_before_the_wait, _CHANGED),
        Mistake(sent_without_a_wait, _SEND_OPEN),
        Mistake(received_without_a_wait, _RECEIVE_OPEN),
        Mistake(one_way, "Even ranks send and odd ranks receive, and that is half of a swap. The "
                "numbers of the odd ranks have to come back."),
        Mistake(in_a_new_tensor, _REBOUND),
        Mistake(with_the_next_rank, "You send to the next rank and receive from the one before, "
                "round in a circle. Here ranks swap in pairs: 0 with 1, 2 with 3."),
        Mistake(without_asking_for_a_partner, "With an odd number of ranks, the last has no "
                "partner. It sends nothing and keeps its own tensor."),
        Mistake(among_all, _GATHERED),
        Mistake(barrier_and_swap, _MET),
        Mistake(barrier_first, "Both ranks of a pair still begin with a send, and wait for a "
                "receive. A barrier, a pause or `isend` with `wait()` right after it changes "
                "nothing about that: one of the two has to receive while the other sends.",
                hangs=True),
        Mistake(both_receive_first, "Now both ranks of a pair begin with a receive, and each waits "
                "for a send that the other has not reached. The two need different orders.",
                hangs=True),
        Mistake(rank_0_sends_first, _ONE_PAIR, hangs=True),
        Mistake(rank_0_receives_first, _ONE_PAIR, hangs=True),
    )

    def trial(self, attempt):
        rank, facts = dist.get_rank(), {}
        with CallLog() as log, InFlight() as flight:
            for swap_name, late, tensors in ((EVEN_LATE, 0, _floats), (ODD_LATE, 1, _integers)):
                tensor = tensors(rank)
                if rank % 2 == late:
                    time.sleep(_LATE)
                attempt(tensor)
                facts[swap_name] = tensor
            changed = flight.changed()
            left_open = flight.end_what_is_open()
        among_all = sum(not call.is_point_to_point for call in log.calls)
        return {**facts, OF_ALL: among_all, BOTH_WAYS: log.count() - among_all,
                SENDS_OPEN: left_open["send"], RECEIVES_OPEN: left_open["recv"],
                SHARED: flight.shared, CHANGED: changed}

    def expected(self, world_size):
        def facts(rank):
            partner = rank ^ 1 if rank ^ 1 < world_size else rank
            of_all = {OF_ALL: AtMost(0, "only partners talk to each other")}
            return {SENDS_OPEN: AtMost(0, "some of the numbers may not have left yet"),
                    RECEIVES_OPEN: AtMost(0, "the partner's numbers may not have come yet"),
                    SHARED: AtMost(0, "what arrives may overwrite what has yet to leave"),
                    CHANGED: AtMost(0, "some of the old numbers may not have left yet"),
                    EVEN_LATE: _floats(partner), ODD_LATE: _integers(partner),
                    **(of_all if world_size > 1 else {}),
                    BOTH_WAYS: 0 if partner == rank else 4}

        return [facts(rank) for rank in range(world_size)]

    def described(self, difference, got, world_size):
        """Whose numbers a rank holds, instead of what can be said of any tensor."""
        tensors = {EVEN_LATE: _floats, ODD_LATE: _integers}.get(difference.fact)
        if tensors is None:
            return super().described(difference, got, world_size)
        own = difference.rank
        whose = next((rank for rank in range(4)
                      if agree(tensors(rank), difference.got, self.tolerance)), None)
        note = ("" if whose is None else "it is still this rank's own" if whose == own
                else f"it is rank {whose}'s")
        ranks = f"on {world_size} rank{'s' * (world_size > 1)}"
        return f"{ranks}, rank {own}: {replace(difference, note=note)}"

    def explanation(self, attempt, got, world_size):
        if isinstance(got, RankError):
            return _of_the_receive(got) or super().explanation(attempt, got, world_size)
        for fact, why in ((SENDS_OPEN, _SEND_OPEN), (RECEIVES_OPEN, _RECEIVE_OPEN),
                          (SHARED, _SHARED), (CHANGED, _CHANGED)):
            if any(facts[fact] for facts in got):
                return why  # whatever the tensors hold: that was luck
        own = all(agree(tensors(rank), found[fact], self.tolerance)
                  for rank, (right, found) in enumerate(
                      zip(self.expected_of_all(world_size), got, strict=True))
                  for fact, tensors in ((EVEN_LATE, _floats), (ODD_LATE, _integers))
                  if not agree(right[fact], found[fact], self.tolerance))
        is_wrong = any(not agree(right[fact], found[fact], self.tolerance)
                       for right, found in zip(self.expected_of_all(world_size), got, strict=True)
                       for fact in (EVEN_LATE, ODD_LATE))
        # A rank that sends its partner's numbers back leaves the same: the code tells them apart.
        if is_wrong and own and _rebinds_its_argument(attempt):
            return _REBOUND
        why = super().explanation(attempt, got, world_size)
        if why.removeprefix(AT_LEAST) in (_GATHERED, _MET):
            # What else goes wrong is the hang on three ranks, which these sentences name.
            return "" if is_wrong else why.removeprefix(AT_LEAST)
        return why


def _of_the_receive(error):
    """Why the process died in a receive; "" where it did not, or the tensor has room."""
    into = re.search(r"recv of (\w+)\[([\d, ]*)\]", str(error))
    if error.kind != "died" or into is None:
        return ""
    if into[1] == "float32" and into[2] == "2, 3":  # the tensors of this shape are whole numbers
        return _OTHER_DTYPE
    room = math.prod(int(length) for length in into[2].split(",") if length.strip())
    return _TOO_SMALL if into[1] == "float32" and room < len(_floats(0)) else ""


class InFlight:
    """What becomes of tensors between the start of their send or receive and its ``wait()``.

    ``shared``: how often a tensor was given to a send while a receive into the same memory was not
    over, or to a receive while a send from it was not. Time decides nothing here: a call is over
    when its ``wait()`` has returned.
    """

    def __init__(self):
        self.shared = 0
        self._open = []  # [operation, tensor, its version after the start, work]
        self._changed = 0

    def __enter__(self):
        self._originals = {name: getattr(dist.ProcessGroup, name)
                           for name in ("send", "recv", "recv_anysource")}
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, self._started(name, original))
        self._wait = wait = dist.Work.wait

        def and_over(work, *args, **kwargs):
            result = wait(work, *args, **kwargs)
            self._over(work)
            return result

        dist.Work.wait = and_over
        return self

    def __exit__(self, *_):
        dist.Work.wait = self._wait
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)

    def changed(self):
        """How many tensors were written to before their send was waited for."""
        return self._changed + sum(map(_is_changed, self._open))

    def end_what_is_open(self):
        """How many sends and receives nobody has waited for, which it then does.

        Without this, what becomes of them would be luck: a handle that nobody keeps takes its send
        with it, if the numbers have not left by then. This object keeps all handles.
        """
        still_open, self._open = self._open, []
        for *_, work in still_open:
            with contextlib.suppress(RuntimeError):  # there may be no partner
                self._wait(work, _NO_PARTNER)
        return Counter(operation for operation, *_ in still_open)

    def _started(self, name, original):
        def call(group, tensors, *args, **kwargs):
            operation = "send" if name == "send" else "recv"
            self.shared += any(other[0] != operation and _overlap(other[1], tensor)
                               for other in self._open for tensor in tensors)
            work = original(group, tensors, *args, **kwargs)
            self._open += [[operation, tensor, tensor._version, work] for tensor in tensors]
            return work

        return call

    def _over(self, work):
        over = [each for each in self._open if each[3] is work]
        self._changed += sum(map(_is_changed, over))
        self._open = [each for each in self._open if each[3] is not work]


def _is_changed(started):
    operation, tensor, version, _ = started
    return operation == "send" and tensor._version != version


def _overlap(one, other):
    """Whether two tensors, each without gaps, have memory in common."""
    (begin, end), (start, stop) = ((each.data_ptr(), each.data_ptr() + each.nbytes)
                                   for each in (one, other))
    return begin < stop and start < end


def _rebinds_its_argument(function):
    """Whether it assigns to the name of its first argument."""
    code = getattr(function, "__code__", None)
    return code is not None and any(
        step.opname == "STORE_FAST" and step.argval == code.co_varnames[0]
        for step in dis.get_instructions(code))

EVEN_LATE = "`tensor` after the first swap (even ranks are late)"

ODD_LATE = "`tensor` after the second swap (odd ranks are late)"

SENDS_OPEN = "the number of sends without a `wait()`"

RECEIVES_OPEN = "the number of receives without a `wait()`"

SHARED = "the number of tensors that are sent and received into at once"

CHANGED = "the number of tensors that are written to before the `wait()` of their send"

OF_ALL = "the number of collectives of all ranks"

BOTH_WAYS = "the number of sends and receives in two swaps"

_LATE = 0.05  # seconds: so that the other rank is already waiting

_NO_PARTNER = timedelta(seconds=1)  # after which a call that is still open has none


def _floats(rank):
    return seeded(f"tensor of rank {rank}", 5)


def _integers(rank):
    return whole_numbers(f"tensor of rank {rank}", 2, 3)
