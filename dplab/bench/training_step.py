"""The strategies that benches compare, torch's, DeepSpeed's and the course's: a step of each."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dplab.parallel import FullyShardedModel, ShardedGradientOptimizer, ShardedOptimizer

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
SHARDED_OPTIMIZERS: dict[str, Callable] = {
    "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
    "ShardedOptimizer": ShardedOptimizer,
    "ShardedOptimizer, reduce_gradients=True": partial(ShardedOptimizer, reduce_gradients=True),
    "ShardedGradientOptimizer": ShardedGradientOptimizer,
}
IN_DDP = "DDP", "ZeroRedundancyOptimizer", "ShardedOptimizer"
RESHARDS = {"fully_shard": None, "fully_shard, reshard_after_forward=True": True,
            "fully_shard, reshard_after_forward=False": False, "HSDP": None}
# With its defaults, stage 3 gathers a small model once: it keeps whole what is small, or used soon.
DEEPSPEED = {**{f"DeepSpeed {stage}": {"stage": stage} for stage in range(4)},
             "DeepSpeed 3, nothing kept": {
                 "stage": 3, "stage3_param_persistence_threshold": 0,
                 "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}


def training_step(name: str, model: nn.Module, compute_loss: Callable, optimizer_cls: type,
                  units: Sequence[nn.Module] = (), bucket_mb: float = 25, **settings) -> Callable:
    """On each rank: a function that trains ``model`` for one step on a batch; it returns the loss.

    name: of the tables above, or FullyShardedModel. compute_loss: of the model in its wrapper, and
    the batch. units: what is gathered at a time, besides the root. settings: the optimizer's.
    """
    if name in IN_DDP:
        model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    elif name == "FullyShardedModel":
        model = FullyShardedModel(model, units=list(units))
    elif name in RESHARDS:
        mesh = _mesh(hybrid=name == "HSDP")
        for unit in (*units, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=RESHARDS[name])
    elif name not in SHARDED_OPTIMIZERS | DEEPSPEED:
        raise ValueError(f"no strategy {name!r}")
    if name in SHARDED_OPTIMIZERS:
        if name == "ShardedGradientOptimizer":
            settings["bucket_mb"] = bucket_mb
        optimizer = SHARDED_OPTIMIZERS[name](model.parameters(), optimizer_cls, **settings)
    else:
        optimizer = optimizer_cls(model.parameters(), **settings)
    if name in DEEPSPEED:
        return _deepspeed(model, optimizer, compute_loss, DEEPSPEED[name])

    def step(*batch):
        optimizer.zero_grad()
        loss = compute_loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def _mesh(hybrid):
    ranks = dist.get_world_size()
    if not hybrid:
        return init_device_mesh("cpu", (ranks,))
    in_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh("cpu", (ranks // in_node, in_node), mesh_dim_names=("copies", "shards"))


def _deepspeed(model, optimizer, compute_loss, zero):
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    warnings.simplefilter("ignore", FutureWarning)
    import deepspeed

    # Or the first use compiles a shared-memory operation that only inference needs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
                "zero_optimization": zero})

    def step(*batch):
        loss = compute_loss(engine, *batch)
        engine.backward(loss)
        engine.step()
        return loss.item()
    return step
