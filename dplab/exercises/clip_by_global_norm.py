"""Exercise 9.2: clip sharded gradients by their global norm."""

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog


def clip_by_global_norm(parameters, max_norm):
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros(())
    for gradient in gradients:
        squares += gradient.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    scale = min(1.0, max_norm / (norm.item() + 1e-6))  # or divide by zero where all is zero
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _clip(total, scale=lambda norm, limit: min(1.0, limit / (norm + 1e-6)),
          whose=lambda gradient: gradient):
    """Clipping with one thing wrong; ``total`` makes the norm from the gradients."""

    def attempt(parameters, max_norm):
        gradients = _gradients(parameters)
        norm = total(gradients)
        for gradient in gradients:
            whose(gradient).mul_(scale(norm.item(), max_norm))
        return norm

    return attempt


def _gradients(parameters):
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _squares(gradients):
    return sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))


def _global_norm(gradients):
    return reduced(_squares(gradients)).sqrt()


def _own_norm(gradients):
    return _squares(gradients).sqrt()


def _one_call_each(gradients):
    return sum((reduced(gradient.square().sum()) for gradient in gradients),
               torch.zeros(())).sqrt()


def _each_alone(parameters, max_norm):
    gradients = _gradients(parameters)
    squares = reduced(torch.stack([gradient.square().sum() for gradient in gradients]))
    for gradient, norm in zip(gradients, squares.sqrt(), strict=True):
        gradient.mul_(min(1.0, max_norm / max(norm.item(), 1e-12)))
    return squares.sum().sqrt()


def _returns_own(parameters, max_norm):
    own = _own_norm(_gradients(parameters))
    clip_by_global_norm(parameters, max_norm)
    return own


def _returns_new(parameters, max_norm):
    return min(clip_by_global_norm(parameters, max_norm), torch.tensor(max_norm))


def _own_limit(parameters, max_norm):
    gradients, limit = _gradients(parameters), max_norm / dist.get_world_size() ** 0.5
    own = _own_norm(gradients)
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / max(own.item(), 1e-12)))
    return reduced(own**2).sqrt()


def _skips_where_empty(parameters, max_norm):
    if not any(gradient.numel() for gradient in _gradients(parameters)):
        return torch.zeros(())
    return clip_by_global_norm(parameters, max_norm)

_NO_SUM = ("You used the norm of this rank's own shards, as torch's `clip_grad_norm_` does on "
           "plain tensors. Every rank then scales by another number: sum the squares over the "
           "ranks.")


