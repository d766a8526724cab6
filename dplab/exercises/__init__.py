"""Exercises that check themselves and say what is wrong: `check`, `hint`, `solution`, `progress`.

An exercise is a class of one of the ``chapter_NN`` files: a goal, hints, a solution that is real
code, and the known mistakes, each a short wrong implementation with one sentence that explains it.
"""

import functools
import importlib
import pkgutil

from dplab.exercises import cards, record
from dplab.exercises.exercise import Exercise

__all__ = ["Exercise", "check", "every_exercise", "find", "hint", "progress", "solution",
           "solution_source"]


def check(id: str, *objects) -> None:
    """Runs the reader's code on real ranks and shows one of four outcomes; raises nothing.

    ``id`` is chapter and exercise, such as ``"4.1"``; ``objects`` is what the exercise asks for.
    """
    exercise = find(id)
    if exercise is None:
        return
    verdict = exercise.judge(*objects)
    saved = record.save_outcome(id, verdict.outcome)
    cards.show_verdict(exercise, verdict, saved=saved)


def hint(id: str) -> None:
    """Shows the next hint."""
    exercise = find(id)
    if exercise is not None:
        number = record.next_hint(id, len(exercise.hints))
        cards.show_hint(exercise, number)


def solution(id: str) -> None:
    """Shows the reference solution."""
    exercise = find(id)
    if exercise is not None:
        cards.show_solution(exercise)


def progress() -> None:
    """Shows every exercise with its last outcome, by chapter."""
    cards.show_progress(every_exercise(), record.outcomes())


def solution_source(id: str) -> str:
    """The reference solution as the source of the name that the exercise asks for."""
    exercise = find(id)
    if exercise is None:
        raise ValueError(f"there is no exercise {id!r}")
    return exercise.solution_source()


@functools.cache
def every_exercise() -> tuple[Exercise, ...]:
    """All exercises in the order of the course."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__)
                     if module.name.startswith("chapter_"))
    return tuple(kind() for name in modules
                 for kind in importlib.import_module(f"{__name__}.{name}").EXERCISES)


def find(id: str) -> Exercise | None:
    """The exercise of this id; for an unknown one, None, and a card that lists the known ones."""
    exercises = {exercise.id: exercise for exercise in every_exercise()}
    if id not in exercises:
        cards.show_unknown(id, exercises.values())
    return exercises.get(id)
