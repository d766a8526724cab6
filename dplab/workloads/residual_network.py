"""The residual network whose FSDP units chapter 10 chooses, and the dry run that judges them."""

import torch
from torch import nn

from dplab import dryrun

BLOCKS, WIDTH = 6, 128


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    """Tokens, int64 of (length,), to logits of (length, vocabulary)."""

    def __init__(self, vocabulary=12 * WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def dry_run_of(units, world_size: int) -> dryrun.DryRun:
    """A step of `Network` with these units, as `dryrun.fully_shard` takes them: fp32, SGD."""
    return dryrun.fully_shard(
        Network, world_size, units=units, inputs=lambda: torch.zeros(8, dtype=torch.int64),
        precision="fp32", optimizer=torch.optim.SGD)


def bytes_beyond_shards(run: dryrun.DryRun) -> float:
    """What a rank holds at the peak, less its own shards of the parameters."""
    return run.peak - run.states.parameters
