"""How many bytes a parameter takes: by precision, and as model states on one rank.

Sources: for each precision its own.
"""

from dataclasses import dataclass

from dplab.predict.checks import DERIVED, one_of


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter: ``optimizer`` is the K of the ZeRO paper.

    ``gathered``: of a parameter as forward and backward use it, by default ``parameters``.
    ``reduced``: of a gradient as collectives add it up, by default ``gradients``. ``in_step``: what
    the optimizer holds in passing, for each element of the tensor that it works on; by default two
    numbers in fp32, as Adam does. ``per_tensor``: bytes of optimizer state for each tensor (Adam
    counts its steps in a float32), which only `shards.real_states` adds.
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


def precision_of(name: Precision | str) -> Precision:
    """The one of `PRECISIONS` with that name, or ``name`` itself where it is one of your own."""
    if isinstance(name, Precision):
        return name
    return PRECISIONS[one_of(name, PRECISIONS, "precision")]


@dataclass(frozen=True)
class States:
    """Model states on one rank, in bytes."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer
