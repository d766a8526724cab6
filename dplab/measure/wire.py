"""Bytes that really crossed the loopback interface, by the kernel's own counters."""

import sys

import psutil
import torch
import torch.distributed as dist

import dplab

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class WireMeter:
    """Counts what all ranks together put on the loopback during a ``with`` block.

    Every rank of the default group enters and leaves it together: both ends wait for all ranks.
    Afterwards ``bytes_per_rank`` (a float, bytes) is what crossed the interface divided by the
    world size, the same on every rank. Packet headers and the two barriers count too, as does
    whatever else uses the interface meanwhile: a notebook's messages cross the loopback. So measure
    16 MiB or more, print nothing inside, and run with ``backend="gloo"``: NVLink and shared memory
    cross no interface.
    """

    def __init__(self) -> None:
        self.bytes_per_rank: float | None = None

    def __enter__(self):
        self._start = self._read()
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None:
            self.bytes_per_rank = (self._read() - self._start) / dist.get_world_size()

    def _read(self) -> int:
        """The counter as rank 0 reads it while every rank waits."""
        dist.barrier()
        sent = psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent
        shared = torch.tensor([sent], dtype=torch.int64, device=dplab.device())
        dist.broadcast(shared, src=0)
        return int(shared.item())
