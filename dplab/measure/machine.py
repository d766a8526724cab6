"""What this machine lends to a program."""

import os
from importlib.metadata import version

import psutil


def available_cores() -> int:
    """How many cores this process may run on: fewer than there are, where it is bound to some."""
    bound = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1


def describe_machine() -> str:
    """One line: cores, memory, and torch's version."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{available_cores()} cores, {memory:.0f} GiB of memory, torch {version('torch')}"
