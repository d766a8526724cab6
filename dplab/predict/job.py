"""What is trained, and on what: `Job` and `Cluster`, plain data for all that computes with them."""

from dataclasses import dataclass, replace

from dplab.predict.catalogue import Gpu
from dplab.predict.checks import DERIVED, one_of, whole
from dplab.predict.cost import Link
from dplab.predict.pace import PACES
from dplab.predict.rates import ATTENTION_KERNELS
from dplab.predict.transformer_config import TransformerConfig, numel

SIMULATED_STRATEGIES = ("DDP", "FSDP", "HSDP")

RECOMPUTE = {
    "none": "nothing is computed again",
    "selective": "in backward all but attention and half of the matrix products",
    "full": "in backward the whole forward of the block",
}
"""What backward computes again; "selective" as torchtitan's activation checkpointing by operation,
which keeps attention's output and that of every second matrix product."""


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines with ``per_node`` GPUs each, all alike.

    ``inside``: each GPU's link within its node; ``between``: one of the node's ``nics`` links to
    the network (by default as many as GPUs), which takes all of them at full speed.
    ``pace``: one of `PACES`, for all measured rates. ``node_size``: GPUs that a node has, of which
    ``per_node`` are in use; by default all. Raises ValueError for another pace, and like
    `checks.whole` for counts.
    """

    gpu: Gpu
    nodes: int
    inside: Link
    between: Link
    per_node: int = 8
    nics: int = DERIVED
    pace: str = "typical"
    node_size: int = DERIVED

    def __post_init__(self):
        for name in ("nics", "node_size"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.per_node)
        for count in ("nodes", "per_node", "nics", "node_size"):
            whole(getattr(self, count), count)
        one_of(self.pace, PACES, "pace")

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def of(self, ranks: int) -> "Cluster":
        """The same with so many ranks: part of one node, or whole nodes (else ValueError)."""
        if whole(ranks, "ranks") < self.node_size:
            return replace(self, nodes=1, per_node=ranks)
        if ranks % self.node_size:
            raise ValueError(f"{ranks} ranks do not fill nodes of {self.node_size}: take a "
                             "multiple of that, or fewer")
        return replace(self, nodes=ranks // self.node_size, per_node=self.node_size)


@dataclass(frozen=True)
class Job:
    """A model trained with ``accumulation`` micro-batches a step on each rank, each of ``batch``
    sequences of ``sequence`` tokens.

    ``strategy``: one of `SIMULATED_STRATEGIES`; HSDP shards in a node and all-reduces shards among
    the nodes. ``recompute``: one of `RECOMPUTE`. Bytes:
    of a parameter and of a gradient as they travel, and of the optimizer's states per parameter
    (K). ``reshard`` after forward, so that backward gathers again. ``bucket_bytes``: DDP's.
    ``compiled``: whether torch.compile made the blocks and the loss; ``attention``: one of
    `rates.ATTENTION_KERNELS`; ``cast_weights``: weights that are fp32 where they are used are cast
    to bf16 each time, as under autocast, and their gradients back. Raises ValueError for what is
    none of these, and like `checks.whole` for batch, sequence and accumulation.
    """

    model: TransformerConfig
    batch: int
    sequence: int
    strategy: str = "FSDP"
    recompute: str = "none"
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12
    reshard: bool = True
    bucket_bytes: float = 25 * 2**20
    compiled: bool = False
    attention: str = ATTENTION_KERNELS[0]
    cast_weights: bool = False
    accumulation: int = 1

    def __post_init__(self):
        whole(self.batch, "batch"), whole(self.sequence, "sequence")
        whole(self.accumulation, "accumulation")
        one_of(self.strategy, SIMULATED_STRATEGIES, "strategy")
        one_of(self.recompute, RECOMPUTE, "recompute")
        one_of(self.attention, ATTENTION_KERNELS, "attention")

    @property
    def tokens(self) -> int:
        """Of one rank in a step."""
        return self.accumulation * self.batch * self.sequence

    @property
    def model_flops(self) -> float:
        """Of one rank's step: 6 for each parameter in a matrix and token, 12·L·d·s for attention.

        Recomputing does not count, nor does the lookup of embeddings; attention counts as if it
        were not causal, by PaLM's convention.
        """
        model = self.model
        block = numel(shape for shape in model.block.values() if len(shape) > 1)
        matrices = model.layers * block + model.vocabulary * model.d_model
        return self.tokens * (6 * matrices + 12 * model.layers * model.d_model * self.sequence)
