"""From a model, a cluster and a global batch to a strategy: a recommendation that says why.

    cluster = Cluster(GPUS["H100"], 8, LINKS["NVLink 4"], LINKS["400 Gb/s"])
    found = recommend(MODELS["Llama-3 8B"], cluster, global_batch=512, sequence=8192)
    print(found.best, found.advice)

Each strategy is taken as torch's usual settings make it (`settings` has the code), in mixed
precision: parameters, gradients and Adam's moments in fp32, 16 bytes a parameter in all; computing,
gathers and activations in bf16. `memory` says what that holds, `cluster` how long a step takes.
Micro-batch, accumulation and recomputation are searched.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from dplab.predict import memory, shards
from dplab.predict.checks import one_of, whole
from dplab.predict.cluster import Prediction, job_spans
from dplab.predict.job import RECOMPUTE, Cluster, Job
from dplab.predict.memory import Budget
from dplab.predict.network import collective_seconds
from dplab.predict.precision import PRECISIONS, Precision, States
from dplab.predict.step import COMMUNICATION, Span
from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Strategy:
    """``what`` it does, and what it is to `memory` and to `cluster`."""

    what: str
    stage: str
    simulated: str
    reshard: bool = True

    @property
    def replicated(self) -> bool:
        """Whether every rank has all parameters."""
        return self.simulated == "DDP"


CHOICES = {
    "DDP": Strategy("everything on every rank", "DDP", "DDP"),
    "ZeRO-1": Strategy("DDP, optimizer sharded", "ZeRO-1", "DDP"),
    "FSDP": Strategy("all sharded among all ranks", "ZeRO-3", "FSDP"),
    "FSDP, kept": Strategy("FSDP that gathers each block once a step", "ZeRO-3", "FSDP",
                           reshard=False),
    "HSDP": Strategy("sharded in a node, a copy on each", "ZeRO-3", "HSDP"),
}
"""From the simplest on: a later one is taken where it fits and is faster. "FSDP, kept" is without
resharding after forward. On one rank DDP stands for the model without a wrapper."""

PRECISION_CHOICES = {
    "mixed": "states in fp32, computing in bf16, gradients reduced in fp32",
    "mixed, bf16 reduction": "the same, gradients of FSDP and HSDP reduced in bf16",
}
"""They compute in bf16, as the measured rates do. `STORED` has the bytes of each."""
_MIXED = PRECISIONS["fp32 shards, bf16 gathered"]
STORED = dict(zip(PRECISION_CHOICES, (_MIXED, replace(_MIXED, reduced=2)), strict=True))
BLOCK_RECOMPUTE = ("none", "full")
"""Of each block all is kept, or its input alone; `job.RECOMPUTE` has a third way."""
_FREE = 0.1  # the share of memory that is left to the allocator and the libraries
MEMORY_ERROR = 0.03
"""Two budgets that differ by less, relatively, are not told apart. A prediction is nearer than that
to a dry run (tests/predict/test_moments.py); what a GPU's allocator adds is not known."""
TIE = 0.12
"""Two step times that differ by less, relatively, are a tie. Of two runs that were published side
by side and differ in strategy, the predicted ratio is off by so much in the median; between numbers
of GPUs alone it is off by less."""


@dataclass(frozen=True)
class Option(Prediction):
    """One of `CHOICES`, in one of `PRECISION_CHOICES`: its ``job`` is what `cluster` simulates.

    What if? Ask an option that `dataclasses.replace` has made of it.
    """

    strategy: str
    precision: str = "mixed"

    @property
    def name(self) -> str:
        """The strategy; on one rank DDP is a model without a wrapper."""
        return "no wrapper" if self.is_plain else self.strategy

    @property
    def is_plain(self) -> bool:
        """Whether one rank trains the model as it is."""
        return self.strategy == "DDP" and self.cluster.ranks == 1

    @cached_property
    def budget(self) -> Budget:
        """What a rank holds at its worst moment, by `memory.budget`; ZeRO-1: the fullest rank."""
        job, stored = self.job, STORED[self.precision]
        ranks = self.cluster.per_node if self.strategy == "HSDP" else self.cluster.ranks
        return memory.budget(
            job.model, ranks, self.cluster.gpu.memory_bytes, precision=stored,
            stage=CHOICES[self.strategy].stage, batch=job.batch, sequence=job.sequence,
            recompute=job.recompute,
            reshard=job.reshard, bucket_views=True, accumulates=job.accumulation > 1,
            held=fullest_rank(job.model, ranks, stored) if self.strategy == "ZeRO-1" else None)

    @property
    def limit(self) -> float:
        """The bytes that the budget may have; a share of the GPU's memory stays free."""
        return (1 - _FREE) * self.cluster.gpu.memory_bytes

    @property
    def margin(self) -> float:
        """Bytes that are left below ``limit``; below 0: too many by so much."""
        return self.limit - self.budget.total

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @cached_property
    def spans(self) -> Sequence[Span]:
        """What each rank does in a step; under ZeRO-1 as with DDP, and then the parameters go out.

        torch gives whole tensors to the ranks, so that one updates more than the others.
        """
        spans = job_spans(self.job, self.cluster)
        if self.strategy != "ZeRO-1":
            return spans
        *others, optimizer = spans
        stored, model = STORED[self.precision], self.job.model
        owned = fullest_rank(model, self.cluster.ranks, stored).optimizer
        end = optimizer.start + optimizer.seconds * owned / (stored.optimizer * model.parameters)
        nbytes = stored.parameters * model.parameters
        gathered = end + collective_seconds(self.cluster, "all-gather", nbytes)
        return [*others, replace(optimizer, end=end),
                Span("all-gather of parameters", COMMUNICATION, end, gathered, nbytes)]

    @property
    def global_batch(self) -> int:
        """Sequences in a step of all ranks."""
        return self.cluster.ranks * self.job.batch * self.job.accumulation

    def recomputing(self, way: str) -> "Option":
        """The same with another way to recompute."""
        return replace(self, job=replace(self.job, recompute=way))

    def __str__(self):
        again = {"none": "", "full": ", blocks recomputed", "selective": ", partly recomputed"}[
            self.job.recompute]
        return f"{self.name}{again}"


