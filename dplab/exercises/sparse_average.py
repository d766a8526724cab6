"""Exercise 13.1: send the largest elements, keep the rest."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import seeded
from dplab.measure import CallLog

ELEMENTS, SENT, ROUNDS = 1000, 37, 4


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


def _gathered(tensor, shared=False):
    every = [torch.empty_like(tensor)] * dist.get_world_size()
    every = every if shared else [each.clone() for each in every]
    dist.all_gather(every, tensor)
    return torch.cat(every)


def _place(indices, values, accumulate=True):
    return torch.zeros(ELEMENTS).index_put((indices,), values, accumulate=accumulate)


def _total(it, shared=False, accumulate=True):
    return _place(_gathered(it.indices, shared), _gathered(it.values, shared), accumulate)


def _by_senders(it):
    """The mean of those who sent an element, times N for the division that follows."""
    senders = _place(_gathered(it.indices), torch.ones(len(it.indices) * dist.get_world_size()))
    return _total(it) / senders.clamp(min=1) * dist.get_world_size()


def _summed(tensor):
    return _gathered(tensor).view(-1, len(tensor)).sum(dim=0)


def _sparse(*, whole=lambda it: it.gradient + it.residual, score=lambda it: it.whole.abs(),
            value=lambda it: it.whole, rest=lambda it: it.whole - it.sent, total=_total,
            divisor=dist.get_world_size):
    """A sparse average with one thing wrong."""

    def attempt(gradient, residual, k):
        it = SimpleNamespace(gradient=gradient, residual=residual)
        it.whole = whole(it)
        it.indices = score(it).topk(k).indices
        it.values = value(it)[it.indices]
        it.sent = _place(it.indices, it.values)
        it.mean = total(it) / divisor()
        residual.copy_(rest(it))
        return it.mean

    return attempt


class SparseAverage(Exercise):
    number = "13.1"
    title = "Send the largest elements, keep the rest"
    minutes = 25
    hints = (
        "Choose from gradient *plus* residual: `whole.abs().topk(k).indices` says where.",
        "What stays is the whole with zeros where something was sent: `residual.copy_(...)`. It "
        "depends on what this rank sent, and not on the others.",
        "`dist.all_gather` values and indices, into lists of one tensor for each rank. Add each "
        "rank's values at its indices to a tensor of zeros, and divide by the world size.",
    )
    solution = staticmethod(sparse_average)
    mistakes = (
        Mistake(_sparse(score=lambda it: it.whole), "You chose the largest values. A large "
                "negative element matters as much: choose by `abs()`."),
        Mistake(_sparse(value=lambda it: it.whole.abs()), "You send magnitudes: the signs are "
                "lost. Take the indices from `abs().topk(k)`, and the values from the tensor."),
        Mistake(_sparse(rest=lambda it: it.residual), "Nothing stays in `residual`: what you do "
                "not send is lost. Write the rest into the tensor itself; an assignment to its "
                "name leaves the caller's as it was."),
        Mistake(_sparse(whole=lambda it: it.gradient), "You keep what is left, and never send it: "
                "choose from gradient plus residual."),
        Mistake(_sparse(rest=lambda it: it.gradient.where(it.sent == 0, 0)), "You keep the rest of "
                "this gradient, and lose what was left before: it is gradient *and* residual."),
        Mistake(_sparse(rest=lambda it: it.whole), "What was sent is still in the residual, so it "
                "is sent again and again: set it to zero there."),
        Mistake(_sparse(rest=lambda it: it.residual + it.whole - it.sent), "The old residual is "
                "part of what is left, and you add it once more: overwrite it."),
        Mistake(_sparse(score=lambda it: it.gradient.abs()), "You choose by the gradient alone: "
                "what is left may wait for ever. Take the largest of gradient plus residual."),
        Mistake(_sparse(rest=lambda it: it.whole - it.mean), "You subtract the mean of the ranks "
                "from what stays. What a rank still owes is what *itself* has not sent."),
        Mistake(_sparse(rest=lambda it: it.whole.where(it.mean == 0, 0)), "You clear what *any* "
                "rank sent. This rank's own part there is lost, if it did not send it."),
        Mistake(_sparse(score=lambda it: -it.whole.abs()), "You chose the smallest elements: "
                "`argsort()` goes upwards."),
        Mistake(_sparse(divisor=lambda: 1), "You return the sum: divide by the world size."),
        Mistake(_sparse(total=_by_senders), "You divide an element by the number of ranks that "
                "sent it. The others count as zeros: divide by the world size."),
        Mistake(_sparse(total=lambda it: _total(it, accumulate=False)), "Where several ranks "
                "chose the same index, only one counts. `t[i] += v` adds once where `i` has an "
                "index twice: go rank by rank, or use `index_add_`."),
        Mistake(_sparse(total=lambda it: _total(it, shared=True)), "`[tensor] * n` is n names "
                "for one tensor, and the last rank's data overwrites the others': make n tensors."),
        Mistake(_sparse(total=lambda it: _place(it.indices, _summed(it.values))), "You add up the "
                "ranks' values, but each rank chose other indices: gather those, too."),
        Mistake(_sparse(total=lambda it: _summed(it.sent)), "The mean is right, but the zeros "
                "travel, too: as many bytes as without choosing. Gather k values and k indices."),
        Mistake(_sparse(whole=lambda it: it.gradient / dist.get_world_size() + it.residual,
                        divisor=lambda: 1), "You divide before you keep the rest, so the residual "
                "is too small by the world size: it is this rank's own. Divide the sum."),
    )

    def trial(self, attempt):
        residual, facts = torch.zeros(ELEMENTS), {}
        for number in range(1, ROUNDS + 1):
            with CallLog() as log:
                mean = attempt(_gradient(number, dist.get_rank()), residual, SENT)
            facts |= _of_round(number, mean, residual.clone(), log.bytes())
        return facts

    def expected(self, world_size):
        residuals, ranks = torch.zeros(world_size, ELEMENTS), [{} for _ in range(world_size)]
        enough = AtMost(12 * SENT, "k float32 values and k int64 indices are enough")
        for number in range(1, ROUNDS + 1):
            whole = residuals + torch.stack([_gradient(number, r) for r in range(world_size)])
            smallest = whole.abs().topk(SENT).values[:, -1:]
            residuals = whole.where(whole.abs() < smallest, 0)
            mean = (whole - residuals).mean(dim=0)
            for facts, residual in zip(ranks, residuals, strict=True):
                facts |= _of_round(number, mean, residual, enough)
        return ranks


def _of_round(number, mean, residual, nbytes):
    return {f"the mean in step {number}": mean, f"the residual after step {number}": residual,
            f"the bytes handed to collectives in step {number}": nbytes}


def _gradient(number, rank):
    """Partly common to all ranks, so that some choose the same elements."""
    return (seeded(f"of all in step {number}", ELEMENTS)
            + 0.6 * seeded(f"of rank {rank} in step {number}", ELEMENTS))
