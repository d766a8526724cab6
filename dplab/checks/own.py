"""Whose part it is: what a reader wrote is kept when it passes, and `mine` gives it back."""

import contextlib
import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dplab.checks import compare
from dplab.checks.exercise import PASSED, Exercise
from dplab.desk import kept, record
from dplab.desk.definition import CannotWrite
from dplab.desk.edits import source_of as source_in_python
from dplab.spawn.rank import device as devices

COURSES = "the course's"

_being_given: list[str] = []  # slugs; a part may ask for others while it is defined


def keep(exercise: Exercise, attempt) -> str:
    """Keeps the attempt, which has just passed, as source. Returns a sentence for the reader.

    The source is tried on fresh ranks before it counts. They run the exercise's trial at its
    largest world size: the same code has just passed at the others.
    """
    if str(getattr(attempt, "__module__", "")).split(".")[0] == "dplab":
        return "This is the course's own code, so nothing is kept as yours."
    if kept.slug_of(attempt) == exercise.slug:
        return ""  # it is what was kept before
    place = kept.place(exercise.slug)
    try:
        source = kept.source_of(attempt, exercise.name, exercise.slug)
        largest = (max(exercise.world_sizes),)
        fault = exercise.rerun(kept.Kept(source, exercise.name, place), largest)
        if fault:
            raise CannotWrite(f"its source does not pass in a fresh process ({fault}).")
        kept.write(exercise.slug, source)
    except CannotWrite as error:
        earlier = " What you had kept before stays." if place.exists() else ""
        return f"It cannot be kept for `dplab.mine`: {error}{earlier}"
    except OSError as error:
        return f"It could not be kept for `dplab.mine` in `{place}`: {error.strerror}."
    _note(exercise, source, "")
    return f'It is kept: `dplab.mine("{exercise.slug}")` gives it in every notebook.'


class Given(NamedTuple):
    """What `dplab.mine` returns; whether it is the reader's; and one line that says so."""

    value: Any
    is_readers: bool
    line: str


def given(exercise: Exercise) -> Given:
    """The reader's part where it is kept and passes, or else the course's.

    ``exercise`` may be what `of_the_course` returns: then what it calls is the reader's or not.
    """
    if of_the_course(exercise.slug):
        parts = _own_parts(exercise)
        whose = [f"{name}, {'yours' if part.is_readers else COURSES}"
                 for name, part in parts.items()]
        return Given(kept.given(_on_own_parts(exercise, parts), exercise.slug),
                     all(part.is_readers for part in parts.values()),
                     f"{exercise.name}: made of {'; '.join(whose)}.")
    slug, place = exercise.slug, kept.place(exercise.slug)
    if slug in _being_given:  # yours uses itself: below it, the course's takes over
        return Given(kept.given(exercise.solution, slug), False, "")
    _being_given.append(slug)
    course = exercise.solution
    try:
        course = _on_own_parts(exercise, _own_parts(exercise))
        source = kept.read(slug)
        if source is None:
            passed = record.entries("exercises").get(slug, {}).get("outcome") == PASSED
            why = (f"since yours was not kept. Check exercise {exercise.number} again: its card "
                   "says why" if passed else f"until you pass exercise {exercise.number}")
            return Given(kept.given(course, slug), False, f"{exercise.name}: the course's, {why}.")
        value = kept.define(source, exercise.name, place)
        if not _fault(exercise, source):
            return Given(kept.given(value, slug), True,
                         f"{exercise.name}: yours, from {_in_short(place)}.")
        words = (f"yours no longer passes exercise {exercise.number}; dplab.check says why "
                 f"({_in_short(place)}).")
    except kept.Broken as error:
        words = f"yours cannot be used ({error})."
    finally:
        _being_given.pop()
    return Given(kept.given(course, slug), False,
                 f"{exercise.name}: the course's, since {words}")


def of_the_course(slug: str):
    """The row of the stack of this slug, if the course makes that part of the reader's parts."""
    row = _row(slug)
    return row if row and row.by == "course" and row.uses else None


def _row(slug):
    from dplab.checks.stack import PARTS  # which needs all exercises of the stack

    return next((part for part in PARTS if part.slug == slug), None)


def _own_parts(exercise):
    """What is given for each part of the stack that it calls, by name."""
    from dplab import checks

    row = _row(exercise.slug)
    used = [of_the_course(slug) or (_row(slug).by == "reader" and checks.find(slug))
            for slug in (row.uses if row else ())]
    return {part.name: given(part) for part in used if part}


def _on_own_parts(exercise, parts):
    """The course's version, which calls what `_own_parts` gave where some of it is the reader's."""
    own = {name: part.value for name, part in parts.items()}
    courses = vars(sys.modules[exercise.solution.__module__])
    if all(value is courses[name] for name, value in own.items()):
        return exercise.solution
    source = source_in_python(exercise.solution)
    return source.compiled(source.text, own)


def is_asked_by_the_reader() -> bool:
    """Whether no part asks for another while it is defined, and no rank asks but torchrun's 0."""
    is_first = devices.under_torchrun() and os.environ.get("RANK") == "0"
    return not _being_given and (is_first or not (devices.in_rank() or devices.under_torchrun()))


def source_of(exercise: Exercise) -> str | None:
    """What the reader wrote and passed with, without the file's header; None if there is none."""
    try:
        source = kept.read(exercise.slug)
    except kept.Broken:
        return None
    return source and kept.without_header(source)


def _in_short(place):
    """With ``~`` for the reader's home."""
    with contextlib.suppress(ValueError, RuntimeError):
        return Path("~", place.relative_to(Path.home()))
    return place


def _fault(exercise, source) -> str:
    """Why the kept source does not pass, or "". It runs if it or its check are new."""
    known = record.entries("exercises").get(exercise.slug, {}).get("kept", {})
    if known.get("of") == _of(exercise, source):
        return known.get("fault", "")
    if devices.in_rank() or devices.under_torchrun():
        return ""  # ranks cannot start ranks; the notebook has looked
    fault = exercise.rerun(
        kept.Kept(source, exercise.name, kept.place(exercise.slug)), exercise.world_sizes)
    _note(exercise, source, fault)
    return fault


def _note(exercise, source, fault):
    record.update("exercises", exercise.slug, lambda entry: entry.update(
        kept={"of": _of(exercise, source), "fault": fault}))


def _of(exercise, source):
    """What the outcome depends on: the source, the check, and what both run on."""
    return kept.digest(source, _check_of(type(exercise)), torch.__version__,
                       platform.python_version())


@functools.cache
def _check_of(kind):
    files = {sys.modules[each.__module__].__file__ for each in kind.__mro__ if each is not object}
    return kept.digest(*(Path(file).read_text() for file in sorted({*files, compare.__file__})))
