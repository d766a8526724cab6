"""Counts by sample, added over the ranks, say what was repeated and what was skipped."""

from collections import Counter

import torch
import torch.distributed as dist

from dplab.checks.exercise import WITHOUT_GROUP
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.broadcast_weights import InPairsToo


def count_samples(indices, size, group=None):
    """How often each sample was taken is a sum over the ranks, as long on all of them."""
    counts = torch.bincount(indices, minlength=size)
    dist.all_reduce(counts, group=group)
    return (counts > 1).sum().item(), (counts == 0).sum().item()


def from_everybodys_lists(indices, size, group=None):
    """The same: the lists themselves travel."""
    lists = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, indices.tolist(), group)
    taken = Counter(index for own in lists for index in own)
    repeated = sum(times > 1 for times in taken.values())
    return repeated, size - len(taken)


SIZE = 40
SHARES = 12, 0, 9, 15  # how many samples each rank takes, where their numbers differ
EPOCHS = ("an epoch in which no sample is repeated", "an epoch in which ranks overlap",
          "an epoch in which ranks also repeat their own samples")
REPEATED, SKIPPED = "the number of repeated samples of {}", "the number of skipped samples of {}"

# As they stand in the right answer.
COUNTED, SUMMED = "torch.bincount(indices, minlength=size)", "dist.all_reduce(counts, group=group)"
TWICE, NEVER = "(counts > 1).sum()", "(counts == 0).sum()"


class CountSamples(InPairsToo):
    number = "4.4"
    title = "An instrument that counts samples"
    minutes = 10
    solution = staticmethod(count_samples)
    also_right = (from_everybodys_lists,)

    def facts_of(self, attempt, group):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        facts = {}
        for epoch, taken in zip(EPOCHS, _taken_by(dist.get_rank(), rank, ranks), strict=True):
            facts |= _facts(epoch, *map(int, attempt(taken, SIZE, group)))
        return facts

    def right(self, ranks):
        facts = {}
        of_ranks = [_taken_by(rank, place, len(ranks)) for place, rank in enumerate(ranks)]
        for epoch, lists in zip(EPOCHS, zip(*of_ranks, strict=True), strict=True):
            taken = Counter(torch.cat(lists).tolist())
            facts |= _facts(epoch, sum(times > 1 for times in taken.values()), SIZE - len(taken))
        return facts

    hints = (
        "Which table, as long on every rank, would tell both numbers if it were about all ranks? "
        "What can one rank fill in of it?",
        "How often each sample was taken is a sum over the ranks. Lists of different lengths do "
        "not add up, and no collective of equal tensors takes them; counts by sample do.",
        "`torch.bincount(indices, minlength=size)` counts by sample. All-reduce the counts, and "
        "then ask how many are more than 1, and how many are 0.",
    )
    slips = (
        Slip("Each rank counted its own samples alone. What one rank skips, another may have "
             "taken, and what two ranks take once each is repeated: add up the counts of all ranks "
             "first.", {SUMMED: "pass"}),
        Slip("`bincount` gives no more counts than up to the largest index that it meets. The "
             "samples after it are skipped too, and all ranks need equally many counts: "
             "`minlength=size`.", {", minlength=size": ""}),
        Slip("A sample that one rank took twice counts as taken once. (A set leaves out what is "
             "double, and `counts[indices] += 1` adds 1 to an index, however often it stands "
             "there.) `torch.bincount` counts each.",
             {"bincount(indices": "bincount(indices.unique()"}),
        Slip("You counted each further time that a sample is taken. A sample taken three times is "
             "*one* repeated sample.", {TWICE: "(counts - 1).clamp(min=0).sum()"}),
        Slip("You took the number of samples taken from `size`. A sample that is taken twice hides "
             "then one that was skipped: count by sample.",
             {NEVER: "(size - counts.sum())"}, {NEVER: "(size - counts.sum()).clamp(min=0)"}),
        Slip("You took the largest count of a rank in place of the sum: a sample that two ranks "
             "take once each is repeated.",
             {SUMMED: "dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)"}),
        Slip("You added up the numbers of each rank. A sample that rank 0 skips may be rank 1's, "
             "and what both take once is repeated: add up the counts by sample.",
             {SUMMED: "numbers = torch.stack([(counts > 1).sum(), (counts == 0).sum()])\n"
                      "dist.all_reduce(numbers, group=group)\nreturn tuple(numbers.tolist())"}),
        Slip("You return the skipped ones first. The order is `(repeated, skipped)`.",
             {f"{TWICE}.item(), {NEVER}.item()": f"{NEVER}.item(), {TWICE}.item()"}),
        Slip("`reduce` gives the counts of all ranks to rank 0 alone. Every rank has to return the "
             "same: `all_reduce`.", {SUMMED: "dist.reduce(counts, group_dst=0, group=group)"}),
        Slip("Only rank 0 calls the collective, and waits for ever: every rank has to call it.",
             {SUMMED: f"if dist.get_rank(group) == 0:\n    {SUMMED}"}, hangs=True),
        Slip(WITHOUT_GROUP, {", group=group": ""}, {"(group)": "()", ", group)": ")"}),
    )


def _taken_by(rank, place, ranks):
    """What this rank takes in each epoch, where it is the one at ``place`` of so many."""
    order = seeded("order", SIZE - 4).argsort()
    return (order[: SIZE - 10][place::ranks],
            seeded(f"what rank {rank} draws", SIZE - 4).argsort()[: SHARES[rank]],
            seeded(f"what rank {rank} draws again and again", SHARES[rank]).mul(8).long() % SIZE)


def _facts(epoch, repeated, skipped):
    return {REPEATED.format(epoch): repeated, SKIPPED.format(epoch): skipped}
