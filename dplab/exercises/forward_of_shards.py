"""A forward through layers of which every rank holds a part: each is whole while it is used."""

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog, MemoryTimeline


def forward_of_shards(shards, shapes, x):
    for shard, (rows, columns) in zip(shards, shapes, strict=True):
        whole = shard.new_empty(dist.get_world_size() * shard.numel())
        dist.all_gather_single(whole, shard)
        weight = whole[: rows * columns].view(rows, columns)
        bias = whole[rows * columns :][:rows]
        x = torch.tanh(x @ weight.T + bias)
        del whole, weight, bias
    return x


WIDTHS = (37, 41, 38, 40, 39, 41, 37, 40, 38)
LAYERS = len(WIDTHS) - 1
MOST_LAYERS = 5  # held whole at once; gathering as a list of parts and then joining takes three
HELD = "layers whose whole parameters were held at once"
LOOP = "for shard, (rows, columns) in zip(shards, shapes, strict=True):"
GATHER = "dist.all_gather_single(whole, shard)"
GATHERING = f"whole = shard.new_empty(dist.get_world_size() * shard.numel())\n        {GATHER}"


class ForwardOfShards(Exercise):
    number = "10.1"
    title = "Gather, use, free"
    minutes = 20
    solution = staticmethod(forward_of_shards)

    def trial(self, attempt):
        wholes, shapes = _layers()
        shards = nn.ParameterList(
            nn.Parameter(_shard_of(whole), requires_grad=False) for whole in wholes)
        x = _input(dist.get_rank())
        with CallLog() as log, MemoryTimeline(shards) as memory, torch.no_grad():
            output = attempt([shard.data for shard in shards], shapes, x)
        held = max(sample.total - sample.bytes["parameters"] for sample in memory.samples)
        layers = held / max(4 * whole.numel() for whole in wholes)
        calls = [call for call in log.calls if not call.is_point_to_point]
        return {"the output": output, "the number of collectives": len(calls),
                "the bytes that a rank hands to one collective":
                    max((call.bytes for call in calls), default=0),
                HELD: f"at most {MOST_LAYERS}" if layers < MOST_LAYERS + 0.5 else f"all {LAYERS}"}

    def expected(self, world_size):
        wholes, shapes = _layers()
        largest = max(-(-whole.numel() // world_size) for whole in wholes)
        facts = {"the number of collectives": AtMost(LAYERS, "one all-gather for each layer"),
                 "the bytes that a rank hands to one collective":
                     AtMost(4 * largest, "that is more than its shard of the largest layer"),
                 HELD: f"at most {MOST_LAYERS}"}
        found = []
        for rank in range(world_size):
            x = _input(rank)
            for whole, (rows, columns) in zip(wholes, shapes, strict=True):
                weight, bias = whole.split([rows * columns, rows])
                x = torch.tanh(x @ weight.view(rows, columns).T + bias)
            found.append({"the output": x, **facts})
        return found

    hints = (
        "One loop over the layers. Each turn gathers the layer, computes, and lets go of what it "
        "gathered before the next turn needs its place.",
        "`whole = shard.new_empty(world_size * shard.numel())` and "
        "`dist.all_gather_single(whole, shard)` put the ranks' shards side by side, in rank order.",
        "`whole[: rows * columns].view(rows, columns)` is the weight, the next `rows` numbers are "
        "the bias, and the rest is padding. Memory is free when no name holds the tensor: `del`, "
        "or assign something else to the name.",
    )
    slips = (
        # What is gathered.
        Slip("You fill the layer with copies of this rank's own shard: the others have to be "
             "gathered.", {GATHERING: "whole = shard.repeat(dist.get_world_size())"}),
        Slip("You broadcast rank 0's shard, and use it for all. Each rank has another part of the "
             "layer: gather them.",
             {GATHERING: "copy = shard.clone()\ndist.broadcast(copy, src=0)\n"
                         "whole = copy.repeat(dist.get_world_size())"}),
        Slip("You add up the ranks' shards. They are different parts of the layer: side by side, "
             "an all-gather.",
             {GATHERING: "whole = shard.repeat(dist.get_world_size())\ndist.all_reduce(whole)"}),
        Slip("You mixed the ranks' shards element by element. A shard is a contiguous part: the "
             "whole is rank 0's shard, then rank 1's, and so on.",
             {GATHER: f"{GATHER}\nwhole = whole.view(dist.get_world_size(), -1).T.flatten()"}),
        Slip("You put this rank's shard in front of the others. The order is that of the ranks, "
             "the same on all of them.",
             {GATHER: f"{GATHER}\nparts = list(whole.split(len(shard)))\n"
                      "whole = torch.cat([parts.pop(dist.get_rank()), *parts])"}),
        # By which collectives, and when.
        Slip("You gather all layers with one collective: for a while every rank holds the whole "
             "model, and nothing was gained. Gather inside the loop, one layer at a time.",
             {LOOP: "wholes = torch.empty(dist.get_world_size() * sum(map(len, shards)))\n"
                    "dist.all_gather_single(wholes, torch.cat(shards))\n"
                    "parts = wholes.view(dist.get_world_size(), -1).split(list(map(len, shards)), "
                    "dim=1)\nfor part, (rows, columns) in zip(parts, shapes):",
              GATHERING: "whole = part.flatten()"}),
        Slip("In the end the whole model is there: either you gather all layers before you use the "
             "first, or something keeps what was gathered (a list, a dict). Gather a layer, use "
             "it, let go of it; and only then gather the next.",
             {LOOP: f"kept = []\n{LOOP}", "del whole, weight, bias": "kept.append(whole)"}),
        Slip("You broadcast each rank's shard by itself: that is N collectives for a layer, where "
             "one all-gather does it.",
             {GATHER: "for source, part in enumerate(whole.split(len(shard))):\n"
                      "    if source == dist.get_rank():\n        part.copy_(shard)\n"
                      "    dist.broadcast(part, src=source)"}),
        Slip("You put the shard into a tensor of zeros and sum over the ranks. That is right, and "
             "moves twice the bytes of an all-gather, half of them zeros.",
             {GATHER: "whole.zero_().split(len(shard))[dist.get_rank()].copy_(shard)\n"
                      "dist.all_reduce(whole)"}),
        # What is computed.
        Slip("You read the weight as (columns, rows). It lies row by row: `view(rows, columns)`, "
             "and then `.T`.",
             {"view(rows, columns)": "view(columns, rows)", "weight.T": "weight"}),
        Slip("You take the bias from the end of the flat tensor, where the padding is. It begins "
             "right behind the weight.", {"whole[rows * columns :][:rows]": "whole[-rows:]"}),
        Slip("You take everything behind the weight as the bias, the padding too. The bias has "
             "`rows` elements.", {"[:rows]": ""}),
        Slip("The bias is missing: it lies behind the weight in the same flat tensor.",
             {" + bias": ""}),
        Slip("You add the bias after the tanh. It belongs inside.",
             {"weight.T + bias)": "weight.T) + bias"}),
        Slip("The last layer has its tanh, too: the formula holds for all.",
             {"x = torch.tanh(x @ weight.T + bias)":
              "x = x @ weight.T + bias\nif shard is not shards[-1]:\n    x = torch.tanh(x)"}),
    )


def _layers():
    """Each layer's flat parameters, weight and then bias, and the weight's shape."""
    shapes = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))
    return [seeded(f"layer {number}", rows * columns + rows) / 5
            for number, (rows, columns) in enumerate(shapes)], shapes


def _shard_of(whole):
    """This rank's part of it, padded at the end with what must not be used."""
    size = -(-whole.numel() // dist.get_world_size())
    padded = torch.cat([whole, torch.full((size * dist.get_world_size() - whole.numel(),), 7.0)])
    return padded[dist.get_rank() * size :][:size].clone()


def _input(rank):
    return seeded(f"x of rank {rank}", 3, WIDTHS[0])
