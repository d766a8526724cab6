"""The norm of a gradient of which every rank holds a part, and one scale for all parts."""

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
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


CASES = (("a norm above max_norm", (7, 11, 2, 5), 3.0, 1.0),
         ("a norm below max_norm", (7, 11, 2, 5), 0.1, 5.0),
         ("a gradient of two numbers", (2,), 2.0, 1.0))
TOTAL = "dist.all_reduce(squares)\n    norm = squares.sqrt()"


class ClipByGlobalNorm(Exercise):
    number = "C.4"
    title = "Clip sharded gradients by their global norm"
    minutes = 15
    tolerance = 1e-4
    solution = staticmethod(clip_by_global_norm)

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
                                  AtMost(8 * max(len(sizes), world_size),
                                         "a number of each rank, or of each tensor, is enough"))
        return found

    hints = (
        "The norm of a vector in pieces: the square root of the sum of all squares, whoever holds "
        "them. Norms themselves do not add up.",
        "Add the squares of all your shards to one number, all-reduce that, and take the root.",
        "The scale is `max_norm / norm`, but never more than 1. A rank whose shards are empty "
        "still takes part in the all-reduce, with a zero.",
    )
    slips = (
        # The norm.
        Slip("You used the norm of this rank's own shards, as torch's `clip_grad_norm_` does on "
             "plain tensors. Every rank then scales by another number: sum the squares over the "
             "ranks.", {"dist.all_reduce(squares)": "pass"}),
        Slip("You summed the ranks' norms. Norms do not add up, their squares do: all-reduce the "
             "sum of squares, then take the root.",
             {TOTAL: "norm = squares.sqrt()\ndist.all_reduce(norm)"}),
        Slip("You averaged the ranks' norms. Each is that of a part alone; the squares of the "
             "parts add up to the square of the whole.",
             {TOTAL: "norm = squares.sqrt()\ndist.all_reduce(norm)\n"
                     "norm /= dist.get_world_size()"}),
        Slip("You took the largest of the ranks' norms. The whole is longer than each of its "
             "parts: sum the squares.",
             {TOTAL: "norm = squares.sqrt()\ndist.all_reduce(norm, op=dist.ReduceOp.MAX)"}),
        Slip("The root is missing: you used the sum of squares as the norm.", {".sqrt()": ""}),
        Slip("You divided the sum of squares by the world size. The shards are parts of one "
             "gradient, not copies of it: nothing is to be averaged.",
             {"squares.sqrt()": "(squares / dist.get_world_size()).sqrt()"}),
        Slip("You add up absolute values. The norm is the root of the sum of squares.",
             {"gradient.square()": "gradient.abs()", ".sqrt()": ""}),
        Slip("You all-reduce once for each tensor. Add the squares of all tensors first: one "
             "number, one collective.",
             {"squares += gradient.square().sum()": "square = gradient.square().sum()\n"
              "dist.all_reduce(square)\nsquares += square", "dist.all_reduce(squares)": "pass"}),
        Slip("You stop at the first parameter that has no `.grad`: it is frozen. Pass over it, and "
             "take the others.",
             {"[parameter.grad for parameter in parameters if parameter.grad is not None]":
              "[]\nfor parameter in parameters:\n    if parameter.grad is None:\n        break\n"
              "    gradients.append(parameter.grad)"}),
        Slip("A rank whose shards are all empty does not take part, and the others wait for it. It "
             "contributes a zero.",
             {"dist.all_reduce(squares)": "if not any(map(torch.numel, gradients)):\n"
              "    return squares\ndist.all_reduce(squares)"}, hangs=True),
        # The scale.
        Slip("You clip each tensor by its own norm, which changes the gradient's direction. All "
             "are scaled by one number.",
             {"dist.all_reduce(squares)": "each = torch.stack([gradient.square().sum() for "
              "gradient in gradients])\ndist.all_reduce(each)\nsquares = each.sum()",
              "for gradient in gradients:\n        gradient.mul_(scale)":
              "for gradient, square in zip(gradients, each.tolist()):\n"
              "    gradient.mul_(min(1.0, max_norm / (square**0.5 + 1e-6)))"}),
        Slip("Each rank clips its own shards, to max_norm/√N, by a number of its own. That turns "
             "the gradient: all ranks scale by the same number.",
             {"dist.all_reduce(squares)": "own = (dist.get_world_size() * squares).sqrt()\n"
              "dist.all_reduce(squares)", "norm.item()": "own.item()"}),
        Slip("You scale up, too, where the norm is below `max_norm`. The scale is at most 1.",
             {"min(1.0, max_norm / (norm.item() + 1e-6))": "max_norm / (norm.item() + 1e-6)"}),
        Slip("The gradients stay as they were. Scale each `parameter.grad` itself, in place with "
             "`mul_`: not a copy of it, and not the parameter.", {"gradient.mul_": "gradient.mul"}),
        # What is returned.
        Slip("You scale by the global norm, and return that of this rank's own shards. Return the "
             "global one.",
             {"dist.all_reduce(squares)": "own = squares.sqrt()\ndist.all_reduce(squares)",
              "return norm": "return own"}),
        Slip("You return the norm after clipping. Asked is the one before: it goes into the log.",
             {"return norm": "return norm * scale"}),
    )


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
