"""``python -m dplab.checks.classroom FILE…``: the progress of a class, in two tables.

Each FILE is what ``dplab.progress(export=…)`` wrote for a student. Only JSON is read, and no code
of a student is run. The files are the students' own, and can be edited: they show where a class is,
and prove nothing.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from dplab.checks import every_exercise
from dplab.desk import course, record
from dplab.drills.sick_job import print_table


def read(file: Path) -> dict:
    """What a student's file holds. Raises ValueError, whose text says what is wrong with it."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{file} cannot be read: its student should export it again") from None
    if not isinstance(kept, dict) or kept.get("edition") != record.EDITION:
        raise ValueError(f"{file} holds no progress of this edition of the course")
    return kept


def by_student(students: dict[str, dict]) -> list[list]:
    """A row for each student: exercises passed by chapter, and what help they took."""
    chapters = list(dict.fromkeys(each.chapter for each in every_exercise()))
    rows: list[list] = [
        ["", *map(course.label, chapters), "all", "hints", "solutions", "sick jobs"]]
    for name, kept in students.items():
        begun = {row["exercise"]: row for row in kept["exercises"]}
        passed = [sum(begun[each.slug]["passed"] for each in every_exercise()
                      if each.chapter == chapter and each.slug in begun) for chapter in chapters]
        rows.append([name, *passed, sum(passed), sum(row["hints"] for row in begun.values()),
                     sum(row["solution seen before"] for row in begun.values()),
                     sum(bool(each.get("solved")) for each in kept["drills"].values())])
    return rows


def by_exercise(students: dict[str, dict]) -> list[list]:
    """A row for each exercise that somebody has begun, those that fewest passed first."""
    rows = []
    for exercise in every_exercise():
        begun = [row for kept in students.values() for row in kept["exercises"]
                 if row["exercise"] == exercise.slug and (
                     row["passed"] or row["tries"] or row["hints"] or row["solution seen before"])]
        if begun:
            rows.append([f"{exercise.number} {exercise.title}", len(begun),
                         sum(row["passed"] for row in begun),
                         f"{statistics.median([row['tries'] for row in begun]):g}",
                         sum(row["hints"] for row in begun),
                         sum(row["solution seen before"] for row in begun)])
    rows.sort(key=lambda row: row[2] / row[1])
    return [["", "begun", "passed", "tries (median)", "hints", "solutions"], *rows]


def main(files: Sequence[str]) -> int:
    """Prints both tables; returns 1 if a file could not be read or none is named, else 0."""
    students, faults = {}, [] if files else [__doc__]
    for file in map(Path, files):
        try:
            students[file.stem] = read(file)
        except ValueError as error:
            faults.append(f"{error}.")
    if students:
        print("Exercises passed, by chapter. hints: taken; solutions: seen before passing.\n")
        print_table(*by_student(students))
        print("\nExercises that were begun, those that fewest passed first.\n")
        print_table(*by_exercise(students))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
