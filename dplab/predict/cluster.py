"""A training step on a cluster of any size: its time, what bounds it, and how it scales.

    job = Job(MODELS["Llama-3 8B"], batch=1, sequence=8192)
    node = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
    print(predict(job, node.of(1024)))

All ranks do the same at the same time, so one rank's timeline stands for all, and 100,000 ranks
take no longer to simulate than 8: their number enters only the cost of a collective. `network` has
the links, `schedule` the timeline and what it leaves out; what breaks the symmetry, slow ranks and
failing ones, is in `reliability`. Tensor and pipeline parallelism are not covered.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dplab.predict import memory, step
from dplab.predict.checks import one_of
from dplab.predict.cost import Link
from dplab.predict.network import WAYS, Cluster, collective_seconds, ring_link
from dplab.predict.schedule import STRATEGIES, Job, sharded_timeline, timeline, units
from dplab.predict.step import COMPUTE, Span

__all__ = ["RESOURCES", "STRATEGIES", "WAYS", "Cluster", "Job", "Prediction", "SimulatedStep",
           "collective_seconds", "efficiency", "predict", "ring_link", "sharded_timeline",
           "stops_paying", "strong_scaling", "timeline", "units", "weak_scaling", "without"]


class SimulatedStep:
    """What follows from a step's ``spans``, and from ``savings``: what each resource costs it."""

    job: Job
    cluster: Cluster

    if TYPE_CHECKING:  # a field of one subclass, computed in another
        @property
        def spans(self) -> Sequence[Span]: ...

        @property
        def savings(self) -> dict[str, float]: ...

    @property
    def seconds(self) -> float:
        """Of the step."""
        return step.step_seconds(self.spans)

    @property
    def compute_seconds(self) -> float:
        """Of the step, computing, the optimizer's part too."""
        return sum(span.seconds for span in self.spans if span.lane == COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        """Of the step, neither computing nor hidden behind it."""
        return step.exposed_seconds(self.spans)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.cluster.ranks * self.job.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `Job.model_flops` over what the GPU could do in that time."""
        return self.job.model_flops / (self.seconds * self.cluster.gpu.bf16_flops)

    @property
    def bound(self) -> str:
        """The resource without which the step would be shortest."""
        savings = self.savings
        return max(savings, key=savings.__getitem__)


@dataclass(frozen=True)
class Prediction(SimulatedStep):
    """One step of a job on a cluster; ``spans``: what each rank does, in seconds."""

    job: Job
    cluster: Cluster
    spans: tuple[Span, ...]

    @property
    def savings(self) -> dict[str, float]:
        """By resource: the seconds that the step would be shorter if that took no time."""
        return {resource: max(0.0, self.seconds - predict(self.job, without(
            self.cluster, resource)).seconds) for resource in RESOURCES}

    @property
    def budget(self) -> memory.Budget:
        """What a rank must hold, at 2 bytes a parameter and gradient; see `memory.budget`."""
        job, ranks = self.job, self.cluster.ranks
        if job.strategy == "HSDP":
            ranks = job.shard_ranks or self.cluster.per_node
        precision = memory.Precision(f"K = {job.optimizer_bytes}", 2, 2, job.optimizer_bytes)
        return memory.budget(job.model, ranks, self.cluster.gpu.memory_bytes,
                             stage="DDP" if job.strategy == "DDP" else "ZeRO-3",
                             precision=precision, batch=job.batch, sequence=job.sequence,
                             recompute=job.recompute)

    def __str__(self):
        return (f"{self.job.strategy} on {self.cluster.ranks} × {self.cluster.gpu.name}: "
                f"{self.seconds:.3g} s a step, {self.exposed_seconds:.2g} s of it only sending; "
                f"{self.tokens_per_second:.4g} tokens/s, MFU {self.mfu:.1%}; "
                f"bound by {self.bound}")


def predict(job: Job, cluster: Cluster) -> Prediction:
    """One step of ``job``, of which each rank of ``cluster`` does its part.

    Whether that fits in memory is another question: `Prediction.budget` answers it.
    """
    return Prediction(job, cluster, tuple(timeline(job, cluster)))


def _no_bandwidth_limit(link: Link) -> Link:
    return replace(link, bandwidth=math.inf)


_WITHOUT = {
    "arithmetic": lambda c: replace(c, gpu=replace(c.gpu, bf16_flops=math.inf)),
    "memory bandwidth": lambda c: replace(c, gpu=replace(c.gpu, memory_bandwidth=math.inf)),
    "bandwidth inside nodes": lambda c: replace(c, inside=_no_bandwidth_limit(c.inside)),
    "bandwidth between nodes": lambda c: replace(c, between=_no_bandwidth_limit(c.between)),
    "latency": lambda c: replace(c, inside=replace(c.inside, latency=0),
                                 between=replace(c.between, latency=0)),
}
RESOURCES = tuple(_WITHOUT)


def without(cluster: Cluster, resource: str) -> Cluster:
    """The cluster if that resource took no time; ``resource`` is one of `RESOURCES`."""
    return _WITHOUT[one_of(resource, RESOURCES, "resource")](cluster)


def weak_scaling(job: Job, cluster: Cluster, ranks: Iterable[int]) -> list[Prediction]:
    """The same batch on each rank, at each number of ranks."""
    return [predict(job, cluster.of(count)) for count in ranks]


def strong_scaling(job: Job, cluster: Cluster, ranks: Iterable[int],
                   global_batch: int) -> list[Prediction]:
    """``global_batch`` sequences in all. Raises ValueError where ranks do not divide them."""
    predictions = []
    for count in ranks:
        if global_batch % count:
            raise ValueError(f"{count} ranks do not divide {global_batch} sequences: take ranks "
                             "that do")
        predictions.append(predict(replace(job, batch=global_batch // count), cluster.of(count)))
    return predictions


def efficiency(curve: Sequence[tuple[int, float]]) -> list[float]:
    """The rate per rank at each point (ranks, rate), over that of the first point."""
    ranks, rate = curve[0]
    return [ranks * each / (rate * count) for count, each in curve]


def stops_paying(curve: Sequence[tuple[int, float]], least: float = 0.5) -> int | None:
    """The number of ranks from which adding ranks no longer pays, or None if it does to the end.

    ``curve``: (ranks, rate), such as tokens per second, in rising ranks. Adding pays while each
    rank that the next point adds brings ``least`` of what a rank brings at the first point.
    """
    first_ranks, first_rate = curve[0]
    for (ranks, rate), (more, higher) in itertools.pairwise(curve):
        if (higher - rate) / (more - ranks) < least * first_rate / first_ranks:
            return ranks
    return None
