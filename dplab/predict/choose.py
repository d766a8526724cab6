"""From a model, a cluster and a batch to a strategy: a recommendation that says why.

    cluster = Cluster(GPUS["H100"], 8, LINKS["NVLink 4"], LINKS["400 Gb/s"])
    print(recommend(MODELS["Llama-3 8B"], cluster, batch=1, sequence=8192))

Each strategy is taken as torch's usual settings make it (`settings` has the code). By default that
is mixed precision: parameters, gradients and Adam's moments in fp32, 16 bytes a parameter in all;
computing, gathers and activations in bf16; gradients reduced in fp32. `IN_BF16` has what else there
is. `memory` says what that holds, `cluster` how long a step takes. What to change is found by
trying: each change is predicted anew.
"""

import math
import textwrap
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from dplab.predict import memory, network, shards
from dplab.predict.checks import one_of, whole
from dplab.predict.cluster import BLOCK_RECOMPUTE, Prediction, job_spans
from dplab.predict.job import Cluster, Job
from dplab.predict.memory import Budget
from dplab.predict.moments import LOSS_BYTES
from dplab.predict.network import collective_seconds
from dplab.predict.precision import PRECISIONS, Precision, States, readable
from dplab.predict.step import COMMUNICATION, Span
from dplab.predict.traffic import Transfers, collectives
from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Strategy:
    """``what`` it does, and what it is to `memory`, to `cluster` and to `traffic`."""

    what: str
    stage: str
    simulated: str
    sends: str
    reshard: bool = True


CHOICES = {
    "DDP": Strategy("everything on every rank", "DDP", "DDP", "DDP"),
    "ZeRO-1": Strategy("DDP, optimizer sharded", "ZeRO-1", "DDP", "ZeroRedundancyOptimizer"),
    "FSDP": Strategy("all sharded among all ranks", "ZeRO-3", "FSDP", "fully_shard"),
    "FSDP, kept": Strategy("whole until backward", "ZeRO-3", "FSDP",
                           "fully_shard, reshard_after_forward=False", reshard=False),
    "HSDP": Strategy("sharded in a node, a copy on each", "ZeRO-3", "HSDP", "fully_shard"),
}
"""From the simplest on: a later one is taken where it fits and is faster. "FSDP, kept" is without
resharding after forward. On one rank DDP stands for the model without a wrapper."""

IN_BF16 = {
    "mixed": "states in fp32, computing in bf16",
    "bf16": "all in bf16, Adam's moments too",
}
"""Precisions that compute in bf16, as the measured rates do, named as in `dplab.dryrun`. In "bf16"
updates round, and the memory of the states is half."""
_PRECISIONS = dict(zip(IN_BF16, (PRECISIONS["fp32 shards, bf16 gathered"],
                                 PRECISIONS["pure bf16"]), strict=True))
_MANY_NODES = [2**power for power in range(18)]
_FREE = 0.1  # the share of memory that is left to the allocator and the libraries
MEMORY_ERROR = 0.03
"""Two budgets that differ by less, relatively, are not told apart. A prediction is nearer than that
to a dry run (``python -m dplab.bench memory``); what a GPU's allocator adds is not known."""
TIE = 0.06
"""Two step times that differ by less, relatively, are a tie. The predicted ratio of two runs that
were published side by side is off by so much in the median: ``python -m dplab.bench cluster``."""


