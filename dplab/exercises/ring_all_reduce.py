"""An all-reduce is a reduce-scatter and an all-gather, one after the other."""

import torch
import torch.distributed as dist

from dplab.checks.mistakes import Slip
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.exercises.ring_reduce_scatter import OnARing, ring_reduce_scatter


def ring_all_reduce(flat, group=None):
    """The sum of all ranks' flat tensors, on every rank."""
    return ring_all_gather(ring_reduce_scatter(flat, group), group)


def with_a_copy(flat, group=None):
    """The same, with the finished chunk put in its place among copies of the others."""
    chunks = flat.clone().chunk(dist.get_world_size(group))
    chunk = chunks[dist.get_rank(group)]
    chunk.copy_(ring_reduce_scatter(flat, group))
    return ring_all_gather(chunk, group)


class RingAllReduce(OnARing):
    number = "3.4"
    title = "The whole ring: all-reduce"
    minutes = 3
    solution = staticmethod(ring_all_reduce)
    also_right = (with_a_copy,)
    fact = "the sum"
    steps = 2

    def result_of(self, tensors, rank):
        return torch.stack(tensors).sum(dim=0)

    def parts_of(self, tensors, rank):
        return tensors

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "What does each rank hold after your reduce-scatter, and what do the others lack?",
        "Your two halves are all that you need, one after the other.",
        "Hand the chunk that `ring_reduce_scatter(flat, group)` returns to `ring_all_gather`, "
        "with the same group.",
    )
    slips = (
        Slip("This is the first half alone: one chunk is complete on each rank. The all-gather is "
             "missing, which brings each chunk to all ranks.",
             {"return ring_all_gather(chunk, group)": "return chunk"}),
        Slip("You gather this rank's chunk as it was. `ring_reduce_scatter` leaves its input alone "
             "and returns the sum: gather that.",
             {"chunk.copy_(ring_reduce_scatter(flat, group))": "ring_reduce_scatter(flat, group)"}),
        Slip("You gather before you reduce, so every rank first gets all tensors whole. Reduce and "
             "scatter first; then the parts are small.",
             {"ring_all_gather(ring_reduce_scatter(": "ring_reduce_scatter(ring_all_gather("}),
        Slip("The sum is right, and every rank has sent its whole tensor N-1 times. Let the "
             "reduce-scatter add, and gather only finished chunks.",
             {"ring_reduce_scatter(flat, group), group)":
              "flat, group).view(-1, len(flat)).sum(dim=0)"}),
        Slip("You sum in float32, whatever the dtype: it has no room for all digits of a float64, "
             "or of a large integer. Keep the dtype of `flat`.",
             {"ring_reduce_scatter(flat, group), group)":
              "ring_reduce_scatter(flat.float(), group), group).to(flat.dtype)"}),
        Slip("The sum is in the caller's tensor, as with `dist.all_reduce`. Here the input is left "
             "alone, and the sum returned.",
             {"return ": "flat[:] = "}),
    )
