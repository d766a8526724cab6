"""Drills: sick training jobs that the reader diagnoses from their instruments.

`drill` hands one out, `scores` says how many are solved, and how many of these at the first try.
A file holds the jobs of one chapter.
"""

import importlib
import random
from typing import NamedTuple

from dplab.desk import record
from dplab.drills.sick_job import SickJob, key

__all__ = ["drill", "minutes", "scores"]

_OF_CHAPTER = {0: ("failing_reports", "FailingReport"),
               1: ("sliced_step", "SlicedStep"),
               2: ("wrong_gradients", "WrongGradient"),
               4: ("silent_failures", "SilentFailure"),
               5: ("late_buckets", "LateBuckets"),
               6: ("slow_jobs", "SlowJob"),
               7: ("wrong_steps", "WrongSteps"),
               8: ("sharded_training", "ShardedTraining"),
               9: ("gathered_layers", "GatheredLayers"),
               10: ("wrapped_transformer", "WrappedTransformer"),
               11: ("flawed_plans", "FlawedPlan"),
               12: ("restarted_jobs", "RestartedJob"),
               13: ("rare_meetings", "RareMeetings")}


def drill(chapter: str, seed: int | None = None) -> SickJob:
    """A sick job of this chapter (``"04"``), with its complaint shown.

    Without a ``seed`` it is another one each time: first those that are not solved, and of these
    the ones that were handed out least, in a random order. With a seed it is the same job again.
    Raises ValueError for a chapter without drills, TypeError for a seed that is no integer.
    """
    kind = _kind(chapter)
    if seed is None:
        seed = _next_seed(kind)
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer such as 1234, not {seed!r}")
    job = kind(seed)
    job._keep(taken=job._kept().get("taken", 0) + 1)
    job._show()
    return job


class Score(NamedTuple):
    """How many of a chapter's jobs are solved, at the first try, and how many there are."""

    solved: int
    first_try: int  # of those, how many whose first answer was right
    total: int


def scores() -> dict[int, Score]:
    """For each chapter that has drills: how many jobs the reader has solved."""
    kept = record.entries("drills")
    found = {}
    for chapter in _OF_CHAPTER:
        cases = _kind(chapter).cases
        solved = [entry for case in cases
                  if (entry := kept.get(key(chapter, case), {})).get("solved")]
        found[chapter] = Score(len(solved), sum(entry.get("tries") == 1 for entry in solved),
                               len(cases))
    return found


def minutes(chapter: int) -> int:
    """How long a reader needs for one of this chapter's jobs."""
    return _kind(chapter).minutes


def _kind(chapter) -> type[SickJob]:
    try:
        module, name = _OF_CHAPTER[int(chapter)]
    except (KeyError, TypeError, ValueError):
        known = ", ".join(f'"{number:02d}"' for number in _OF_CHAPTER)
        raise ValueError(f"there are no drills for chapter {chapter!r}; there are for "
                         f"{known}") from None
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _next_seed(kind: type[SickJob]) -> int:
    """A seed whose job is one of those whose turn it is."""
    kept = record.entries("drills")

    def turn(case):
        entry = kept.get(key(kind.chapter, case), {})
        return bool(entry.get("solved")), entry.get("taken", 0)

    first = min(map(turn, kind.cases))
    return next(seed for seed in iter(lambda: random.randrange(1000, 10_000), None)
                if turn(kind(seed)._case) == first)
