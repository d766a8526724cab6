"""The reader's answers to exercises: taken from one notebook by slug, and put into another."""

import re

from dplab.lab.notebook import cleared_cell

NOTE = "# Above is the course's stub as it is now. Below is your answer."
_HEAD = re.compile(r"^\s*(?:async )?(?:def|class) .*", re.MULTILINE)


def stubs_in(notebook: dict) -> dict[str, str]:
    """The source of each exercise's first cell, by slug."""
    return {slug: source for slug, source in reversed(_cells_of_exercises(notebook))}


def answers_in(notebook: dict, stubs: dict[str, str]) -> dict[str, str]:
    """What stands in cells of exercises in place of their stubs, by slug.

    ``stubs``: those that the notebook was made with. Of another exercise, a cell that still raises
    NotImplementedError is none. An answer in several cells becomes one text.
    """
    found: dict[str, list[str]] = {}
    for slug, source in _cells_of_exercises(notebook):
        is_stub = source == stubs[slug] if slug in stubs else "NotImplementedError" in source
        if source.strip() and not is_stub:
            found.setdefault(slug, []).append(source)
    return {slug: "\n\n\n".join(sources) for slug, sources in found.items()}


def with_answers(notebook: dict, answers: dict[str, str]) -> dict:
    """The notebook with each answer in the first cell of its exercise.

    Where the stub has another signature than the answer, it stays, and the answer stands below it.
    """
    cells, left = [], dict(answers)
    for cell in notebook["cells"]:
        answer = left.pop(_slug_of(cell), None)
        if answer is not None:
            if not {*_heads(cell["source"])} <= {*_heads(answer)}:
                answer = f"{cell['source'].rstrip()}\n\n\n{NOTE}\n{answer}"
            cell = cleared_cell({**cell, "source": answer})
        cells.append(cell)
    return {**notebook, "cells": cells}


def _cells_of_exercises(notebook):
    return [(slug, cell["source"]) for cell in notebook["cells"] if (slug := _slug_of(cell))]


def _slug_of(cell):
    if cell["cell_type"] != "code" or "exercise" not in cell["metadata"].get("tags", []):
        return None
    return cell["metadata"].get("dplab", {}).get("exercise")


def _heads(source):
    """The lines that define functions and classes."""
    return [line.strip() for line in _HEAD.findall(source)]
