"""A model on units: equal weights to begin with, chunks to train, and the whole to look at."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import unpack
from dplab.exercises.broadcast_weights import broadcast_weights
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.exercises.sharded_unit import ShardedUnit


def shard_model(model, parts):
    """Makes each part a unit; returns the chunks, and a function that gathers all weights."""
    broadcast_weights(model)  # before the cut: afterwards nobody has whole weights to send
    shapes = [[parameter.detach().to("meta") for parameter in part.parameters()] for part in parts]
    chunks = [ShardedUnit(part).chunk for part in parts]

    def whole():
        return [weight for chunk, tensors in zip(chunks, shapes, strict=True)
                for weight in unpack(ring_all_gather(chunk.detach()), tensors)]

    return chunks, whole


def with_units(model, parts):
    """The same with a loop, and with torch's collectives."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    sizes = [[parameter.shape for parameter in part.parameters()] for part in parts]
    units = []
    for part in parts:
        units.append(ShardedUnit(part))

    def whole():
        weights = []
        for unit, shapes in zip(units, sizes, strict=True):
            flat = torch.empty(dist.get_world_size() * len(unit.chunk))
            dist.all_gather_single(flat, unit.chunk.detach())
            for shape in shapes:
                weights.append(flat[:shape.numel()].view(shape))
                flat = flat[shape.numel():]
        return weights

    return [unit.chunk for unit in units], whole


NAMES = ("first.weight", "first.bias", "middle.0.weight", "middle.0.bias", "middle.2.weight",
         "middle.2.bias", "last.weight", "last.bias")
BEFORE, AFTER = " before training", " after two steps"
CUT = "chunks = [ShardedUnit(part).chunk for part in parts]"


class Model(nn.Module):
    """Three parts, the second one with two layers; other weights on each rank."""

    def __init__(self, rank):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))
        self.last = nn.Linear(7, 3)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(seeded(f"{name} of rank {rank}", *parameter.shape) / 2)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x + self.middle(x))

    def parts(self):
        return [self.first, self.middle, self.last]


class ShardAModel(Exercise):
    number = "9.5"
    title = "Put the stack together"
    minutes = 10
    world_sizes = (2, 3, 4, 1)
    seconds = 10.0
    solution = staticmethod(shard_model)
    also_right = (with_units,)

    def trial(self, attempt):
        rank = dist.get_rank()
        model = Model(rank)
        chunks, whole = attempt(model, model.parts())
        chunks = list(chunks)
        facts = {"the number of chunks": len(chunks),
                 "the numbers that the chunks hold": sum(each.numel() for each in chunks)}
        facts |= self._weights(whole, BEFORE)
        optimizer = torch.optim.SGD(chunks, lr=0.1)
        for number in range(2):
            output = model(seeded(f"x {number} of rank {rank}", 4, 5))
            facts[f"the output of step {number + 1}"] = output.detach()
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return facts | self._weights(whole, AFTER)

    def _weights(self, whole, when):
        found = [each.detach().clone() for each in whole()]
        return {f"the number of weights that `whole()` returns{when}": len(found),
                **{f"`{name}`{when}": each for name, each in zip(NAMES, found, strict=False)}}

    def expected(self, world_size):
        model = Model(0)
        chunks = [-(-sum(each.numel() for each in part.parameters()) // world_size)
                  for part in model.parts()]
        known = {"the number of chunks": len(chunks),
                 "the numbers that the chunks hold": sum(chunks)}
        known |= self._weights(lambda: list(copy.deepcopy(model).parameters()), BEFORE)
        of_ranks = [{} for _ in range(world_size)]
        for number in range(2):
            for rank, facts in enumerate(of_ranks):
                output = model(seeded(f"x {number} of rank {rank}", 4, 5))
                facts[f"the output of step {number + 1}"] = output.detach()
                (output.square().mean() / world_size).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        known |= self._weights(lambda: list(model.parameters()), AFTER)
        return [known | facts for facts in of_ranks]

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "Three jobs: all ranks begin with the same weights, each part becomes a unit, and somebody "
        "wants to see the weights later. In which order must the first two come?",
        "After the cut no rank has whole weights that it could send. And after the cut the modules "
        "hold None, so keep the shapes of each part's parameters before it (`tensor.to(\"meta\")` "
        "has a shape and no memory).",
        "`whole` gathers each chunk with `ring_all_gather(chunk.detach())`, and `unpack` finds the "
        "parameters in it.",
    )
    slips = (
        Slip("The ranks begin with different weights, and each keeps a chunk of its own ones: what "
             "is gathered is made of N models. Broadcast rank 0's weights, and do it before the "
             "cut: afterwards the modules hold None, and nothing is sent.",
             {"broadcast_weights(model)  #": "pass  #"}),
        Slip("`whole` returns what the weights were when you cut them, and training has gone on. "
             "Gather the chunks when it is called.",
             {"    def whole():\n        return [weight": "    def gathered():\n        return "
                                                          "[weight",
              "return chunks, whole": "known = gathered()\nreturn chunks, lambda: known"}),
        Slip("`whole` returns each unit as one flat tensor. Cut it into the unit's parameters, in "
             "their shapes: `unpack` does that.",
             {"for weight in unpack(ring_all_gather(chunk.detach()), tensors)]":
              "for weight in [ring_all_gather(chunk.detach())]]"}),
        Slip("`whole` returns this rank's chunks. Gather each, and cut it into the unit's "
             "parameters, in their shapes.",
             {"for weight in unpack(ring_all_gather(chunk.detach()), tensors)]":
              "for weight in [chunk.detach()]]"}),
        Slip("`whole` returns no weights. You ask the modules for their shapes after the cut, and "
             "then they hold None: keep the shapes before it.",
             {CUT: f"{CUT}\nshapes = [list(part.parameters()) for part in parts]"}),
        Slip("The whole model is one unit. Each part is to be one of its own.",
             {"shapes = [[": "parts = [model]\nshapes = [["}),
        Slip("You broadcast the chunks too, so all ranks hold chunk 0. Each keeps its own.",
             {CUT: f"{CUT}\nfor chunk in chunks:\n    dist.broadcast(chunk.data, src=0)"}),
    )
