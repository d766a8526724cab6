"""What a rank must hold: model states, exact shards, buffers; and what fits a GPU.

Model states are parameters, gradients and optimizer state. `states` gives them by the formulas of
the paper, at Ψ/N elements for what is sharded; `predict.shards` gives the exact bytes of each rank
for real implementations, and `predict.activations` what the batch adds, which none of them shards.
Left out everywhere: the allocator's rounding and fragmentation, what kernels allocate inside, and
the memory of CUDA and of the communication library.

Sources: S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", 2020, https://arxiv.org/abs/1910.02054 (sections 3 and 5); for each precision its own.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from dplab.predict.checks import one_of, whole
from dplab.predict.moments import Moment, Step, moments
from dplab.predict.precision import PRECISIONS as PRECISIONS
from dplab.predict.precision import Precision, States, precision_of
from dplab.predict.transformer_config import TransformerConfig

STAGES: dict[str, tuple[str, ...]] = {
    "DDP": (),
    "ZeRO-1": ("optimizer",),
    "ZeRO-2": ("gradients", "optimizer"),
    "ZeRO-3": ("parameters", "gradients", "optimizer"),
}
"""What each stage shards."""


def states(stage: str, precision: Precision | str, world_size: int, parameters: int) -> States:
    """Bytes on each of ``world_size`` ranks by the paper's formulas, for so many parameters.

    ``stage`` is one of `STAGES`, ``precision`` one of `PRECISIONS` or your own. Tensors are taken
    to divide evenly, so that bytes need not be whole.
    """
    sharded, precision = STAGES[one_of(stage, STAGES, "stage")], precision_of(precision)
    ranks, parameters = whole(world_size, "the world size"), whole(parameters, "parameters")
    return States(*(parameters * getattr(precision, part) / (ranks if part in sharded else 1)
                    for part in ("parameters", "gradients", "optimizer")))


@dataclass(frozen=True)
class Budget(Step):
    """What one rank holds in a step, in bytes, beside ``memory_bytes`` that there are."""

    memory_bytes: float = math.inf

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Those of the step that can be its highest, in order."""
        return tuple(moments(self))

    @cached_property
    def peak(self) -> Moment:
        return max(moments(self, outermost=True), key=lambda moment: moment.total)

    @property
    def moment(self) -> str:
        """When that is, such as "loss" or "backward of block 31"."""
        return self.peak.name

    @property
    def parts(self) -> dict[str, float]:
        """What is held then, for each of `moments.PARTS`, to be drawn or summed."""
        return self.peak.parts

    @property
    def total(self) -> float:
        return self.peak.total

    @property
    def fits(self) -> bool:
        """Whether it is within ``memory_bytes``, with nothing left free."""
        return self.total <= self.memory_bytes


def budget(model: TransformerConfig, world_size: int, memory_bytes: float, *, stage: str = "ZeRO-3",
           precision: Precision | str = "K = 12", batch: int = 1, sequence: int = 1024,
           recompute: str = "none", reshard: bool = True, bucket_views: bool = False,
           held: States | None = None, accumulates: bool = False) -> Budget:
    """What a step needs on each rank, with ``batch`` sequences of ``sequence`` tokens per rank.

    ``stage``: one of `STAGES`, each as a usual implementation does it, moment by moment (`moments`
    says which). DDP and ZeRO-1 have buckets as large as the gradients. ZeRO-2 reduces a block at a
    time. ZeRO-3 is `fully_shard` on each block and the root, and HSDP the same with the ranks of
    one copy as its world. Where a rank keeps whole parameters in more bytes than ``gathered``, it
    computes under autocast.

    ``reshard``: False for reshard_after_forward=False. ``bucket_views``: as with
    gradient_as_bucket_view=True, so that DDP's buckets are the gradients. ``recompute``: see
    `activations`. ``held``: the states of a rank, such as one of `shards.real_states`, where they
    are not those of the formulas. ``accumulates``: the batch is one of several micro-batches, so
    that the sum of gradients is there from the start. Raises like `states`, and its moments like
    `activations`, for what cannot be.
    """
    by_formula = states(stage, precision, world_size, model.parameters)
    return Budget(model, world_size, STAGES[stage], precision_of(precision), held or by_formula,
                  batch, sequence, recompute, reshard, bucket_views, accumulates, memory_bytes)
