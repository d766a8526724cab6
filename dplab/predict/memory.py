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

from dplab.predict.checks import DERIVED, one_of, whole
from dplab.predict.moments import Moment, Step, moments
from dplab.predict.transformer_config import TransformerConfig

STAGES: dict[str, tuple[str, ...]] = {
    "DDP": (),
    "ZeRO-1": ("optimizer",),
    "ZeRO-2": ("gradients", "optimizer"),
    "ZeRO-3": ("parameters", "gradients", "optimizer"),
}
"""What each stage shards."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter: ``optimizer`` is the K of the ZeRO paper.

    ``gathered``: of a parameter as forward and backward use it, by default ``parameters``.
    ``reduced``: of a gradient as collectives add it up, by default ``gradients``. ``in_step``: what
    the optimizer holds in passing, for each element of the tensor that it works on; by default two
    numbers in fp32, as Adam does. ``per_tensor``: bytes of optimizer state for each tensor (Adam
    counts its steps in a float32), which only `shards.real_states` adds. Raises TypeError for sizes
    that are no integers, and ValueError for negative ones.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int = DERIVED
    reduced: int = DERIVED
    in_step: int = 8
    per_tensor: int = 4
    source: str = ""

    def __post_init__(self):
        if self.gathered is None:
            object.__setattr__(self, "gathered", self.parameters)
        if self.reduced is None:
            object.__setattr__(self, "reduced", self.gradients)
        for size in ("parameters", "gradients", "optimizer", "gathered", "reduced", "in_step",
                     "per_tensor"):
            whole(getattr(self, size), f"bytes ({size})", least=0)

    @property
    def total(self) -> int:
        """Bytes of model states per parameter on one rank alone."""
        return self.parameters + self.gradients + self.optimizer


PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in (
    Precision("K = 12", 2, 2, 12,
              source="ZeRO, section 3.1: bf16 or fp16, Adam with fp32 master weights (4 + 4 + 4)"),
    Precision("K = 8", 2, 2, 8,
              source="bf16 parameters updated as they are, Adam's moments in fp32 (4 + 4)"),
    Precision("K = 12, fp32 accumulation", 2, 6, 12, reduced=4,
              source="Ultra-Scale Playbook: gradients in bf16 and, accumulated, in fp32 (2 + 4)"),
    Precision("K = 12, fp32 gradients", 2, 4, 12,
              source="Megatron-LM, docs/source/api-guide/dist_optimizer.md: 18, or 6 + 12/N"),
    Precision("K = 16", 2, 2, 16,
              source="Megatron-LM, ibid., and DeepSpeed: fp32 gradients kept by the optimizer"),
    Precision("fp32", 4, 4, 8, source="Adam; with autocast too, whose copies in bf16 are passing"),
    Precision("fp32 shards, bf16 gathered", 4, 4, 8, gathered=2,
              source="fully_shard with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
    Precision("pure bf16", 2, 2, 4, in_step=4,
              source="bf16 throughout, Adam's moments too (2 + 2)"),
    Precision("fp32, SGD with momentum", 4, 4, 4, in_step=0, per_tensor=0,
              source="torch.optim.SGD"),
    Precision("fp32, SGD", 4, 4, 0, in_step=0, per_tensor=0,
              source="torch.optim.SGD without momentum"),
)}


@dataclass(frozen=True)
class States:
    """Model states on one rank, in bytes."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def __str__(self):
        return (f"parameters {readable(self.parameters)}, gradients {readable(self.gradients)}, "
                f"optimizer {readable(self.optimizer)}: together {readable(self.total)}")


def states(stage: str, precision: Precision | str, world_size: int, parameters: int) -> States:
    """Bytes on each of ``world_size`` ranks by the paper's formulas, for so many parameters.

    ``stage`` is one of `STAGES`, ``precision`` one of `PRECISIONS` or your own. Tensors are taken
    to divide evenly, so that bytes need not be whole.
    """
    sharded, precision = STAGES[one_of(stage, STAGES, "stage")], precision_of(precision)
    ranks, parameters = whole(world_size, "the world size"), whole(parameters, "parameters")
    return States(*(parameters * getattr(precision, part) / (ranks if part in sharded else 1)
                    for part in ("parameters", "gradients", "optimizer")))


