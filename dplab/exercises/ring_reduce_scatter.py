"""The half of a ring in which sums travel; and what the checks of both halves share."""

from functools import partial

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.composition import NEAR, made_of
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded, whole_numbers
from dplab.exercises.exchange import exchange
from dplab.measure import CallLog, sent_messages


def ring_reduce_scatter(flat, group=None):
    """This rank's chunk of the sum of all ranks' flat tensors."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = flat.view(ranks, -1)

    # Chunk c starts at rank c+1, collects each rank's part on its way round, and ends at rank c.
    total = chunks[left].clone()
    for step in range(1, ranks):
        arriving = exchange(total, right, left, group)
        total = arriving + chunks[(rank - 1 - step) % ranks]
    return total


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


# Elements of a chunk, by dtype: more than the sixteen chunks that four ranks have, so that a sum of
# some of them says which.
CHUNKS = {"float32": (40, torch.float32), "float64": (24, torch.float64),
          "int64": (32, torch.int64)}
IN_A_PAIR = ", in a group of two ranks"
SENT = "what it sends"


class OnARing(Exercise):
    """Base of both halves: several dtypes, the input left alone, and every send counted.

    On four ranks, ranks 0 and 2 are also a group, and 1 and 3 another one, both at once.
    """

    world_sizes = (2, 3, 4, 1)  # one rank last: what fails there only is beside the idea
    seconds = 5.0
    with_groups = True
    too_long = (f"{Exercise.too_long} On a ring, both are the chunk that your neighbour sends in "
                "this step.")
    fact: str

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        facts = {}
        for name in CHUNKS:
            facts |= self._facts(f", {name}", attempt, self.given_to(name, rank, rank, ranks),
                                 None)
        if ranks == 4 and self.with_groups:
            pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
            facts |= self._facts(IN_A_PAIR, attempt,
                                 self.given_to("float32", rank, rank // 2, 2), pair)
        return facts

    def given_to(self, name, rank, place, ranks):
        """What rank ``rank`` brings as number ``place`` of a group of so many ranks."""
        return inputs_of(name, [rank], ranks)[0]

    def _facts(self, where, attempt, tensor, group):
        before = tensor.clone()
        with CallLog() as log:
            returned = attempt(tensor, group)
        result, own = returned, where != ", float32"  # what is said of one dtype is enough
        if isinstance(returned, torch.Tensor):
            result = returned.clone()
            if not own:
                attempt(-tensor, group)
                own = torch.equal(returned, result) and (
                    returned.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr())
        sent = [call for call in log.calls if call.operation == "send"]
        others = len(log.calls) - len(sent) - log.count("recv")
        return self._named(where, result, torch.equal(tensor, before), own, len(sent),
                           log.bytes("send"), len({call.peer for call in sent}), others)

    def expected(self, world_size):
        every, facts = range(world_size), [{} for _ in range(world_size)]
        for name, (length, dtype) in CHUNKS.items():
            for rank in every:
                facts[rank] |= self._limits(
                    f", {name}", self.result_of(inputs_of(name, every), rank),
                    length * dtype.itemsize, world_size)
        if world_size == 4:
            for rank in every:
                pair = inputs_of("float32", [rank % 2, rank % 2 + 2], 2)
                facts[rank] |= self._limits(IN_A_PAIR, self.result_of(pair, rank // 2),
                                            4 * CHUNKS["float32"][0], 2)
        return facts

    def _limits(self, where, result, chunk_bytes, ranks):
        steps = ranks - 1
        return self._named(
            where, result, True, True,
            AtMost(steps, "each half of a ring takes N-1 steps"),
            AtMost(steps * chunk_bytes, "you sent more than one chunk in a step"),
            AtMost(1, "on a ring, a rank sends to one neighbour only"),
            AtMost(0, "build it from send and receive"))

    def _named(self, where, result, same, own, messages, nbytes, peers, others):
        return {f"{self.fact}{where}": result,
                f"that the input is as it was{where}": same,
                "that the result has memory of its own, which neither the input nor a later call "
                f"uses{where}": own,
                f"the number of messages sent{where}": messages,
                f"the number of bytes sent{where}": nbytes,
                f"the number of ranks sent to{where}": peers,
                f"the number of collectives{where}": others}

    def parts(self, world_size, rank):
        return {f"{self.fact}, {name}": self.parts_of(inputs_of(name, range(world_size)), rank)
                for name in CHUNKS}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}


def inputs_of(name, ranks, world_size=None):
    """The whole tensors of these ranks, N equal chunks each."""
    ranks = list(ranks)
    length, dtype = CHUNKS[name]
    draw = partial(seeded, dtype=dtype) if dtype.is_floating_point else whole_numbers
    return [draw(f"rank {rank}", length * (world_size or len(ranks))) for rank in ranks]


class RingReduceScatter(OnARing):
    number = "3.2"
    title = "The first half of the ring: reduce-scatter"
    minutes = 25
    world_sizes = (3, 2, 4, 1)  # three ranks first: with two, there is no second step to see
    solution = staticmethod(ring_reduce_scatter)
    also_right = (with_all_chunks,)
    fact = "this rank's chunk of the sum"

    def _facts(self, where, attempt, tensor, group):
        """With each message that is sent."""
        with sent_messages() as sent:  # the numbers tell which chunk it was
            facts = super()._facts(where, attempt, tensor, group)
        of_first_call = sent[:facts[f"the number of messages sent{where}"]]
        return facts | {SENT + where: [message.tensor for message in of_first_call]}

    def result_of(self, tensors, rank):
        return torch.stack([tensor.chunk(len(tensors))[rank] for tensor in tensors]).sum(dim=0)

    def parts_of(self, tensors, rank):
        return {f"rank {other}'s chunk {chunk}": part for other, tensor in enumerate(tensors)
                for chunk, part in enumerate(tensor.chunk(len(tensors)))}

    def described(self, difference, got, world_size):
        """With what the rank sends in each step."""
        words = super().described(difference, got, world_size)
        parts = self.parts(world_size, difference.rank).get(difference.fact)
        where = difference.fact.removeprefix(self.fact)
        messages = [made_of(message, parts) for message in
                    got[difference.rank].get(SENT + where, ())] if parts else []
        if not messages or None in messages:
            return words
        steps = [" + ".join(name if abs(times - 1) < NEAR else f"{times:.3g} · {name}"
                            for name, times in message.items() if abs(times) > NEAR) or "zeros"
                 for message in messages]
        return f"{words}\nRank {difference.rank} sends {'; then '.join(steps)}."

    hints = (
        "Take one chunk and follow it: it visits every rank once, each adds its own part, and its "
        "way must end at the rank that is to keep it. Where does chunk c have to start?",
        "Going right, chunk c starts at rank c+1. So rank r first sends chunk r-1; in the next "
        "step it sends the one that has just arrived from the left, with its own part added.",
        "Keep one tensor, `total`: first chunk r-1. In step s of N-1, `exchange(total, right, "
        "left, group)` brings a partial sum of chunk (r-1-s) mod N: add your own part of it.",
    )
    slips = (
        # Which chunk.
        Slip("The chunk is complete, but it is a neighbour's. Rank r has to end with chunk r: "
             "start with another chunk, so that its way ends there.",
             {"chunks[left]": "chunks[rank]", "rank - 1 - step": "rank - step"},
             {"chunks[left]": "chunks[(rank - 2) % ranks]", "rank - 1 - step": "rank - 2 - step"},
             {"rank - 1 - step": "rank - step", "rank - 2 - step": "rank - 1 - step",
              "chunks[rank].clone()": "chunks[right].clone()"}),
        Slip("You return chunk r as it was: no sum has ended there. In each of N-1 steps send what "
             "has just arrived, with your own part of the same chunk added to it, and start with "
             "such a chunk that the way of chunk r ends at rank r.",
             {"range(ranks - 1)": "range(ranks - 2)"},
             {"chunks[mine] += arriving": "arriving += chunks[mine]"},
             {"rank - 1 - step": "rank - step", "rank - 2 - step": "rank - 1 - step"},
             {"rank - 1 - step": "rank + step", "rank - 2 - step": "rank + 1 + step"}),
        Slip("Parts of different chunks come together. What arrives belongs to your own part of "
             "the same chunk: if you send to the right, that is one chunk further back in each "
             "step; to the left, one further on.",
             {"+ chunks[(rank - 1 - step) % ranks]": "+ chunks[(rank - 1 + step) % ranks]"},
             {"right, left, group)": "left, right, group)"},
             {"rank - 1 - step": "rank + step", "rank - 2 - step": "rank + 1 + step",
              "return chunks[rank]": "return chunks[right]"},
             {"chunks[left]": "chunks[right]", "rank - 1 - step": "rank + 1 + step"}),
        Slip("You add the same chunk in every step, so parts of different chunks come together. "
             "Another chunk arrives each time: add your own part of that one.",
             {"chunks[(rank - 1 - step) % ranks]": "chunks[rank]"}),
        Slip("You add your own part of the chunk that you have just sent. Another one arrives: add "
             "your own part of that.",
             {"+ chunks[(rank - 1 - step) % ranks]": "+ chunks[(rank - step) % ranks]"},
             {"chunks[left]": "chunks[right]", "(total, right, left,": "(total, left, right,",
              "rank - 1 - step": "rank + step"}),
        # What is added, and sent on.
        Slip("The chunk that arrives overwrites yours. It holds the sum of the ranks that it has "
             "passed: add it to your own part.",
             {"arriving + chunks[(rank - 1 - step) % ranks]": "arriving"},
             {"+= arriving": "= arriving"}),
        Slip("All that arrives is added to your chunk r, and it holds a neighbour's parts of other "
             "chunks. Add it to your own part of the same chunk, and send that sum on.",
             {"chunks[mine] += arriving": "chunks[rank] += arriving"}),
        Slip("You send your own parts, and not the sums: only one other rank's part gets into your "
             "chunk. Send what has arrived, with your part added.",
             {"exchange(total,": "exchange(chunks[(rank - step) % ranks],"},
             {"exchange(chunks[sent],": "exchange(flat.view(ranks, -1)[sent],"}),
        Slip("You pass the whole tensor around. In each step, send only one of the N chunks: that "
             "is where a ring saves its bytes.",
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
        # The steps and the neighbours.
        Slip("You go around once too often: N-1 steps are enough. After those, a chunk has been at "
             "every rank.",
             {"range(1, ranks)": "range(1, ranks + 1)"}, {"range(ranks - 1)": "range(ranks)"},
             {"chunks[left]": "chunks[rank]", "rank - 1 - step": "rank - step",
              "range(1, ranks)": "range(1, ranks + 1)"}),
        Slip("You stop one step too early: with N ranks, a chunk has to make N-1 hops to have been "
             "at every rank.", {"range(1, ranks)": "range(1, ranks - 1)"}),
        Slip("The result is right, and the bytes are as few as can be; but you send to every rank "
             "directly. On a ring, each rank needs one link only, to its neighbour: pass the "
             "chunks on.",
             {"total = chunks[left].clone()": "total = chunks[rank].clone()",
              "exchange(total, right, left,": "exchange(chunks[(rank + step) % ranks], "
                                              "(rank + step) % ranks, (rank - step) % ranks,",
              "arriving + chunks[(rank - 1 - step) % ranks]": "total + arriving"}),
        Slip("You called a finished collective. Here, you build one: from send and receive alone.",
             {"arriving = exchange": "dist.all_reduce(flat.clone(), group=group)\n"
                                     "arriving = exchange"},
             {"for step in range(ranks - 1):": "dist.all_reduce(chunks, group=group)\n"
                                               "for step in []:"}),
        Slip("You receive from the neighbour that you send to. On a ring, what you send goes to "
             "one side, and what arrives comes from the other.",
             {"right, left, group": "right, right, group"}, hangs=True),
        Slip("Every rank sends before it receives, and each send waits until its neighbour "
             "receives: all wait in a circle. `exchange` does both at once.",
             {"arriving = exchange(total, right, left, group)":
              "arriving = torch.empty_like(total)\ndist.send(total, group_dst=right, group=group)\n"
              "dist.recv(arriving, group_src=left, group=group)"}, hangs=True),
        Slip("Every rank waits to receive before it sends, so nobody ever sends, around the whole "
             "circle. `exchange` does both at once.",
             {"arriving = exchange(total, right, left, group)":
              "arriving = torch.empty_like(total)\ndist.recv(arriving, group_src=left, group=group)"
              "\ndist.send(total, group_dst=right, group=group)"}, hangs=True),
        Slip("There is no rank N, nor a rank -1: the neighbours are (rank + 1) % N and "
             "(rank - 1) % N.",
             {"(rank + 1) % ranks, (rank - 1) % ranks": "rank + 1, rank - 1",
              "[left]": "[rank - 1]"}),
        # The tensors.
        Slip("The caller's tensor is changed: its chunks hold partial sums now. Add into a tensor "
             "of your own.", {"flat.clone()": "flat"}),
        Slip("On one rank you return a view of the input: who changes the result changes the input "
             "too. Copy it (`clone`).", {"chunks[left].clone()": "chunks[left]"}),
        Slip("What travels is float32, which rounds large integers and float64. `exchange` keeps "
             "the dtype of what you hand it.",
             {"flat.view(": "flat.float().view(", "return total": "return total.to(flat.dtype)"},
             {"flat.clone()": "flat.clone().float()",
              "return chunks[rank].clone()": "return chunks[rank].to(flat.dtype)"}),
        Slip("What you return is float32. A result keeps the dtype of `flat`, and so does what "
             "travels: float32 rounds large integers and float64.",
             {"flat.view(": "flat.float().view("}, {"flat.clone()": "flat.clone().float()"}),
        Slip("You divided by the world size: this exercise asks for the sum.",
             {"return total": "return total / ranks"},
             {"chunks[rank].clone()": "chunks[rank] / ranks"}),
        Slip("You return the whole tensor, and only chunk r of it is complete on rank r: return "
             "that one.",
             {"return total": "whole = flat.clone()\nwhole.view(ranks, -1)[rank] = total\n"
                              "return whole"}, {"return chunks[rank]": "return chunks.view(-1)"}),
        Slip("You return nothing: return the result as a new tensor.",
             {"return total": ""}, {"return chunks[rank].clone()": ""}),
    )
