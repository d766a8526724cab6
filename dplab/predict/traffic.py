"""Bytes that each rank sends in a step, by strategy and by what real implementations do.

`collectives` lists the collectives of a step with their sizes; what a ring sends for each is
`cost.bytes_sent`. With p and g bytes per parameter and gradient, Ψ parameters and f = (N−1)/N, a
rank sends 2gΨf for DDP, (g+p)Ψf for ZeRO-1 and 2, (g+2p)Ψf for ZeRO-3. Implementations differ: some
all-reduce where a reduce-scatter would do, some gather more often or less. Small messages (flags,
norms, a scalar loss) are left out.

Sources: ZeRO, section 7; DeepSpeed edaa7221, runtime/zero (stage_1_and_2.py, stage3.py, config.py);
torch 2.13, distributed/optim/zero_redundancy_optimizer.py and distributed/fsdp/_fully_shard;
Y. Zhao et al., "PyTorch FSDP", 2023, section 3.2.2 (hybrid sharding).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dplab.predict import cost, shards
from dplab.predict.checks import one_of, whole
from dplab.predict.transformer_config import Shape, numel

ALL_REDUCE, SCATTER, GATHER = "ring all-reduce", "ring reduce-scatter", "ring all-gather"
BROADCAST, TO_OWNER = "pipelined broadcast", "pipelined reduce"
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

    def __str__(self):
        count = "" if self.count is None else f"{self.count} × "
        return f"{count}{self.algorithm} of {self.of}"


@dataclass(frozen=True)
class Part:
    """``when``: "step" for once a step, "backward" for each backward that synchronises,
    "micro-step" for each, "not root" for each, but of parameters that the root does not own.
    ``calls``: what one round is split into: "unit", "tensor", "whole", or "" where buckets decide.
    """

    algorithm: str
    of: str
    when: str
    calls: str = ""


def _strategies():
    def once(algorithm, of, calls=""):
        return Part(algorithm, of, "step", calls)

    average = Part(ALL_REDUCE, "gradients", "backward")
    gather_all = once(GATHER, "parameters")
    gather = Part(GATHER, "parameters", "micro-step", "unit")
    scatter = Part(SCATTER, "gradients", "backward", "unit")
    torch_scatter = Part(TORCH_SCATTER, "gradients", "backward", "unit")
    deepspeed_gather = Part(GATHER, "parameters", "micro-step")
    deepspeed_scatter = Part(TORCH_SCATTER, "gradients", "micro-step")
    owner = "reduce to the owner"  # use_multi_rank_bucket_allreduce=false
    return {
        "DDP": (average,),
        "ZeRO-1": (once(SCATTER, "gradients"), gather_all),
        "ZeRO-2": (Part(SCATTER, "gradients", "backward"), gather_all),
        "ZeRO-3": (gather, gather, scatter),
        "ZeroRedundancyOptimizer": (average, once(BROADCAST, "parameters", "tensor")),
        "ShardedOptimizer": (average, once(GATHER, "parameters", "whole")),
        "ShardedOptimizer, reduce_gradients=True": (
            once(SCATTER, "gradients", "whole"), once(GATHER, "parameters", "whole")),
        "ShardedGradientOptimizer": (scatter, once(GATHER, "parameters", "unit")),
        "FullyShardedModel": (gather, gather, scatter),
        "fully_shard": (gather, Part(GATHER, "parameters", "not root", "unit"), torch_scatter),
        "fully_shard, reshard_after_forward=True": (gather, gather, torch_scatter),
        "fully_shard, reshard_after_forward=False": (gather, torch_scatter),
        "HSDP": (gather, gather, torch_scatter, Part(ALL_REDUCE, "shards of gradients",
                                                     "backward", "unit")),
        "DeepSpeed 0": (once(ALL_REDUCE, "gradients"),),
        "DeepSpeed 1": (once(ALL_REDUCE, "gradients"), gather_all),
        f"DeepSpeed 1, {owner}": (once(TO_OWNER, "gradients"), gather_all),
        "DeepSpeed 2": (Part(ALL_REDUCE, "gradients", "micro-step"), gather_all),
        f"DeepSpeed 2, {owner}": (Part(TO_OWNER, "gradients", "micro-step"), gather_all),
        "DeepSpeed 3": (deepspeed_gather, deepspeed_gather, deepspeed_scatter),
        "DeepSpeed 3, gathered once": (deepspeed_gather, deepspeed_scatter),
    }


STRATEGIES: dict[str, tuple[Part, ...]] = _strategies()
"""By name: the paper's (ZeRO-1 to 3), torch's, the course's own, DeepSpeed's with its defaults, and
fully_shard also with each ``reshard_after_forward``; HSDP resharding, as "…=True". DeepSpeed 3
keeps after forward what backward uses within ``stage3_max_reuse_distance`` (10⁹ elements), so that
a smaller model is gathered once."""

_CUTS = {"ShardedOptimizer", "ShardedGradientOptimizer", "FullyShardedModel", "fully_shard", "HSDP"}


def collectives(strategy: str, world_size: int, units: int | Iterable[Sequence[Shape]], *,
                parameter_bytes: int = 2, gradient_bytes: int = 2, micro_steps: int = 1,
                no_sync: bool = False, shard_ranks: int | None = None,
                gloo: bool = False) -> list[Transfers]:
    """The collectives of one step of the optimizer, as `STRATEGIES` name them.

    units: the number of parameters, or their shapes as in `shards.real_states`; the last unit is
        what the root itself owns, and may be empty. Shapes make sizes exact, padding included
        (DeepSpeed's few elements aside). A number is one tensor of a single unit, the root.
    parameter_bytes, gradient_bytes: of an element as it travels.
    micro_steps: backwards before the optimizer's step. ``no_sync``: only the last one reduces
        gradients: DDP's and the course's ``no_sync()``, ``set_requires_gradient_sync(False)``. It
        makes no difference to strategies that wait anyway (ZeRO-1), or cannot (DeepSpeed 2 and 3).
    shard_ranks: for HSDP, the ranks among which a copy is sharded; they divide the world size.
    gloo: torch's reduce-scatter over gloo, which is an all-reduce.

    Raises ValueError for what cannot be, TypeError for numbers that are not integers.
    """
    parts = STRATEGIES[one_of(strategy, STRATEGIES, "strategy")]
    ranks = whole(world_size, "the world size")
    if strategy == "HSDP" and shard_ranks is None:
        raise ValueError("HSDP needs shard_ranks, the ranks among which a copy is sharded")
    if strategy != "HSDP" and shard_ranks is not None:
        raise ValueError(f"shard_ranks is for HSDP, not for {strategy}: leave it out")
    group = ranks if shard_ranks is None else whole(shard_ranks, "shard_ranks")
    if ranks % group:
        raise ValueError(f"{group} ranks to a copy do not divide {ranks} ranks: give shard_ranks "
                         "that do")
    rounds = {"step": 1, "micro-step": whole(micro_steps, "micro_steps")}
    rounds["not root"] = rounds["micro-step"]
    rounds["backward"] = 1 if no_sync else micro_steps
    widths = {"parameters": whole(parameter_bytes, "parameter_bytes")}
    widths["gradients"] = widths["shards of gradients"] = whole(gradient_bytes, "gradient_bytes")

    units = shards.checked_units([[(units,)]] if not isinstance(units, Iterable) else units)
    way = "fully_shard" if strategy == "HSDP" else strategy.partition(",")[0]
    found = []
    for part in parts:
        taken = [unit for unit in (units[:-1] if part.when == "not root" else units) if unit]
        if not taken:
            continue
        elements, members = sum(map(numel, taken)), group
        if way in _CUTS and part.algorithm not in (ALL_REDUCE, BROADCAST):
            elements = shards.padded_parameters(way, group, taken)
        if part.of == "shards of gradients":
            elements = shards.padded_parameters(way, group, taken) // group
            members = ranks // group
        algorithm = part.algorithm
        if algorithm == TORCH_SCATTER:
            algorithm = ALL_REDUCE if gloo else SCATTER
        calls = {"unit": len(taken), "tensor": sum(map(len, taken)), "whole": 1}.get(part.calls)
        times = rounds[part.when]
        found.append(Transfers(algorithm, part.of, times * elements * widths[part.of], members,
                                calls and times * calls))
    return found


def bytes_per_step(strategy: str, world_size: int, units: int | Iterable[Sequence[Shape]],
                   **options) -> float:
    """What each rank sends in a step, in bytes, on average over the ranks; see `collectives`."""
    return sum(each.bytes_sent for each in collectives(strategy, world_size, units, **options))
