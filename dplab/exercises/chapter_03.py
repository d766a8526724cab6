"""Exercises of chapter 03: the ring, from one exchange to an all-reduce, and what it costs.

The solutions of the first five stand in `dplab.exercises.stack.parts`, since later parts call them.
"""

import math
import time
from functools import partial

import numpy
import torch
import torch.distributed as dist

from dplab import RankError, parallel
from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import AT_LEAST, Calculation, Exercise, Mistake
from dplab.exercises.mistakes import Slip
from dplab.exercises.stack.parts import (
    exchange,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_seconds,
)
from dplab.exercises.trials import of_cases, seeded, whole_numbers
from dplab.measure import CallLog

# Elements of a chunk, by dtype: more than the sixteen chunks that four ranks have, so that a sum of
# some of them says which.
CHUNKS = {"float32": (40, torch.float32), "float64": (24, torch.float64),
          "int64": (32, torch.int64)}


class OnARing(Exercise):
    """Base of the three rings: several dtypes, the input left alone, and every send counted.

    On four ranks, ranks 0 and 2 are also a group, and 1 and 3 another one, both at once.
    """

    world_sizes = (2, 3, 4, 1)  # one rank last: what fails there only is beside the idea
    seconds = 5.0
    with_groups = True
    too_long = (f"{Exercise.too_long} On a ring, both are the chunk that your neighbour sends in "
                "this step.")
    steps = 1  # times N−1
    fact: str

    def explanation(self, attempt, got, world_size):
        """What fails in a group only is not compared with what hangs among all ranks."""
        if isinstance(got, RankError) and self._fails_in_a_group_only(attempt, world_size):
            return _WITHOUT_GROUP
        return super().explanation(attempt, got, world_size)

    def parts(self, world_size, rank):
        return {f"{self.fact}, {name}": self.parts_of(_inputs(name, range(world_size)), rank)
                for name in CHUNKS}

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        facts = {}
        for name in CHUNKS:
            facts |= self._facts(f", {name}", attempt, self.given_to(name, rank, rank, ranks),
                                 None)
        if ranks == 4 and self.with_groups:
            pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
            facts |= self._facts(_IN_A_PAIR, attempt,
                                 self.given_to("float32", rank, rank // 2, 2), pair)
        return facts

    def expected(self, world_size):
        every, facts = range(world_size), [{} for _ in range(world_size)]
        for name, (length, dtype) in CHUNKS.items():
            for rank in every:
                facts[rank] |= self._limits(
                    f", {name}", self.result_of(_inputs(name, every), rank),
                    length * dtype.itemsize, world_size)
        if world_size == 4:
            for rank in every:
                pair = _inputs("float32", [rank % 2, rank % 2 + 2], 2)
                facts[rank] |= self._limits(_IN_A_PAIR, self.result_of(pair, rank // 2),
                                             4 * CHUNKS["float32"][0], 2)
        return facts

    def given_to(self, name, rank, place, ranks):
        """What rank ``rank`` brings as number ``place`` of a group of so many ranks."""
        return _inputs(name, [rank], ranks)[0]

    def _facts(self, where, attempt, tensor, group):
        before = tensor.clone()
        with CallLog() as log:
            returned = attempt(tensor, group)
        sent = [call for call in log.calls if call.operation == "send"]
        others = len(log.calls) - len(sent) - log.count("recv")
        is_tensor = isinstance(returned, torch.Tensor)
        return self._named(
            where, returned.clone() if is_tensor else returned, torch.equal(tensor, before),
            is_tensor and returned.untyped_storage().data_ptr()
            != tensor.untyped_storage().data_ptr(),
            len(sent), log.bytes("send"), len({call.peer for call in sent}), others)

    def _limits(self, where, result, chunk_bytes, ranks):
        steps = self.steps * (ranks - 1)
        return self._named(
            where, result, True, True,
            AtMost(steps, "each half of a ring takes N-1 steps"),
            AtMost(steps * chunk_bytes, "you sent more than one chunk in a step"),
            AtMost(1, "on a ring, a rank sends to one neighbour only"),
            AtMost(0, "build it from send and receive"))

    def _named(self, where, result, same, own, messages, nbytes, peers, others):
        return {f"{self.fact}{where}": result,
                f"that the input is as it was{where}": same,
                f"that the result has memory of its own{where}": own,
                f"the number of messages sent{where}": messages,
                f"the number of bytes sent{where}": nbytes,
                f"the number of ranks sent to{where}": peers,
                f"the number of collectives{where}": others}


_IN_A_PAIR = ", float32, in a group of two ranks"


def _inputs(name, ranks, world_size=None):
    """The whole tensors of these ranks, N equal chunks each."""
    ranks = list(ranks)
    length, dtype = CHUNKS[name]
    draw = partial(seeded, dtype=dtype) if dtype.is_floating_point else whole_numbers
    return [draw(f"rank {rank}", length * (world_size or len(ranks))) for rank in ranks]


def _ring(group):
    """This rank, the number of ranks, and the neighbours right and left."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return rank, ranks, (rank + 1) % ranks, (rank - 1) % ranks


_ONE_STEP_MORE = ("You go around once too often: N-1 steps are enough. After those, a chunk has "
                  "been at every rank.")
_ONE_STEP_LESS = ("You stop one step too early: with N ranks, a chunk has to make N-1 hops to "
                  "have been at every rank.")
_NO_SUCH_RANK = ("There is no rank N, nor a rank -1: the neighbours are (rank + 1) % N and "
                 "(rank - 1) % N.")
_CIRCLE = ("Every rank sends before it receives, and each send waits until its neighbour "
           "receives: all wait in a circle. `exchange` does both at once.")
_EMPTY_CIRCLE = ("Every rank waits to receive before it sends, so nobody ever sends, around the "
                 "whole circle. `exchange` does both at once.")
_WRONG_SIDE = ("You receive from the neighbour that you send to. On a ring, what you send goes to "
               "one side, and what arrives comes from the other.")
_FINISHED = ("You called a finished collective. Here, you build one: from send and receive alone.")
_FLOAT32 = ("What travels is float32, which rounds large integers and float64. `exchange` keeps "
            "the dtype of what you hand it.")
_WITHOUT_GROUP = ("You left out the group in some call. Pass it on to `dist.get_rank`, "
                  "`dist.get_world_size` and `exchange`: where only some of the ranks call, they "
                  "are all that there are.")
_SHARES_MEMORY = ("On one rank you return a view of the input: who changes the result changes the "
                  "input too. Copy it (`clone`).")
_STRAIGHT = ("The result is right, and the bytes are as few as can be; but you send to every rank "
             "directly. On a ring, each rank needs one link only, to its neighbour: pass the "
             "chunks on.")
_DIVIDED = "You divided by the world size: this exercise asks for the sum."
_NOTHING = "You return nothing: return the result as a new tensor."


def _divided(whole):
    return lambda tensor, group=None: whole(tensor, group) / dist.get_world_size(group)


def _in_float32(whole):
    return lambda tensor, group=None: whole(tensor.float(), group).to(tensor.dtype)


def _among_all(whole):
    return lambda tensor, group=None: whole(tensor)


def _returning_nothing(whole):
    def attempt(tensor, group=None):
        whole(tensor, group)

    return attempt


# --- 3.1: exchange -------------------------------------------------------------------------------

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
    slug = "exchange"
    number = "3.1"
    title = "Send and receive at the same time"
    name = "exchange"
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


# --- 3.2: the ring's first half ------------------------------------------------------------------

def with_all_chunks(flat, group=None):
    """The same, with a copy of all chunks to add into."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = flat.clone().view(ranks, -1)
    for step in range(ranks - 1):
        sent = (rank - 1 - step) % ranks
        arriving = exchange(chunks[sent], right, left, group)
        mine = (rank - 2 - step) % ranks
        chunks[mine] += arriving
    return chunks[rank].clone()


_NOT_SENT_ON = ("You return chunk r as it was. What arrives is added to a tensor that you do not "
                "send on: in each step, send the sum of the step before.")
_ENDS_ELSEWHERE = ("The sums travel as they should, but they end elsewhere: the chunk that is "
                   "complete on rank r is a neighbour's, and you return chunk r as it was. Start "
                   "with another chunk, so that the way of chunk r ends at rank r.")
_MIXED = ("Parts of different chunks come together, and you return chunk r as it was. What arrives "
          "belongs to your own part of the same chunk: if you send to the right, the chunk that "
          "you send is one further back in each step; to the left, one further on.")
_SEND_FIRST = """arriving = torch.empty_like(total)
dist.send(total, group_dst=right, group=group)
dist.recv(arriving, group_src=left, group=group)"""
_RECEIVE_FIRST = """arriving = torch.empty_like(total)
dist.recv(arriving, group_src=left, group=group)
dist.send(total, group_dst=right, group=group)"""
_AS_IT_WAS = {"its own part": _NOT_SENT_ON, "a sum": _ENDS_ELSEWHERE, "a mixture": _MIXED}
_SENT_ON = "what it sends in the second step"


def _sent_on(sent, rank, ranks):
    """What the second message of this rank holds: a sum of parts of one chunk, or not."""
    parts = [tensor.chunk(ranks) for tensor in _inputs("float32", range(ranks))]
    own = parts[rank]
    if (sent.shape, sent.dtype) != (own[0].shape, own[0].dtype):
        return "another kind of tensor"
    if any(torch.equal(sent, part) for part in own):
        return "its own part"
    neighbours = parts[(rank + 1) % ranks], parts[(rank - 1) % ranks]
    return "a sum" if any(torch.allclose(sent, mine + theirs[chunk]) for theirs in neighbours
                          for chunk, mine in enumerate(own)) else "a mixture"


class RingReduceScatter(OnARing):
    slug = "ring-reduce-scatter"
    number = "3.2"
    title = "The first half of the ring: reduce-scatter"
    name = "ring_reduce_scatter"
    minutes = 25
    fact = "this rank's chunk of the sum"
    hints = (
        "Take one chunk and follow it: it visits every rank once, each adds its own part, and its "
        "way must end at the rank that is to keep it. Where does chunk c have to start?",
        "Going right, chunk c starts at rank c+1. So rank r first sends chunk r-1; in the next "
        "step it sends the one that has just arrived from the left, with its own part added.",
        "Keep one tensor, `total`: first chunk r-1. In step s of N-1, `exchange(total, right, "
        "left, group)` brings a partial sum of chunk (r-1-s) mod N: add your own part of it.",
    )
    solution = staticmethod(ring_reduce_scatter)
    also_right = (with_all_chunks,)
    slips = (
        Slip("The chunk is complete, but it is a neighbour's. Rank r has to end with chunk r: "
             "start "
             "with another chunk, so that its way ends there.",
             {"chunks[left]": "chunks[rank]", "rank - 1 - step": "rank - step"},
             {"rank - 1 - step": "rank - step", "rank - 2 - step": "rank - 1 - step",
              "chunks[rank].clone()": "chunks[right].clone()"}),
        Slip("The chunk is complete, but it is a neighbour's. Rank r has to end with chunk r: you "
             "start one chunk too far back.",
             {"chunks[left]": "chunks[(rank - 2) % ranks]", "rank - 1 - step": "rank - 2 - step"}),
        Slip("The chunk that arrives overwrites yours. It holds the sum of the ranks that it has "
             "passed: add it to your own part.",
             {"arriving + chunks[(rank - 1 - step) % ranks]": "arriving"},
             {"+= arriving": "= arriving"}),
        Slip(_NOT_SENT_ON, {"chunks[mine] += arriving": "arriving += chunks[mine]"}),
        Slip(_ENDS_ELSEWHERE,
             {"rank - 1 - step": "rank - step", "rank - 2 - step": "rank - 1 - step"},
             {"rank - 1 - step": "rank + step", "rank - 2 - step": "rank + 1 + step",
              "], right, left,": "], left, right,"}),
        Slip(_MIXED,
             {"rank - 1 - step": "rank + step", "rank - 2 - step": "rank + 1 + step"},
             {"rank - 1 - step": "rank - step", "rank - 2 - step": "rank - 1 - step",
              "], right, left,": "], left, right,"}),
        Slip("You add the same chunk in every step, so parts of different chunks come together. "
             "Another chunk arrives each time: add your own part of that one.",
             {"chunks[(rank - 1 - step) % ranks]": "chunks[rank]"}),
        Slip("You add a part of the wrong chunk. What arrives from the left is one chunk further "
             "back in each step, not one further on; from the right, one further on.",
             {"+ chunks[(rank - 1 - step) % ranks]": "+ chunks[(rank - 1 + step) % ranks]"},
             {"right, left, group)": "left, right, group)"},
             {"rank - 1 - step": "rank + step", "rank - 2 - step": "rank + 1 + step",
              "return chunks[rank]": "return chunks[right]"},
             {"chunks[left]": "chunks[right]", "rank - 1 - step": "rank + 1 + step"}),
        Slip("You add your own part of the chunk that you have just sent. What arrives from the "
             "left "
             "is one chunk further back: add your own part of that one.",
             {"+ chunks[(rank - 1 - step) % ranks]": "+ chunks[(rank - step) % ranks]"}),
        Slip("All that arrives is added to your chunk r, and it holds the left neighbour's parts "
             "of "
             "other chunks. Add it to your own part of the same chunk, and send that sum on.",
             {"chunks[mine] += arriving": "chunks[rank] += arriving"}),
        Slip("You send your own parts, and not the sums: only one other rank's part gets into your "
             "chunk. Send what has arrived, with your part added.",
             {"exchange(total,": "exchange(chunks[(rank - step) % ranks],"},
             {"exchange(chunks[sent],": "exchange(flat.view(ranks, -1)[sent],"}),
        Slip(_ONE_STEP_MORE + " Another step adds a part a second time.",
             {"range(1, ranks)": "range(1, ranks + 1)"},
             {"chunks[left]": "chunks[rank]", "rank - 1 - step": "rank - step",
              "range(1, ranks)": "range(1, ranks + 1)"}),
        Slip(_ONE_STEP_MORE, {"range(ranks - 1)": "range(ranks)"}),
        Slip(_ONE_STEP_LESS, {"range(1, ranks)": "range(1, ranks - 1)"},
             {"range(ranks - 1)": "range(ranks - 2)"}),
        Slip("You pass the whole tensor around. In each step, send only one of the N chunks: that "
             "is "
             "where a ring saves its bytes.",
             {"chunks = flat.view(ranks, -1)": "passing = flat",
              "chunks[left].clone()": "flat.view(ranks, -1)[rank].clone()",
              "arriving = exchange(total,": "passing = exchange(passing,",
              "arriving + chunks[(rank - 1 - step) % ranks]":
                  "total + passing.view(ranks, -1)[rank]"}),
        Slip("You send your sum so far, whole, and add the sum that arrives: parts are added more "
             "than once. Send one chunk in each step, another one each time.",
             {"chunks[left].clone()": "flat.clone()",
              "arriving + chunks[(rank - 1 - step) % ranks]": "total + arriving",
              "return total": "return total.view(ranks, -1)[rank].clone()"}),
        Slip("The caller's tensor is changed: its chunks hold partial sums now. Add into a tensor "
             "of "
             "your own.",
             {"flat.clone()": "flat"}),
        Slip(_SHARES_MEMORY, {"chunks[left].clone()": "chunks[left]"}),
        Slip(_FLOAT32, {"flat.view(": "flat.float().view(",
                        "return total": "return total.to(flat.dtype)"},
             {"flat.clone()": "flat.clone().float()", "return chunks[rank].clone()":
                  "return chunks[rank].to(flat.dtype)"}),
        Slip("What you return is float32. A result keeps the dtype of `flat`, and so does what "
             "travels: float32 rounds large integers and float64.",
             {"flat.view(": "flat.float().view("}, {"flat.clone()": "flat.clone().float()"}),
        Slip(_STRAIGHT,
             {"total = chunks[left].clone()": "total = chunks[rank].clone()",
              "exchange(total, right, left,": "exchange(chunks[(rank + step) % ranks], "
                                              "(rank + step) % ranks, (rank - step) % ranks,",
              "arriving + chunks[(rank - 1 - step) % ranks]": "total + arriving"}),
        Slip(_FINISHED, {"for step in range(1, ranks):": "dist.all_reduce(flat.clone(), "
                                                         "group=group)\n"
                                                       "for step in range(1, ranks):"},
             {"for step in range(ranks - 1):": "dist.all_reduce(chunks, group=group)\n"
                                               "for step in []:"}),
        Slip(_WITHOUT_GROUP, {"left, group)": "left)"}, {"get_rank(group)": "get_rank()"},
             {"get_world_size(group)": "get_world_size()"}, {"(group)": "()"},
             {"(group)": "()", "left, group)": "left)"}),
        Slip(_CIRCLE, {"arriving = exchange(total, right, left, group)": _SEND_FIRST}, hangs=True),
        Slip(_EMPTY_CIRCLE, {"arriving = exchange(total, right, left, group)": _RECEIVE_FIRST},
             hangs=True),
        Slip(_WRONG_SIDE, {"right, left, group": "right, right, group"}, hangs=True),
        Slip(_NO_SUCH_RANK, {"(rank + 1) % ranks, (rank - 1) % ranks": "rank + 1, rank - 1",
                             "[left]": "[rank - 1]", "[(rank - 1 - step) % ranks]":
                             "[rank - 1 - step]"}),
        Slip(_DIVIDED, {"return total": "return total / ranks"},
             {"chunks[rank].clone()": "chunks[rank] / ranks"}),
        Slip("You return the whole tensor, and only chunk r of it is complete on rank r: return "
             "that "
             "one.",
             {"return total": "whole = flat.clone()\nwhole.view(ranks, -1)[rank] = total\n"
                              "return whole"}),
        Slip(_NOTHING, {"return total": ""}, {"return chunks[rank].clone()": ""}),
    )

    def explanation(self, attempt, got, world_size):
        """Where chunk r comes back as it was, what three ranks send on tells the reason."""
        why = super().explanation(attempt, got, world_size)
        if why in _AS_IT_WAS.values():
            on_three = self._observe(attempt, 3, quiet=True)
            if not isinstance(on_three, RankError):
                return _AS_IT_WAS.get(on_three[0].get(_SENT_ON), "")
        return why

    def _facts(self, where, attempt, tensor, group):
        """With what is sent in the second step: on two ranks there is none."""
        sent, send = [], dist.ProcessGroup.send

        def keep(group, tensors, *arguments):
            sent.append(tensors[0].clone())
            return send(group, tensors, *arguments)

        dist.ProcessGroup.send = keep  # in this rank's process only
        try:
            facts = super()._facts(where, attempt, tensor, group)
        finally:
            dist.ProcessGroup.send = send
        if where == ", float32" and len(sent) > 1:
            facts[_SENT_ON] = _sent_on(sent[1], dist.get_rank(), dist.get_world_size())
        return facts

    def parts_of(self, tensors, rank):
        return {f"rank {other}'s chunk {chunk}": part for other, tensor in enumerate(tensors)
                for chunk, part in enumerate(tensor.chunk(len(tensors)))}

    def result_of(self, tensors, rank):
        return torch.stack([tensor.chunk(len(tensors))[rank] for tensor in tensors]).sum(dim=0)


# --- 3.3: the ring's second half -----------------------------------------------------------------

def sends_its_own_chunk_each_time(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    for step in range(1, ranks):
        chunks[(rank - step) % ranks] = exchange(chunk, right, left, group)
    return chunks.view(-1)


def keeps_the_order_of_arrival(chunk, group=None):
    _, ranks, right, left = _ring(group)
    found = [chunk]
    for _ in range(ranks - 1):
        found.append(exchange(found[-1], right, left, group))
    return torch.cat(found)


def puts_them_before_its_own(chunk, group=None):
    _, ranks, right, left = _ring(group)
    found = [chunk]
    for _ in range(ranks - 1):
        found.insert(0, exchange(found[0], right, left, group))
    return torch.cat(found)


def puts_them_one_place_further(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    passing = chunk
    for step in range(1, ranks):
        passing = exchange(passing, right, left, group)
        chunks[(rank + step) % ranks] = passing
    return chunks.view(-1)


def gathers_one_step_more(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    for step in range(ranks if ranks > 1 else 0):
        arriving = exchange(chunks[(rank - step) % ranks], right, left, group)
        chunks[(rank - 1 - step) % ranks] = arriving
    return chunks.view(-1)


def gathers_one_step_less(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.new_zeros(ranks, len(chunk))
    chunks[rank] = chunk
    for step in range(ranks - 2):
        arriving = exchange(chunks[(rank - step) % ranks], right, left, group)
        chunks[(rank - 1 - step) % ranks] = arriving
    return chunks.view(-1)


def adds_what_arrives(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.new_zeros(ranks, len(chunk))
    passing = chunks[rank] = chunk
    for step in range(1, ranks):
        passing = passing + exchange(passing, right, left, group)
        chunks[(rank - step) % ranks] = passing
    return chunks.view(-1)


def sends_all_that_it_has(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    whole = chunk.new_zeros(ranks, len(chunk))
    whole[rank] = chunk
    passing = whole
    for _ in range(ranks - 1):
        passing = exchange(passing, right, left, group)
        whole = whole + passing
    return whole.view(-1)


def sends_to_every_rank(chunk, group=None):
    rank, ranks, *_ = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    for distance in range(1, ranks):
        source = (rank - distance) % ranks
        chunks[source] = exchange(chunk, (rank + distance) % ranks, source, group)
    return chunks.view(-1)


def returns_rows(chunk, group=None):
    return ring_all_gather(chunk, group).view(-1, len(chunk))


def returns_the_input_on_one_rank(chunk, group=None):
    return chunk if dist.get_world_size(group) == 1 else ring_all_gather(chunk, group)


def calls_all_gather(chunk, group=None):
    whole = chunk.new_empty(dist.get_world_size(group) * len(chunk))
    dist.all_gather_single(whole, chunk, group=group)
    return whole


def _all_gather_of(rank, ranks, chunk, group):
    chunks = chunk.new_empty(ranks, len(chunk))
    chunks[rank] = chunk
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        chunks[(rank - 1 - step) % ranks] = exchange(
            outgoing, (rank + 1) % ranks, (rank - 1) % ranks, group)
    return chunks.view(-1)


def gathers_by_its_rank_among_all(chunk, group=None):
    return _all_gather_of(dist.get_rank(), dist.get_world_size(group), chunk, group)


def gathers_for_all_ranks(chunk, group=None):
    return _all_gather_of(dist.get_rank(group), dist.get_world_size(), chunk, group)


def gathers_from_all_ranks(chunk, group=None):
    return _all_gather_of(dist.get_rank(group), dist.get_world_size(group), chunk, None)


def _gather_by(swap):
    """The second half, by another exchange."""
    def attempt(chunk, group=None):
        rank, ranks, right, left = _ring(group)
        chunks = chunk.repeat(ranks, 1)
        for step in range(1, ranks):
            arriving = swap(chunks[(rank - step + 1) % ranks].clone(), right, left, group)
            chunks[(rank - step) % ranks] = arriving
        return chunks.view(-1)

    return attempt


def gathers_without_modulo(chunk, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunk.repeat(ranks, 1)
    for step in range(1, ranks):
        chunks[rank - step] = exchange(chunks[rank - step + 1], rank + 1, rank - 1, group)
    return chunks.view(-1)


class RingAllGather(OnARing):
    slug = "ring-all-gather"
    number = "3.3"
    title = "The second half of the ring: all-gather"
    name = "ring_all_gather"
    minutes = 15
    fact = "all chunks"
    hints = (
        "In the first step a rank has one chunk to send. Which new one does it have to send in "
        "the second?",
        "Pass on what has just arrived. What arrives first is the left neighbour's chunk; whose is "
        "the next one? Put each in its place, in the order of ranks.",
        "Make `chunks` of shape (N, len(chunk)), with your own in row r. In step s of N-1, what "
        "arrives is chunk (r-s) mod N, and what you send is the one from the step before.",
    )
    solution = staticmethod(ring_all_gather)
    mistakes = (
        Mistake(sends_its_own_chunk_each_time, "You send your own chunk in every step, so your "
                "neighbour gets it N-1 times and nothing else. Pass on the one that has just "
                "arrived."),
        Mistake(keeps_the_order_of_arrival, "All chunks are there, in the order in which they "
                "arrived, which is another one on each rank. Put chunk c in place c."),
        Mistake(puts_them_before_its_own, "All chunks are there, and this rank's own is the last "
                "one. They have to lie in the order of ranks: chunk c in place c."),
        Mistake(puts_them_one_place_further, "A chunk lies in the wrong place. What arrives from "
                "the left belongs to a rank further and further to the left."),
        Mistake(gathers_one_step_more, _ONE_STEP_MORE),
        Mistake(gathers_one_step_less, _ONE_STEP_LESS),
        Mistake(adds_what_arrives, "You add in the second half, too. The chunks that travel here "
                "are finished: copy them."),
        Mistake(sends_all_that_it_has, "You send room for all chunks in each step. One chunk is "
                "enough: the one that your neighbour does not have yet."),
        Mistake(sends_to_every_rank, _STRAIGHT),
        Mistake(_in_float32(ring_all_gather), _FLOAT32),
        Mistake(returns_rows, "The numbers are right, in rows. Return them flat, in one "
                "dimension: `view(-1)`."),
        Mistake(returns_the_input_on_one_rank, _SHARES_MEMORY),
        Mistake(calls_all_gather, _FINISHED),
        *(Mistake(attempt, _WITHOUT_GROUP) for attempt in (
            _among_all(ring_all_gather), gathers_by_its_rank_among_all, gathers_for_all_ranks,
            gathers_from_all_ranks)),
        Mistake(_gather_by(send_first), _CIRCLE, hangs=True),
        Mistake(_gather_by(receive_first), _EMPTY_CIRCLE, hangs=True),
        Mistake(_gather_by(receives_from_where_it_sends), _WRONG_SIDE, hangs=True),
        Mistake(gathers_without_modulo, _NO_SUCH_RANK),
        Mistake(_divided(ring_all_gather), "You divided by the world size. An all-gather computes "
                "nothing: every chunk arrives as it was."),
        Mistake(_returning_nothing(ring_all_gather), _NOTHING),
    )

    def given_to(self, name, rank, place, ranks):
        return _inputs(name, [rank], ranks)[0].chunk(ranks)[place].clone()

    def parts_of(self, tensors, rank):
        return ()

    def result_of(self, tensors, rank):
        return torch.cat([tensor.chunk(len(tensors))[each] for each, tensor in enumerate(tensors)])


# --- 3.4: the whole ring -------------------------------------------------------------------------

def first_half_only(flat, group=None):
    return ring_reduce_scatter(flat, group)


def gathers_what_was_not_summed(flat, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    ring_reduce_scatter(flat, group)
    return ring_all_gather(flat.chunk(ranks)[rank].contiguous(), group)


def gathers_first(flat, group=None):
    return ring_reduce_scatter(ring_all_gather(flat, group), group)


def gathers_everything(flat, group=None):
    rows = ring_all_gather(flat, group).view(dist.get_world_size(group), -1)
    return rows.sum(dim=0)


def writes_into_its_input(flat, group=None):
    flat.copy_(ring_all_reduce(flat, group))
    return flat.clone()


def writes_into_its_input_only(flat, group=None):
    flat.copy_(ring_all_reduce(flat, group))


def sums_among_all(flat, group=None):
    return ring_all_gather(ring_reduce_scatter(flat))


def groups_the_first_half_only(flat, group=None):
    return ring_all_gather(ring_reduce_scatter(flat, group))


def groups_the_second_half_only(flat, group=None):
    return ring_all_gather(ring_reduce_scatter(flat), group)


def calls_all_reduce(flat, group=None):
    total = flat.clone()
    dist.all_reduce(total, group=group)
    return total


def sends_everything_to_everyone(flat, group=None):
    total = flat.clone()
    parallel.naive_all_reduce(total, group)
    return total


class RingAllReduce(OnARing):
    slug = "ring-all-reduce"
    number = "3.4"
    title = "The whole ring: all-reduce"
    name = "ring_all_reduce"
    minutes = 3
    steps = 2
    fact = "the sum"
    hints = (
        "What does each rank hold after your reduce-scatter, and what do the others lack?",
        "Your two halves are all that you need, one after the other.",
        "Hand the chunk that `ring_reduce_scatter(flat, group)` returns to `ring_all_gather`, "
        "with the same group.",
    )
    solution = staticmethod(ring_all_reduce)
    mistakes = (
        Mistake(first_half_only, "This is the first half alone: one chunk is complete on each "
                "rank. The all-gather is missing, which brings each chunk to all ranks."),
        Mistake(gathers_what_was_not_summed, "You gather this rank's chunk as it was. "
                "`ring_reduce_scatter` leaves its input alone and returns the sum: gather that."),
        Mistake(gathers_first, "You gather before you reduce, so every rank first gets all "
                "tensors whole. Reduce and scatter first; then the parts are small."),
        Mistake(gathers_everything, "The sum is right, and every rank has sent its whole tensor "
                "N-1 times. Let the reduce-scatter add, and gather only finished chunks."),
        Mistake(_divided(ring_all_reduce), _DIVIDED),
        Mistake(writes_into_its_input, "The caller's tensor is overwritten with the sum. Leave "
                "it as it is, and return a new one."),
        Mistake(writes_into_its_input_only, "The sum is in the caller's tensor, as with "
                "`dist.all_reduce`. Here the input is left alone, and the sum returned."),
        Mistake(sums_among_all, "You left out the group. Pass it on to both halves: where only "
                "some of the ranks call, they are all that there are."),
        *(Mistake(attempt, "Only one of the two halves gets the group. Pass it on to both.")
          for attempt in (groups_the_first_half_only, groups_the_second_half_only)),
        Mistake(calls_all_reduce, _FINISHED),
        Mistake(sends_everything_to_everyone, "You send the whole tensor to every rank. On a ring, "
                "each rank sends one chunk in each step, to one neighbour."),
    )

    def parts_of(self, tensors, rank):
        return tensors

    def result_of(self, tensors, rank):
        return torch.stack(tensors).sum(dim=0)


# --- 3.5: what a ring costs ----------------------------------------------------------------------

def seconds_of_one_half(nbytes, ranks, bandwidth, latency):
    return (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def seconds_of_whole_tensors(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / bandwidth)


def latency_once(nbytes, ranks, bandwidth, latency):
    return latency + 2 * (ranks - 1) / ranks * nbytes / bandwidth


def latency_left_out(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) / ranks * nbytes / bandwidth


def one_chunk_in_all(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * latency + nbytes / ranks / bandwidth


def a_step_too_many(nbytes, ranks, bandwidth, latency):
    return 2 * ranks * (latency + nbytes / ranks / bandwidth)


def bytes_of_many_ranks(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * latency + 2 * nbytes / bandwidth


def bytes_of_the_tensor(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * latency + nbytes / bandwidth


def all_ranks_one_after_another(nbytes, ranks, bandwidth, latency):
    return ranks * 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def steps_of_a_tree(nbytes, ranks, bandwidth, latency):
    return 2 * math.log2(ranks) * (latency + nbytes / ranks / bandwidth)


def times_bandwidth(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / ranks * bandwidth)


def bits_for_bytes(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + 8 * nbytes / ranks / bandwidth)


def both_ways_at_once(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / ranks / (2 * bandwidth))


def bytes_of_both_halves_twice(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + 2 * nbytes / ranks / bandwidth)


class RingSeconds(Calculation):
    slug = "ring-seconds"
    number = "3.5"
    title = "The seconds of a ring"
    name = "ring_seconds"
    minutes = 5
    hints = (
        "How many messages does a rank send, each of which waits for the one before it? How many "
        "bytes does each of them carry?",
        "Every rank sends in every step, at the same time. So the time of the ring is that of one "
        "rank's messages, one after the other.",
        "There are 2(N-1) messages of nbytes/N each. A message takes the latency, and its bytes "
        "over the bandwidth.",
    )
    solution = staticmethod(ring_seconds)
    mistakes = (
        Mistake(seconds_of_one_half, "This is one half of the ring. An all-reduce is a "
                "reduce-scatter and then an all-gather: twice as many messages and bytes."),
        Mistake(seconds_of_whole_tensors, "Here each message takes as long as the whole tensor. It "
                "carries one chunk, an N-th of the bytes."),
        Mistake(latency_once, "The latency counts once for each message that waits for the one "
                "before it. Count the steps of both halves."),
        Mistake(latency_left_out, "The latency is missing; small tensors have little else."),
        Mistake(one_chunk_in_all, "Every message carries a chunk: mind the brackets, both terms "
                "are multiplied by the number of messages."),
        Mistake(a_step_too_many, "Each half of the ring has N-1 steps, not N: nobody sends to "
                "itself."),
        Mistake(bytes_of_many_ranks, "A rank sends less than twice the tensor. It comes near to "
                "that with many ranks; count the chunks."),
        Mistake(bytes_of_the_tensor, "A rank sends more than its tensor once. Count the chunks of "
                "both halves."),
        Mistake(all_ranks_one_after_another, "You counted the messages of all ranks one after "
                "another. In each step all ranks send at the same time, each on its own link."),
        Mistake(steps_of_a_tree, "The logarithm belongs to a tree. On a ring, a chunk makes one "
                "hop in each step, past every rank."),
        Mistake(times_bandwidth, "You multiplied by the bandwidth. Bytes over bytes per second "
                "are seconds."),
        Mistake(bits_for_bytes, "You turned bytes into bits. The bandwidth is in bytes per second "
                "here."),
        Mistake(bytes_of_both_halves_twice, "The factor 2 for both halves is in the bytes twice. "
                "There are 2(N-1) messages already; each carries one chunk."),
        Mistake(both_ways_at_once, "You doubled the bandwidth. It is given for each direction, and "
                "a rank sends in one while it receives in the other."),
    )
    CASES = ((28_000_000_000, 8, 50e9, 14e-6), (4000, 1024, 450e9, 3.4e-6),
             (50_000_000, 3, 12.5e9, 14e-6), (1000, 1, 1e9, 1e-6))

    def trial(self, attempt):
        return of_cases(_seconds_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_seconds_facts, self.CASES, ring_seconds)


def _seconds_facts(case, seconds):
    nbytes, ranks, bandwidth, latency = case
    return {f"the seconds of {nbytes:g} bytes on {ranks} ranks, {bandwidth:g} bytes/s and "
            f"{latency:g} s": _as_float(seconds)}


def _as_float(value):
    """A whole number as a float, so that 0 and 0.0 are the same answer."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# --- 3.6: α and β, fitted ------------------------------------------------------------------------

def fit_alpha_beta(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    # α·(1/t) + (1/β)·(n/t) = 1 for each point: linear in α and 1/β.
    rows = numpy.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, inverse_beta = numpy.linalg.lstsq(rows, numpy.ones(len(sizes)))[0]
    return alpha, 1 / inverse_beta


def fits_absolute_errors(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1)
    return intercept, 1 / slope


def weighs_too_much(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(seconds) ** 2)
    return intercept, 1 / slope


def weighs_too_little(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.sqrt(seconds))
    return intercept, 1 / slope


def weighs_the_wrong_way(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=numpy.array(seconds))
    return intercept, 1 / slope


def weighs_by_size(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(sizes))
    return intercept, 1 / slope


def inverse_of_beta(sizes, seconds):
    alpha, beta = fit_alpha_beta(sizes, seconds)
    return alpha, 1 / beta


def beta_first(sizes, seconds):
    return fit_alpha_beta(sizes, seconds)[::-1]


def slope_for_alpha(sizes, seconds):
    alpha, beta = fit_alpha_beta(sizes, seconds)
    return 1 / beta, 1 / alpha


def first_and_last_point(sizes, seconds):
    beta = (sizes[-1] - sizes[0]) / (seconds[-1] - seconds[0])
    return seconds[0] - sizes[0] / beta, beta


def smallest_and_largest(sizes, seconds):
    return seconds[0], sizes[-1] / seconds[-1]


def mean_bandwidth(sizes, seconds):
    return min(seconds), float(numpy.mean(numpy.array(sizes) / numpy.array(seconds)))


def line_of_logarithms(sizes, seconds):
    slope, intercept = numpy.polyfit(numpy.log(sizes), numpy.log(seconds), 1)
    return math.exp(intercept), 1 / slope


def errors_of_logarithms(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    alpha, beta = fit_alpha_beta(sizes, seconds)
    for _ in range(50):  # Gauss and Newton's steps for log(α + n/β) − log t
        times = alpha + sizes / beta
        rows = numpy.stack([1 / times, sizes / times], axis=1)
        step = numpy.linalg.lstsq(rows, numpy.log(seconds / times))[0]
        alpha, beta = alpha + step[0], 1 / (1 / beta + step[1])
    return alpha, beta


def relative_to_the_prediction(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    alpha, beta = fit_alpha_beta(sizes, seconds)
    for _ in range(50):  # Gauss and Newton's steps for t / (α + n/β) − 1
        times = alpha + sizes / beta
        rows = numpy.stack([seconds / times**2, seconds * sizes / times**2], axis=1)
        step = numpy.linalg.lstsq(rows, seconds / times - 1)[0]
        alpha, beta = alpha + step[0], 1 / (1 / beta + step[1])
    return alpha, beta


def weighs_by_the_prediction(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(seconds))
    for _ in range(50):
        weights = 1 / (intercept + slope * numpy.array(sizes))
        slope, intercept = numpy.polyfit(sizes, seconds, 1, w=weights)
    return intercept, 1 / slope


def without_alpha(sizes, seconds):
    rows = numpy.array(sizes) / numpy.array(seconds)
    return 0.0, (rows @ rows) / rows.sum()


def relative_to_the_mean(sizes, seconds):
    alpha, beta = fits_absolute_errors(sizes, seconds)
    return alpha / numpy.mean(seconds), beta


def in_microseconds(sizes, seconds):
    alpha, beta = fit_alpha_beta(sizes, seconds)
    return 1e6 * alpha, beta


_ONE_TIME = ("You took the time of one message for α. Its bytes took a part of that time: fit α "
             "and β together, to all points.")


class FitAlphaBeta(Calculation):
    slug = "fit-alpha-beta"
    number = "3.6"
    title = "Fit latency and bandwidth"
    name = "fit_alpha_beta"
    minutes = 15
    tolerance = 1e-3
    hints = (
        "The relative error is (α + n/β)/t − 1. What do you have to take for the two unknowns, so "
        "that it is linear in both?",
        "With the unknowns α and 1/β: a point (n, t) asks for α·(1/t) + (1/β)·(n/t) = 1. That is "
        "one row of a linear system, and there are more rows than unknowns.",
        "`numpy.linalg.lstsq(rows, ones)` solves it, with a row [1/t, n/t] for each point; or "
        "`numpy.polyfit(sizes, seconds, 1, w=1/t)`, which weighs each point with 1/t.",
    )
    solution = staticmethod(fit_alpha_beta)
    mistakes = (
        Mistake(fits_absolute_errors, "You made the errors in seconds small, and those of the "
                "large messages drown the others. The relative errors count: divide each by the "
                "time that was measured."),
        Mistake(weighs_too_much, "You divide by the square of the time. The relative error is "
                "divided by the time once; squaring comes after."),
        Mistake(weighs_too_little, "You divide by the root of the time. `w` multiplies the errors "
                "before they are squared, so it is 1/t."),
        Mistake(weighs_the_wrong_way, "You multiply the errors by the time, so large messages "
                "count still more. The relative error is divided by it."),
        Mistake(weighs_by_size, "You divide the errors by the size. Relative is to the time that "
                "was measured: small messages take hardly less than twice as large ones."),
        Mistake(inverse_of_beta, "α is right. You return seconds per byte, and β is bytes per "
                "second."),
        Mistake(beta_first, "Both are right, in the wrong order: α comes first."),
        Mistake(slope_for_alpha, "You took the slope for α. α is where the line meets zero bytes; "
                "the slope is 1/β."),
        Mistake(first_and_last_point, "You put a line through two points and leave out the others: "
                "the noise of these two goes into α and β. Use all points."),
        Mistake(smallest_and_largest, "You took the time of the smallest message for α, and n/t of "
                "the largest for β. Each holds some of the other; fit both together."),
        Mistake(mean_bandwidth, "You averaged n/t over all sizes. For a small message that is "
                "nearly all latency, not bandwidth. Fit both together."),
        Mistake(line_of_logarithms, "You fitted a line to the logarithms. α + n/β is a line in n "
                "itself, and bends on logarithmic axes."),
        Mistake(errors_of_logarithms, "You squared the differences of the logarithms. They are "
                "close to the relative errors, and not the same: the contract asks for "
                "(alpha + n/beta) / t - 1."),
        *(Mistake(attempt, "You divide by the predicted time. The contract divides by t, the time "
                  "that was measured: ((alpha + n/beta) / t - 1).")
          for attempt in (relative_to_the_prediction, weighs_by_the_prediction)),
        Mistake(without_alpha, "You left out α: a message of no bytes takes time too."),
        Mistake(relative_to_the_mean, "You divided by one time for all points. Each error is "
                "relative to the time of its own point."),
        Mistake(in_microseconds, "β is right. α is asked in seconds."),
    )

    def explanation(self, attempt, got, world_size):
        """One message's time taken for α is named, whatever stands for β."""
        why = super().explanation(attempt, got, world_size)
        if (why and not why.startswith(AT_LEAST)) or isinstance(got, RankError):
            return why
        alphas = {name: got[0].get(f"α in seconds of {name}") for name in self.given}
        taken = all(isinstance(alpha, float) and alpha in self.given[name][1]
                    for name, alpha in alphas.items())
        return _ONE_TIME if taken else why

    def prepare(self):
        """Known links, as points with noise: (sizes, seconds) of each."""
        found = {}
        for seed, (name, alpha, beta) in enumerate((("a slow link", 4e-4, 1.2e8),
                                                    ("a fast link", 3e-6, 4e10))):
            noise = numpy.random.default_rng(seed)
            sizes = [1024 * 4**power for power in range(7)]
            found[name] = sizes, [float((alpha + n / beta) * (1 + 0.25 * noise.standard_normal()))
                                  for n in sizes]
        return found

    def trial(self, attempt):
        facts = {}
        for name, (sizes, seconds) in self.given.items():
            alpha, beta = attempt(list(sizes), list(seconds))
            facts |= {f"α in seconds of {name}": _as_float(alpha),
                      f"β in bytes/s of {name}": _as_float(beta)}
        return facts

    def expected(self, world_size):
        facts = {}
        for name, (sizes, seconds) in self.given.items():
            alpha, beta = fit_alpha_beta(sizes, seconds)
            facts |= {f"α in seconds of {name}": float(alpha),
                      f"β in bytes/s of {name}": float(beta)}
        return facts


# --- 3.7: where two algorithms take equally long -------------------------------------------------

def crossover_bytes(one, other, alpha, beta):
    # m₁·α + c₁·M/β = m₂·α + c₂·M/β, solved for M.
    (messages, carried), (other_messages, other_carried) = one, other
    if carried == other_carried:
        return None
    size = (other_messages - messages) * alpha * beta / (carried - other_carried)
    return size if size > 0 else None


def wrong_sign(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return None if size is None else -size


def wrong_sign_and_none(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return -size if size is not None and size < 0 else None


def never_none(one, other, alpha, beta):
    return _crossing(one, other, alpha, beta)


def without_its_sign(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return None if size is None else abs(size)


def divides_by_zero(one, other, alpha, beta):
    return (other[0] - one[0]) * alpha * beta / (one[1] - other[1])


def upside_down(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else (alpha * beta) ** 2 / size


def alpha_over_beta(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else size / beta**2


def without_beta(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else size / beta


def without_alpha_in_it(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else size / alpha


def seconds_for_bytes(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else one[0] * alpha + one[1] * size / beta


def counts_messages_alone(one, other, alpha, beta):
    if one[1] == other[1] or (other[0] - one[0]) / (one[1] - other[1]) <= 0:
        return None
    return abs(other[0] - one[0]) * alpha * beta


def counts_bytes_alone(one, other, alpha, beta):
    if one[1] == other[1] or (other[0] - one[0]) / (one[1] - other[1]) <= 0:
        return None
    return alpha * beta / abs(one[1] - other[1])


def sums_for_differences(one, other, alpha, beta):
    if crossover_bytes(one, other, alpha, beta) is None:
        return None
    return (one[0] + other[0]) * alpha * beta / (one[1] + other[1])


def bytes_of_each_message(one, other, alpha, beta):
    return crossover_bytes((one[0], one[0] * one[1]), (other[0], other[0] * other[1]), alpha, beta)


def zero_for_as_many_messages(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return size if size is not None and size >= 0 else None


def infinite_for_as_many_bytes(one, other, alpha, beta):
    return math.inf if one[1] == other[1] else crossover_bytes(one, other, alpha, beta)


def zero_where_one_wins(one, other, alpha, beta):
    return crossover_bytes(one, other, alpha, beta) or 0.0


def _crossing(one, other, alpha, beta):
    """Where the two lines meet, also where no tensor is."""
    if one[1] == other[1]:
        return None
    return (other[0] - one[0]) * alpha * beta / (one[1] - other[1])


class CrossoverBytes(Calculation):
    slug = "crossover-bytes"
    number = "3.7"
    title = "Where two algorithms take equally long"
    name = "crossover_bytes"
    minutes = 10
    hints = (
        "Write down the seconds of each algorithm for a tensor of M bytes. Where are they equal?",
        "With four ranks, a tree takes 5α + 5M/β and a ring 6α + 1.5M/β. Bring M to one side "
        "first; then write letters for the numbers.",
        "M = (difference of the messages) · α · β / (difference of the bytes), the second minus "
        "the first above and the first minus the second below. No size where it is not above 0.",
    )
    solution = staticmethod(crossover_bytes)
    mistakes = (
        Mistake(wrong_sign, "The sign is wrong: where one difference is the first minus the "
                "second, the other one is the second minus the first."),
        Mistake(wrong_sign_and_none, "You return None where there is such a size, and a size where "
                "there is none: the sign is wrong. Where one difference is the first minus the "
                "second, the other one is the second minus the first."),
        Mistake(never_none, "Where the lines meet below 0 bytes or at 0, one algorithm is faster "
                "for every tensor: return None."),
        Mistake(without_its_sign, "A size below 0 is no size, and its absolute value is none "
                "either: there one algorithm is faster for every tensor. Return None."),
        Mistake(divides_by_zero, "You divide by zero where both send equally much. There is no "
                "size then: return None."),
        Mistake(upside_down, "The fraction is upside down. More messages make the size larger, a "
                "larger difference in bytes makes it smaller."),
        Mistake(alpha_over_beta, "You divide by β, and have to multiply: on a faster link more "
                "bytes fit into one latency."),
        Mistake(without_beta, "β is missing: what you return is in seconds. Multiply by bytes per "
                "second."),
        Mistake(without_alpha_in_it, "α is missing: without latency nobody would save messages."),
        Mistake(seconds_for_bytes, "You return how long both take there. The size is asked, in "
                "bytes."),
        Mistake(counts_messages_alone, "You left out how many bytes the algorithms send. Divide "
                "by the difference of these."),
        Mistake(counts_bytes_alone, "You left out how many messages the algorithms have. Multiply "
                "by the difference of these."),
        Mistake(sums_for_differences, "You added, where each side is taken from the other: bring "
                "α to one side of the equation and M to the other."),
        Mistake(bytes_of_each_message, "The second number is what all messages in the sequence "
                "carry together, not each of them. Do not multiply by the messages again."),
        Mistake(zero_for_as_many_messages, "With as many messages on both sides, the lines meet at "
                "0 bytes, and no tensor has 0 bytes: one is faster for every tensor. Return None."),
        Mistake(infinite_for_as_many_bytes, "Where both carry as many bytes, the lines run side by "
                "side and never meet. No size is infinite: return None."),
        Mistake(zero_where_one_wins, "Where one algorithm is faster for every tensor there is no "
                "size, not 0: return None."),
    )
    CASES = (((5, 5.0), (6, 1.5), 25e-3, 20e6), ((14, 1.75), (9, 9.0), 14e-6, 50e9),
             ((2, 3.0), (5, 0.5), 3e-6, 1e11), ((3, 3.0), (6, 6.0), 1e-5, 1e9),
             ((6, 1.5), (4, 1.5), 1e-5, 1e9), ((4, 2.0), (4, 1.0), 1e-5, 1e9))

    def trial(self, attempt):
        return of_cases(_crossover_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_crossover_facts, self.CASES, crossover_bytes)


def _crossover_facts(case, size):
    one, other, alpha, beta = case
    return {f"the size for (messages, bytes) of {one} and {other}, α = {alpha:g} s and "
            f"β = {beta:g} bytes/s": "infinite" if size == math.inf else _as_float(size)}


# --- 3.8: a time as bus bandwidth ----------------------------------------------------------------

def bus_bandwidth(collective, nbytes, ranks, seconds):
    # What the busiest rank has to send, in units of the whole tensor.
    must_send = {"all_reduce": 2 * (ranks - 1) / ranks,  # N−1 chunks in each of two halves
                 "reduce_scatter": (ranks - 1) / ranks,
                 "all_gather": (ranks - 1) / ranks,
                 "broadcast": 1}[collective]  # the root's tensor has to leave the root
    return must_send * nbytes / seconds


def algorithm_bandwidth(collective, nbytes, ranks, seconds):
    return nbytes / seconds


def all_reduce_always(collective, nbytes, ranks, seconds):
    return bus_bandwidth("all_reduce", nbytes, ranks, seconds)


def one_half_for_all_reduce(collective, nbytes, ranks, seconds):
    if collective == "all_reduce":
        collective = "reduce_scatter"
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def one_chunk_for_all_gather(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective == "all_gather" else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def one_chunk_for_both_halves(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective in ("all_gather", "reduce_scatter") else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def one_chunk_for_reduce_scatter(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective == "reduce_scatter" else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def whole_tensors_in_each_step(collective, nbytes, ranks, seconds):
    whole = nbytes if collective == "broadcast" else nbytes * ranks
    return bus_bandwidth(collective, whole, ranks, seconds)


def whole_tensors_in_an_all_reduce(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective == "all_reduce" else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def one_chunk_only(collective, nbytes, ranks, seconds):
    if collective in ("all_gather", "reduce_scatter"):
        return nbytes / ranks / seconds
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_in_chunks(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        collective = "all_gather"
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_of_one_chunk(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        return nbytes / ranks / seconds
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_as_two_halves(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        collective = "all_reduce"
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_to_each_rank(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        return (ranks - 1) * nbytes / seconds
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def bytes_of_all_ranks(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        return (ranks - 1) * nbytes / seconds
    return ranks * bus_bandwidth(collective, nbytes, ranks, seconds)


def a_chunk_too_many(collective, nbytes, ranks, seconds):
    chunks = {"all_reduce": 2 * ranks, "reduce_scatter": ranks, "all_gather": ranks,
              "broadcast": ranks}[collective]
    return chunks / ranks * nbytes / seconds


def the_factor_upside_down(collective, nbytes, ranks, seconds):
    return (nbytes / seconds) ** 2 / bus_bandwidth(collective, nbytes, ranks, seconds)


def sent_and_received(collective, nbytes, ranks, seconds):
    return 2 * bus_bandwidth(collective, nbytes, ranks, seconds)


def in_gigabytes(collective, nbytes, ranks, seconds):
    return bus_bandwidth(collective, nbytes, ranks, seconds) / 1e9


def in_bits(collective, nbytes, ranks, seconds):
    return 8 * bus_bandwidth(collective, nbytes, ranks, seconds)


class BusBandwidth(Calculation):
    slug = "bus-bandwidth"
    number = "3.8"
    title = "The bus bandwidth of a measured time"
    name = "bus_bandwidth"
    minutes = 6
    hints = (
        "How many bytes must the busiest rank send, at the least, in each of the four? You have "
        "counted two halves and a whole. Who is the busiest in a broadcast?",
        "A half of the ring sends N-1 chunks of nbytes/N from each rank, an all-reduce twice as "
        "much. In a broadcast, every byte has to leave the root once.",
        "`factor * nbytes / seconds`, where the factor is 2(N-1)/N for an all-reduce, (N-1)/N for "
        "each half, and 1 for a broadcast.",
    )
    solution = staticmethod(bus_bandwidth)
    mistakes = (
        Mistake(algorithm_bandwidth, "This is the algorithm bandwidth, the tensor over the time. "
                "Count what the busiest rank has to send for it instead."),
        Mistake(all_reduce_always, "You count an all-reduce each time. A reduce-scatter and an "
                "all-gather are half of one, and a broadcast only brings one tensor out."),
        Mistake(one_half_for_all_reduce, "An all-reduce is a reduce-scatter and then an "
                "all-gather: the busiest rank sends twice as much as in one half."),
        *(Mistake(attempt, "`nbytes` is the whole tensor here, all N chunks together. You took it "
                  "for one rank's chunk.")
          for attempt in (one_chunk_for_all_gather, one_chunk_for_reduce_scatter,
                          one_chunk_for_both_halves)),
        *(Mistake(attempt, "You let a rank send the whole tensor in each step. It "
                  "sends one chunk in each step, an N-th of nbytes.")
          for attempt in (whole_tensors_in_each_step, whole_tensors_in_an_all_reduce)),
        Mistake(one_chunk_only, "A rank sends more than its own chunk in a half of the ring: one "
                "chunk in each of N-1 steps."),
        *(Mistake(attempt, "In a broadcast only the root has the tensor, so every byte of it must "
                  "leave the root: nbytes, and not a part of it.")
          for attempt in (broadcast_in_chunks, broadcast_of_one_chunk)),
        Mistake(broadcast_as_two_halves, "A broadcast sums nothing. What must leave the root is "
                "its tensor, once."),
        Mistake(broadcast_to_each_rank, "The root need not send to every rank itself: another rank "
                "can pass the tensor on. At the least, the tensor leaves the root once."),
        Mistake(bytes_of_all_ranks, "You counted the bytes of all ranks together. A link belongs "
                "to one rank: take the busiest one alone."),
        Mistake(a_chunk_too_many, "Each half of the ring has N-1 steps, not N: nobody sends to "
                "itself."),
        Mistake(the_factor_upside_down, "You divided by the factor. The busiest rank sends the "
                "factor times the tensor: multiply."),
        Mistake(sent_and_received, "You count what a rank sends and what it receives. A link's "
                "bandwidth holds for each direction: count what is sent."),
        Mistake(in_gigabytes, "The number is right in GB/s, and bytes/s are asked."),
        Mistake(in_bits, "You turned bytes into bits, and bytes/s are asked."),
    )
    CASES = tuple((collective, nbytes, ranks, seconds)
                  for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
                  for nbytes, ranks, seconds in ((2**33, 8, 0.05), (3_000_000, 3, 2e-3)))

    def trial(self, attempt):
        return of_cases(_bus_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_bus_facts, self.CASES, bus_bandwidth)


def _bus_facts(case, bandwidth):
    collective, nbytes, ranks, seconds = case
    return {f"the bytes/s of {collective}, {nbytes:,} bytes on {ranks} ranks in {seconds:g} s":
            _as_float(bandwidth)}


EXERCISES = (Exchange, RingReduceScatter, RingAllGather, RingAllReduce, RingSeconds, FitAlphaBeta,
             CrossoverBytes, BusBandwidth)
