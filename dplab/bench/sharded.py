"""A training step of the course's ZeRO-1, 2 and 3 beside torch's and DeepSpeed's, in one run."""

import importlib.util
import logging
import os
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dplab import run
from dplab.measure import WireMeter
from dplab.parallel import FullyShardedModel, ShardedGradientOptimizer, ShardedOptimizer

MIB = 2**20
LEARNING_RATE = 1e-3


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--rounds", type=int, default=25,
                        help="each times one step of every kind, in turn (default 25)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (default 1024)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank (default 64)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="some of the kinds, by name")


def main(options):
    size = 4 * options.layers * (options.width + 1) * options.width
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; gloo, float32, AdamW; "
          f"{options.layers} layers of {options.width}×{options.width}, M = {size / MIB:.1f} MiB, "
          f"{options.batch} samples a rank; medians of {options.rounds} rounds, least in brackets")
    for ranks in options.ranks:
        times, sent = run(measured, ranks, options, backend="gloo", timeout=900)[0]
        base = statistics.median(times.get("fully_shard", next(iter(times.values()))))
        share = (ranks - 1) / ranks
        print(f"\n{ranks} ranks, f = (N−1)/N = {share:.3g}\n{'':40}{'a step':>20}"
              f"{'÷ fully_shard':>15}{'bytes ÷ M':>12}{'÷ fM':>8}")
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            moved = sent[name] / size
            print(f"{name:40}{1000 * middle:10.1f} ms ({1000 * min(seconds):.1f})"
                  f"{middle / base:13.2f}×{moved:12.3f}{moved / share:8.2f}")


def measured(options):
    """Kind: the seconds that a step took the slowest rank, each round; and its bytes per rank."""
    kinds = {name: kind for name, kind in KINDS.items()
             if options.only is None or name in options.only}
    steps = {name: kind(_model(options)) for name, kind in kinds.items()}
    x = torch.randn(options.batch, options.width)
    times, sent = {name: [] for name in steps}, {}
    for number in range(options.rounds + 3):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(x)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name].append(seconds.item())
            if number < 3:  # the least of three: the loopback may have other users
                with WireMeter() as wire:
                    step(x)
                sent[name] = min(wire.bytes_per_rank, sent.get(name, wire.bytes_per_rank))
    return {name: seconds[3:] for name, seconds in times.items()}, sent


def _model(options):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU())
                           for _ in range(options.layers)])


def _stepping(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return step


def _ddp(model):
    model = DistributedDataParallel(model)
    return _stepping(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def _zero_redundancy(model):
    model = DistributedDataParallel(model)
    return _stepping(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
                                                    lr=LEARNING_RATE))


def _zero_1_with_ddp(model):
    model = DistributedDataParallel(model)
    return _stepping(model, ShardedOptimizer(model.parameters(), torch.optim.AdamW,
                                             lr=LEARNING_RATE))


def _zero_1(model):
    return _stepping(model, ShardedOptimizer(model.parameters(), torch.optim.AdamW,
                                             reduce_gradients=True, lr=LEARNING_RATE))


def _zero_2(model):
    return _stepping(model, ShardedGradientOptimizer(model.parameters(), torch.optim.AdamW,
                                                     bucket_mb=4, lr=LEARNING_RATE))


def _zero_3(model):
    model = FullyShardedModel(model)
    return _stepping(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def _fully_shard(reshard):
    def wrap(model):
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        return _stepping(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    return wrap


def _deepspeed(stage):
    def wrap(model):
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        warnings.simplefilter("ignore", FutureWarning)
        import deepspeed

        # Or the first use compiles a shared-memory operation that only inference needs.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
            config={"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
                    "zero_optimization": {"stage": stage}})

        def step(x):
            engine.backward(engine(x).square().mean())
            engine.step()
        return step
    return wrap


KINDS = {
    "DDP": _ddp,
    "DDP + ZeroRedundancyOptimizer": _zero_redundancy,
    "DDP + ShardedOptimizer": _zero_1_with_ddp,
    "ShardedOptimizer(reduce_gradients=True)": _zero_1,
    "ShardedGradientOptimizer": _zero_2,
    "fully_shard, not resharded": _fully_shard(False),
    "FullyShardedModel": _zero_3,
    "fully_shard": _fully_shard(True),
}
if importlib.util.find_spec("deepspeed"):
    KINDS |= {f"DeepSpeed, stage {stage}": _deepspeed(stage) for stage in range(4)}
