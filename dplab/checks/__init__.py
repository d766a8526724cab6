"""Exercises that check themselves and say what is wrong: `check`, `hint`, `solution`, `progress`.

The exercises are in `dplab.exercises`, one file each; here is what judges an answer. Each exercise
has a slug, such as ``"average-gradients"``, which names its file and stays its own for good, and a
number, such as ``"4.2"`` or ``"B.1"``, which says where it stands today. All functions take either.
"""

import functools
import importlib
import json
import pkgutil
import re
from pathlib import Path

from dplab import drills, exercises
from dplab.checks import outcomes, own
from dplab.checks.exercise import NOT_ATTEMPTED, PASSED, Exercise, Verdict
from dplab.desk import cards, course, guesses, kept, record
from dplab.spawn.parent.output import in_notebook, ipython

__all__ = ["Exercise", "check", "every_exercise", "find", "hint", "mine", "progress", "reset",
           "solution", "solution_source", "whose"]

_CALL_OF_RESET = re.compile(
    r"""^(?:dplab\.)?reset\( *["']?([\w.-]+)["']? *\)[ ;]*(?:#.*)?$""", re.MULTILINE)


def check(id: str, *objects) -> None:
    """Runs the reader's code on real ranks and shows one of four outcomes; raises nothing.

    ``id`` is the exercise's slug or number; ``objects`` is what the exercise asks for.
    """
    exercise = find(id)
    if exercise is not None:
        judge(exercise, *objects)


def judge(exercise: Exercise, *objects) -> Verdict:
    """Judges the reader's code, notes the outcome, and shows it."""
    verdict = _for_another(exercise, objects) or outcomes.watched(exercise, objects)
    saved = verdict.outcome == NOT_ATTEMPTED or record.update(
        "exercises", exercise.slug, functools.partial(_note, outcome=verdict.outcome))
    note = own.keep(exercise, *objects) if verdict.outcome == PASSED else ""
    outcomes.show_verdict(exercise, verdict, following=_after(exercise), saved=saved, note=note)
    _offer_help(exercise, verdict.outcome)
    return verdict


def hint(id: str) -> None:
    """Shows the next hint."""
    exercise = find(id)
    if exercise is None:
        return
    count = len(exercise.hints)
    number = 0

    def take(entry):
        nonlocal number
        number = min(entry.get("hints", 0), count)
        entry["hints"] = min(number + 1, count)

    record.update("exercises", exercise.slug, take)
    outcomes.show_hint(exercise, number)


def mine(id: str):
    """The function or class that you wrote for an exercise, once it has passed; until then, the
    course's. One line says which. It works on ranks as anything that a notebook defines.

    ``id`` is the exercise's slug or number, or "ring-all-reduce", which the course makes of two of
    yours. Raises ValueError for another.
    """
    part = own.given(_part_or_error(id))
    if own.is_asked_by_the_reader():
        print(part.line)
    return part.value


def whose(id: str) -> str:
    """Whose part `mine` gives for this exercise: ``"yours"`` or ``"the course's"``.

    Raises ValueError for another.
    """
    return "yours" if own.given(_part_or_error(id)).is_readers else "the course's"


def solution(id: str) -> None:
    """Shows the course's version in a fold, and before it yours, if you have passed."""
    exercise = find(id)
    if exercise is not None:
        record.update("exercises", exercise.slug, _note_solution)
        outcomes.show_solution(exercise, own.source_of(exercise))


def reset(id: str) -> None:
    """Forgets how far you were with the exercise, and gives you its stub once more.

    In a notebook, the stub takes the place of the call, so that Run All does not call it again.
    """
    exercise = find(id)
    if exercise is None:
        return
    record.forget("exercises", exercise.slug)
    aside = kept.set_aside(exercise.slug)
    words = f"The answer with which you passed is kept as `{aside}`. " if aside else ""
    stub = course.stub_of(exercise.chapter, exercise.slug)
    as_it_ran = _cell_that_runs()
    cell = _with_stubs(as_it_ran)
    if stub is None:
        words += "The course's notebooks are not beside the package, so its stub is not at hand."
    elif cell != as_it_ran:
        ipython().set_next_input(cell, replace=True)
        stub = ""
        words += ("The stub is in this cell now, in place of the call, so that Run All does not "
                  "reset the exercise again. Your own cell is left alone.")
    else:
        words += "Here is the stub as it was."
    cards.card(f"Exercise {exercise.number}: as if never tried", words, stub or "")


