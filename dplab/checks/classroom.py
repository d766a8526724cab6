"""``python -m dplab.checks.classroom NAME…``: the progress of a class, in one table.

Each NAME is a student's: a file that ``dplab.progress(export=…)`` wrote, or the folder that holds
their progress (``~/.dplab``, or their DPLAB_HOME). Only JSON is read, and no code of a student is
run. The files are the students' own, and can be edited: they show where a class is, and prove
nothing.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dplab.checks import every_exercise
from dplab.checks.exercise import PASSED, Exercise
from dplab.desk import course, record

MOST = 1_000_000  # tries or hints that somebody may have taken


class NoProgress(Exception):
    """A file that holds nobody's progress. The text says which, and why."""


@dataclass
class Entry:
    """What is known of a student and an exercise. ``seen``: the solution, before it was passed."""

    passed: bool = False
    tries: int = 0
    hints: int = 0
    seen: bool = False

    @property
    def begun(self) -> bool:
        return bool(self.tries or self.hints or self.seen)


@dataclass
class Student:
    """``exercises``: by slug, those that were begun; ``jobs``: how many sick jobs are solved."""

    name: str
    exercises: dict[str, Entry] = field(default_factory=dict)
    jobs: int = 0

    def of(self, exercise: Exercise) -> Entry:
        return self.exercises.get(exercise.slug, Entry())


def read(path: Path) -> Student:
    """The student's progress; nothing begun, where their folder has no file yet.

    Raises NoProgress.
    """
    student = Student(name_of(path))
    file = path
    try:
        if path.is_dir():
            file = path / "progress.json"
            if not file.exists():
                return student
        kept = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoProgress(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NoProgress(f"{file} is no JSON file. {student.name} can export it again") from error
    if not isinstance(kept, dict) or kept.get("edition") != record.EDITION:
        raise NoProgress(f"{file} holds no progress of this edition of the course")
    try:
        student.exercises = dict(_entries(kept["exercises"]))
        student.jobs = sum(bool(entry.get("solved")) for entry in kept["drills"].values())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoProgress(f"{file} is damaged. {student.name} should export it again") from error
    return student


def _entries(exercises):
    if isinstance(exercises, list):  # as exported
        for row in exercises:
            yield row["exercise"], Entry(bool(row["passed"]), _count(row["tries"]),
                                         _count(row["hints"]), bool(row["solution seen before"]))
    else:  # as kept
        for slug, entry in exercises.items():
            yield slug, Entry(entry.get("outcome") == PASSED, _count(entry.get("tries", 0)),
                              _count(entry.get("hints", 0)), bool(entry.get("solution_seen")))


def _count(value):
    if not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"{value!r} counts nothing")
    return value


def name_of(path: Path) -> str:
    """ada, of ``ada.json``, ``~ada/.dplab`` or ``/srv/class/ada``."""
    parts = [part.removesuffix(".json") for part in path.absolute().parts]
    return next((part for part in reversed(parts) if part not in (".dplab", "progress")), str(path))


def name_apart(students: Mapping[Path, Student]) -> None:
    """Those of one name get their paths for names."""
    names = [student.name for student in students.values()]
    for path, student in students.items():
        if names.count(student.name) > 1:
            student.name = str(path)


def table(students: Sequence[Student]) -> str:
    """A line for each student: exercises passed by chapter, and what help they took."""
    chapters = {chapter: list(group) for chapter, group in
                itertools.groupby(every_exercise(), lambda exercise: exercise.chapter)}
    head = ["", *map(course.label, chapters), "all", "hints", "solutions", "sick jobs"]
    of = ["of", *(str(len(group)) for group in chapters.values()), str(len(every_exercise())),
          "", "", ""]
    rows = []
    for student in students:
        passed = [sum(student.of(exercise).passed for exercise in group)
                  for group in chapters.values()]
        entries = student.exercises.values()
        rows.append([student.name, *(str(count or "·") for count in passed), str(sum(passed)),
                     str(sum(entry.hints for entry in entries)),
                     str(sum(entry.seen for entry in entries)), str(student.jobs)])
    return _aligned([head, of, *rows])


def hardest(students: Sequence[Student]) -> str:
    """A line for each exercise that somebody has begun, those that fewest passed first."""
    rows = []
    for exercise in every_exercise():
        begun = [entry for student in students if (entry := student.of(exercise)).begun]
        if begun:
            passed = sum(entry.passed for entry in begun)
            rows.append((passed / len(begun), [
                f"{exercise.number} {exercise.title}", str(len(begun)), str(passed),
                f"{statistics.median(entry.tries for entry in begun):g}",
                str(sum(entry.hints for entry in begun)),
                str(sum(entry.seen for entry in begun))]))
    rows.sort(key=lambda row: row[0])
    head = ["", "begun", "passed", "tries (median)", "hints", "solutions"]
    return _aligned([head, *(row for _, row in rows)])


def write_csv(students: Iterable[Student], file) -> None:
    """A line for each student and exercise."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["student", "number", "exercise", "passed", "tries", "hints",
                     "solution seen before"])
    for student in students:
        for exercise in every_exercise():
            entry = student.of(exercise)
            writer.writerow([student.name, exercise.number, exercise.slug, int(entry.passed),
                             entry.tries, entry.hints, int(entry.seen)])


def _aligned(rows):
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(
        cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables; returns 1 if a name could not be read, and 0 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m dplab.checks.classroom",
        description="Shows the progress of a class in one table.")
    parser.add_argument("names", nargs="+", type=Path, metavar="NAME",
                        help="what dplab.progress(export=…) wrote for a student, or the folder "
                        "of their progress (~/.dplab)")
    parser.add_argument("--csv", type=Path, metavar="FILE",
                        help="also write a line for each student and exercise, for a spreadsheet")
    options = parser.parse_args(arguments)
    paths = {os.path.realpath(path): path for path in options.names}  # each counts once
    if options.csv and (options.csv.suffix == ".json" or os.path.realpath(options.csv) in paths):
        parser.error(f"--csv writes over its FILE, and {options.csv} looks like a student's. "
                     "Name another one, such as --csv class.csv")
    by_path, faults = {}, []
    for path in paths.values():
        try:
            by_path[path] = read(path)
        except NoProgress as error:
            faults.append(str(error))
    name_apart(by_path)
    students = list(by_path.values())
    if students:
        print("Exercises passed, by chapter. hints: taken; solutions: seen before passing.\n")
        print(table(students))
        print("\nExercises that were begun, those that fewest passed first.\n")
        print(hardest(students))
    if options.csv:
        try:
            with options.csv.open("w", encoding="utf-8", newline="") as file:
                write_csv(students, file)
        except OSError as error:
            faults.append(f"{options.csv} cannot be written: {error.strerror}")
    for fault in faults:
        print(f"{fault}.", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
