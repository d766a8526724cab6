"""What a dry run is to run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Setup:
    """What to run: ``strategy``, "fully_shard", "DDP" or "ZeRO-1", and the arguments of these."""

    strategy: str
    model: TransformerConfig | Callable[[], nn.Module]
    world_size: int
    batch: int = 1
    sequence: int | None = None
    precision: str = "mixed"
    checkpointing: bool = False
    optimizer: Callable = torch.optim.AdamW
    inputs: Callable | None = None
    full: bool = True
    units: str | int | type | tuple[type, ...] | Callable = "blocks"
    reshard_after_forward: bool | None = None
    shard_ranks: int | None = None
    bucket_views: bool = False
