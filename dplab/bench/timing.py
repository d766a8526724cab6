"""How long something takes, all ranks together, and how that is written."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist


def slowest_seconds(function, *args) -> float:
    """The seconds that ``function(*args)`` takes the slowest rank; all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    function(*args)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def spread(times: Sequence[float], digits: int = 1) -> str:
    """The median, then least and most in brackets."""
    return (f"{statistics.median(times):.{digits}f} "
            f"({min(times):.{digits}f} to {max(times):.{digits}f})")
