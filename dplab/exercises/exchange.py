"""Sending and receiving at once, so that no circle of ranks waits for one another."""

import time

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import whole_numbers


def exchange(outgoing, to, source, group=None):
    """Sends a tensor to one rank and returns what another one sends, of the same size and dtype."""
    arriving = torch.empty_like(outgoing)
    sending = dist.isend(outgoing, group_dst=to, group=group)  # does not wait, so nobody deadlocks
    dist.recv(arriving, group_src=source, group=group)
    sending.wait()
    return arriving


def message_of(rank):
    return whole_numbers(f"message of rank {rank}", 5)


def facts_of(where, unchanged, arrived):
    return {f"that `outgoing` is left unchanged when each rank sends {where}": unchanged,
            f"what arrives when each rank sends {where}": arrived}


TO_THE_RIGHT = "{} to the right"
IN_A_PAIR = "to the other rank of a group of two"
NEW = "that each call returns a tensor of its own, which no later call changes"


class Exchange(Exercise):
    number = "3.1"
    title = "Send and receive at the same time"
    minutes = 5
    solution = staticmethod(exchange)
    world_sizes = (2, 3, 4)
    seconds = 5.0
    with_groups = True
    too_long = ("The tensor that you receive into has less room than the message. It needs the "
                "length and the dtype of `outgoing`: `torch.empty_like(outgoing)` has both.")

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        found, returned = {}, []

        def exchanged(where, rank, ranks, distance, group):
            outgoing = message_of(dist.get_rank())
            before = outgoing.clone()
            arrived = attempt(outgoing, (rank + distance) % ranks, (rank - distance) % ranks, group)
            unchanged = torch.equal(outgoing, before)
            if isinstance(arrived, torch.Tensor):
                returned.append((arrived, arrived.clone()))
                arrived = arrived.clone()
            outgoing.fill_(-1)  # the caller may: the exchange is over
            found.update(facts_of(where, unchanged, arrived))

        for distance in range(1, ranks):
            if rank == 1:  # late, so what another rank has sent to it is still under way
                time.sleep(0.1)
            exchanged(TO_THE_RIGHT.format(distance), rank, ranks, distance, None)
        if ranks == 4 and self.with_groups:
            pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
            exchanged(IN_A_PAIR, rank % 2, 2, 1, pair)
        return found | {NEW: all(torch.equal(tensor, copy) for tensor, copy in returned)}

    def expected(self, world_size):
        every = [{} for _ in range(world_size)]
        for rank, right in enumerate(every):
            for distance in range(1, world_size):
                right |= facts_of(TO_THE_RIGHT.format(distance), True,
                                  message_of((rank - distance) % world_size))
            if world_size == 4:
                right |= facts_of(IN_A_PAIR, True, message_of(rank ^ 1))
            right[NEW] = True
        return every

    def parts(self, world_size, rank):
        messages = {"this rank's own message" if each == rank else f"rank {each}'s message":
                    message_of(each) for each in range(world_size)}
        return dict.fromkeys(self.expected_of_all(world_size)[rank], messages)

    hints = (
        "Which of the two calls has to return before anything has arrived, so that nobody waits "
        "in the circle?",
        "Start the send with `dist.isend`, and receive while it is under way. When may the caller "
        "change `outgoing` again?",
        "`arriving = torch.empty_like(outgoing)`; start the send; `dist.recv(arriving, "
        "group_src=source, group=group)`; then wait on the send's handle and return `arriving`.",
    )
    slips = (
        Slip("Every rank waits in its send until somebody receives: all wait in a circle. Start "
             "the send without waiting, receive, and wait for the send last.",
             {"isend": "send", "sending.wait()": ""}, hangs=True),
        Slip("Every rank waits to receive before it sends, so nobody ever sends. Start the send "
             "first, without waiting for it.",
             {"sending = dist.isend(outgoing, group_dst=to, group=group)": "",
              "sending.wait()": "dist.send(outgoing, group_dst=to, group=group)"}, hangs=True),
        Slip("An order of the ranks helps only where one partner sends first and the other "
             "receives first. Here two ranks do the same thing first, and wait for each other. Let "
             "no rank wait: `isend`.",
             {"sending = dist.i": "if dist.get_rank(group) % 2 == 0:\n    dist.",
              "sending.wait()": "if dist.get_rank(group) % 2 == 1:\n"
                                "    dist.send(outgoing, group_dst=to, group=group)"},
             hangs=True),
        Slip("You receive from the rank that you send to. What arrives comes from `source`, which "
             "may be another rank.",
             {"group_src=source": "group_src=to"}, hangs=True),
        Slip("What you return is float32. Send `outgoing` as it is, and receive into "
             "`torch.empty_like(outgoing)`, which has its size and its dtype.",
             {"arriving = torch": "outgoing = outgoing.float()\narriving = torch"}),
        Slip("`to` and `source` count within the group, and `dst=` and `src=` take the numbers of "
             "all ranks. Use `group_dst=` and `group_src=`; in a `P2POp`, `group_peer=`.",
             {"group_dst=": "dst=", "group_src=": "src="}, {"group_dst=": "dst="},
             {"group_src=": "src="}),
    )
