"""The algorithms that the course builds, as readable reference code. It needs torch alone."""

from dplab.parallel.bucketed_ddp import BucketedDDP
from dplab.parallel.collectives import (
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from dplab.parallel.manual_ddp import ManualDDP, average_gradients, broadcast_module
from dplab.parallel.overlapped_ddp import OverlappedDDP

__all__ = [
    "BucketedDDP", "ManualDDP", "OverlappedDDP", "average_gradients", "broadcast_module",
    "naive_all_reduce", "ring_all_gather", "ring_all_reduce", "ring_reduce_scatter",
    "tree_all_reduce",
]
