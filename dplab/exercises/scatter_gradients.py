"""Exercise 8.3: reduce-scatter the gradients."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab import parallel
from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.exercises.sharded_optimizer import _a_chunk_more, _chunk_size, _times
from dplab.measure import CallLog

SHAPES = (((3, 5), (4,), (3,)), ((2,), (1,)))


def scatter_gradients(parameters):
    ranks = dist.get_world_size()
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters]) / ranks
    chunk = -(-len(flat) // ranks)
    flat = F.pad(flat, (0, ranks * chunk - len(flat)))
    for parameter in parameters:
        parameter.grad = None
    own = torch.empty(chunk)
    dist.reduce_scatter_single(own, flat)
    return own


def _scatter(own, flat):
    dist.reduce_scatter_single(own, flat)
    return own


def _chunk_of(flat, own):
    return flat.split(len(own))[dist.get_rank()]


def _scattered(reduce=_scatter, *, power=1, free=True, size=_chunk_size, order=list,
               of=lambda parameter: parameter.grad,
               pad=lambda flat, padding: F.pad(flat, (0, padding))):
    """Scatters gradients with one thing wrong; ``reduce(own, flat)`` returns this rank's chunk."""

    def attempt(parameters):
        ranks = dist.get_world_size()
        flat = torch.cat([of(each).flatten() for each in order(parameters)]) / ranks**power
        chunk = size(len(flat), ranks)
        flat = pad(flat, ranks * chunk - len(flat))
        if free:
            for parameter in parameters:
                parameter.grad = None
        return reduce(torch.zeros(chunk), flat)

    return attempt

_SLICED = ("The values are right, but every rank is sent everything, as in an all-reduce, with "
           "twice the bytes, and throws most of it away. Reduce-scatter sends it its own chunk.")


