"""A training step of the course's DDPs beside torch's: seconds and their ratio, in one run."""

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab import run
from dplab.measure import EmulatedLink
from dplab.parallel import BucketedDDP, ManualDDP, OverlappedDDP


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--rounds", type=int, default=25,
                        help="each times one step of every kind, in turn (default 25)")
    parser.add_argument("--layers", type=int, default=16, help="of the model (default 16)")
    parser.add_argument("--width", type=int, default=512, help="of each layer (default 512)")
    parser.add_argument("--batch", type=int, default=128, help="samples of a rank (default 128)")
    parser.add_argument("--bucket", type=float, default=2.0, metavar="MIB", help="default 2")
    parser.add_argument("--bandwidth", type=float, default=0.5, metavar="GB/S",
                        help="of the emulated link (default 0.5)")


def main(options):
    link = EmulatedLink(1e9 * options.bandwidth, 5e-5)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; {options.layers} layers of "
          f"{options.width}×{options.width}, {options.batch} samples a rank, buckets of "
          f"{options.bucket:g} MiB; medians of {options.rounds} rounds, least in brackets")
    for ranks in options.ranks:
        for where in (None, link):
            times = run(timed, ranks, options, link=where, backend="gloo", timeout=600)[0]
            base = statistics.median(times["torch DDP"])
            print(f"\n{ranks} ranks, {where or 'real gloo'}")
            for name, seconds in times.items():
                middle = statistics.median(seconds)
                print(f"  {name:14}{1000 * middle:9.1f} ms ({1000 * min(seconds):.1f})"
                      f"{middle / base:9.2f}×")


def timed(options):
    """Kind of DDP: the seconds that one step took the slowest rank, in each round but the first."""
    wrappers = {
        "torch DDP": lambda model: DistributedDataParallel(model, bucket_cap_mb=options.bucket),
        "OverlappedDDP": lambda model: OverlappedDDP(model, options.bucket),
        "BucketedDDP": lambda model: BucketedDDP(model, options.bucket),
        "ManualDDP": ManualDDP,
    }
    models = {name: wrap(_model(options)) for name, wrap in wrappers.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3)
                  for name, model in models.items()}
    x = torch.randn(options.batch, options.width)
    times = {name: [] for name in models}
    for _ in range(options.rounds + 3):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            optimizers[name].zero_grad()
            model(x).square().mean().backward()
            if isinstance(model, ManualDDP):
                model.finish_gradient_sync()
            optimizers[name].step()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name].append(seconds.item())
    return {name: seconds[3:] for name, seconds in times.items()}


def _model(options):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU())
                           for _ in range(options.layers)])
