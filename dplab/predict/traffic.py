"""Bytes that each rank sends in a step, by strategy and by what real implementations do.

`collectives` lists the collectives of a step with their sizes; what a ring sends for each is
`cost.bytes_sent`. With p and g bytes per parameter and gradient, Ψ parameters and f = (N−1)/N, a
rank sends 2gΨf for DDP, (g+p)Ψf for ZeRO-1 and 2, (g+2p)Ψf for ZeRO-3. Small messages (flags,
norms, a scalar loss) are left out.

Sources: ZeRO, section 7; torch 2.13, distributed/optim/zero_redundancy_optimizer.py and
distributed/fsdp/_fully_shard; Y. Zhao et al., "PyTorch FSDP", 2023, section 3.2.2 (hybrid
sharding).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dplab.predict import cost, shards
from dplab.predict.checks import one_of, whole
from dplab.predict.transformer_config import Shape, numel

ALL_REDUCE, SCATTER, GATHER = "ring all-reduce", "ring reduce-scatter", "ring all-gather"
BROADCAST = "pipelined broadcast"
TORCH_SCATTER = "torch's reduce-scatter"  # the ring, but over gloo


@dataclass(frozen=True)
class Transfers:
    """Collectives of one kind in a step.

    ``algorithm`` is one of `cost.ALGORITHMS`, ``of`` is "gradients" or "parameters",
    ``tensor_bytes`` the size M of all their tensors together, each whole; ``world_size`` that of
    the group. ``count``: how many calls there are, None where buckets decide.
    """

    algorithm: str
    of: str
    tensor_bytes: int
    world_size: int
    count: int | None = None

    @property
    def bytes_sent(self) -> float:
        """By a rank, on average over the ranks."""
        return cost.bytes_sent(self.algorithm, self.world_size, self.tensor_bytes)


_GATHER = (GATHER, "parameters", "unit")
_SCATTER = (TORCH_SCATTER, "gradients", "unit")
_AVERAGE = (ALL_REDUCE, "gradients", "bucket")
STRATEGIES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "DDP": (_AVERAGE,),
    "ZeroRedundancyOptimizer": (_AVERAGE, (BROADCAST, "parameters", "tensor")),
    "ShardedOptimizer, reduce_gradients=True": (
        (SCATTER, "gradients", "whole"), (GATHER, "parameters", "whole")),
    "FullyShardedModel": (_GATHER, _GATHER, (SCATTER, "gradients", "unit")),
    "fully_shard": (_GATHER, (GATHER, "parameters", "unit but the root"), _SCATTER),
    "fully_shard, reshard_after_forward=False": (_GATHER, _SCATTER),
    "HSDP": (_GATHER, _GATHER, _SCATTER, (ALL_REDUCE, "shards of gradients", "unit")),
}
"""By name, torch's and two of the course's own: by what algorithm each sends what, in a call for
each what. HSDP gathers the root twice too."""


def collectives(strategy: str, world_size: int, units: Iterable[Sequence[Shape]], *,
                parameter_bytes: int = 2, gradient_bytes: int = 2, shard_ranks: int | None = None,
                gloo: bool = False) -> list[Transfers]:
    """The collectives of one step with one backward, as `STRATEGIES` name them.

    units: the shapes of the tensors, as in `shards.real_states`; the last unit is what the root
        itself owns, and may be empty. Sizes are exact, padding included.
    parameter_bytes, gradient_bytes: of an element as it travels.
    shard_ranks: for HSDP, the ranks among which a copy is sharded; they divide the world size.
    gloo: torch's reduce-scatter over gloo, which is an all-reduce.

    Raises ValueError for what cannot be, TypeError for numbers that are not integers.
    """
    parts = STRATEGIES[one_of(strategy, STRATEGIES, "strategy")]
    ranks = whole(world_size, "the world size")
    group = ranks if strategy != "HSDP" else whole(shard_ranks, "shard_ranks")
    if ranks % group:
        raise ValueError(f"{group} ranks to a copy do not divide {ranks} ranks: give shard_ranks "
                         "that do")
    units = [list(unit) for unit in units]
    way = "fully_shard" if strategy == "HSDP" else strategy.partition(",")[0]
    found = []
    for algorithm, of, each in parts:
        taken = [unit for unit in (units[:-1] if each == "unit but the root" else units) if unit]
        if not taken:
            continue
        elements, members = sum(map(numel, taken)), group
        if algorithm in (GATHER, SCATTER, TORCH_SCATTER):
            elements = shards.padded_parameters(way, group, taken)
        if of == "shards of gradients":
            elements = shards.padded_parameters(way, group, taken) // group
            members = ranks // group
        if algorithm == TORCH_SCATTER:
            algorithm = ALL_REDUCE if gloo else SCATTER
        width = parameter_bytes if of == "parameters" else gradient_bytes
        calls = {"tensor": sum(map(len, taken)), "whole": 1, "bucket": None}.get(each, len(taken))
        found.append(Transfers(algorithm, of, elements * width, members, calls))
    return found
