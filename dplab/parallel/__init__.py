"""The algorithms that the course builds, as readable reference code. It needs torch alone."""

from dplab.parallel.bucketed_ddp import BucketedDDP
from dplab.parallel.collectives import (
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from dplab.parallel.fully_sharded_model import FullyShardedModel
from dplab.parallel.local_sgd import DiLoCo, LocalSGD, StreamingDiLoCo
from dplab.parallel.manual_ddp import ManualDDP, average_gradients, broadcast_module
from dplab.parallel.overlapped_ddp import OverlappedDDP
from dplab.parallel.parameter_server import ParameterServer
from dplab.parallel.sharded_gradients import ShardedGradientOptimizer
from dplab.parallel.sharded_optimizer import ShardedOptimizer

__all__ = [
    "BucketedDDP", "DiLoCo", "FullyShardedModel", "LocalSGD", "ManualDDP", "OverlappedDDP",
    "ParameterServer", "ShardedGradientOptimizer", "ShardedOptimizer", "StreamingDiLoCo",
    "average_gradients", "broadcast_module", "naive_all_reduce", "ring_all_gather",
    "ring_all_reduce", "ring_reduce_scatter", "tree_all_reduce",
]
