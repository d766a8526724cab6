"""A model of linear layers and its optimizer under each strategy: the tests ask what they hold."""

import itertools

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dplab.parallel import FullyShardedModel, ShardedGradientOptimizer

WIDTHS = [7, 11, 5, 3]  # no world size above 1 divides them
UNITS = [[(wide, narrow), (wide,)] for narrow, wide in itertools.pairwise(WIDTHS)]
BUCKET_MB = 4 * 20 / 2**20  # 20 elements
OPTIMIZERS = {
    "fp32": torch.optim.AdamW,
    "fp32, SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "fp32, SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
}


def layers(widths):
    return nn.Sequential(*[nn.Linear(*pair) for pair in itertools.pairwise(widths)])


def prepared(implementation, make_optimizer, widths=WIDTHS):
    """A model and its optimizer."""
    model = layers(widths)
    if implementation.startswith("fully_shard"):
        kept = implementation == "fully_shard, reshard_after_forward=False"
        options = {"reshard_after_forward": False} if kept else {}
        for layer in model[:-1]:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    elif implementation in ("DDP", "ZeroRedundancyOptimizer"):
        model = DistributedDataParallel(model)
    elif implementation == "FullyShardedModel":
        model = FullyShardedModel(model)
    if implementation == "ZeroRedundancyOptimizer":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    if implementation == "ShardedGradientOptimizer":
        return model, ShardedGradientOptimizer(model.parameters(), torch.optim.AdamW,
                                               bucket_mb=BUCKET_MB)
    return model, make_optimizer(model.parameters())
