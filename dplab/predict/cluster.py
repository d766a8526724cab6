"""A training step on a cluster of any size: its time, what bounds it, and how it scales.

    job = Job(MODELS["Llama-3 8B"], batch=1, sequence=8192)
    node = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
    print(predict(job, node.of(1024)).seconds)

`network` has the time of each collective. Here are one rank's spans: DDP, FSDP, HSDP. All ranks do
the same at the same time, so one rank stands for all, and 100,000 ranks take no longer to simulate
than 8. Computing that runs beside a collective of NCCL takes longer, by
`network.computing_slowdown`. The time of computing comes from `kernels`, at the rates that others
measured. Of several micro-batches DDP all-reduces the sum (``no_sync``), FSDP gathers and reduces
for each, and HSDP all-reduces among its copies for the last alone (``set_requires_all_reduce``).
Left out: slow ranks, the CPU's time beyond the launches, loading of data. All make a step longer.
Tensor and pipeline parallelism are not covered.

Sources: `network` has those of the collectives, `kernels` those of computing, `step` DDP's; torch
2.13, distributed/fsdp/_fully_shard (the order of gathers); A. Chowdhery et al., "PaLM", 2022,
appendix B (model FLOPs).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dplab.predict import network, step
from dplab.predict.job import Cluster, Job
from dplab.predict.kernels import optimizer_seconds, rates_of, unit_costs
from dplab.predict.network import collective_seconds, computing_slowdown
from dplab.predict.step import COMMUNICATION, COMPUTE, Layer, Span, end_beside


def fsdp_spans(blocks: Sequence[Layer], root: Layer, *, gather: Callable[[float], float],
               scatter: Callable[[float], float], reduce: Callable[[float], float] | None = None,
               shard_ranks: int = 1, parameter_ratio: float = 1.0, reshard: bool = True,
               slowdown: float = 1.0, optimizer_seconds: float = 0.0) -> list[Span]:
    """One rank's step with `fully_shard` on each block and the root.

    ``gather``, ``scatter``: seconds for the bytes of a whole unit; ``reduce``, for HSDP: for those
    of one of ``shard_ranks`` shards, whose all-reduce follows each reduce-scatter, beside the next
    gathers. Collectives of a lane go one by one in order of launch. A
    block is gathered when the second block before it is done; in backward the reduce-scatter of a
    block comes before the gather that its end permits. The root is gathered once and reduced last.
    ``parameter_ratio``: bytes of parameters over those of gradients. What is computed beside a
    collective takes ``slowdown`` times as long.
    """
    spans, going, free = [], [], {"shards": 0.0, "copies": 0.0}
    now = 0.0

    def send(what, layer, seconds, ready, lane="shards", nbytes=None):
        nbytes = layer.gradient_bytes if nbytes is None else nbytes
        start = max(ready, free[lane])
        free[lane] = start + seconds(nbytes)
        spans.append(Span(f"{what} {layer.name}", COMMUNICATION, start, free[lane], nbytes))
        going.append(spans[-1])  # those that may not have ended before what is computed next
        return free[lane]

    def fetch(layer, ready):
        return send("gather", layer, gather, ready, nbytes=parameter_ratio * layer.gradient_bytes)

    def compute(what, layer, seconds, ready):
        nonlocal now
        start = max(now, ready)
        going[:] = [span for span in going if span.end > start]
        now = end_beside(sorted(going, key=lambda span: span.start), start, seconds, slowdown)
        spans.append(Span(f"{what} {layer.name}", COMPUTE, start, now))
        return now

    def give(layer):
        end = send("reduce-scatter", layer, scatter, now)
        if reduce is not None:
            send("all-reduce", layer, reduce, end, "copies", layer.gradient_bytes / shard_ranks)

    def through(what, order, ends, gathers, arrived=()):
        """``ends``: of what was computed before, the latest last; ``arrived``: of gathers."""
        arrived = list(arrived)
        for place, layer in enumerate(order):
            for further in order[len(arrived):place + 2] if gathers else ():
                before = len(ends) - place + len(arrived) - 2
                arrived.append(fetch(further, ends[max(0, before)]))
            seconds = layer.forward_seconds if what == "forward" else layer.backward_seconds
            ends.append(compute(what, layer, seconds, arrived[place] if gathers else 0.0))
            if what == "backward":
                give(layer)

    whole_root = fetch(root, 0.0)
    through("forward", blocks, [0.0], True)
    done = compute("forward", root, root.forward_seconds, whole_root)
    early = [fetch(block, done) for block in blocks[-1:] if reshard]
    ends = [done, compute("backward", root, root.backward_seconds, 0.0)]
    through("backward", blocks[::-1], ends, reshard, early)
    give(root)
    start = max(now, *free.values())
    return [*spans, Span("optimizer", COMPUTE, start, start + optimizer_seconds)]


def job_spans(job: Job, cluster: Cluster) -> list[Span]:
    """One rank's step of the job. DDP's gradients come ready evenly over a block's backward."""
    blocks, root = unit_costs(job, cluster)
    size = {"DDP": 1, "FSDP": cluster.ranks, "HSDP": cluster.per_node}[job.strategy]
    # The states are read and written, and 4 bytes more: a gradient in fp32 is read, or one in bf16
    # is read and a parameter in bf16 written.
    optimizer = optimizer_seconds(job.model.parameters / size, cluster.gpu,
                                  nbytes=2 * job.optimizer_bytes + 4, pace=cluster.pace)

    def seconds(collective, ranks, local=None):
        return functools.cache(lambda nbytes: collective_seconds(
            cluster, collective, nbytes, ranks=ranks, local=local))

    slowdown = computing_slowdown(cluster)
    if job.strategy == "DDP":
        head = 0 if job.model.tied else (
            job.model.vocabulary * job.model.d_model * job.gradient_bytes)
        first = Layer(0, 0, root.gradient_bytes - head, "embedding")
        layers = [piece for layer in (first, *blocks, replace(root, gradient_bytes=head))
                  for piece in _pieces(layer, job.bucket_bytes)]
        return step.ddp_spans(
            layers, cluster.ranks, seconds("all-reduce", cluster.ranks),
            bucket_bytes=job.bucket_bytes, slowdown=slowdown, optimizer_seconds=optimizer)
    copies = cluster.ranks // size
    return fsdp_spans(
        blocks, root, gather=seconds("all-gather", size), scatter=seconds("reduce-scatter", size),
        reduce=seconds("all-reduce", copies, 1) if copies > 1 else None, shard_ranks=size,
        reshard=job.reshard, slowdown=slowdown, optimizer_seconds=optimizer,
        parameter_ratio=job.parameter_bytes / job.gradient_bytes)


