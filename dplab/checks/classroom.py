"""``python -m dplab.checks.classroom FILE…``: the progress of a class, in one table.

Each FILE is what ``dplab.progress(export=…)`` wrote for a student. Only JSON is read, and no code
of a student is run. The files are the students' own, and can be edited: they show where a class is,
and prove nothing.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dplab.checks import every_exercise
from dplab.desk import course, record

MOST = 1_000_000  # tries or hints that somebody may have taken


class NoProgress(Exception):
    """A file that holds nobody's progress. The text says which, and why."""


class Entry(NamedTuple):
    """What is known of a student and an exercise. ``seen``: the solution, before it was passed."""

    passed: bool
    tries: int
    hints: int
    seen: bool


class Student(NamedTuple):
    """``exercises``: by slug, those that were begun; ``jobs``: how many sick jobs are solved."""

    exercises: dict[str, Entry]
    jobs: int


def read(file: Path) -> Student:
    """The student's progress. Raises NoProgress."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or kept.get("edition") != record.EDITION:
            raise NoProgress(f"{file} holds no progress of this edition of the course")
        found = {row["exercise"]: Entry(row["passed"], row["tries"], row["hints"],
                                        row["solution seen before"]) for row in kept["exercises"]}
        if not all(isinstance(count, int) and 0 <= count <= MOST
                   for entry in found.values() for count in entry):
            raise ValueError("a count that is none")
        solved = sum(bool(each.get("solved")) for each in kept["drills"].values())
    except OSError as error:
        raise NoProgress(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise NoProgress(f"{file} is damaged. Its student should export it again") from error
    return Student({slug: entry for slug, entry in found.items() if any(entry)}, solved)


def table(students: Mapping[str, Student]) -> str:
    """A line for each student: exercises passed by chapter, and what help they took."""
    chapters = {chapter: [each.slug for each in group] for chapter, group in
                itertools.groupby(every_exercise(), lambda exercise: exercise.chapter)}
    rows = [["", *map(course.label, chapters), "all", "hints", "solutions", "sick jobs"],
            ["of", *map(len, chapters.values()), len(every_exercise()), "", "", ""]]
    for name, (exercises, jobs) in students.items():
        passed = [sum(exercises[slug].passed for slug in slugs if slug in exercises)
                  for slugs in chapters.values()]
        rows.append([name, *(count or "·" for count in passed), sum(passed),
                     sum(entry.hints for entry in exercises.values()),
                     sum(entry.seen for entry in exercises.values()), jobs])
    return _aligned(rows)


def hardest(students: Mapping[str, Student]) -> str:
    """A line for each exercise that somebody has begun, those that fewest passed first."""
    rows = []
    for exercise in every_exercise():
        if begun := [each.exercises[exercise.slug] for each in students.values()
                     if exercise.slug in each.exercises]:
            passed, tries, hints, seen = zip(*begun, strict=True)
            rows.append([f"{exercise.number} {exercise.title}", len(begun), sum(passed),
                         f"{statistics.median(tries):g}", sum(hints), sum(seen)])
    rows.sort(key=lambda row: row[2] / row[1])
    return _aligned([["", "begun", "passed", "tries (median)", "hints", "solutions"], *rows])


def _aligned(rows):
    """The first column to the left, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(
        cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables; returns 1 if a file could not be read, and 0 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m dplab.checks.classroom",
        description="Shows the progress of a class in one table.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help="what dplab.progress(export=…) wrote for a student")
    files = list(dict.fromkeys(parser.parse_args(arguments).files))  # each counts once
    names = [file.stem for file in files]
    students, faults = {}, []
    for file, name in zip(files, names, strict=True):
        try:
            students[name if names.count(name) == 1 else str(file)] = read(file)
        except NoProgress as error:
            faults.append(str(error))
    if students:
        print("Exercises passed, by chapter. hints: taken; solutions: seen before passing.\n")
        print(table(students))
        print("\nExercises that were begun, those that fewest passed first.\n")
        print(hardest(students))
    for fault in faults:
        print(f"{fault}.", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
