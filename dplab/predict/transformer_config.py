"""A decoder-only transformer by its configuration: its tensors, and how many parameters they have.

Two families are covered: GPT (LayerNorm, biases, learned positions, one GELU between two matrices)
and Llama (RMSNorm, no biases, rotary positions, a gated unit of three matrices). `catalogue.MODELS`
has the published configurations.

Sources: A. Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2);
H. Touvron et al., "Llama 2", 2023; A. Dubey et al., "The Llama 3 herd of models", 2024.
"""

import math
from dataclasses import dataclass

from dplab.predict.checks import DERIVED, one_of, whole

Shape = tuple[int, ...]
NORMS = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class TransformerConfig:
    """``kv_heads``: by default as many as ``heads``, so that each has its own keys and values.

    ``d_ff`` is the width inside the feed-forward part, ``gated`` whether that has a third matrix,
    ``tied`` whether the head is the embedding, ``biases`` whether the linear layers in the blocks
    have them. Raises TypeError for a size that is not an integer; ValueError for one below 1, for
    heads that do not divide ``d_model``, and for ``kv_heads`` that do not divide the heads.
    """

    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocabulary: int
    context: int
    kv_heads: int = DERIVED
    gated: bool = False
    biases: bool = True
    norm: str = "layernorm"
    learned_positions: bool = True
    tied: bool = True
    name: str = ""
    source: str = ""

    def __post_init__(self):
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for size in ("layers", "d_model", "heads", "d_ff", "vocabulary", "context", "kv_heads"):
            whole(getattr(self, size), size)
        if self.d_model % self.heads:
            raise ValueError(f"{self.heads} heads do not divide d_model = {self.d_model}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} kv_heads do not divide {self.heads} heads")
        one_of(self.norm, NORMS, "norm")

    @property
    def d_kv(self) -> int:
        """The width of the keys, and of the values."""
        return self.kv_heads * self.d_model // self.heads

    @property
    def block(self) -> dict[str, Shape]:
        """The tensors of one block by name; a matrix is (out, in), as in ``nn.Linear``."""
        linears: dict[str, Shape] = {
            "query": (self.d_model, self.d_model), "key": (self.d_kv, self.d_model),
            "value": (self.d_kv, self.d_model), "out": (self.d_model, self.d_model),
            "up": (self.d_ff, self.d_model), "down": (self.d_model, self.d_ff)}
        if self.gated:
            linears["gate"] = (self.d_ff, self.d_model)
        tensors = {**self._norm("norm1"), **self._norm("norm2")}
        for name, shape in linears.items():
            tensors[f"{name}.weight"] = shape
            if self.biases:
                tensors[f"{name}.bias"] = shape[:1]
        return tensors

    @property
    def ends(self) -> dict[str, Shape]:
        """The tensors outside the blocks by name: embedding, positions, last norm, head."""
        tensors: dict[str, Shape] = {"embedding.weight": (self.vocabulary, self.d_model)}
        if self.learned_positions:
            tensors["positions.weight"] = (self.context, self.d_model)
        tensors |= self._norm("norm")
        if not self.tied:
            tensors["head.weight"] = (self.vocabulary, self.d_model)
        return tensors

    @property
    def units(self) -> list[list[Shape]]:
        """What `fully_shard` gathers at a time where each block and the root are wrapped.

        A list of shapes for each block, and last what stays with the root.
        """
        return [list(self.block.values())] * self.layers + [list(self.ends.values())]

    @property
    def block_parameters(self) -> int:
        return numel(self.block.values())

    @property
    def parameters(self) -> int:
        """All of them, each tied one once."""
        return self.layers * self.block_parameters + numel(self.ends.values())

    def _norm(self, name):
        parts = ("weight", "bias") if self.norm == "layernorm" else ("weight",)
        return {f"{name}.{part}": (self.d_model,) for part in parts}


def numel(shapes) -> int:
    """The elements of all tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)
