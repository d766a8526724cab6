"""The course's collectives beside gloo's: seconds, their ratio, and bytes sent, in one run."""

import statistics

import torch
import torch.distributed as dist

from dplab import run
from dplab.bench.results import spread
from dplab.measure import WireMeter
from dplab.parallel import (
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from dplab.workloads.timed_steps import slowest_seconds

KIB, MIB = 2**10, 2**20
_GLOO_OF = {
    "ring_all_reduce": "gloo all_reduce", "tree_all_reduce": "gloo all_reduce",
    "naive_all_reduce": "gloo all_reduce", "ring_reduce_scatter": "gloo reduce_scatter",
    "ring_all_gather": "gloo all_gather",
}


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="KIB",
                        default=[1, 16, 256, 4 * KIB, 16 * KIB, 64 * KIB],
                        help="of the whole tensor, in KiB (default 1 to 65536)")
    parser.add_argument("--rounds", type=int, default=15,
                        help="each times every function once, in turn (default 15)")
    parser.add_argument("--metered-size", type=int, default=16 * KIB, metavar="KIB",
                        help="for the bytes sent, 16384 or more (default 16384)")


def main(options):
    ranks = options.ranks
    print(f"{ranks} ranks, float32, gloo on the loopback; median of {options.rounds} rounds, least "
          "and most")
    print(f"\n{'size':>10}  {'':20}{'ours, ms':>28}{'gloo, ms':>28}{'ours/gloo':>11}")
    for kib in options.sizes:
        times = run(timed, ranks, kib * KIB, options.rounds, backend="gloo", timeout=600)[0]
        for ours, gloo in _GLOO_OF.items():
            middle, base = statistics.median(times[ours]), statistics.median(times[gloo])
            print(f"{kib:6d} KiB  {ours:20}{_milliseconds(times[ours]):>28}"
                  f"{_milliseconds(times[gloo]):>28}{middle / base:10.2f}×")
    size = options.metered_size * KIB
    sent = run(metered, ranks, size, backend="gloo", timeout=600)[0]
    print(f"\nsent per rank for M = {size / MIB:g} MiB, by the kernel's counters, in units of M")
    for ours, gloo in _GLOO_OF.items():
        print(f"{ours:20}{sent[ours] / size:7.3f}   {gloo:20}{sent[gloo] / size:7.3f}"
              f"   ours/gloo {sent[ours] / sent[gloo]:.2f}")


def timed(nbytes, rounds):
    """Function: the seconds that one call took the slowest rank, in each round but the first."""
    functions = _functions(nbytes)
    calls = max(1, min(20, 4 * MIB // nbytes))  # one call on a small tensor is too short to time
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            times[name].append(slowest_seconds(_repeat, function, calls) / calls)
    return {name: values[1:] for name, values in times.items()}


def _repeat(function, calls):
    for _ in range(calls):
        function()


def metered(nbytes):
    """Function: bytes per rank on the loopback for one call."""
    sent = {}
    for name, function in _functions(nbytes).items():
        function()
        with WireMeter() as wire:
            function()
        sent[name] = wire.bytes_per_rank
    return sent


def _functions(nbytes):
    """All on the same tensor of zeros, which stay zeros however often they are added up."""
    ranks = dist.get_world_size()
    length = max(1, nbytes // 4 // ranks) * ranks
    tensor, chunk = torch.zeros(length), torch.zeros(length // ranks)
    return {
        "gloo all_reduce": lambda: dist.all_reduce(tensor),
        "ring_all_reduce": lambda: ring_all_reduce(tensor),
        "gloo reduce_scatter": lambda: dist.reduce_scatter_single(chunk, tensor),
        "ring_reduce_scatter": lambda: ring_reduce_scatter(tensor),
        "gloo all_gather": lambda: dist.all_gather_single(tensor, chunk),
        "ring_all_gather": lambda: ring_all_gather(chunk, tensor),
        "tree_all_reduce": lambda: tree_all_reduce(tensor),
        "naive_all_reduce": lambda: naive_all_reduce(tensor),
    }


def _milliseconds(seconds):
    return spread([1000 * each for each in seconds], digits=2)
