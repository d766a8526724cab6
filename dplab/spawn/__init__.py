"""Starts N ranks, runs a function on each, and brings back their values or a diagnosis."""

from dplab.spawn.backend import device
from dplab.spawn.errors import RankError, expect_failure
from dplab.spawn.launch import run
from dplab.spawn.start import warm_up

__all__ = ["RankError", "device", "expect_failure", "run", "warm_up"]
