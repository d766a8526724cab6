"""Does a blocking ring on one thread run reliably beside backward? And what does it cost?

The same model is trained in three ways on the same ranks: with the stack's blocking ring after
backward, with the same ring on one communication thread with a group of its own, launched from
hooks, and with torch's asynchronous all-reduce, launched from hooks. Ranks pause at random in
forward, and ``--busy`` processes keep the cores busy. A run that does not end counts as a hang.
At the end, the ring runs beside a backward that only waits, as a CPU does beside a GPU.
``--steps 0`` runs that alone.

    python tests/tools/ring_beside_backward.py --runs 5 --steps 500 --busy 2

It found that such a ring is reliable, so the chain of the stack goes on in chapter 05:

  hangs     0 of 8 runs of 500 steps on 4 ranks, with random pauses, on 2 busy cores (load 20). The
            weights are those of training with torch's all-reduce, to 1e-8 (they moved by 1e-2).
  time      0.69 to 0.97 times the step with the same ring after backward, and 1.9 to 2.9 times the
            step with torch's asynchronous all-reduce from hooks. With a load of 2 it was 1.3 times
            the ring after backward: ranks that compute on all cores leave none to the thread, and
            each of its messages waits until the neighbour's process has a core.
  hidden    Beside a backward that only waits, as a CPU does beside a GPU, the thread hides all but
            the last bucket. Six layers wait 50 ms each, and each bucket takes 30 ms: 480 ms with
            the ring after backward, 330 ms with the thread, 0.69 times. 10 runs with a load of 9
            to 15 took 621 to 914 ms and 356 to 661 ms, 0.48 to 0.72 times: other processes delay
            the ring, and the thread hides part of that delay too. Chapter 05 needs such a backward
            to show that its own ring pays.
  commands  python tests/tools/ring_beside_backward.py --runs 8 --steps 500 --busy 0
            python tests/tools/ring_beside_backward.py --runs 8 --steps 0 --busy 0
"""

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from dplab import RankError, run
from dplab.exercises.gradient_buckets import average_in_buckets
from dplab.exercises.make_buckets import make_buckets
from dplab.exercises.overlapped_gradients import OverlappedGradients
from dplab.measure import EmulatedLink
from dplab.parallel import OverlappedDDP

WIDTHS = [192, 256, 320, 256, 192, 256, 320, 256, 64]
BUCKET_BYTES = 300_000
BATCH = 48
WAYS = ("after backward", "on a thread", "torch's asynchronous")


def trial(steps: int, ranks: int = 4, seed: int = 0, timeout: float = 600.0) -> dict:
    """``seconds`` of a step by way, and ``apart``: how far the weights of the ways are apart.

    The seconds are the medians of the slowest rank's. Raises RankError where a rank hangs or fails.
    """
    found = run(_train_in_all_ways, ranks, steps, seed, backend="gloo", timeout=timeout)
    seconds = {way: statistics.median(map(max, zip(*(each["seconds"][way] for each in found),
                                                   strict=True))) for way in WAYS}
    wholes = [each["weights"][way] for each in found for way in WAYS]
    return {"seconds": seconds,
            "apart": max((whole - wholes[0]).abs().max().item() for whole in wholes),
            "moved": (wholes[0] - found[0]["start"]).abs().max().item()}


def _train_in_all_ways(steps, seed):
    """The ways take turns, ten steps at a time, so that each meets the same load of the machine."""
    models = {way: _model() for way in WAYS}
    averages = _averages(models)
    start = _flat(models[WAYS[0]])
    optimizers = {way: torch.optim.SGD(model.parameters(), 0.01) for way, model in models.items()}
    pauses = random.Random(f"{seed} {dist.get_rank()}")
    seconds = {way: [] for way in WAYS}
    for first in range(0, steps, 10):
        for way in WAYS:
            for step in range(first, min(first + 10, steps)):
                seconds[way].append(_step(step, models[way], optimizers[way], averages[way],
                                          pauses))
    return {"seconds": seconds, "weights": {way: _flat(models[way]) for way in WAYS},
            "start": start}