@dataclass(frozen=True)
class Recommendation:
    """What `recommend` was asked for, and what it finds; its ``advice`` says why."""

    model: TransformerConfig
    cluster: Cluster
    sequence: int
    global_batch: int
    batch: int | None = None
    precision: str = "mixed"
    recompute: Collection[str] = BLOCK_RECOMPUTE
    compiled: bool = False

    @property
    def starved(self) -> bool:
        """Whether there are fewer sequences than ranks."""
        return self.global_batch < self.cluster.ranks

    @property
    def sequences(self) -> int:
        """Of a rank in a step; where the ranks do not divide the global batch, rounded."""
        return max(1, round(self.global_batch / self.cluster.ranks))

    def option(self, strategy: str) -> Option:
        """The strategy at the micro-batch and the recomputation that make it fastest.

        For each way to recompute the largest micro-batch that fits is predicted. Where none fits,
        the one that holds least.
        """
        return _fastest(self, strategy)

    def _largest(self, strategy, way):
        def at(batch):
            return option_of(strategy, self.model, self.cluster, batch=batch,
                             accumulation=max(1, round(self.sequences / batch)),
                             sequence=self.sequence, precision=self.precision, recompute=way,
                             compiled=self.compiled)

        if self.batch:
            return at(min(self.batch, self.sequences))
        if (whole_batch := at(self.sequences)).fits:
            return whole_batch
        sizes = _divisors(self.sequences)[:-1] or [1]
        return at(sizes[max(0, bisect_left(sizes, True, key=lambda size: not at(size).fits) - 1)])

    @cached_property
    def options(self) -> tuple[Option, ...]:
        strategies = [name for name in CHOICES if name != "HSDP" or self.cluster.nodes > 1]
        if self.cluster.ranks == 1:  # the others are the same as one of these, as HSDP in a node
            strategies = ["DDP", "FSDP"]
        return tuple(map(self.option, strategies))

    @property
    def best(self) -> Option | None:
        """The simplest of `ties`; None if none fits, or if some ranks have no sequence."""
        return next(iter(self.ties), None)

    def runs(self, option: Option) -> bool:
        """Whether it fits, and each rank has a sequence."""
        return option.fits and not self.starved

    @cached_property
    def ties(self) -> list[Option]:
        """Those that fit and are as fast as the fastest within `TIE`, the simplest first.

        On one rank nothing is shared, so that the simplest that fits stands alone.
        """
        fitting = list(filter(self.runs, self.options))
        if self.cluster.ranks == 1:
            return fitting[:1]
        shortest = min((option.seconds for option in fitting), default=0)
        return [option for option in fitting if option.seconds <= (1 + TIE) * shortest]

    @cached_property
    def enough_ranks(self) -> int | None:
        """A number of ranks on which FSDP fits with its blocks recomputed: the fewest in a node,
        else the first of 2, 4, 8 … nodes. None where it fits on none.
        """
        node, leanest = self.cluster.node_size, self.option("FSDP").recomputing("full")
        job = replace(leanest.job, batch=self.batch or 1)
        counts = [*range(1, node + 1), *(node * 2**power for power in range(1, 18))]
        return next((ranks for ranks in counts if replace(
            leanest, cluster=self.cluster.of(ranks), job=job).fits), None)

    @property
    def advice(self) -> list[str]:
        """Why it is the best, or what would run, in sentences."""
        if self.best is not None:
            return [self._why(self.best)]
        found = []
        if not any(option.fits for option in self.options):
            if "full" not in self.recompute and self.option("FSDP").recomputing("full").fits:
                found.append("With its blocks recomputed, FSDP fits: allow that.")
            elif self.enough_ranks is None:
                found.append("No number of GPUs is enough for FSDP, with its blocks recomputed. "
                             "What is left asks for tensor or context parallelism, or offloading; "
                             "none of these is simulated here.")
            else:
                found.append(f"FSDP, with its blocks recomputed, fits on {self.enough_ranks:,} "
                             "GPUs.")
        if self.starved:
            ranks = self.cluster.ranks
            found.append(f"The global batch has {self.global_batch:,} sequences, so "
                         f"{ranks - self.global_batch:,} of {ranks:,} GPUs have none. More GPUs "
                         "have to share a sequence or a layer: tensor, context or pipeline "
                         "parallelism, which is not simulated here.")
        return found

    def _why(self, best):
        if best.is_plain:
            return ("One GPU has nothing to share: train the model as it is, without DDP or "
                    "FSDP.")
        if self.cluster.ranks == 1:
            return ("Without a wrapper it does not fit. FSDP on one GPU shares nothing, but it "
                    "frees each block's parameters in bf16 after use.")
        if sum(map(self.runs, self.options)) == 1:
            return f"Only one strategy fits: {best}."
        others = [str(option) for option in self.ties if option is not best]
        if not others:
            return f"{best} is the fastest that fits, by more than {TIE:.0%}."
        return (f"{best} is as fast as {' and '.join(others)}, within the {TIE:.0%} by which the "
                "ratio of two predictions is off in the median. It is the simplest; measure to "
                "tell them apart.")


