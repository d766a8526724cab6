"""The mean of all gradients, of which each rank keeps its chunk: ZeRO's second stage."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import pack
from dplab.exercises.broadcast_weights import InPairsToo
from dplab.exercises.ring_reduce_scatter import ring_reduce_scatter
from dplab.exercises.sharded_optimizer import times_sent
from dplab.measure import CallLog


def scatter_gradients(parameters, group=None):
    ranks = dist.get_world_size(group)
    flat = pack([parameter.grad for parameter in parameters], ranks) / ranks
    for parameter in parameters:
        parameter.grad = None
    return ring_reduce_scatter(flat, group)


def with_torch(parameters, group=None):
    """The same with torch's reduce-scatter, and without `pack`."""
    ranks = dist.get_world_size(group)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters]) / ranks
    chunk = -(-len(flat) // ranks)
    flat = F.pad(flat, (0, ranks * chunk - len(flat)))
    for parameter in parameters:
        parameter.grad = None
    own = torch.empty(chunk)
    dist.reduce_scatter_single(own, flat, group=group)
    return own


# The chunks of the first have more elements than the parts that are known of a chunk.
SHAPES = (((13, 5), (4,), (5,)), ((2,), (1,)))
SCATTERING = "dist.reduce_scatter_single(own, flat, group=group)"
PADDING = "flat = F.pad(flat, (0, ranks * chunk - len(flat)))"


class ScatterGradients(InPairsToo):
    number = "8.3"
    title = "Gradients go to their owners"
    minutes = 8
    solution = staticmethod(scatter_gradients)
    also_right = (with_torch,)

    def facts_of(self, attempt, group):
        facts = {}
        for shapes in SHAPES:
            parameters = _with_gradients(shapes, [dist.get_rank()])
            before = [parameter.detach().clone() for parameter in parameters]
            with CallLog() as log:
                chunk = attempt(parameters, group)
            held = chunk.untyped_storage().nbytes() if isinstance(chunk, torch.Tensor) else 0
            facts |= _of_chunk(shapes, chunk, held, [each.grad is None for each in parameters],
                               all(map(torch.equal, before, parameters)),
                               times_sent(log, sum(map(math.prod, shapes)), group=group))
        return facts

    def right(self, ranks):
        every = [{} for _ in ranks]
        for shapes in SHAPES:
            for facts, own in zip(every, _chunks_of(_with_gradients(shapes, ranks), len(ranks)),
                                  strict=True):
                facts |= _of_chunk(
                    shapes, own, AtMost(own.nbytes, "a slice keeps the whole flat tensor alive"),
                    [True] * len(shapes), True,
                    AtMost(1, "one reduce-scatter of the gradients is enough"))
        return every

    def parts(self, world_size, rank):
        parts = {}
        for other in range(world_size):
            parameters = _with_gradients(SHAPES[0], [other])
            parts |= {f"chunk {number} of rank {other}'s gradients": chunk
                      for number, chunk in enumerate(_chunks_of(parameters, world_size))}
        values = pack(parameters, world_size).chunk(world_size)
        return {_fact("the chunk", SHAPES[0]): parts | {"its chunk of the parameters":
                                                        values[rank]}}

    hints = (
        "Which part of the stack leaves rank r with chunk r of a sum, and with nothing else? The "
        "sum is not the mean yet.",
        "`pack` lays the gradients flat and pads them; divide by N; your reduce-scatter does the "
        "rest. What it returns has memory of its own.",
        "A parameter's gradient is freed by `parameter.grad = None`, once it is in the flat "
        "tensor. The flat tensor itself goes when the function returns, if no view of it is left.",
    )
    slips = (
        # The flat tensor.
        Slip("You summed and did not divide by the world size: the chunk has to be the mean over "
             "the ranks.", {"parameters]) / ranks": "parameters])"}),
        Slip("You divided by the world size twice (`ReduceOp.AVG` divides already).",
             {"parameters]) / ranks": "parameters]) / ranks**2"}),
        Slip("You sent the parameters' values; what has to be averaged is their `.grad`.",
             {"parameter.grad.flatten()": "parameter.detach().flatten()"}),
        Slip("You lay the gradients flat from the last to the first. Backward makes them in that "
             "order; the chunks are cut in the list's.",
             {"in parameters])": "in reversed(parameters)])"}),
        Slip("You cut each gradient by itself. The chunks are those of all gradients together, "
             "one behind the other: make one flat tensor first.",
             {"ranks = dist.get_world_size(group)": "if len(parameters) > 1:\n    return torch.cat("
              "[scatter_gradients([each], group) for each in parameters])\n"
              "ranks = dist.get_world_size(group)"}),
        Slip("You put the padding in front, which shifts every element. It belongs at the end.",
             {"(0, ranks * chunk - len(flat))": "(ranks * chunk - len(flat), 0)"}),
        Slip("You cut without padding, into chunks whose sizes differ by one. Here all have ⌈n/N⌉ "
             "elements: pad with zeros first.",
             {PADDING: "pass", SCATTERING: "from dplab.parallel import ring_reduce_scatter\n"
              "own = ring_reduce_scatter(flat).clone()"}),
        Slip("You rounded the chunk down, and the last elements are nobody's. Round up, and pad.",
             {"-(-len(flat) // ranks)": "len(flat) // ranks"}),
        Slip("The world size does not divide the number of elements, so that "
             "`reduce_scatter_single` refuses: pad with zeros to a multiple of it.",
             {PADDING: "pass"}),
        Slip("Where the world size divides n you pad by a whole N, which is what `N - n % N` is "
             "there. `-n % N` is 0.", {"-(-len(flat) // ranks)": "len(flat) // ranks + 1"}),
        Slip("Each parameter still holds its whole gradient, so no memory is saved: set `.grad` "
             "to None.", {"parameter.grad = None": "pass"}),
        # This rank's chunk.
        Slip("The values are right, but every rank is sent everything, as in an all-reduce, with "
             "twice the bytes, and throws most of it away. Reduce-scatter sends it its own chunk.",
             {SCATTERING: "dist.all_reduce(flat)\nown = flat.split(chunk)[dist.get_rank()]"},
             {SCATTERING: "dist.all_reduce(flat)\n"
              "own = flat.split(chunk)[dist.get_rank()].clone()"}),
        Slip("You return the whole gradient. A rank needs no more than the mean for its own "
             "chunk.", {SCATTERING: "dist.all_reduce(flat)\nown = flat"}),
        Slip("Your chunk is the one of the next rank: rank r owns chunk r.",
             {"(own, flat,": "(own, flat.roll(-chunk),"}),
        Slip("`dist.reduce` puts the sum on one rank alone; the others cut their chunk out of "
             "something else. Each rank wants its own chunk: reduce-scatter.",
             {SCATTERING: "dist.reduce(flat, 0)\n"
              "own = flat.split(chunk)[dist.get_rank()].clone()"}),
        Slip("You took this rank's chunk of its own gradient: nothing was added up over the "
             "ranks.", {SCATTERING: "own = flat.split(chunk)[dist.get_rank()].clone()"}),
        Slip("You return a view, which keeps all of the flat tensor in memory: `clone()` the "
             "chunk.", {"torch.empty(chunk)": "torch.empty_like(flat)[:chunk]"}),
    )


def _with_gradients(shapes, ranks):
    """Parameters with the mean of these ranks' gradients."""
    parameters = [nn.Parameter(seeded(f"parameter {number}", *shape))
                  for number, shape in enumerate(shapes)]
    for number, parameter in enumerate(parameters):
        parts = [seeded(f"gradient {number} of rank {rank}", *parameter.shape) for rank in ranks]
        parameter.grad = torch.stack(parts).mean(dim=0)
    return parameters


def _chunks_of(parameters, world_size):
    """Of their gradients, laid flat and padded."""
    return pack([parameter.grad for parameter in parameters], world_size).chunk(world_size)


def _of_chunk(shapes, chunk, held, freed, untouched, sent):
    return {_fact("the chunk", shapes): chunk,
            _fact("the bytes of memory behind the chunk", shapes): held,
            _fact("which parameters' `.grad` is None", shapes): freed,
            _fact("that the parameters are not changed", shapes): untouched,
            _fact("how many times the bytes of one reduce-scatter this rank sends", shapes): sent}


def _fact(name, shapes):
    return f"{name}, for {len(shapes)} parameters"
