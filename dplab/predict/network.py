"""A cluster's links in a hierarchy, and what a collective costs on them.

Inside a node each GPU has a fast link; between nodes each node has some slower ones. A collective
goes over both, in one of three `WAYS`, and each of them takes as long as a plain ring would over
some single `Link`, which `ring_link` gives; so `cost` has the time, and the number of ranks is but
a number in it.

Sources: `cost` has those of the rings; NCCL 2.28, src/graph/tuning.cc (what rings and trees take,
and that the faster is taken).
"""

import math
from dataclasses import dataclass, replace

from dplab.predict import cost
from dplab.predict.catalogue import Gpu
from dplab.predict.checks import DERIVED, one_of, whole
from dplab.predict.cost import Link

MATMUL_SHARE = {"A100": 271.2 / 312, "H100": 794.5 / 989, "H200": 794.5 / 989,
                "B200": 1745 / 2250}
"""What large bf16 matrix products reach of the peak, measured; H200: the H100's, the same chip.

Source: stas00/ml-engineering 744d01e, compute/accelerator/README.md."""

WAYS = ("NCCL", "flat ring", "two-level ring", "tree")


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines with ``per_node`` GPUs each, all alike.

    ``inside``: each GPU's link within its node; ``between``: one of the node's ``nics`` links to
    the network (by default as many as GPUs), which takes all of them at full speed.
    ``matmul_share``: of the GPU's peak, by default `MATMUL_SHARE`. Raises ValueError where that has
    no entry, and like `checks.whole` for counts.
    """

    gpu: Gpu
    nodes: int
    inside: Link
    between: Link
    per_node: int = 8
    nics: int = DERIVED
    matmul_share: float = DERIVED

    def __post_init__(self):
        if self.nics is None:
            object.__setattr__(self, "nics", self.per_node)
        for count in ("nodes", "per_node", "nics"):
            whole(getattr(self, count), count)
        if self.matmul_share is None:
            if self.gpu.name not in MATMUL_SHARE:
                raise ValueError(f"no measured matmul_share for {self.gpu.name}: give one")
            object.__setattr__(self, "matmul_share", MATMUL_SHARE[self.gpu.name])

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def of(self, ranks: int) -> "Cluster":
        """The same with so many ranks: part of one node, or whole nodes (else ValueError)."""
        if whole(ranks, "ranks") < self.per_node:
            return replace(self, nodes=1, per_node=ranks)
        if ranks % self.per_node:
            raise ValueError(f"{ranks} ranks do not fill nodes of {self.per_node}: take a multiple "
                             "of that, or fewer")
        return replace(self, nodes=ranks // self.per_node)


def ring_link(cluster: Cluster, ranks: int, local: int, way: str = "flat ring") -> Link:
    """The link with which one plain ring takes as long as ``way`` does on the cluster.

    A group of ``ranks`` has ``local`` members in each of its nodes; where that is not all of a
    node's GPUs, like groups work at once and share its NICs.

    "flat ring": as many rings as NICs, each through all ranks, so that the node's links to the
    network work together, up to what a GPU's link inside carries. Each message waits for the one
    before it, over the network once per node. "two-level ring": one inside, then one between
    the nodes for each local rank, in turn. "tree": bytes as the flat ring, but ⌈log2⌉ messages
    between nodes. Raises ValueError for an unknown way and for a group that fits no nodes.
    """
    whole(ranks, "ranks")
    if local > cluster.per_node or ranks % whole(local, "local") or ranks > cluster.ranks:
        raise ValueError(f"{ranks} ranks, {local} to a node, do not fit this cluster of "
                         f"{cluster.nodes} × {cluster.per_node} GPUs")
    one_of(way, WAYS[1:], "way")
    nodes, share = ranks // local, cluster.nics / cluster.per_node * cluster.between.bandwidth
    if nodes == 1:
        return cluster.inside
    per_gpu = replace(cluster.between, bandwidth=share)
    if way == "two-level ring":
        inside, between = (cost.seconds("ring all-gather", size, 1 / part, replace(link, latency=0))
                           for size, part, link in ((local, 1, cluster.inside),
                                                    (nodes, local, per_gpu)))
        latency = (local - 1) * cluster.inside.latency + (nodes - 1) * per_gpu.latency
        per_byte = inside + between
    else:
        slow = min(nodes, ranks - 1)
        latency = slow * per_gpu.latency + (ranks - 1 - slow) * cluster.inside.latency
        if way == "tree":
            latency = ((nodes - 1).bit_length() * per_gpu.latency
                       + (local - 1) * cluster.inside.latency)
        limit = min(share * local, cluster.inside.bandwidth) if local > 1 else share
        per_byte = cost.bytes_sent("ring all-gather", ranks, 1) / limit
    bandwidth = (ranks - 1) / ranks / per_byte if per_byte else math.inf
    return Link(way, bandwidth, latency / (ranks - 1))


def collective_seconds(cluster: Cluster, collective: str, nbytes: float, *,
                       ranks: int | None = None, local: int | None = None,
                       way: str = "NCCL") -> float:
    """Seconds of an "all-reduce", "all-gather" or "reduce-scatter" of ``nbytes``, the whole tensor.

    By default among all ranks; see `ring_link` for a group. ``way``: one of `WAYS`; "NCCL" takes
    the flat ring, and the faster of ring and tree for an all-reduce. Raises ValueError for another
    collective or way, and for a group that fits no nodes.
    """
    one_of(collective, ("all-reduce", "all-gather", "reduce-scatter"), "collective")
    ranks = cluster.ranks if ranks is None else ranks
    local = min(ranks, cluster.per_node) if local is None else local
    ways = (way,) if way != "NCCL" else (
        ("flat ring", "tree") if collective == "all-reduce" else ("flat ring",))
    return min(cost.seconds(f"ring {collective}", ranks, nbytes,
                            ring_link(cluster, ranks, local, each)) for each in ways)
