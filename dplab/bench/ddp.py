"""A training step of the course's DDPs beside torch's: seconds and their ratio, in one run."""

import statistics

import torch
from torch import nn

from dplab import run
from dplab.bench.results import spread
from dplab.bench.training_step import WRAPPERS, training_step
from dplab.measure import EmulatedLink
from dplab.workloads.timed_steps import slowest_seconds


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
    print(f"{options.layers} layers of {options.width}×{options.width}, {options.batch} samples a "
          f"rank, buckets of {options.bucket:g} MiB; median of {options.rounds} rounds, least and "
          "most")
    for ranks in options.ranks:
        for where in (None, link):
            times = run(timed, ranks, options, link=where, backend="gloo", timeout=600)[0]
            base = statistics.median(times["DDP"])
            head = f"{ranks} ranks, {where or 'real gloo'}"
            print(f"\n{head:70}{'ms a step':>26}{'÷ torch':>9}")
            for name, seconds in times.items():
                milliseconds = [1000 * each for each in seconds]
                print(f"  {'torch DDP' if name == 'DDP' else name:68}{spread(milliseconds):>26}"
                      f"{statistics.median(seconds) / base:8.2f}×")


def timed(options):
    """Kind of DDP: the seconds that one step took the slowest rank, in each round but the first."""
    steps = {name: training_step(name, equal_layers(options), mean_square, torch.optim.SGD,
                                 bucket_mb=options.bucket, lr=1e-3) for name in WRAPPERS}
    x = torch.randn(options.batch, options.width)
    times = {name: [] for name in steps}
    for _ in range(options.rounds + 3):
        for name, step in steps.items():
            times[name].append(slowest_seconds(step, x))
    return {name: seconds[3:] for name, seconds in times.items()}


def equal_layers(options):
    """``options.layers`` of ``options.width``, the same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU())
                           for _ in range(options.layers)])


def mean_square(model, x):
    return model(x).square().mean()
