"""Exercise 3.1: send and receive at the same time."""

import time

import torch
import torch.distributed as dist

from dplab import RankError
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import whole_numbers


def exchange(outgoing, to, source, group=None):
    """Sends a tensor to one rank and returns what another one sends, of the same size and dtype."""
    arriving = torch.empty_like(outgoing)
    sending = dist.isend(outgoing, group_dst=to, group=group)  # does not wait, so nobody deadlocks
    dist.recv(arriving, group_src=source, group=group)
    sending.wait()
    return arriving


def send_first(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    dist.send(outgoing, group_dst=to, group=group)
    dist.recv(arriving, group_src=source, group=group)
    return arriving


def receive_first(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    dist.recv(arriving, group_src=source, group=group)
    dist.send(outgoing, group_dst=to, group=group)
    return arriving


def in_the_order_of_ranks(outgoing, to, source, group=None):
    if dist.get_rank(group) % 2 == 0:
        return send_first(outgoing, to, source, group)
    return receive_first(outgoing, to, source, group)


def rank_0_receives_first(outgoing, to, source, group=None):
    if dist.get_rank(group) == 0:
        return receive_first(outgoing, to, source, group)
    return send_first(outgoing, to, source, group)


def waits_before_it_receives(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    dist.isend(outgoing, group_dst=to, group=group).wait()
    dist.recv(arriving, group_src=source, group=group)
    return arriving


def receives_from_where_it_sends(outgoing, to, source, group=None):
    return exchange(outgoing, to, to, group)


def returns_what_it_sent(outgoing, to, source, group=None):
    exchange(outgoing, to, source, group)
    return outgoing


def returns_no_tensor(outgoing, to, source, group=None):
    exchange(outgoing, to, source, group)


def receives_into_what_it_sends(outgoing, to, source, group=None):
    sending = dist.isend(outgoing.clone(), group_dst=to, group=group)
    dist.recv(outgoing, group_src=source, group=group)
    sending.wait()
    return outgoing


def keeps_what_it_sends(outgoing, to, source, group=None):
    outgoing.copy_(exchange(outgoing, to, source, group))
    return outgoing.clone()


def receives_while_it_sends(outgoing, to, source, group=None):
    sending = dist.isend(outgoing, group_dst=to, group=group)
    dist.recv(outgoing, group_src=source, group=group)
    sending.wait()
    return outgoing


def receives_floats(outgoing, to, source, group=None):
    arriving = torch.empty(len(outgoing))
    sending = dist.isend(outgoing, group_dst=to, group=group)
    dist.recv(arriving, group_src=source, group=group)
    sending.wait()
    return arriving


def exchanges_floats(outgoing, to, source, group=None):
    return exchange(outgoing.float(), to, source, group)


def ranks_of_everybody(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    sending = dist.isend(outgoing, dst=to, group=group)
    dist.recv(arriving, src=source, group=group)
    sending.wait()
    return arriving


def exchange_among_all(outgoing, to, source, group=None):
    return exchange(outgoing, to, source)

_OVERWRITTEN = ("The caller's tensor is overwritten with what arrived. Leave `outgoing` as it is, "
                "and receive into a new tensor: `torch.empty_like`.")


class Exchange(Exercise):
    number = "3.1"
    title = "Send and receive at the same time"
    minutes = 5
    world_sizes = (2, 3, 4)
    seconds = 5.0
    too_long = ("The tensor that you receive into has less room than the message. It needs the "
                "length and the dtype of `outgoing`: `torch.empty_like(outgoing)` has both.")
    hints = (
        "Which of the two calls has to return before anything has arrived, so that nobody waits "
        "in the circle?",
        "Start the send with `dist.isend`, and receive while it is under way. When may the caller "
        "change `outgoing` again?",
        "`arriving = torch.empty_like(outgoing)`; start the send; `dist.recv(arriving, "
        "group_src=source, group=group)`; then wait on the send's handle and return `arriving`.",
    )
    solution = staticmethod(exchange)
    mistakes = (
        *(Mistake(attempt, "Every rank waits in its send until somebody receives: all wait in a "
                  "circle. Start the send without waiting, receive, and wait for the send last.",
                  hangs=True) for attempt in (send_first, waits_before_it_receives)),
        Mistake(receive_first, "Every rank waits to receive before it sends, so nobody ever sends. "
                "Start the send first, without waiting for it.", hangs=True),
        *(Mistake(attempt, "An order of the ranks helps only where one partner sends first and "
                  "the other receives first. Here two ranks do the same thing first, and wait for "
                  "each other. Let no rank wait: `isend`.", hangs=True)
          for attempt in (in_the_order_of_ranks, rank_0_receives_first)),
        Mistake(receives_from_where_it_sends, "You receive from the rank that you send to. What "
                "arrives comes from `source`, which may be another rank.", hangs=True),
        Mistake(returns_what_it_sent, "You return what you sent. Receive into a new tensor, and "
                "return that one."),
        Mistake(returns_no_tensor, "You return nothing: return the tensor that has arrived."),
        *(Mistake(attempt, _OVERWRITTEN) for attempt in (
            receives_into_what_it_sends, receives_while_it_sends, keeps_what_it_sends)),
        Mistake(receives_floats, too_long),
        Mistake(exchanges_floats, "What you receive into is not of the dtype that arrives. "
                "`torch.empty_like(outgoing)` has its size and its dtype."),
        Mistake(ranks_of_everybody, "`to` and `source` count within the group, and `dst=` and "
                "`src=` take the numbers of all ranks. Use `group_dst=` and `group_src=`."),
        Mistake(exchange_among_all, "You left out the group: `to` and `source` are ranks of that "
                "group. Pass it to both calls.", hangs=True),
    )

    def explanation(self, attempt, got, world_size):
        """An overwritten `outgoing` is named whatever else its overwriting has spoiled."""
        why = super().explanation(attempt, got, world_size)
        if not why and not isinstance(got, RankError):
            for facts in got:
                kept = [fact for name, fact in facts.items() if name.startswith(_UNCHANGED)]
                why = why if all(kept) else _OVERWRITTEN
        return why

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        facts = {}
        for distance in range(1, ranks):
            if rank == 1:  # late, so what another rank has sent to it is still under way
                time.sleep(0.1)
            facts |= _exchanged(f"{distance} to the right", attempt, rank, ranks, distance, None)
        if ranks == 4:
            group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
            facts |= _exchanged(_TO_THE_OTHER, attempt, rank % 2, 2, 1, group)
        return facts

    def expected(self, world_size):
        facts = [{} for _ in range(world_size)]
        for rank in range(world_size):
            for distance in range(1, world_size):
                facts[rank] |= _exchange_facts(f"{distance} to the right",
                                               _message((rank - distance) % world_size), True)
            if world_size == 4:
                facts[rank] |= _exchange_facts(_TO_THE_OTHER, _message(1 - rank % 2), True)
        return facts

_UNCHANGED = "that `outgoing` is left unchanged"

_TO_THE_OTHER = "to the other rank of a group of two"


def _exchanged(where, attempt, rank, ranks, distance, group):
    outgoing = _message(rank)
    got = attempt(outgoing, (rank + distance) % ranks, (rank - distance) % ranks, group)
    got = got.clone() if isinstance(got, torch.Tensor) else got
    same = torch.equal(outgoing, _message(rank))
    outgoing.fill_(-1)  # the caller may: the exchange is over
    return _exchange_facts(where, got, same)


def _exchange_facts(where, arrived, same):
    return {f"what arrives when each rank sends {where}": arrived,
            f"{_UNCHANGED} by a call in which each rank sends {where}": same}


def _message(rank):
    return whole_numbers(f"message of rank {rank}", 5)
