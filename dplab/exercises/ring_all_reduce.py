"""Exercise 3.4: the whole ring: all-reduce."""

import torch
import torch.distributed as dist

from dplab import parallel
from dplab.checks.exercise import Mistake
from dplab.exercises.ring_all_gather import _divided, ring_all_gather
from dplab.exercises.ring_reduce_scatter import _DIVIDED, _FINISHED, OnARing, ring_reduce_scatter


def ring_all_reduce(flat, group=None):
    """The sum of all ranks' flat tensors, on every rank."""
    return ring_all_gather(ring_reduce_scatter(flat, group), group)


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
    number = "3.4"
    title = "The whole ring: all-reduce"
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
