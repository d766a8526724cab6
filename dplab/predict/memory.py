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

from dplab.predict.activations import Activations, activations
from dplab.predict.checks import DERIVED, one_of, whole
from dplab.predict.transformer_config import TransformerConfig, numel

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
    ``per_tensor``: bytes of optimizer state for each tensor (Adam counts its steps in a float32),
    which only `shards.real_states` adds. Raises TypeError for sizes that are no integers, and
    ValueError for negative ones.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int = DERIVED
    per_tensor: int = 4
    source: str = ""

    def __post_init__(self):
        if self.gathered is None:
            object.__setattr__(self, "gathered", self.parameters)
        for size in ("parameters", "gradients", "optimizer", "gathered", "per_tensor"):
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
    Precision("K = 12, fp32 accumulation", 2, 6, 12,
              source="Ultra-Scale Playbook: gradients in bf16 and, accumulated, in fp32 (2 + 4)"),
    Precision("K = 12, fp32 gradients", 2, 4, 12,
              source="Megatron-LM, docs/source/api-guide/dist_optimizer.md: 18, or 6 + 12/N"),
    Precision("K = 16", 2, 2, 16,
              source="Megatron-LM, ibid., and DeepSpeed: fp32 gradients kept by the optimizer"),
    Precision("fp32", 4, 4, 8, source="Adam; with autocast too, whose copies in bf16 are passing"),
    Precision("fp32 shards, bf16 gathered", 4, 4, 8, gathered=2,
              source="fully_shard with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
    Precision("pure bf16", 2, 2, 4, source="bf16 throughout, Adam's moments too (2 + 2)"),
    Precision("fp32, SGD with momentum", 4, 4, 4, per_tensor=0, source="torch.optim.SGD"),
    Precision("fp32, SGD", 4, 4, 0, per_tensor=0, source="torch.optim.SGD without momentum"),
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
    """What one rank holds at the worst moment of a step, in bytes, beside what there is.

    ``gathered``: whole parameters of sharded ones; ``gradients_in_passing``: whole gradients before
    they are reduced to shards; ``communication``: buckets and flat buffers.
    """

    states: States
    gathered: float
    gradients_in_passing: float
    communication: float
    activations: Activations
    memory_bytes: float

    @property
    def parts(self) -> dict[str, float]:
        """By name, to be drawn or summed."""
        return {"parameters": self.states.parameters, "gradients": self.states.gradients,
                "optimizer": self.states.optimizer, "gathered": self.gathered,
                "gradients in passing": self.gradients_in_passing,
                "communication": self.communication, "activations": self.activations.total}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it is within ``memory_bytes``, with nothing left free."""
        return self.total <= self.memory_bytes

    def __str__(self):
        parts = ", ".join(f"{name} {readable(size)}" for name, size in self.parts.items() if size)
        return (f"{parts}: together {readable(self.total)} of {readable(self.memory_bytes)}, "
                f"which {'fits' if self.fits else 'does not fit'}")


def budget(model: TransformerConfig, world_size: int, memory_bytes: float, *, stage: str = "ZeRO-3",
           precision: Precision | str = "K = 12", batch: int = 1, sequence: int = 1024,
           recompute: str = "none", bucket_views: bool = False) -> Budget:
    """What a step needs on each rank, with ``batch`` sequences of ``sequence`` tokens per rank.

    The buffers are those of a usual implementation: for DDP and ZeRO-1 buckets as large as the
    gradients, unless ``bucket_views`` (gradient_as_bucket_view=True); for ZeRO-2 and 3, each block
    a unit, the whole gradients of a block and the buffer from which they are reduced. ZeRO-3 adds
    the parameters of the root and of one block, the buffer in which the next block arrives, and
    the root's whole gradients, which `fully_shard` keeps to the end. It errs either way: not all
    of it is there at once, and what lives within one operation is left out. ``recompute``: see
    `activations`, here with flash attention and without dropout.
    """
    held = states(stage, precision, world_size, model.parameters)
    precision = precision_of(precision)
    block, root = model.block_parameters, numel(model.ends.values())
    sharded = STAGES[stage]
    gathered, passing, communication = 0, 0, 0
    if "gradients" not in sharded:
        communication = 0 if bucket_views else model.parameters * precision.gradients
    elif "parameters" not in sharded:
        passing, communication = block * precision.gathered, block * precision.gathered
    else:
        gathered = passing = (root + block) * precision.gathered
        communication = 2 * block * precision.gathered
    return Budget(held, gathered, passing, communication,
                  activations(model, batch, sequence, element=precision.gathered,
                              recompute=recompute), memory_bytes)


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
