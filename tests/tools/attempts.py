"""Attempts at exercises: two that many tests use, and the ranks that known mistakes share."""

import contextlib
import pickle
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from dplab import RankError, run
from dplab.exercises.exercise import Exercise

_OBSERVE = Exercise._observe


def stub(model):
    """All-reduce the gradients."""
    raise NotImplementedError("write me")


def raises(model):
    return model.no_such_thing


class SharedRanks:
    """What the ranks return for known mistakes, most of it from ranks that try many in turn.

    Fresh ranks for each mistake would take most of the tests' time. A mistake has ranks of its own
    where it raises, hangs or mismatches, and where its exercise starts ranks in its own way.
    """

    def __init__(self):
        self._outcomes = {}  # the ranks' facts, or the RankError, by exercise, attempt, world size
        self._tried = set()  # exercise, world size
        self._alone = set()  # exercise, attempt

    def in_place_of(self, observe: Callable, *, attempts_too: bool) -> Callable:
        """The same method, by which no known mistake runs twice at one world size.

        Without ``attempts_too`` that holds of what an attempt is compared with; what is judged
        itself has fresh ranks.
        """
        def shared(exercise, attempt, world_size, *, quiet=False):
            if not quiet and not attempts_too:
                return observe(exercise, attempt, world_size)
            place = exercise.slug, attempt, world_size
            if observe is _OBSERVE and place[::2] not in self._tried:
                self._tried.add(place[::2])
                self._try_all(exercise, world_size)
            if place not in self._outcomes:
                self._outcomes[place] = observe(exercise, attempt, world_size, quiet=True)
            return self._outcomes[place]

        return shared

    def _try_all(self, exercise, world_size):
        attempts = [mistake.attempt for mistake in exercise.mistakes
                    if not mistake.hangs and (exercise.slug, mistake.attempt) not in self._alone]
        while attempts:
            outcomes = _tried_in_turn(exercise, attempts, world_size)
            for attempt, facts in zip(attempts, outcomes, strict=False):
                if facts is None:
                    self._alone.add((exercise.slug, attempt))
                else:
                    self._outcomes[exercise.slug, attempt, world_size] = facts
            attempts = attempts[len(outcomes):]


def _tried_in_turn(exercise: Exercise, attempts: Sequence[Callable], world_size: int) -> list:
    """For each attempt, up to one at which the ranks end: their facts, or None for that one."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(RankError):
            run(_facts_in_turn, world_size, exercise, attempts, folder,
                timeout=exercise.seconds, backend="gloo")
        outcomes = []
        for number in range(len(attempts)):
            if not list(Path(folder).glob(f"{number}.*.done")):
                return [*outcomes, None]
            outcomes.append([pickle.loads(Path(folder, f"{number}.{rank}").read_bytes())
                             for rank in range(world_size)])
        return outcomes


def _facts_in_turn(exercise, attempts, folder):
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
        facts = exercise._facts(attempt, True)
        place = Path(folder, f"{number}.{rank}")
        place.write_bytes(pickle.dumps(facts))
        dist.barrier()
        place.with_suffix(f".{rank}.done").touch()