class ScatterGradients(Exercise):
    number = "8.3"
    title = "Reduce-scatter the gradients"
    minutes = 15
    hints = (
        "One flat tensor of all gradients, divided by N, and padded with zeros at its end to a "
        "multiple of N: its r-th chunk is the one that rank r owns.",
        "`dist.reduce_scatter_single(own, flat)` adds up the ranks' `flat`, and `own` gets this "
        "rank's chunk of the sum. `own` has ⌈n/N⌉ elements.",
        "Set each parameter's `.grad` to None. And return a tensor of its own: a slice of the flat "
        "tensor would keep all of it in memory.",
    )
    solution = staticmethod(scatter_gradients)
    mistakes = (
        Mistake(_scattered(power=0), "You summed and did not divide by the world size: the chunk "
                "has to be the mean over the ranks."),
        Mistake(_scattered(power=2), "You divided by the world size twice (`ReduceOp.AVG` divides "
                "already)."),
        Mistake(_scattered(lambda own, flat: _chunk_of(reduced(flat), own).clone()), _SLICED),
        Mistake(_scattered(lambda own, flat: _chunk_of(reduced(flat), own)), _SLICED),
        Mistake(_scattered(lambda own, flat: reduced(flat)), "You return the whole gradient. A "
                "rank needs no more than the mean for its own chunk."),
        Mistake(_scattered(lambda own, flat: _scatter(own, flat.roll(-len(own)))), "Your chunk is "
                "the one of the next rank: rank r owns chunk r."),
        Mistake(_scattered(lambda own, flat: (dist.reduce(flat, 0), _chunk_of(flat, own).clone())[
                -1]), "`dist.reduce` puts the sum on one rank alone; the others cut their chunk "
                "out of something else. Each rank wants its own chunk: reduce-scatter."),
        Mistake(_scattered(lambda own, flat: _chunk_of(flat, own).clone()), "You took this rank's "
                "chunk of its own gradient: nothing was added up over the ranks."),
        Mistake(_scattered(free=False), "Each parameter still holds its whole gradient, so no "
                "memory is saved: set `.grad` to None."),
        Mistake(_scattered(lambda own, flat: parallel.ring_reduce_scatter(flat)), "You return a "
                "view, which keeps all of the flat tensor in memory: `clone()` the chunk."),
        Mistake(_scattered(pad=lambda flat, padding: F.pad(flat, (padding, 0))), "You put the "
                "padding in front, which shifts every element. It belongs at the end."),
        Mistake(_scattered(lambda own, flat: parallel.ring_reduce_scatter(flat).clone(),
                pad=lambda flat, padding: flat), "You cut without padding, into chunks whose sizes "
                "differ by one. Here all have ⌈n/N⌉ elements: pad with zeros first."),
        Mistake(lambda parameters: torch.cat([scatter_gradients([each]) for each in parameters]),
                "You cut each gradient by itself. The chunks are those of all gradients together, "
                "one behind the other: make one flat tensor first."),
        Mistake(_scattered(order=reversed), "You lay the gradients flat from the last to the "
                "first. Backward makes them in that order; the chunks are cut in the list's."),
        Mistake(_scattered(size=lambda n, ranks: n // ranks), "You rounded the chunk down, and the "
                "last elements are nobody's. Round up, and pad."),
        Mistake(_scattered(pad=lambda flat, padding: flat), "The world size does not divide the "
                "number of elements, so that `reduce_scatter_single` refuses: pad with zeros to a "
                "multiple of it."),
        Mistake(_scattered(size=_a_chunk_more), "Where the world size divides n you pad by a whole "
                "N, which is what `N - n % N` is there. `-n % N` is 0."),
        Mistake(_scattered(of=lambda parameter: parameter.detach()), "You sent the parameters' "
                "values; what has to be averaged is their `.grad`."),
    )

    def trial(self, attempt):
        facts = {}
        for shapes in SHAPES:
            parameters = _with_gradients(shapes, [dist.get_rank()])
            before = [parameter.detach().clone() for parameter in parameters]
            with CallLog() as log:
                chunk = attempt(parameters)
            held = chunk.untyped_storage().nbytes() if isinstance(chunk, torch.Tensor) else 0
            facts |= _of_chunk(shapes, chunk, held, [each.grad is None for each in parameters],
                               all(map(torch.equal, before, parameters)),
                               _times(log, sum(map(math.prod, shapes))))
        return facts

    def expected(self, world_size):
        expected = [{} for _ in range(world_size)]
        for shapes in SHAPES:
            gradients = [parameter.grad.flatten()
                         for parameter in _with_gradients(shapes, range(world_size))]
            size = sum(map(len, gradients))
            chunk = _chunk_size(size, world_size)
            flat = F.pad(torch.cat(gradients), (0, world_size * chunk - size))
            for facts, own in zip(expected, flat.split(chunk), strict=True):
                facts |= _of_chunk(
                    shapes, own, AtMost(4 * chunk, "a slice keeps the whole flat tensor alive"),
                    [True] * len(shapes), True,
                    AtMost(1, "one reduce-scatter of the gradients is enough"))
        return expected


def _with_gradients(shapes, ranks):
    """Parameters with the mean of these ranks' gradients."""
    parameters = [nn.Parameter(seeded(f"parameter {number}", *shape))
                  for number, shape in enumerate(shapes)]
    for number, parameter in enumerate(parameters):
        parts = [seeded(f"gradient {number} of rank {rank}", *parameter.shape) for rank in ranks]
        parameter.grad = torch.stack(parts).mean(dim=0)
    return parameters


def _of_chunk(shapes, chunk, held, freed, untouched, sent):
    of = f", for {len(shapes)} parameters"
    return {f"the chunk{of}": chunk,
            f"the bytes of memory behind the chunk{of}": held,
            f"which parameters' `.grad` is None{of}": freed,
            f"that the parameters are not changed{of}": untouched,
            f"how many times the bytes of one reduce-scatter this rank sends{of}": sent}