def bytes_per_parameter(stage: str, precision: Precision | str, world_size: int) -> States:
    """The same for one parameter: 4 + K/N for ZeRO-1, 2 + (2 + K)/N for ZeRO-2, and so on."""
    return states(stage, precision, world_size, 1)


def most_parameters(stage: str, precision: Precision | str, world_size: int,
                    memory_bytes: float) -> int:
    """The largest model whose states alone fit ``memory_bytes`` on each rank."""
    return math.floor(memory_bytes / bytes_per_parameter(stage, precision, world_size).total)


@dataclass(frozen=True)
class Budget:
    """What one rank holds in a ``step``, in bytes, beside what there is; ``peak``: at most."""

    step: Step
    peak: Moment
    memory_bytes: float

    @property
    def states(self) -> States:
        """Parameters, gradients and optimizer state as they are after the step."""
        return self.step.states

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Those of the step that can be its highest, in order."""
        return tuple(moments(self.step))

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

    def __str__(self):
        parts = ", ".join(f"{name} {readable(size)}" for name, size in self.parts.items() if size)
        return (f"{parts}: together {readable(self.total)} of {readable(self.memory_bytes)}, "
                f"which {'fits' if self.fits else 'does not fit'}; the peak is at: {self.moment}")


def budget(model: TransformerConfig, world_size: int, memory_bytes: float, *, stage: str = "ZeRO-3",
           precision: Precision | str = "K = 12", batch: int = 1, sequence: int = 1024,
           recompute: str = "none", reshard: bool = True, bucket_views: bool = False,
           foreach: bool = False, held: States | None = None) -> Budget:
    """What a step needs on each rank, with ``batch`` sequences of ``sequence`` tokens per rank.

    ``stage``: one of `STAGES`, each as a usual implementation does it, moment by moment (`moments`
    says which). DDP and ZeRO-1 have buckets as large as the gradients. ZeRO-2 reduces a block at a
    time. ZeRO-3 is `fully_shard` on each block and the root, and HSDP the same with the ranks of
    one copy as its world. Where a rank keeps whole parameters in more bytes than ``gathered``, it
    computes under autocast.

    ``reshard``: False for reshard_after_forward=False. ``bucket_views``: as with
    gradient_as_bucket_view=True, so that DDP's buckets are the gradients. ``foreach``: the
    optimizer works on all tensors at once, as torch.optim does on a GPU unless told ``fused=True``
    or ``foreach=False``. ``recompute``: see `activations`, here with flash attention and without
    dropout. ``held``: the states of a rank, such as one of `shards.real_states`, where they are not
    those of the formulas. Raises like `states` and `activations` for what cannot be.
    """
    by_formula = states(stage, precision, world_size, model.parameters)
    held, precision = held or by_formula, precision_of(precision)
    step = Step(model, whole(world_size, "the world size"), STAGES[stage], precision, held, batch,
                sequence, recompute, reshard, bucket_views, foreach)
    peak = max(moments(step, outermost=True), key=lambda moment: moment.total)
    return Budget(step, peak, memory_bytes)


def deepspeed_estimate(parameters: int, gpus: int) -> int:
    """DeepSpeed's own estimate for stage 2: bytes of model states on each of ``gpus`` GPUs.

    Two bytes a parameter on each, and 18 for what is sharded. Source: DeepSpeed edaa7221,
    runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs.
    """
    return 2 * parameters + 18 * parameters // gpus


def readable(nbytes: float) -> str:
    """``nbytes`` in decimal units, with at most four digits: "227.5 GB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.99995 * factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.4g} B"


def precision_of(name: Precision | str) -> Precision:
    """The one of `PRECISIONS` with that name, or ``name`` itself where it is one of your own."""
    if isinstance(name, Precision):
        return name
    return PRECISIONS[one_of(name, PRECISIONS, "precision")]