class ClipByGlobalNorm(Exercise):
    number = "9.2"
    title = "Clip sharded gradients by their global norm"
    minutes = 15
    tolerance = 1e-4
    hints = (
        "The norm of a vector in pieces: the square root of the sum of all squares, whoever holds "
        "them. Norms themselves do not add up.",
        "Add the squares of all your shards to one number, all-reduce that, and take the root.",
        "The scale is `max_norm / norm`, but never more than 1. A rank whose shards are empty "
        "still takes part in the all-reduce, with a zero.",
    )
    solution = staticmethod(clip_by_global_norm)
    mistakes = (
        Mistake(_clip(_own_norm), _NO_SUM),
        Mistake(nn.utils.clip_grad_norm_, _NO_SUM),
        Mistake(_clip(lambda each: reduced(_own_norm(each))), "You summed the ranks' norms. Norms "
                "do not add up, their squares do: all-reduce the sum of squares, then take the "
                "root."),
        Mistake(_clip(lambda each: reduced(_own_norm(each)) / dist.get_world_size()),
                "You averaged the ranks' norms. Each is that of a part alone; the squares of the "
                "parts add up to the square of the whole."),
        Mistake(_clip(lambda each: reduced(_own_norm(each), dist.ReduceOp.MAX)),
                "You took the largest of the ranks' norms. The whole is longer than each of its "
                "parts: sum the squares."),
        Mistake(_clip(lambda each: reduced(_squares(each))), "The root is missing: you used the "
                "sum of squares as the norm."),
        Mistake(_clip(lambda each: (reduced(_squares(each)) / dist.get_world_size()).sqrt()),
                "You divided the sum of squares by the world size. The shards are parts of one "
                "gradient, not copies of it: nothing is to be averaged."),
        Mistake(_each_alone, "You clip each tensor by its own norm, which changes the gradient's "
                "direction. All are scaled by one number."),
        Mistake(_clip(_one_call_each), "You all-reduce once for each tensor. Add the squares of "
                "all tensors first: one number, one collective."),
        Mistake(_clip(_global_norm, scale=lambda norm, limit: limit / norm), "You scale up, too, "
                "where the norm is below `max_norm`. The scale is at most 1."),
        Mistake(_clip(_global_norm, whose=torch.clone), "The gradients stay as they were. Scale "
                "each `parameter.grad` itself, in place with `mul_`: not a copy of it, and not "
                "the parameter."),
        Mistake(lambda parameters, max_norm: reduced(torch.zeros(())), "You stop at the first "
                "parameter that has no `.grad`: it is frozen. Pass over it, and take the others."),
        Mistake(_returns_own, "You scale by the global norm, and return that of this rank's own "
                "shards. Return the global one."),
        Mistake(_returns_new, "You return the norm after clipping. Asked is the one before: it "
                "goes into the log."),
        Mistake(_clip(lambda each: reduced(sum((one.abs().sum() for one in each),
                torch.zeros(())))), "You add up absolute values. The norm is the root of the sum "
                "of squares."),
        Mistake(_own_limit, "Each rank clips its own shards, to max_norm/√N, by a number of its "
                "own. That turns the gradient: all ranks scale by the same number."),
        Mistake(_skips_where_empty, "A rank whose shards are all empty does not take part, and the "
                "others wait for it. It contributes a zero.", hangs=True),
    )

    def trial(self, attempt):
        facts = {}
        for name, sizes, factor, max_norm in CASES:
            parameters = [nn.Parameter(torch.zeros_like(shard)) for shard in _shards(sizes, factor)]
            for parameter, gradient in zip(parameters, _shards(sizes, factor), strict=True):
                parameter.grad = gradient
            frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            with CallLog() as log:
                norm = attempt([frozen, *parameters], max_norm)
            facts |= _of_case(name, norm if norm is None else float(norm),
                              torch.cat([each.grad for each in parameters]),
                              log.count(), max((call.bytes for call in log.calls), default=0))
        return facts

    def expected(self, world_size):
        found = [{} for _ in range(world_size)]
        for name, sizes, factor, max_norm in CASES:
            norm = torch.cat(_wholes(sizes, factor)).norm().item()
            for rank, facts in enumerate(found):
                shards = torch.cat(_shards(sizes, factor, rank, world_size))
                facts |= _of_case(name, norm, shards * min(1.0, max_norm / norm),
                                  AtMost(1, "one number is all that has to be summed"),
                                  AtMost(8 * len(sizes), "a number has 8 bytes at most"))
        return found

CASES = (("a norm above max_norm", (7, 11, 2, 5), 3.0, 1.0),
         ("a norm below max_norm", (7, 11, 2, 5), 0.1, 5.0),
         ("a gradient of two numbers", (2,), 2.0, 1.0))


def _of_case(name, norm, gradients, calls, nbytes):
    return {f"{name}: what it returns": norm, f"{name}: the rank's gradients": gradients,
            f"{name}: the number of collectives": calls,
            f"{name}: the bytes of the largest": nbytes}


def _wholes(sizes, factor):
    return [factor * seeded(f"gradient {number}, times {factor}", size)
            for number, size in enumerate(sizes)]


def _shards(sizes, factor, rank=None, world_size=None):
    """The rank's part of each gradient, cut along it into equal parts, the last ones shorter."""
    rank = dist.get_rank() if rank is None else rank
    world_size = dist.get_world_size() if world_size is None else world_size
    return [whole[-(-len(whole) // world_size) * rank :][: -(-len(whole) // world_size)].clone()
            for whole in _wholes(sizes, factor)]