@dataclass(frozen=True)
class Option(Prediction):
    """One of `CHOICES`, in a precision of `IN_BF16`: its ``job`` is what `cluster` simulates.

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
        job, stored = self.job, _PRECISIONS[self.precision]
        ranks = self.cluster.per_node if self.strategy == "HSDP" else self.cluster.ranks
        return memory.budget(
            job.model, ranks, self.cluster.gpu.memory_bytes, precision=stored,
            stage=CHOICES[self.strategy].stage, batch=job.batch, sequence=job.sequence,
            recompute=job.recompute, reshard=job.reshard, bucket_views=True,
            held=fullest_rank(job.model, ranks, stored) if self.strategy == "ZeRO-1" else None)

    @property
    def limit(self) -> float:
        """The bytes that the budget may have; a share of the GPU's memory stays free."""
        return (1 - _FREE) * self.cluster.gpu.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the budget is within ``limit``."""
        return self.budget.total <= self.limit

    @property
    def margin(self) -> float:
        """Bytes that are left below ``limit``; below 0: too many by so much."""
        return self.limit - self.budget.total

    @cached_property
    def spans(self) -> Sequence[Span]:
        """What each rank does in a step; under ZeRO-1 as with DDP, and then the parameters go out.

        torch gives whole tensors to the ranks, so that one updates more than the others.
        """
        spans = job_spans(self.job, self.cluster)
        if self.strategy != "ZeRO-1":
            return spans
        *others, optimizer = spans
        stored, model = _PRECISIONS[self.precision], self.job.model
        owned = fullest_rank(model, self.cluster.ranks, stored).optimizer
        end = optimizer.start + optimizer.seconds * owned / (stored.optimizer * model.parameters)
        nbytes = stored.parameters * model.parameters
        gathered = end + collective_seconds(self.cluster, "all-gather", nbytes)
        return [*others, replace(optimizer, end=end),
                Span("all-gather of parameters", COMMUNICATION, end, gathered, nbytes)]

    @property
    def transfers(self) -> list[Transfers]:
        """The collectives of a step, by `traffic.collectives`.

        Under HSDP the root is gathered once, as by torch, where `traffic` gathers all units twice.
        """
        stored, cluster = _PRECISIONS[self.precision], self.cluster
        wire = stored.parameters if self.strategy == "ZeRO-1" else stored.gathered

        def sent(name, ranks, shard_ranks=None):
            return collectives(name, ranks, self.job.model.units, parameter_bytes=wire,
                               gradient_bytes=stored.reduced, shard_ranks=shard_ranks)

        sends = CHOICES[self.strategy].sends
        if self.strategy != "HSDP":
            return sent(sends, cluster.ranks)
        return [*sent(sends, cluster.per_node),
                *(each for each in sent("HSDP", cluster.ranks, cluster.per_node)
                  if each.of == "shards of gradients")]

    def recomputing(self, way: str) -> "Option":
        """The same with another way to recompute."""
        return replace(self, job=replace(self.job, recompute=way))

    def __str__(self):
        again = ", blocks recomputed" if self.job.recompute == "full" else ""
        return f"{self.name}{again}"


@dataclass(frozen=True)
class Change:
    """Something else to try: ``gain`` is in tokens/s of a GPU, relative; None if nothing fits."""

    what: str
    best: Option | None
    gain: float | None


@dataclass(frozen=True)
class Recommendation:
    """What `recommend` found, with two of its arguments; printed, it says why."""

    options: tuple[Option, ...]
    most_tokens: float
    recompute: Collection[str] = BLOCK_RECOMPUTE

    @property
    def best(self) -> Option | None:
        """The simplest of `ties`; None if none fits."""
        return next(iter(self.ties), None)

    @cached_property
    def ties(self) -> list[Option]:
        """Those that fit and are as fast as the fastest within `TIE`, the simplest first.

        On one rank nothing is shared, so that the simplest that fits stands alone.
        """
        fitting = [option for option in self.options if option.fits]
        if self.options[0].cluster.ranks == 1:
            return fitting[:1]
        shortest = min((option.seconds for option in fitting), default=0)
        return [option for option in fitting if option.seconds <= (1 + TIE) * shortest]

    @property
    def global_tokens(self) -> int:
        """Of one step on all ranks."""
        return self.options[0].cluster.ranks * self.options[0].job.tokens

    @property
    def _leanest(self) -> Option:
        return next(option for option in self.options if option.strategy == "FSDP")

    @cached_property
    def least_ranks(self) -> int | None:
        """The fewest ranks on which FSDP fits, recomputing, in part of a node or in whole nodes.

        None where it fits on no number of ranks.
        """
        node, limit = self._leanest.cluster.node_size, self._leanest.limit

        def fits(ranks):
            return self._leanest_on(ranks).total <= limit

        most = next((nodes for nodes in _MANY_NODES if fits(nodes * node)), None)
        if most is None:
            return None
        if most == 1:
            return next(ranks for ranks in range(1, node + 1) if fits(ranks))
        return node * bisect_left(range(most), True, lo=most // 2 + 1,
                                  key=lambda nodes: fits(nodes * node))

    @cached_property
    def _least(self) -> tuple[Budget, int]:
        """What FSDP holds at least, recomputing, and on how many ranks.

        On more ranks than a tensor has rows, filling these up to whole shards takes more again.
        """
        node = self._leanest.cluster.node_size
        return min(((self._leanest_on(nodes * node), nodes * node) for nodes in _MANY_NODES),
                   key=lambda found: found[0].total)

    def _leanest_on(self, ranks, *, recompute="full", batch=None):
        """What FSDP holds on so many ranks, with its blocks recomputed."""
        job, cluster = self._leanest.job, self._leanest.cluster
        return replace(self._leanest, cluster=cluster.of(ranks), job=replace(
            job, recompute=recompute, batch=batch or job.batch)).budget

    @cached_property
    def changes(self) -> list[Change]:
        """One thing changed at a time, the largest gain first; empty where nothing fits now.

        None makes the global batch larger than training can use.
        """
        best = self.best
        if best is None:
            return []
        job, cluster = best.job, best.cluster
        more = 2 * cluster.ranks
        if more > cluster.node_size:
            more = cluster.node_size * math.ceil(more / cluster.node_size)  # whole nodes
        said = "twice the" if more == 2 * cluster.ranks else f"{more:,}"
        tried = [("twice the batch on each rank", 2 * job.batch, cluster),
                 (f"{said} ranks, the same batch on each", job.batch, cluster.of(more))]
        if cluster.nodes > 1:
            tried.append(("a network twice as fast", job.batch, replace(
                cluster, between=replace(cluster.between,
                                         bandwidth=2 * cluster.between.bandwidth))))
        found, rate = [], job.tokens / best.seconds
        for what, batch, other in tried:
            tokens = other.ranks * batch * job.sequence
            if tokens > max(self.most_tokens, self.global_tokens):
                continue
            instead = replace(self, options=_options(
                job.model, other, batch=batch, sequence=job.sequence, precision=best.precision,
                recompute=self.recompute)).best
            gain = None if instead is None else (
                instead.job.tokens / instead.seconds / rate - 1)
            found.append(Change(what, instead, gain))
        return sorted(found, key=lambda change: -math.inf if change.gain is None else change.gain,
                      reverse=True)

    @property
    def advice(self) -> list[str]:
        """What to change, in sentences: first of the best option, then what is near of others."""
        others = [option for option in self.options if option is not self.best]
        return [*self._about_memory(), *self._about_margins(self.ties[:1]), *self._about_ties(),
                *self._about_the_bound(), *self._about_the_batch(), *self._about_margins(others)]

    @property
    def unknown(self) -> tuple[str, ...]:
        """The links that nobody measured, and what stands in for each, in sentences."""
        return network.basis(self.options[0].cluster, stand_ins=True)

    def _about_memory(self):
        if self.best is not None:
            return []
        if self._leanest.recomputing("full").fits:
            return ["With its blocks recomputed, FSDP fits: allow that."]
        job, ranks, least = self._leanest.job, self._leanest.cluster.ranks, self.least_ranks
        if least is None:
            held, ranks = self._least
            loss = job.tokens * job.model.vocabulary * LOSS_BYTES
            ways = ["a smaller local batch"] if job.batch > 1 else []
            if held.moment == "loss":
                ways.append(f"a loss in chunks (it takes {readable(loss)})")
            parts = ", ".join(f"{name} {readable(size)}" for name, size in held.parts.items()
                              if size)
            return [f"No number of ranks is enough. FSDP, with its blocks recomputed, needs least "
                    f"on {ranks:,} ranks: {readable(held.total)} at its peak, {held.moment} "
                    f"({parts}). It takes {', '.join([*ways, 'smaller units'])} or offloading; "
                    "what is left then asks for tensor or context parallelism."]
        if least > ranks:
            return [f"The states need more ranks: FSDP, with its blocks recomputed, needs at least "
                    f"{least:,}."]
        return [f"These are too many ranks: the rows of each tensor are filled up to whole shards. "
                f"FSDP, with its blocks recomputed, fits on {least:,}."]

    def _about_margins(self, options):
        """Which of these fit or not by less than the predicted memory may be off."""
        close = [option for option in options
                 if abs(option.margin) <= MEMORY_ERROR * option.budget.total]
        return [f"{option} is {readable(abs(option.margin))} "
                f"{'below' if option.fits else 'over'} the limit. The prediction is within "
                f"{MEMORY_ERROR:.0%} of dry runs; no GPU was measured: try it, or do a dry run."
                for option in close]

    def _about_ties(self):
        if self.best is not None and self.best.cluster.ranks == 1:
            if self.best.is_plain:
                return ["One GPU has nothing to share: train the model as it is, without DDP or "
                        "FSDP."]
            return ["Without a wrapper it does not fit. FSDP on one GPU shares nothing, but it "
                    "frees each block's parameters in bf16 after use."]
        others = [str(option) for option in self.ties if option is not self.best]
        if not others:
            return []
        also = others[0] if len(others) == 1 else f"{', '.join(others[:-1])} and {others[-1]}"
        return [f"{self.best} is as fast as {also}, within the {TIE:.0%} by which the ratio of two "
                "predictions is off in the median. It is the simplest; measure to tell them apart."]

    def _about_the_bound(self):
        if self.best is None:
            return []
        alone = self.best.cluster.ranks == 1
        said = [(_REMEDIES | _ALONE if alone else _REMEDIES)[self.best.bound]]
        (most, first), (next_most, second) = sorted(
            ((saved / self.best.seconds, name) for name, saved in self.best.savings.items()),
            reverse=True)[:2]
        if next_most > max(TIE, most / 2):
            said.append(f"Without the time of {first} the step would be {most:.0%} shorter, "
                        f"without that of {second} {next_most:.0%}.")
        if self.best.job.recompute == "full":
            kept = self.best.recomputing("none")
            more = self.best.compute_seconds / kept.compute_seconds - 1
            if kept.fits:
                said.append(f"Blocks are recomputed, which costs {more:.0%} more computing. "
                            f"{self.best.strategy} fits without that too.")
            else:
                said.append(f"Blocks are recomputed to save memory, which costs {more:.0%} more "
                            f"computing. {self._instead_of_recomputing()}")
        return said + [f"Tried: {change.what}: {_told(change)}" for change in self.changes]

    def _instead_of_recomputing(self):
        """Which of two ways makes room to keep all activations."""
        option = self._leanest
        node, ranks = option.cluster.node_size, option.cluster.ranks
        more = any(self._leanest_on(nodes * node, recompute="none").total <= option.limit
                   for nodes in _MANY_NODES if nodes * node > ranks)
        smaller = option.job.batch > 1 and (
            self._leanest_on(ranks, recompute="none", batch=1).total <= option.limit)
        ways = [way for way, avoids in (("more ranks", more), ("a smaller local batch", smaller))
                if avoids]
        if not ways:
            return "Neither more ranks nor a smaller local batch alone would avoid that."
        return f"With FSDP, {' or '.join(ways)} would avoid that."

    def _about_the_batch(self):
        if self.global_tokens <= self.most_tokens:
            return []
        most = self.most_tokens // self.options[0].job.tokens
        if not most:
            return [f"The {self.options[0].job.tokens:,} tokens of one GPU exceed the largest "
                    f"useful global batch of {self.most_tokens:,.0f}: take a smaller local batch "
                    "or shorter sequences."]
        return [f"The global batch of {self.global_tokens:,} tokens exceeds "
                f"{self.most_tokens:,.0f}: at most {most:,.0f} of "
                f"{self.options[0].cluster.ranks:,} ranks can be data parallel with this local "
                "batch. Where it cannot shrink, several ranks must share a sequence or a layer: "
                "tensor, context, pipeline parallelism."]

    def __str__(self):
        best, cluster, job = self.best, self.options[0].cluster, self.options[0].job
        lines = [f"{job.model.name} on {cluster.ranks:,} × {cluster.gpu.name}, {job.batch} × "
                 f"{job.sequence:,} tokens each (prediction)", ""]
        for option in self.options:
            mark = "→" if option is best else "=" if option in self.ties else " "
            if option.fits:
                fast, slow = option.interval
                time = (f"{option.seconds:8.3f} s ({fast:.3f} to {slow:.3f}) {option.mfu:6.1%} MFU"
                        f"  bound by {option.bound}")
            else:
                time = f"  {readable(-option.margin)} over the limit of {readable(option.limit)}"
            lines.append(f"{mark} {option!s:31}{readable(option.budget.total):>9}{time}")
        advice = (textwrap.fill(line, 96, initial_indent="- ", subsequent_indent="  ")
                  for line in self.advice)
        unknown = (textwrap.fill(f"{line}.", 96, initial_indent="- ", subsequent_indent="  ")
                   for line in self.unknown)
        return "\n".join([*lines, "", *advice, *unknown])


def _told(change):
    if change.best is None:
        return "then nothing fits."
    gain = f"{_signed(change.gain)} tokens/s per GPU, with {change.best}"
    return f"{gain}." if abs(change.gain) > TIE else (
        f"{gain}: no more than the prediction may be off.")


def _signed(share):
    percents = round(100 * share, 1)
    return f"{'+' if percents > 0 else '−' if percents < 0 else ''}{abs(percents):.1f}%"


_REMEDIES = {
    "arithmetic": "Computing bounds it.",
    "memory bandwidth": "The bandwidth of the GPU's memory bounds it: fuse operations "
                        "(torch.compile), or share the optimizer's work among the ranks.",
    "bandwidth inside nodes": "The links inside a node bound it: more tokens for each "
                              "synchronisation, or fewer bytes.",
    "bandwidth between nodes": "The network bounds it: more tokens for each synchronisation, "
                               "fewer bytes between nodes, or a faster network.",
    "latency": "Latency bounds it: larger units, more tokens.",
}
_ALONE = {"memory bandwidth": "The bandwidth of the GPU's memory bounds it: fuse operations "
                              "(torch.compile)."}
"""What else there is to say on one rank."""


def recommend(model: TransformerConfig, cluster: Cluster, *, batch: int = 1, sequence: int = 4096,
              most_tokens: float = math.inf, precision: str = "mixed",
              recompute: str | Collection[str] = BLOCK_RECOMPUTE) -> Recommendation:
    """Which strategy trains ``model`` fastest, with ``batch`` sequences on each rank.

    ``most_tokens``: the largest global batch that training can use, see chapter 07. ``precision``:
    one of `IN_BF16`. ``recompute``: the way or ways allowed, of `cluster.BLOCK_RECOMPUTE`; the
    first that fits is taken, so that by default blocks are recomputed only where nothing else
    fits. A tenth of the memory is left to the allocator and the libraries. Adding up gradients over
    several micro-batches is not considered, nor are tensor, context and pipeline parallelism, which
    it can only ask for. Raises like `checks.whole` for batch and sequence.
    """
    whole(batch, "batch"), whole(sequence, "sequence")
    if not most_tokens > 0:
        raise ValueError(f"most_tokens, the largest global batch, is above 0, not {most_tokens}")
    one_of(precision, IN_BF16, "precision")
    recompute = _ways(recompute)
    if not recompute:
        raise ValueError(f"recompute allows nothing: give some of {BLOCK_RECOMPUTE}")
    for way in recompute:
        one_of(way, BLOCK_RECOMPUTE, "recompute")
    options = _options(model, cluster, batch=batch, sequence=sequence, precision=precision,
                       recompute=recompute)
    return Recommendation(options, most_tokens, recompute)


def option_of(strategy: str, model: TransformerConfig, cluster: Cluster, *, batch: int,
              sequence: int, precision: str = "mixed",
              recompute: str | Collection[str] = BLOCK_RECOMPUTE) -> Option:
    """One strategy, with the first way to ``recompute`` that fits, or else the last.

    In mixed precision DDP and ZeRO-1 compute under autocast; their gradients are views of buckets.
    Raises ValueError for an unknown strategy, and for a precision that is not one of `IN_BF16`.
    """
    chosen = CHOICES[one_of(strategy, CHOICES, "strategy")]
    stored = _PRECISIONS[one_of(precision, IN_BF16, "precision")]
    first, *others = _ways(recompute)
    casts = stored.gathered < stored.parameters
    job = Job(
        model, batch, sequence, chosen.simulated, recompute=first, reshard=chosen.reshard,
        parameter_bytes=stored.gathered, gradient_bytes=stored.reduced,
        optimizer_bytes=stored.optimizer + (4 if casts else 0),
        cast_weights=casts and chosen.simulated == "DDP",
        # The optimizer reads and writes parameters and moments, and reads gradients.
        update_bytes=2 * (stored.parameters + stored.optimizer) + stored.gradients)
    option = Option(job, cluster, strategy, precision)
    for way in others:
        if option.fits:
            break
        option = option.recomputing(way)
    return option


def _ways(recompute: str | Collection[str]) -> Collection[str]:
    return (recompute,) if isinstance(recompute, str) else recompute


def _options(model, cluster, **settings):
    strategies = [name for name in CHOICES if name != "HSDP" or cluster.nodes > 1]
    if cluster.ranks == 1:  # the others are the same as one of these, as HSDP is within a node
        strategies = ["DDP", "FSDP"]
    return tuple(option_of(name, model, cluster, **settings) for name in strategies)


def fullest_rank(model: TransformerConfig, ranks: int, precision: Precision | str) -> States:
    """The states of the rank to which ZeroRedundancyOptimizer gives most."""
    tensors = model.layers * len(model.block) + len(model.ends)
    return _fullest(model, min(ranks, tensors), precision)  # further ranks own nothing


@cache
def _fullest(model, ranks, precision):
    return max(shards.real_states("ZeroRedundancyOptimizer", precision, ranks, model.units),
               key=lambda states: states.total)
