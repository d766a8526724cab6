"""Gradients of which each rank sends its largest elements, and keeps the rest for later."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog


def sparse_average(gradient, residual, k):
    whole = gradient + residual
    indices = whole.abs().topk(k).indices
    values = whole[indices]
    residual.copy_(whole)
    residual[indices] = 0

    world_size = dist.get_world_size()
    all_values = [torch.empty_like(values) for _ in range(world_size)]
    all_indices = [torch.empty_like(indices) for _ in range(world_size)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_indices, indices)
    total = torch.zeros_like(gradient)
    total.index_add_(0, torch.cat(all_indices), torch.cat(all_values))
    return total / world_size


def rank_by_rank(gradient, residual, k):
    """The same with what is sent as a tensor, which has zeros elsewhere."""
    whole = gradient + residual
    indices = whole.abs().topk(k).indices
    values = whole[indices]
    sent = torch.zeros_like(whole)
    sent[indices] = values

    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    all_indices = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, values)
    dist.all_gather(all_indices, indices)
    mean = torch.zeros_like(gradient)
    for place, arrived in zip(all_indices, all_values, strict=True):
        mean[place] += arrived / dist.get_world_size()
    residual.copy_(whole - sent)
    return mean


ELEMENTS, SENT, ROUNDS = 1000, 37, 4


class SparseAverage(Exercise):
    number = "13.1"
    title = "Send the largest elements, keep the rest"
    minutes = 25
    solution = staticmethod(sparse_average)
    also_right = (rank_by_rank,)

    def trial(self, attempt):
        residual, facts = torch.zeros(ELEMENTS), {}
        for number in range(1, ROUNDS + 1):
            with CallLog() as log:
                mean = attempt(_gradient(number, dist.get_rank()), residual, SENT)
            facts |= _of_round(number, mean, residual.clone(), log.bytes())
        return facts

    def expected(self, world_size):
        ranks = [{} for _ in range(world_size)]
        enough = AtMost(12 * SENT, "k float32 values and k int64 indices are enough")
        for number, (before, sent) in enumerate(_rounds(world_size), start=1):
            for rank, facts in enumerate(ranks):
                whole = _gradient(number, rank) + before[rank]
                facts |= _of_round(number, sent.mean(dim=0), whole - sent[rank], enough)
        return ranks

    def parts(self, world_size, rank):
        parts = {}
        for number, (before, sent) in enumerate(_rounds(world_size), start=1):
            every = {f"what rank {other} sends": each for other, each in enumerate(sent)}
            own = {"this rank's gradient": _gradient(number, rank)}
            if number > 1:
                own["its residual before"] = before[rank]
            parts |= _of_round(number, every | own, every | own, {})
        return parts

    hints = (
        "Choose from gradient *plus* residual: `whole.abs().topk(k).indices` says where.",
        "What stays is the whole with zeros where something was sent: `residual.copy_(...)`. It "
        "depends on what this rank sent, and not on the others.",
        "`dist.all_gather` values and indices, into lists of one tensor for each rank. Add each "
        "rank's values at its indices to a tensor of zeros, and divide by the world size.",
    )
    slips = (
        # What is sent.
        Slip("You keep what is left, and never send it: choose from gradient plus residual.",
             {"whole = gradient + residual": "whole = gradient"}),
        Slip("You chose the largest values. A large negative element matters as much: choose by "
             "`abs()`.", {"whole.abs().topk": "whole.topk"}),
        Slip("You choose by the gradient alone: what is left may wait for ever. Take the largest "
             "of gradient plus residual.", {"whole.abs()": "gradient.abs()"}),
        Slip("You chose the smallest elements: `argsort()` goes upwards.",
             {"whole.abs().topk(k).indices": "whole.abs().argsort()[:k]"}),
        Slip("You send magnitudes: the signs are lost. Take the indices from `abs().topk(k)`, and "
             "the values from the tensor.", {"= whole[indices]": "= whole[indices].abs()"}),
        Slip("You divide before you keep the rest, so the residual is too small by the world "
             "size: it is this rank's own. Divide the sum.",
             {"gradient + residual": "gradient / dist.get_world_size() + residual",
              "total / world_size": "total"}),
        # What is left.
        Slip("Nothing stays in `residual`: what you do not send is lost. Write the rest into the "
             "tensor itself; an assignment to its name leaves the caller's as it was.",
             {"residual.copy_(whole - sent)": "residual = whole - sent"}),
        Slip("You keep the rest of this gradient, and lose what was left before: it is gradient "
             "*and* residual.", {"residual.copy_(whole)": "residual.copy_(gradient)"}),
        Slip("What was sent is still in the residual, so it is sent again and again: set it to "
             "zero there.", {"residual[indices] = 0": "pass"}),
        Slip("The old residual is part of what is left, and you add it once more: overwrite it.",
             {"residual.copy_(whole - sent)": "residual += whole - sent"},
             {"residual.copy_(whole)": "residual += whole"}),
        Slip("You subtract the mean of the ranks from what stays. What a rank still owes is what "
             "*itself* has not sent.", {"whole - sent": "whole - mean"}),
        Slip("You clear what *any* rank sent. This rank's own part there is lost, if it did not "
             "send it.", {"whole - sent": "whole.where(mean == 0, 0)"}),
        # The mean.
        Slip("You return the sum: divide by the world size.", {"total / world_size": "total"}),
        Slip("You divide an element by the number of ranks that sent it. The others count as "
             "zeros: divide by the world size.",
             {"total / world_size": "total / torch.bincount(torch.cat(all_indices), "
              "minlength=len(total)).clamp(min=1)"}),
        Slip("Where several ranks chose the same index, only one counts. `t[i] += v` adds once "
             "where `i` has an index twice: go rank by rank, or use `index_add_`.",
             {"total.index_add_(0, torch.cat(all_indices), torch.cat(all_values))":
              "total[torch.cat(all_indices)] += torch.cat(all_values)"}),
        Slip("`[tensor] * n` is n names for one tensor, and the last rank's data overwrites the "
             "others': make n tensors.",
             {"[torch.empty_like(values) for _ in range(world_size)]":
              "[torch.empty_like(values)] * world_size",
              "[torch.empty_like(indices) for _ in range(world_size)]":
              "[torch.empty_like(indices)] * world_size"}),
        Slip("You add up the ranks' values, but each rank chose other indices: gather those, too.",
             {"mean[place] +=": "mean[indices] +="}),
        Slip("The mean is right, but the zeros travel, too: as many bytes as without choosing. "
             "Gather k values and k indices.",
             {"dist.all_gather(all_values, values)": "pass",
              "dist.all_gather(all_indices, indices)": "pass",
              "torch.cat(all_indices), torch.cat(all_values))":
              "indices, values)\ndist.all_reduce(total)"}),
    )


def _rounds(world_size):
    """By round, of every rank: the residual before, and what is sent, with zeros elsewhere."""
    before = torch.zeros(world_size, ELEMENTS)
    for number in range(1, ROUNDS + 1):
        whole = before + torch.stack([_gradient(number, rank) for rank in range(world_size)])
        smallest = whole.abs().topk(SENT).values[:, -1:]
        sent = whole.where(whole.abs() >= smallest, 0)
        yield before, sent
        before = whole - sent


def _of_round(number, mean, residual, nbytes):
    return {f"the mean in step {number}": mean, f"the residual after step {number}": residual,
            f"the bytes handed to collectives in step {number}": nbytes}


def _gradient(number, rank):
    """Partly common to all ranks, so that some choose the same elements."""
    return (seeded(f"of all in step {number}", ELEMENTS)
            + 0.6 * seeded(f"of rank {rank} in step {number}", ELEMENTS))
