"""What this machine lends to a program: cores and memory."""

import contextlib
import math
import os
from importlib.metadata import version
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")  # version 2; in a container, its own


def available_cores() -> int:
    """How many cores' worth of time this process may use.

    Fewer than `os.cpu_count` says where the process is bound to some cores, or in a container that
    has a quota.
    """
    cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
             else os.cpu_count() or 1)
    match _limit("cpu.max"):
        case [quota, period] if quota != "max":
            return min(cores, math.ceil(int(quota) / int(period)))
    return cores


def available_memory() -> int:
    """The bytes of memory that this process and others may use together."""
    memory = psutil.virtual_memory().total
    match _limit("memory.max"):
        case [limit] if limit != "max":
            return min(memory, int(limit))
    return memory


def describe_machine() -> str:
    """One line: cores, memory, and torch's version."""
    return (f"{available_cores()} cores, {available_memory() / 2**30:.0f} GiB of memory, "
            f"torch {version('torch')}")


def _limit(name):
    with contextlib.suppress(OSError):
        return (_CGROUP / name).read_text().split()
    return []