@lru_cache(maxsize=2048)
def _fastest(wish, strategy):
    """Kept, since one plan's curve has most of the next plan's."""
    first, *_ = ways = [wish._largest(strategy, way) for way in wish.recompute]
    fitting = [option for option in ways if option.fits]
    if not fitting:
        return min(ways, key=lambda option: option.budget.total)
    if wish.batch and wish.sequences == wish.batch:
        return fitting[0]  # nothing to search: recomputed only where it must be
    return min(fitting, key=lambda option: option.seconds * (1 if option is first else 1.01))


@cache
def _divisors(number):
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def recommend(model: TransformerConfig, cluster: Cluster, *, global_batch: int | None = None,
              batch: int | None = None, sequence: int = 4096, precision: str = "mixed",
              recompute: Collection[str] = BLOCK_RECOMPUTE,
              compiled: bool = False) -> Recommendation:
    """Which strategy trains ``model`` fastest, with ``global_batch`` sequences in a step.

    ``batch``: sequences of a micro-batch, by default the largest that fits; without a global batch,
    all of a rank's sequences, by default one. ``precision``: one of `PRECISION_CHOICES`.
    ``recompute``: the ways allowed, of `job.RECOMPUTE`. ``compiled``: see `Job`. A tenth of the
    memory is left to the allocator and the libraries. Tensor, context and pipeline parallelism are
    not considered. Raises like `checks.whole` for batches and sequence.
    """
    if global_batch is None:
        batch = 1 if batch is None else batch
        global_batch = whole(batch, "batch") * cluster.ranks
    whole(global_batch, "global_batch"), whole(sequence, "sequence")
    if batch is not None:
        whole(batch, "batch")
    one_of(precision, PRECISION_CHOICES, "precision")
    for way in recompute:
        one_of(way, RECOMPUTE, "recompute")
    return Recommendation(model, cluster, sequence, global_batch, batch, precision,
                          tuple(recompute), compiled)


def option_of(strategy: str, model: TransformerConfig, cluster: Cluster, *, batch: int,
              sequence: int, accumulation: int = 1, precision: str = "mixed",
              recompute: str | Collection[str] = BLOCK_RECOMPUTE,
              compiled: bool = False) -> Option:
    """One strategy, with the first way to ``recompute`` that fits, or else the last.

    DDP and ZeRO-1 compute under autocast; their gradients are views of buckets. Raises ValueError
    for an unknown strategy, and for a precision that is none of `PRECISION_CHOICES`.
    """
    chosen = CHOICES[one_of(strategy, CHOICES, "strategy")]
    stored = STORED[one_of(precision, PRECISION_CHOICES, "precision")]
    first, *others = (recompute,) if isinstance(recompute, str) else recompute
    # The optimizer's 12 bytes of a parameter are fp32 parameters and both moments.
    job = Job(model, batch, sequence, chosen.simulated, recompute=first, reshard=chosen.reshard,
              parameter_bytes=stored.gathered, compiled=compiled, accumulation=accumulation,
              gradient_bytes=stored.gradients if chosen.replicated else stored.reduced,
              optimizer_bytes=stored.parameters + stored.optimizer,
              cast_weights=chosen.replicated)
    option = Option(job, cluster, strategy, precision)
    for way in others:
        if option.fits:
            break
        option = option.recomputing(way)
    return option


def fullest_rank(model: TransformerConfig, ranks: int, precision: Precision | str) -> States:
    """The states of the rank to which ZeroRedundancyOptimizer gives most."""
    tensors = model.layers * len(model.block) + len(model.ends)
    return _fullest(model, min(ranks, tensors), precision)  # further ranks own nothing


@cache
def _fullest(model, ranks, precision):
    return max(shards.real_states("ZeroRedundancyOptimizer", precision, ranks, model.units),
               key=lambda states: states.total)
