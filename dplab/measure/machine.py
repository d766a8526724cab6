"""What this machine lends to a program."""

import contextlib
import math
import os
from importlib.metadata import version
from pathlib import Path

import psutil

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of cgroups 2; in a container, its own


def available_cores() -> int:
    """How many cores' worth of time this process may use.

    Fewer than `os.cpu_count` says where the process is bound to some cores, or in a container that
    has a quota.
    """
    cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
             else os.cpu_count() or 1)
    with contextlib.suppress(OSError):
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            return min(cores, math.ceil(int(quota) / int(period)))
    return cores


def describe_machine() -> str:
    """One line: cores, memory, and torch's version."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{available_cores()} cores, {memory:.0f} GiB of memory, torch {version('torch')}"