def beside_waiting(ranks: int = 4, layers: int = 6) -> tuple[float, float]:
    """The seconds of a step with the ring after backward, and with the ring on a thread.

    Each layer's backward sleeps for 50 ms, and the emulated link takes 30 ms for its bucket.
    """
    message = 0.030 / (2 * (ranks - 1))
    return run(_wait_in_backward, ranks, layers, backend="gloo", link=EmulatedLink(1e9, message))[0]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.05)
        return gradient


def _wait_in_backward(count):
    layers = [nn.Linear(9, 9) for _ in range(count)]
    buckets = [list(layer.parameters()) for layer in reversed(layers)]
    after = _middle_of_three(layers, lambda: average_in_buckets(buckets))
    overlapped = OverlappedGradients(buckets, dist.new_group())
    return after, _middle_of_three(layers, overlapped.finish)


def _middle_of_three(layers, average):
    seconds = []
    for _ in range(3):
        x = torch.ones(2, 9)
        for layer in layers:
            layer.zero_grad()
            x = _Wait.apply(layer(x))
        dist.barrier()
        start = time.perf_counter()
        x.sum().backward()
        average()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _averages(models):
    """By way, what is called after backward."""
    after, threaded, torchs = (models[way] for way in WAYS)
    overlapped = OverlappedGradients(_buckets(threaded), dist.new_group())
    wrapped = OverlappedDDP(torchs, BUCKET_BYTES / 2**20)
    return {WAYS[0]: lambda: average_in_buckets(_buckets(after)),
            WAYS[1]: overlapped.finish, WAYS[2]: wrapped.finish_gradient_sync}


def _buckets(model):
    parameters = list(model.parameters())
    return [[parameters[index] for index in bucket] for bucket in make_buckets(
        [parameter.nbytes for parameter in parameters], BUCKET_BYTES)]


def _step(step, model, optimizer, average, pauses):
    """Seconds from the start of forward until the gradients are averaged."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(BATCH, WIDTHS[0], generator=generator)
    optimizer.zero_grad()
    start = time.perf_counter()
    loss = model(x).square().mean()
    if pauses.random() < 0.1:
        time.sleep(pauses.uniform(0, 0.01))
    loss.backward()
    average()
    seconds = time.perf_counter() - start
    optimizer.step()
    return seconds


def _model():
    torch.manual_seed(7)
    layers = [layer for pair in itertools.pairwise(WIDTHS)
              for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers)


def _flat(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def _burn():
    while True:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep cores busy")
    options = parser.parse_args()
    burners = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(options.busy)]
    for burner in burners:
        burner.start()
    if options.steps > 0:
        _print_trials(options)
    for _ in range(options.runs):
        after, threaded = beside_waiting()
        print(f"beside a backward that only waits: {1e3 * threaded:.0f} of {1e3 * after:.0f} ms, "
              f"{threaded / after:.2f} times after backward, load {os.getloadavg()[0]:.0f}",
              flush=True)


def _print_trials(options):
    failed = 0
    for seed in range(options.runs):
        try:
            found = trial(options.steps, options.ranks, seed, 3600.0)
        except RankError as error:
            failed += 1
            print(f"run {seed}: {error.kind}\n{error}", flush=True)
            continue
        times = found["seconds"]
        ratios = ", ".join(f"{times[WAYS[1]] / times[way]:.2f} times {way}"
                           for way in WAYS if way != WAYS[1])
        print(f"run {seed}: on a thread {1e3 * times[WAYS[1]]:.1f} ms a step: {ratios}; weights "
              f"moved by {found['moved']:.1e} and are {found['apart']:.1e} apart", flush=True)
    print(f"hung or failed: {failed} of {options.runs} runs of {options.steps} steps on "
          f"{options.ranks} ranks")


if __name__ == "__main__":
    main()
