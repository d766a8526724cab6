"""One rank's timeline of a training step on a cluster: DDP, FSDP, HSDP, with overlap and prefetch.

All ranks are taken to do the same at the same time, so one rank stands for all.

The time of computing, from a GPU's two peaks: matrices at the share of the arithmetic peak that
large ones were measured to reach, then everything between them at the full memory bandwidth. Left
out: the time between kernels, the CPU's, copies into buffers, loading of data, accumulation of
gradients, and that computing and sending slow each other down. So it errs towards too fast.

Sources: `step` has DDP's; torch 2.13, distributed/fsdp/_fully_shard (the order of gathers);
A. Chowdhery et al., "PaLM", 2022, appendix B (model FLOPs); T. Dao, "FlashAttention-2", 2023
(attention's).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dplab.predict import step
from dplab.predict.activations import activations
from dplab.predict.checks import one_of, whole
from dplab.predict.network import WAYS, Cluster, collective_seconds, ring_link
from dplab.predict.step import COMMUNICATION, COMPUTE, Layer, Span
from dplab.predict.transformer import Transformer, numel

STRATEGIES = ("DDP", "FSDP", "HSDP")
RECOMPUTE = ("none", "full")


@dataclass(frozen=True)
class Job:
    """A model trained with ``batch`` sequences of ``sequence`` tokens on each rank, one backward.

    ``strategy``: one of `STRATEGIES`; HSDP shards among ``shard_ranks`` (by default a node) and
    all-reduces shards among the copies. ``recompute``: one of `RECOMPUTE`. Bytes: of a parameter
    and of a gradient as they travel, and of the optimizer's states per parameter (K). ``prefetch``:
    blocks gathered ahead; ``reshard`` after forward, so that backward gathers again. ``overlap``:
    whether sending goes on beside computing; ``bucket_bytes``: DDP's; ``way``: one of
    `network.WAYS`, by which collectives go. Raises ValueError for what is none of these, and like
    `checks.whole` for batch, sequence and prefetch.
    """

    model: Transformer
    batch: int
    sequence: int
    strategy: str = "FSDP"
    shard_ranks: int | None = None
    recompute: str = "none"
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12
    prefetch: int = 1
    reshard: bool = True
    overlap: bool = True
    bucket_bytes: float = 25 * 2**20
    way: str = "NCCL"

    def __post_init__(self):
        whole(self.batch, "batch"), whole(self.sequence, "sequence")
        whole(self.prefetch, "prefetch", least=0)
        one_of(self.strategy, STRATEGIES, "strategy")
        one_of(self.recompute, RECOMPUTE, "recompute")
        one_of(self.way, WAYS, "way")
        if self.shard_ranks is not None and self.strategy != "HSDP":
            raise ValueError(f"shard_ranks is for HSDP, not for {self.strategy}: leave it out")

    @property
    def tokens(self) -> int:
        """Of one rank in a step."""
        return self.batch * self.sequence

    @property
    def model_flops(self) -> float:
        """Of one rank's step: 6 for each parameter in a matrix and token, 12·L·d·s for attention.

        Recomputing does not count, nor does the lookup of embeddings; attention counts as if it
        were not causal, by PaLM's convention.
        """
        model = self.model
        matrices = model.layers * _matrix(model.block) + model.vocabulary * model.d_model
        return self.tokens * (6 * matrices + 12 * model.layers * model.d_model * self.sequence)


def units(job: Job, cluster: Cluster) -> tuple[list[Layer], Layer]:
    """What each block costs on one rank, and the root: the head's computing, all ends' gradients.

    Attention computes only the causal half, its backward 2.5 times its forward. Of memory traffic:
    activations are written and read once in forward, in backward read, and their gradients written
    and read. A block's backward includes its second forward where that is recomputed.
    """
    model = job.model
    kept = activations(model, 1, job.sequence)
    scores = 2 * model.d_model * job.sequence * job.tokens

    def layer(matrix, attention, nbytes, parameters, again, name):
        flops = cluster.gpu.bf16_flops * cluster.matmul_share
        seconds = [(2 * passes * matrix * job.tokens + times * attention) / flops
                   + moves * nbytes * job.batch / cluster.gpu.memory_bandwidth
                   for passes, times, moves in ((1, 1, 2), (2, 2.5, 3))]
        return Layer(seconds[0], seconds[1] + again * seconds[0],
                     parameters * job.gradient_bytes, name)

    block = layer(_matrix(model.block), scores, kept.blocks / model.layers,
                  model.block_parameters, job.recompute == "full", "block")
    root = layer(model.vocabulary * model.d_model, 0, kept.ends + kept.logits + kept.loss,
                 numel(model.ends.values()), False, "root")
    return [replace(block, name=f"block {index}") for index in range(model.layers)], root


def sharded_timeline(blocks: Sequence[Layer], root: Layer, *, gather: Callable[[float], float],
                     scatter: Callable[[float], float],
                     reduce: Callable[[float], float] | None = None, own_lane: bool = True,
                     shard_ranks: int = 1, parameter_ratio: float = 1.0, prefetch: int = 1,
                     reshard: bool = True, overlap: bool = True,
                     optimizer_seconds: float = 0.0) -> list[Span]:
    """One rank's step with `fully_shard` on each block and the root.

    ``gather``, ``scatter``: seconds for the bytes of a whole unit; ``reduce``, for HSDP: for those
    of one of ``shard_ranks`` shards, whose all-reduce follows each reduce-scatter, beside the next
    gathers if it has its ``own_lane``. Collectives of a lane go one by one in order of launch. A
    block is gathered when the block ``prefetch`` + 1 before it is done; in backward the
    reduce-scatter of a block comes before the gather that its end permits. The root is gathered
    once and reduced last. ``parameter_ratio``: bytes of parameters over those of gradients. Without
    ``overlap`` computing and sending alternate.
    """
    spans, free = [], {"shards": 0.0, "copies": 0.0}
    ahead = prefetch if overlap else 0
    now = 0.0

    def send(what, layer, seconds, ready, lane="shards", nbytes=None):
        nbytes = layer.gradient_bytes if nbytes is None else nbytes
        start = max(ready, free[lane])
        free[lane] = start + seconds(nbytes)
        spans.append(Span(f"{what} {layer.name}", COMMUNICATION, start, free[lane], nbytes))
        return free[lane]

    def fetch(layer, ready):
        return send("gather", layer, gather, ready, nbytes=parameter_ratio * layer.gradient_bytes)

    def compute(what, layer, seconds, ready):
        nonlocal now
        start = max(now, ready) if overlap else max(now, ready, *free.values())
        now = start + seconds
        spans.append(Span(f"{what} {layer.name}", COMPUTE, start, now))
        return now

    def give(layer):
        end = send("reduce-scatter", layer, scatter, now)
        if reduce is not None:
            send("all-reduce", layer, reduce, end, "copies" if own_lane else "shards",
                 layer.gradient_bytes / shard_ranks)

    def through(what, order, ends, gathers):
        """``ends``: of what was computed before, the latest last."""
        arrived = []
        for place, layer in enumerate(order):
            for further in order[len(arrived):place + ahead + 1] if gathers else ():
                before = len(ends) - place + len(arrived) - 1 - ahead
                arrived.append(fetch(further, ends[max(0, before)]))
            seconds = layer.forward_seconds if what == "forward" else layer.backward_seconds
            ends.append(compute(what, layer, seconds, arrived[place] if gathers else 0.0))
            if what == "backward":
                give(layer)

    whole_root = fetch(root, 0.0)
    now = 0.0 if overlap else whole_root
    through("forward", blocks, [0.0], True)
    done = compute("forward", root, root.forward_seconds, whole_root)
    ends = [done, compute("backward", root, root.backward_seconds, 0.0)]
    through("backward", blocks[::-1], ends, reshard)
    give(root)
    start = max(now, *free.values())
    return [*spans, Span("optimizer", COMPUTE, start, start + optimizer_seconds)]


def timeline(job: Job, cluster: Cluster) -> list[Span]:
    """One rank's step of the job. DDP's gradients come ready evenly over a block's backward.

    Raises ValueError where ``shard_ranks`` and the cluster's nodes do not divide one another.
    """
    blocks, root = units(job, cluster)
    size = {"DDP": 1, "FSDP": cluster.ranks,
            "HSDP": job.shard_ranks or cluster.per_node}[job.strategy]
    if cluster.ranks % size or max(size, cluster.per_node) % min(size, cluster.per_node):
        raise ValueError(f"{size} ranks to a copy do not divide {cluster.ranks} ranks in nodes of "
                         f"{cluster.per_node}: give shard_ranks that do")
    states = 2 * job.optimizer_bytes + job.gradient_bytes + job.parameter_bytes
    optimizer = job.model.parameters / size * states / cluster.gpu.memory_bandwidth

    def seconds(collective, ranks, local):
        return lambda nbytes: collective_seconds(cluster, collective, nbytes, ranks=ranks,
                                                 local=local, way=job.way)

    if job.strategy == "DDP":
        head = 0 if job.model.tied else (
            job.model.vocabulary * job.model.d_model * job.gradient_bytes)
        first = Layer(0, 0, root.gradient_bytes - head, "embedding")
        layers = [piece for layer in (first, *blocks, replace(root, gradient_bytes=head))
                  for piece in _pieces(layer, job.bucket_bytes)]
        ways = ("flat ring", "tree") if job.way == "NCCL" else (job.way,)
        links = [ring_link(cluster, cluster.ranks, cluster.per_node, way) for way in ways]
        return step.timeline(layers, cluster.ranks, min(links, key=lambda link: link.latency),
                             bucket_bytes=job.bucket_bytes, overlap=job.overlap,
                             optimizer_seconds=optimizer)
    local, copies = min(size, cluster.per_node), cluster.ranks // size
    reduce = None
    if copies > 1:
        mates = max(1, cluster.per_node // size)  # members of an all-reduce in the same node
        reduce = seconds("all-reduce", copies, mates)
    return sharded_timeline(
        blocks, root, gather=seconds("all-gather", size, local),
        scatter=seconds("reduce-scatter", size, local), reduce=reduce,
        own_lane=size == cluster.per_node, shard_ranks=size, prefetch=job.prefetch,
        reshard=job.reshard, overlap=job.overlap, optimizer_seconds=optimizer,
        parameter_ratio=job.parameter_bytes / job.gradient_bytes)


def _matrix(tensors):
    return numel(shape for shape in tensors.values() if len(shape) > 1)


def _pieces(layer, nbytes):
    count = max(1, math.ceil(layer.gradient_bytes / nbytes))
    return [Layer(layer.forward_seconds / count, layer.backward_seconds / count,
                  layer.gradient_bytes / count, layer.name)] * count
