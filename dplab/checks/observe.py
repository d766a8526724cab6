"""What attempts do on ranks: one attempt by itself, or many known mistakes in turn."""

import contextlib
import math
import os
import pickle
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from dplab import RankError, run
from dplab.checks import trials
from dplab.checks.compare import COMMUNICATED
from dplab.measure import CallLog


def alone(task: Callable[[object], dict], attempt, world_size: int, *, seconds: float,
          quiet: bool = False) -> list[dict] | RankError:
    """The ranks' facts, ``task(attempt)`` on each, or the RankError in place of them.

    ``quiet``: nobody sees what the ranks write.
    """
    try:
        return run(_facts, world_size, task, attempt, quiet, timeout=seconds, backend="gloo")
    except RankError as error:
        return error


TWICE = ("the first time", "the first time, looked at later", "the second time")


def twice(trial: Callable[[object], dict], attempt) -> dict:
    """The trial's facts, what has become of them after another trial, and those of that one."""
    first = _arrived(trial(attempt))
    kept = pickle.loads(pickle.dumps(first))
    with trials.other_data():
        second = _arrived(trial(attempt))
    return dict(zip(TWICE, (kept, first, second), strict=True))


def in_turn(task: Callable[[object], dict], attempts: Sequence, world_size: int, *,
            seconds: float, until: float = math.inf) -> list[list[dict] | None]:
    """The ranks' facts of each attempt, quietly; None for an attempt that its ranks do not survive.

    They are fewer than the attempts where the time ``until`` comes first. One set of ranks tries as
    many attempts as it can: fresh ranks for each would take most of a check's time.
    """
    outcomes: list[list[dict] | None] = []
    while len(outcomes) < len(attempts) and (left := until - time.monotonic()) > 0:
        outcomes += _until_one_fails(task, attempts[len(outcomes):], world_size,
                                     min(seconds, left))
    return outcomes if time.monotonic() < until else outcomes[:-1]  # the last one may be cut off


def _until_one_fails(task, attempts, world_size, seconds):
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(RankError):
            run(_facts_in_turn, world_size, task, attempts, folder, timeout=seconds,
                backend="gloo")
        outcomes = []
        for number in range(len(attempts)):
            if not list(Path(folder).glob(f"{number}.*.done")):
                return [*outcomes, None]
            outcomes.append([pickle.loads(Path(folder, f"{number}.{rank}").read_bytes())
                             for rank in range(world_size)])
        return outcomes


def _facts_in_turn(task, attempts, folder):
    """Writes each attempt's facts, and that it is done once every rank has come to the end of it.

    A rank that makes another call than the others meets their barrier, and the run fails.
    """
    rank, stores = dist.get_rank(), _world.pg_map
    backend, store = stores[dist.group.WORLD]
    for number, attempt in enumerate(attempts):
        # As in fresh ranks: their seed, and a store without the keys of others.
        random.seed(rank)
        numpy.random.seed(rank)
        torch.manual_seed(rank)
        stores[dist.group.WORLD] = backend, dist.PrefixStore(f"attempt {number}", store)
        facts = _facts(task, attempt, quiet=number == 0)
        place = Path(folder, f"{number}.{rank}")
        place.write_bytes(pickle.dumps(facts))
        dist.barrier()
        place.with_suffix(f".{rank}.done").touch()


def _facts(task, attempt, quiet):
    if quiet:
        _silence()
    # Of collectives' older names, which chapters allow; the reader's verdict comes right below.
    warnings.simplefilter("ignore", FutureWarning)
    with CallLog() as log:
        facts = task(attempt)
    return {**_arrived(facts), COMMUNICATED: log.count() > 0}


def _arrived(facts):
    """With the values of functional collectives, whose tensors may still be under way."""
    return {fact: value.wait() if hasattr(value, "trigger_wait") else value
            for fact, value in facts.items()}


def _silence():
    """Nobody sees what this rank writes from here on, be it Python's or gloo's last words."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
