"""Attempts at exercises: two that many tests use, two mistakes in one, and shared ranks."""

import inspect
import sys
from collections.abc import Callable


def stub(model):
    """All-reduce the gradients."""
    raise NotImplementedError("write me")


def raises(model, group=None):
    return model.no_such_thing


def from_shared_ranks(observe: Callable) -> Callable:
    """`Exercise._observe` in which a known mistake that is judged has no ranks of its own.

    It takes what the exercise has found for the other mistakes to be compared with; only what hangs
    or fails is run, once.
    """
    failed, under_way = {}, set()

    def shared(exercise, attempt, world_size, *, quiet=False):
        mistakes = [each for each in exercise.known if each.attempt is attempt]
        if mistakes and not mistakes[0].hangs and exercise.slug not in under_way:
            under_way.add(exercise.slug)
            found = exercise._outcomes_of(exercise.known, world_size, [])[mistakes[0]]
            under_way.remove(exercise.slug)
            if isinstance(found, list):
                return found
        place = exercise.slug, attempt, world_size
        if place not in failed:
            failed[place] = observe(exercise, attempt, world_size, quiet=True)
        return failed[place]

    return shared


def with_both(first: Callable, second: Callable) -> Callable | None:
    """An attempt that makes both mistakes; None where they are not made by one function, or set the
    same thing wrong.
    """
    (maker, wrong), (other, also_wrong) = _making(first), _making(second)
    if maker is None or maker is not other or wrong.keys() & also_wrong.keys():
        return None
    return maker(**wrong, **also_wrong)


def _making(attempt):
    """The function that made the attempt, and which of its options are not as by default."""
    maker = getattr(sys.modules.get(getattr(attempt, "__module__", None)),
                    getattr(attempt, "__qualname__", "").partition(".<locals>")[0], None)
    if not inspect.isfunction(maker) or maker is attempt:
        return None, {}
    functions = [each for each in vars(attempt).values() if inspect.isfunction(each)] if isinstance(
        attempt, type) else [attempt]
    found = {name: cell.cell_contents for function in functions for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True)}
    options = inspect.signature(maker).parameters
    return maker, {name: value for name, value in found.items()
                   if name in options and value is not options[name].default}
