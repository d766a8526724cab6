"""The half of a ring in which finished chunks travel: each rank passes on what has just arrived."""

import torch
import torch.distributed as dist

from dplab.checks.mistakes import Slip
from dplab.exercises.exchange import exchange
from dplab.exercises.ring_reduce_scatter import OnARing, ring_reduce_scatter


def ring_all_gather(chunk, group=None):
    """The chunks of all ranks, in the order of ranks, as one flat tensor."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = chunk.new_empty(ranks, len(chunk))
    chunks[rank] = chunk

    # Each rank first sends its own chunk, and then passes on the one that has just arrived.
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        chunks[(rank - 1 - step) % ranks] = exchange(outgoing, right, left, group)
    return chunks.view(-1)


def ring_all_reduce(flat, group=None):
    """The sum of all ranks' flat tensors, on every rank: the two halves, one after the other."""
    return ring_all_gather(ring_reduce_scatter(flat, group), group)


def with_one_passing_on(chunk, group=None):
    """The same, with the chunk that is under way beside those that have arrived."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunk.repeat(ranks, 1)
    passing = chunk.clone()
    for step in range(1, ranks):
        arriving = exchange(passing, (rank + 1) % ranks, (rank - 1) % ranks, group)
        passing = arriving
        chunks[(rank - step) % ranks] = passing
    return chunks.view(-1)


class RingAllGather(OnARing):
    number = "3.3"
    title = "The second half of the ring: all-gather"
    minutes = 10
    solution = staticmethod(ring_all_gather)
    also_right = (with_one_passing_on,)
    fact = "all chunks"

    def given_to(self, name, rank, place, ranks):
        return super().given_to(name, rank, place, ranks).chunk(ranks)[place].clone()

    def result_of(self, tensors, rank):
        return torch.cat([tensor.chunk(len(tensors))[each] for each, tensor in enumerate(tensors)])

    def parts_of(self, tensors, rank):
        """Each rank's chunk in each place of a tensor that holds nothing else."""
        places = range(len(tensors))
        chunks = self.result_of(tensors, rank).chunk(len(tensors))
        return {f"rank {each}'s chunk in place {place}": torch.cat([
                    chunk if place == other else torch.zeros_like(chunk) for other in places])
                for place in places for each, chunk in enumerate(chunks)}

    hints = (
        "In the first step a rank has one chunk to send. Which new one does it have to send in "
        "the second?",
        "Pass on what has just arrived. What arrives first is the left neighbour's chunk; whose is "
        "the next one? Put each in its place, in the order of ranks.",
        "Make `chunks` of shape (N, len(chunk)), with your own in row r. In step s of N-1, what "
        "arrives is chunk (r-s) mod N, and what you send is the one from the step before.",
    )
    slips = (
        Slip("You send your own chunk in every step, so your neighbour gets it N-1 times and "
             "nothing else. Pass on the one that has just arrived.",
             {"exchange(passing,": "exchange(chunk,"}),
        Slip("All chunks are there, in the order in which they arrived, which is another one on "
             "each rank. Put chunk c in place c.",
             {"chunks[(rank - step) % ranks] = passing": "chunks[step] = passing"}),
        Slip("All chunks are there, and this rank's own is the last one. They have to lie in the "
             "order of ranks: chunk c in place c.",
             {"chunks[(rank - step) % ranks] = passing": "chunks[ranks - 1 - step] = passing"}),
        Slip("A chunk lies in the wrong place. What arrives from the left belongs to a rank "
             "further and further to the left; what arrives from the right, further to the right.",
             {"chunks[(rank - step) % ranks] = p": "chunks[(rank + step) % ranks] = p"}),
        Slip("You stop one step too early: with N ranks, a chunk has to make N-1 hops to have been "
             "at every rank.",
             {"new_empty": "new_zeros", "range(ranks - 1)": "range(ranks - 2)"},
             {"range(1, ranks)": "range(1, ranks - 1)"}),
        Slip("You add in the second half, too. The chunks that travel here are finished: copy "
             "them.",
             {"passing = arriving": "passing = passing + arriving"},
             {"] = passing": "] += passing"}),
        Slip("What travels is float32, which rounds large integers and float64. `exchange` keeps "
             "the dtype of what you hand it.",
             {"chunk.clone()": "chunk.float()"},
             {"chunk.clone()": "chunk.float()", "chunk.repeat(": "chunk.float().repeat(",
              "view(-1)": "view(-1).to(chunk.dtype)"}),
        Slip("Every rank sends before it receives, and each send waits until its neighbour "
             "receives: all wait in a circle. `exchange` does both at once.",
             {"arriving = exchange(passing, (rank + 1) % ranks, (rank - 1) % ranks, group)":
              "arriving = torch.empty_like(passing)\n"
              "dist.send(passing, group_dst=(rank + 1) % ranks, group=group)\n"
              "dist.recv(arriving, group_src=(rank - 1) % ranks, group=group)"}, hangs=True),
        Slip("Every rank waits to receive before it sends, so nobody ever sends, around the whole "
             "circle. `exchange` does both at once.",
             {"arriving = exchange(passing, (rank + 1) % ranks, (rank - 1) % ranks, group)":
              "arriving = torch.empty_like(passing)\n"
              "dist.recv(arriving, group_src=(rank - 1) % ranks, group=group)\n"
              "dist.send(passing, group_dst=(rank + 1) % ranks, group=group)"}, hangs=True),
        Slip("You receive from the neighbour that you send to. On a ring, what you send goes to "
             "one side, and what arrives comes from the other.",
             {"right, left, group": "right, right, group"}, hangs=True),
        Slip("There is no rank N, nor a rank -1: the neighbours are (rank + 1) % N and "
             "(rank - 1) % N.",
             {"(rank + 1) % ranks, (rank - 1) % ranks": "rank + 1, rank - 1"}),
    )
