"""A training step of the course's ZeRO-1, 2 and 3 beside torch's and DeepSpeed's, in one run."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from dplab import run
from dplab.bench.results import spread
from dplab.bench.training_step import HAS_DEEPSPEED, training_step
from dplab.measure import WireMeter

LAYERS, BATCH, WARM_UP = 8, 64, 3
BASE = "fully_shard, reshard_after_forward=True"
KINDS = ["DDP", "ZeroRedundancyOptimizer", "ShardedOptimizer",
         "ShardedOptimizer, reduce_gradients=True", "ShardedGradientOptimizer",
         "fully_shard, reshard_after_forward=False", "FullyShardedModel", BASE]
KINDS += [f"DeepSpeed {stage}" for stage in range(4)] if HAS_DEEPSPEED else []


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--rounds", type=int, default=25,
                        help="each times one step of every kind, in turn (default 25)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (default 1024)")


def main(options):
    size = 4 * LAYERS * (options.width + 1) * options.width
    print(f"gloo, float32, AdamW; {LAYERS} layers of {options.width}×{options.width}, "
          f"M = {size / 2**20:.1f} MiB, {BATCH} samples a rank; median of {options.rounds} "
          "rounds, least and most")
    if not HAS_DEEPSPEED:
        print("DeepSpeed is not installed")
    for ranks in options.ranks:
        times, sent = run(measured, ranks, options.width, options.rounds, backend="gloo",
                          timeout=900)[0]
        share = (ranks - 1) / ranks
        print(f"\n{f'{ranks} ranks, f = (N−1)/N = {share:.3g}':42}{'ms a step':>26}{'ratio':>9}"
              f"{'bytes ÷ M':>11}{'÷ fM':>7}")
        for name, seconds in times.items():
            ratio = statistics.median(seconds) / statistics.median(times[BASE])
            moved = sent[name] / size
            print(f"{name:42}{spread([1000 * each for each in seconds]):>26}{ratio:8.2f}×"
                  f"{moved:11.3f}{moved / share:7.2f}")


def measured(width, rounds):
    """Kind: the seconds that a step took the slowest rank, each round; and its bytes per rank."""
    steps = {}
    for name in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU())
                                for _ in range(LAYERS)])
        steps[name] = training_step(
            name, model, mean_square, torch.optim.AdamW, units=list(model), lr=1e-3,
            bucket_mb=4 if name == "ShardedGradientOptimizer" else 25)
    x = torch.randn(BATCH, width)
    times, sent = {name: [] for name in steps}, {}
    for number in range(rounds + WARM_UP):
        for name, step in steps.items():
            if number >= WARM_UP:
                times[name].append(slowest_seconds(step, x))
                continue
            with WireMeter() as wire:
                step(x)
            # The least of them: the loopback may have other users.
            sent[name] = min(wire.bytes_per_rank, sent.get(name, wire.bytes_per_rank))
    return times, sent


def mean_square(model, x):
    return model(x).square().mean()


def slowest_seconds(step, x):
    """How long the step takes the slowest rank, once all are ready."""
    dist.barrier()
    begin = time.perf_counter()
    step(x)
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()
