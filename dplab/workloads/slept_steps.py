"""A data-parallel job whose ranks sleep in place of computing, so that many fit on few cores.

As on GPUs, no rank takes a core from another one. Every collective is real: it starts when the last
rank has launched it, and an emulated link holds it back. The job consists of parts, functions as a
training script has them. A run with another function in the place of one part has a known fault.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dplab.measure import Trace
from dplab.measure.trace import STALLED


@dataclass(frozen=True)
class Sizes:
    """``forward`` and ``backward``: seconds of one layer's kernel; ``optimizer``: those of its own.

    Each layer's gradient is one bucket of ``bucket_bytes``. ``batches``: of all ranks together.
    """

    layers: int
    forward: float
    backward: float
    optimizer: float
    bucket_bytes: int
    batches: int


class Worker:
    """One rank with its buckets, in the order of backward, and its trace."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.trace = Trace()
        self.buckets = [torch.ones(sizes.bucket_bytes // 4) for _ in range(sizes.layers)]
        self._late = 0.0  # seconds that the sleeps so far were too long

    def kernel(self, name: str, seconds: float) -> None:
        """Computes for so long: sleeps, and notes a span.

        On a busy machine a sleep is too long, so the next one is that much shorter.
        """
        with self.trace.phase(name):
            begin = time.monotonic()
            time.sleep(max(0.0, seconds - self._late))
            self._late = max(0.0, self._late + time.monotonic() - begin - seconds)


# The parts


def count_batches(rank, ranks, batches):
    return batches // ranks


def load(worker):
    time.sleep(0.0005)  # the loader has the batch ready


def forward(worker):
    for _ in worker.buckets:
        worker.kernel("forward", worker.sizes.forward)


def backward(worker):
    works = []
    for bucket in worker.buckets:
        worker.kernel("backward", worker.sizes.backward)
        works.append(dist.all_reduce(bucket, async_op=True))
    return works


def save(number):
    if number % 4 == 3 and dist.get_rank() == 0:
        time.sleep(0.002)  # writes the checkpoint


@dataclass(frozen=True)
class Parts:
    """What `train` is made of."""

    count_batches: Callable = count_batches
    load: Callable = load
    forward: Callable = forward
    backward: Callable = backward
    save: Callable = save


def train(parts: Parts, worker: Worker, begin=lambda number: None) -> None:
    """Trains on this rank's batches. ``begin`` hears the number of each step. Every rank calls it.
    """
    mine = parts.count_batches(dist.get_rank(), dist.get_world_size(), worker.sizes.batches)
    for number in range(mine):
        begin(number)
        with worker.trace.phase("data", STALLED):
            parts.load(worker)
        parts.forward(worker)
        for work in parts.backward(worker):
            work.wait()
        worker.kernel("optimizer", worker.sizes.optimizer)
        parts.save(number)


def traced_steps(parts: Parts, sizes: Sizes) -> list[list]:
    """Trains; returns this rank's spans of each step. Every rank calls it."""
    worker, starts = Worker(sizes), []
    dist.barrier()
    with worker.trace:
        train(parts, worker, lambda number: starts.append(time.monotonic()))
    return [[span for span in worker.trace.spans if start <= span.start < end]
            for start, end in zip(starts, [*starts[1:], float("inf")], strict=True)]
