"""The memory pictures of chapter 10: what a rank holds over a step, and not with which settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Picture:
    """What one of ``ranks`` ranks holds, change by change, in bytes by category."""

    forward: list[dict[str, int]] = field(repr=False)
    backward: list[dict[str, int]] = field(repr=False)
    root: int  # parameters outside the blocks
    block: int  # parameters of a block
    blocks: int
    ranks: int


def picture_of(samples: Sequence, phases: Sequence, config: TransformerConfig,
               ranks: int) -> Picture:
    """That of a step in the phases "forward" and "backward", real or in a dry run."""
    parts = {phase.name: [sample.bytes for sample in samples if phase.holds(sample)]
             for phase in phases}
    return Picture([samples[0].bytes, *parts["forward"]], parts["backward"],
                   config.parameters - config.layers * config.block_parameters,
                   config.block_parameters, config.layers, ranks)
