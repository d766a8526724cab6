"""Exercise 9.1: gather, use, free."""

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog, MemoryTimeline

WIDTHS = (37, 41, 38, 40, 39, 41, 37, 40, 38)

LAYERS = len(WIDTHS) - 1

MOST_LAYERS = 5  # held whole at once; gathering as a list of parts and then joining takes three

HELD = "layers whose whole parameters were held at once"


def forward_of_shards(shards, shapes, x):
    for shard, (rows, columns) in zip(shards, shapes, strict=True):
        whole = shard.new_empty(dist.get_world_size() * shard.numel())
        dist.all_gather_single(whole, shard)
        weight = whole[: rows * columns].view(rows, columns)
        bias = whole[rows * columns :][:rows]
        x = torch.tanh(x @ weight.T + bias)
        del whole, weight, bias
    return x


def _layer_of(whole, x, rows, columns):
    weight, bias = whole[: rows * columns].view(rows, columns), whole[rows * columns :][:rows]
    return torch.tanh(x @ weight.T + bias)


def _gather(shard):
    whole = shard.new_empty(dist.get_world_size() * shard.numel())
    dist.all_gather_single(whole, shard)
    return whole


def _forward(gather=_gather, layer=_layer_of, keep=False):
    """The forward with one thing wrong."""

    def attempt(shards, shapes, x):
        kept = []
        for shard, shape in zip(shards, shapes, strict=True):
            whole = gather(shard)
            if keep:
                kept.append(whole)
            x = layer(whole, x, *shape)
        return x

    return attempt


def _all_at_once(shards, shapes, x):
    whole = _gather(torch.cat(shards)).view(dist.get_world_size(), -1)
    parts = whole.split([shard.numel() for shard in shards], dim=1)
    for part, shape in zip(parts, shapes, strict=True):
        x = _layer_of(part.flatten(), x, *shape)
    return x


def _interleaved(shard):
    return _gather(shard).view(dist.get_world_size(), -1).T.flatten()


def _of_rank_0(shard):
    copy = shard.clone()
    dist.broadcast(copy, src=0)
    return copy.repeat(dist.get_world_size())


def _by_broadcasts(shard):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    parts[dist.get_rank()] = shard.clone()
    for source, part in enumerate(parts):
        dist.broadcast(part, src=source)
    return torch.cat(parts)


def _by_all_reduce(shard):
    whole = shard.new_zeros(dist.get_world_size(), shard.numel())
    whole[dist.get_rank()] = shard
    dist.all_reduce(whole)
    return whole.flatten()


def _bias_at_end(whole, x, rows, columns):
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T + whole[-rows:])


def _bias_with_padding(whole, x, rows, columns):
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T + whole[rows * columns :])


def _bias_after(whole, x, rows, columns):
    bias = whole[rows * columns :][:rows]
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T) + bias


def _own_first(shard):
    parts = list(_gather(shard).split(len(shard)))
    return torch.cat([parts.pop(dist.get_rank()), *parts])


def _transposed(whole, x, rows, columns):
    weight = whole[: rows * columns].view(columns, rows)
    return torch.tanh(x @ weight + whole[rows * columns :][:rows])


def _last_is_linear(shards, shapes, x):
    *inner, last = zip(shards, shapes, strict=True)
    for shard, shape in inner:
        x = _layer_of(_gather(shard), x, *shape)
    shard, (rows, columns) = last
    whole = _gather(shard)
    return x @ whole[: rows * columns].view(rows, columns).T + whole[rows * columns :][:rows]


def _without_bias(whole, x, rows, columns):
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T)


class ForwardOfShards(Exercise):
    number = "9.1"
    title = "Gather, use, free"
    minutes = 20
    hints = (
        "One loop over the layers. Each turn gathers the layer, computes, and lets go of what it "
        "gathered before the next turn needs its place.",
        "`whole = shard.new_empty(world_size * shard.numel())` and "
        "`dist.all_gather_single(whole, shard)` put the ranks' shards side by side, in rank order.",
        "`whole[: rows * columns].view(rows, columns)` is the weight, the next `rows` numbers are "
        "the bias, and the rest is padding. Memory is free when no name holds the tensor: `del`, "
        "or assign something else to the name.",
    )
    solution = staticmethod(forward_of_shards)
    mistakes = (
        Mistake(_all_at_once, "You gather all layers with one collective: for a while every rank "
                "holds the whole model, and nothing was gained. Gather inside the loop, one layer "
                "at a time."),
        Mistake(_forward(keep=True), "In the end the whole model is there: either you gather all "
                "layers before you use the first, or something keeps what was gathered (a list, a "
                "dict). Gather a layer, use it, let go of it; and only then gather the next."),
        Mistake(_forward(_interleaved), "You mixed the ranks' shards element by element. A shard "
                "is a contiguous part: the whole is rank 0's shard, then rank 1's, and so on."),
        Mistake(_forward(lambda shard: shard.repeat(dist.get_world_size())), "You fill the layer "
                "with copies of this rank's own shard: the others have to be gathered."),
        Mistake(_forward(_of_rank_0), "You broadcast rank 0's shard, and use it for all. Each rank "
                "has another part of the layer: gather them."),
        Mistake(_forward(_by_broadcasts), "You broadcast each rank's shard by itself: that is N "
                "collectives for a layer, where one all-gather does it."),
        Mistake(_forward(_by_all_reduce), "You put the shard into a tensor of zeros and sum over "
                "the ranks. That is right, and moves twice the bytes of an all-gather, half of "
                "them zeros."),
        Mistake(_forward(layer=_bias_at_end), "You take the bias from the end of the flat tensor, "
                "where the padding is. It begins right behind the weight."),
        Mistake(_forward(layer=_bias_with_padding), "You take everything behind the weight as the "
                "bias, the padding too. The bias has `rows` elements."),
        Mistake(_forward(layer=_bias_after), "You add the bias after the tanh. It belongs inside."),
        Mistake(_forward(_own_first), "You put this rank's shard in front of the others. The order "
                "is that of the ranks, the same on all of them."),
        Mistake(_forward(layer=_transposed), "You read the weight as (columns, rows). It lies row "
                "by row: `view(rows, columns)`, and then `.T`."),
        Mistake(_forward(lambda shard: reduced(shard.repeat(dist.get_world_size()))), "You add up "
                "the ranks' shards. They are different parts of the layer: side by side, an "
                "all-gather."),
        Mistake(_last_is_linear, "The last layer has its tanh, too: the formula holds for all."),
        Mistake(_forward(layer=_without_bias), "The bias is missing: it lies behind the weight in "
                "the same flat tensor."),
    )

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
            for whole, shape in zip(wholes, shapes, strict=True):
                x = _layer_of(whole, x, *shape)
            found.append({"the output": x, **facts})
        return found


def _layers():
    """Each layer's flat parameters, weight and then bias, and the weight's shape."""
    generator = torch.Generator().manual_seed(9)
    shapes = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))
    return [torch.randn(rows * columns + rows, generator=generator) / 5
            for rows, columns in shapes], shapes


def _shard_of(whole):
    """This rank's part of it, padded at the end with what must not be used."""
    size = -(-whole.numel() // dist.get_world_size())
    padded = torch.cat([whole, torch.full((size * dist.get_world_size() - whole.numel(),), 7.0)])
    return padded[dist.get_rank() * size :][:size].clone()


def _input(rank):
    return seeded(f"x of rank {rank}", 3, WIDTHS[0])