def progress(*, export: str | Path | None = None, code: bool = False) -> None:
    """Shows how far you are: by chapter, and in each that you have begun, by exercise.

    ``export`` names a JSON file to write instead, for an instructor to collect: for each exercise
    whether it is passed, how many tries and hints that took; and the guesses. With ``code``, your
    own answers too. ``python -m dplab.checks.classroom`` makes one table of many such files.
    """
    entries = record.entries("exercises")
    if export is None:
        last = {slug: entry["outcome"] for slug, entry in entries.items() if entry.get("outcome")}
        outcomes.show_progress(every_exercise(), last, guesses.scores(), drills.scores())
        return
    rows = []
    for exercise in every_exercise():
        entry = entries.get(exercise.slug, {})
        rows.append({
            "exercise": exercise.slug, "number": exercise.number,
            "passed": entry.get("outcome") == PASSED, "tries": entry.get("tries", 0),
            "hints": entry.get("hints", 0),
            "solution seen before": entry.get("solution_seen", False),
            **({"code": own.source_of(exercise)} if code else {})})
    text = json.dumps({"edition": record.EDITION, "exercises": rows,
                       "guesses": record.entries("guesses"), "drills": record.entries("drills")},
                      indent=1)
    try:
        Path(export).write_text(text)
    except OSError as error:
        cards.card(f"Progress could not be written to {export}", f"{error.strerror}.",
                   color=cards.RED)
        return
    cards.card(f"Progress written to {export}", "It holds no code of yours." if not code else "")


def solution_source(id: str) -> str:
    """The reference solution as the source of the name that the exercise asks for."""
    exercise = find(id)
    if exercise is None:
        raise ValueError(f"there is no exercise {id!r}")
    return exercise.solution_source()


@functools.cache
def every_exercise() -> tuple[Exercise, ...]:
    """All exercises in the order of the course."""
    found = map(_of_file, _files())
    return tuple(sorted(found, key=lambda each: (course.place(each.chapter), each.number)))


def _files():
    """The names of the exercises' files."""
    return [module.name for module in pkgutil.iter_modules(exercises.__path__)]


@functools.cache
def _of_file(name):
    """The exercise of a file of `dplab.exercises`: of its own classes, the one with a number."""
    module = importlib.import_module(f"{exercises.__name__}.{name}")
    [kind] = (kind for kind in vars(module).values() if isinstance(kind, type)
              and kind.__module__ == module.__name__ and "number" in vars(kind))
    return kind()


def find(id: str) -> Exercise | None:
    """The exercise of this slug or number; for another, None, and a card that lists them all."""
    exercise = _known(id)
    if exercise is None:
        outcomes.show_unknown(id, every_exercise())
    return exercise


def _known(id):
    """The exercise of this slug or number, which may be given as a number too; else None."""
    file = str(id).replace("-", "_")
    if file in _files():
        return _of_file(file)
    return next((exercise for exercise in every_exercise()
                 if str(id) == exercise.number), None)


def _part_or_error(id):
    """The same, or a part that the course makes of the reader's; ValueError for another."""
    exercise = own.of_the_course(id) or _known(id)
    if exercise is None:
        raise ValueError(outcomes.unknown(id, every_exercise()))
    return exercise


def _cell_that_runs():
    """Its source as the reader wrote it; outside of a notebook, nothing."""
    return ipython().history_manager.input_hist_raw[-1] if in_notebook() else ""


def _with_stubs(cell):
    """The cell with the stub in place of each line that calls `reset`."""
    def stub(call):
        exercise = _known(call[1])
        return (exercise and course.stub_of(exercise.chapter, exercise.slug)) or call[0]

    return _CALL_OF_RESET.sub(stub, cell)


def _for_another(exercise, objects):
    """A verdict on the answer to another exercise, which is not judged; else None."""
    name = getattr(objects[0], "__name__", "") if len(objects) == 1 else ""
    others = [each for each in every_exercise() if each.name == name]
    if not others or exercise.name == name:
        return None
    return Verdict(NOT_ATTEMPTED, f"`{name}` is the answer to exercise {others[0].number}. This "
                                  f"one asks for `{exercise.name}`.")


def _note(entry, outcome):
    """Counts the tries up to the first pass; a pass stays a pass."""
    if entry.get("outcome") != PASSED:
        entry["tries"] = entry.get("tries", 0) + 1
        entry["outcome"] = outcome


def _note_solution(entry):
    """Whether it was seen before the exercise was passed."""
    if entry.get("outcome") != PASSED:
        entry["solution_seen"] = True


def _after(exercise):
    """The next exercise, or None; the path leads into no appendix, and from none to another."""
    in_order = every_exercise()
    following = next(iter(in_order[in_order.index(exercise) + 1:]), None)
    if following and following.chapter in {*course.APPENDICES} - {exercise.chapter}:
        return None
    return following


def _offer_help(exercise, outcome):
    slug = exercise.slug
    actions, words = {}, []
    if outcome != PASSED:
        actions["Hint"] = functools.partial(hint, slug)
        words.append(f'dplab.hint("{slug}")')
    if outcome != NOT_ATTEMPTED:
        actions["Solution"] = functools.partial(solution, slug)
        words.append(f'dplab.solution("{slug}")')
    cards.buttons(actions, "   ".join(words))