def _pieces(layer, nbytes):
    count = max(1, math.ceil(layer.gradient_bytes / nbytes))
    return [Layer(layer.forward_seconds / count, layer.backward_seconds / count,
                  layer.gradient_bytes / count, layer.name)] * count


@dataclass(frozen=True)
class Prediction:
    """One step of a job on a cluster, and what follows from its `spans`."""

    job: Job
    cluster: Cluster

    @functools.cached_property
    def spans(self) -> Sequence[Span]:
        """What each rank does for the last micro-batch of a step, and to update, in seconds."""
        return job_spans(self.job, self.cluster)

    @functools.cached_property
    def _earlier(self) -> tuple[float, float]:
        """Of the micro-batches before the last: their seconds, and how long they compute."""
        if self.job.accumulation == 1:
            return 0.0, 0.0
        job = replace(self.job, accumulation=1)
        one = Prediction(job, self.cluster)
        if job.strategy == "HSDP":
            one = Prediction(replace(job, strategy="FSDP"), self.cluster.of(self.cluster.per_node))
        update = one.spans[-1].seconds
        computing = one.compute_seconds - update
        seconds = computing if job.strategy == "DDP" else one.seconds - update
        return ((self.job.accumulation - 1) * seconds, (self.job.accumulation - 1) * computing)

    @functools.cached_property
    def seconds(self) -> float:
        """Of the step."""
        return step.step_seconds(self.spans) + self._earlier[0]

    @functools.cached_property
    def savings(self) -> dict[str, float]:
        """By resource: the seconds that the step would be shorter if that took no time."""
        return {resource: max(0.0, self.seconds - replace(self, cluster=without(
            self.cluster)).seconds) for resource, without in _WITHOUT.items()}

    @property
    def bound(self) -> str:
        """The resource without which the step would be shortest."""
        return max(self.savings, key=self.savings.__getitem__)

    @property
    def basis(self) -> dict[str, bool]:
        """A line for each measured rate in use: what it is and where it was published; and whether
        it is of this GPU, shape or link, for which else the nearest stands in.
        """
        rates = rates_of(self.job, self.cluster)
        return dict([*((rate.basis, rate.as_asked) for rate in rates),
                     *network.basis(self.cluster)])

    @property
    def compute_seconds(self) -> float:
        """Of the step, computing, the optimizer's part too."""
        return self._earlier[1] + sum(span.seconds for span in self.spans if span.lane == COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        """Of the step, neither computing nor hidden behind it."""
        return step.exposed_seconds(self.spans) + self._earlier[0] - self._earlier[1]

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.cluster.ranks * self.job.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `Job.model_flops` over what the GPU could do in that time."""
        return self.job.model_flops / (self.seconds * self.cluster.gpu.bf16_flops)


def predict(job: Job, cluster: Cluster) -> Prediction:
    """One step of ``job``, of which each rank of ``cluster`` does its part.

    Whether that fits in memory is another question, which `memory.budget` answers.
    """
    return Prediction(job, cluster)


_WITHOUT = {
    "arithmetic": lambda c: replace(c, gpu=replace(c.gpu, bf16_flops=math.inf)),
    "memory bandwidth": lambda c: replace(c, gpu=replace(c.gpu, memory_bandwidth=math.inf)),
    "bandwidth inside nodes": lambda c: replace(c, inside=replace(c.inside, bandwidth=math.inf)),
    "bandwidth between nodes": lambda c: replace(
        c, between=replace(c.between, bandwidth=math.inf)),
    "latency": lambda c: replace(c, inside=replace(c.inside, latency=0),
                                 between=replace(c.between, latency=0)),
}
"""The cluster if that resource took no time."""


def stops_paying(curve: Sequence[tuple[int, float]]) -> int | None:
    """The number of ranks from which adding ranks no longer pays, or None if it does at the end.

    ``curve``: (ranks, rate), such as tokens per second, in rising ranks. Adding pays where each
    rank that the next point adds brings half of what a rank brings at the first point. A step that
    does not pay, such as that from one node to two, is no end where a later one pays.
    """
    first_ranks, first_rate = curve[0]
    stop = None
    for (ranks, rate), (more, higher) in itertools.pairwise(curve):
        if (higher - rate) / (more - ranks) >= first_rate / first_ranks / 2:
            stop = None
        elif stop is None:
            stop = ranks
    return stop
