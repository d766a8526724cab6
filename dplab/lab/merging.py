"""What the reader wrote in a chapter, put into another version of the chapter.

Each cell of the reader's notebook goes one of these ways:

- It is as the course had it: the new version's cell stands.
- It is an exercise's cell with an answer: the answer replaces the stub of the same exercise.
- It was edited, and the new version has the same cell unchanged: the reader's text replaces it.
- It answers a guess: the answer goes into the guess of the same slug. Where that is all that was
  edited, nothing else is kept.
- It was edited, be it a comment, and the new version changed or dropped the cell: the reader's
  text stands in a cell of its own, which does not run, behind the cell that it followed.
- The reader added it: it stands behind the cell that it followed.
"""

import ast
import copy
import uuid
from dataclasses import dataclass, field

from dplab.lab import first_edition
from dplab.lab.guess_answers import answers, open_guesses, with_answers, without_answers
from dplab.lab.notebook import cleared_cell

NOTE_OF_UPDATE = "You wrote this in a cell that the course has changed or removed."
NOTE_OF_STUB = "# The course has changed the stub above. This is your answer from before."
_TOP = ""  # in place of a cell's id: above all cells


@dataclass
class Answer:
    """The reader's cells of one exercise, and the stub that they were written from."""

    stub: str | None
    cells: list[dict] = field(default_factory=list)


def merge(base: dict, mine: dict, new: dict, *, course: dict | None = None,
          elsewhere: dict[str, Answer] | None = None, note: str = NOTE_OF_UPDATE) -> dict:
    """``new`` with what the reader wrote in ``mine``, which was made from ``base``.

    ``course`` is ``new`` without the reader's lines, where ``new`` holds some already: what the
    reader wrote there stays. ``elsewhere``: answers from other notebooks, by slug. ``note`` stands
    above a text that found no place.
    """
    result, course = copy.deepcopy(new), course or new
    homes = {cell["id"]: cell for cell in result["cells"]}
    stubs = stubs_of(result)
    unanswered = {slug for slug, stub in stubs_of(course).items()
                  if slug in stubs and stubs[slug]["source"] == stub["source"]}
    of_base = stubs_of(base)
    there = {_text(cell) for cell in result["cells"]}
    behind: dict[str, list[dict]] = {name: [] for name in (_TOP, *homes)}
    filled: set[str] = set()
    guessed: dict[str, str] = {}
    asked: set[str] = set()
    answered: dict[str, str] = {}
    for cell in result["cells"]:
        if cell["cell_type"] == "code":
            asked |= open_guesses(cell["source"])
            answered |= answers(cell["source"])
    anchor = _TOP

    for cell, original in _matched(base, mine):
        slug = exercise_of(cell)
        home = stubs.get(slug or "") or (homes.get(original["id"]) if original else None)
        if home is not None:
            anchor = home["id"]
        if (not _is_of_reader(cell, original)
                or _text(cell) in there or _text(_aside(cell, note)) in there):
            continue
        if slug in stubs:
            stub = stubs[slug]
            if slug in filled:
                behind[anchor].append(_piece(cell, stub))
            elif slug in unanswered:
                _fill(stub, cell, of_base[slug]["source"] if slug in of_base else None)
                filled.add(slug)
            else:
                behind[anchor].append(_aside(cell, note))
            continue
        if slug:
            behind[anchor].append(_aside(cell, note, slug))
            continue
        guessed.update(answers(cell["source"]))
        if original is None:
            behind[anchor].append(cell)
        elif (home is not None and _text(home) == _text(original)
              and home["cell_type"] == cell["cell_type"]):
            _set_source(home, cell["source"])
        elif (without_answers(cell["source"]) != without_answers(original["source"])
              or any(slug not in asked and answered.get(slug) != answer
                     for slug, answer in answers(cell["source"]).items())):
            behind[anchor].append(_aside(cell, note))

    back = {slug: answer for slug, answer in _answers_aside(mine).items() if slug not in of_base}
    for slug, answer in ((elsewhere or {}) | back).items():
        if slug in unanswered - filled:
            stub, (first, *rest) = stubs[slug], answer.cells
            _fill(stub, first, answer.stub)
            behind[stub["id"]][:0] = [_piece(cell, stub) for cell in rest]
    for cell in homes.values():
        if cell["cell_type"] == "code" and guessed:
            _set_source(cell, with_answers(cell["source"], guessed))

    taken = set(homes)
    cells = [*_with_unique_ids(behind[_TOP], taken)]
    for cell in result["cells"]:
        cells += [cell, *_with_unique_ids(behind[cell["id"]], taken)]
    result["cells"] = cells
    return result


def answers_to_exercises(base: dict, mine: dict) -> dict[str, Answer]:
    """What the reader wrote into cells of exercises, by slug."""
    found: dict[str, Answer] = {}
    stubs = stubs_of(base)
    for cell, original in _matched(base, mine):
        slug = exercise_of(cell)
        stub = stubs[slug]["source"] if slug in stubs else None
        if slug and cell["source"] != stub and _is_of_reader(cell, original):
            found.setdefault(slug, Answer(stub)).cells.append(cell)
    return _answers_aside(mine) | found


def _answers_aside(mine):
    """Answers that stand aside since their exercise left the chapter, by slug."""
    found: dict[str, Answer] = {}
    for cell in mine["cells"]:
        ours = cell["metadata"].get("dplab", {})
        if cell["cell_type"] == "raw" and "answer_to" in ours:
            source = cell["source"].removeprefix(f"{ours['note']}\n\n")
            answer = {**cell, "cell_type": "code", "metadata": {}, "source": source}
            found.setdefault(ours["answer_to"], Answer(None)).cells.append(answer)
    return found


def is_answer(cell: dict, course: dict) -> bool:
    """Whether the cell answers an exercise, as far as the cell alone can tell."""
    slug, stubs = exercise_of(cell), stubs_of(course)
    return bool(slug) and "NotImplementedError" not in cell["source"] and (
        slug not in stubs or cell["source"] != stubs[slug]["source"])


def without_stubs(notebook: dict) -> dict:
    """The notebook without those cells of exercises that nobody has answered."""
    return {**notebook, "cells": [cell for cell in notebook["cells"] if not exercise_of(cell)
                                  or is_answer(cell, {"cells": []})]}


def holds_lines_of_reader(base: dict, mine: dict) -> bool:
    """Whether a cell was added or edited."""
    return any(_is_of_reader(cell, original) for cell, original in _matched(base, mine))


def exercise_of(cell: dict) -> str | None:
    """The slug of the exercise that the cell is a stub of."""
    if cell["cell_type"] != "code" or "exercise" not in cell["metadata"].get("tags", []):
        return None
    name = cell["metadata"].get("dplab", {}).get("exercise")
    return first_edition.SLUGS.get(name, name)


def stubs_of(notebook: dict) -> dict[str, dict]:
    """The first cell of each exercise, by slug."""
    stubs: dict[str, dict] = {}
    for cell in notebook["cells"]:
        if slug := exercise_of(cell):
            stubs.setdefault(slug, cell)
    return stubs


def _matched(base, mine):
    """Each cell of the reader with the cell of ``base`` that it was made from, or None.

    By id; where a program has given new ids, by equal text.
    """
    by_id = {cell["id"]: cell for cell in base["cells"] if cell["id"]}
    taken = {cell["id"] for cell in mine["cells"]} & by_id.keys()
    by_text = {}
    for cell in base["cells"]:
        if cell["id"] not in taken:
            by_text.setdefault(_text(cell), []).append(cell)
    pairs, seen = [], set()
    for cell in mine["cells"]:
        if cell["id"] in by_id and cell["id"] not in seen:
            original = by_id[cell["id"]]
            seen.add(cell["id"])
        else:
            original = (by_text.get(_text(cell)) or [None]).pop(0)
        pairs.append((cell, original))
    return pairs


def _is_of_reader(cell, original):
    if original is None:
        return bool(cell["source"].strip())
    return _text(cell) != _text(original)


def _text(cell):
    return cell["cell_type"], cell["source"].strip()


def _fill(stub, cell, stub_before):
    """Puts an answer in the stub's place; behind it, where the stub now asks for another name."""
    if stub_before is None or _signatures(stub_before) == _signatures(stub["source"]):
        _set_source(stub, cell["source"])
    else:
        _set_source(stub, f"{stub['source'].rstrip()}\n\n\n{NOTE_OF_STUB}\n{cell['source']}")


def _set_source(cell, source):
    if cell["source"] != source:
        cell |= cleared_cell({**cell, "source": source})


def _signatures(source):
    """The functions and classes that a stub defines, with their arguments."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, ast.unparse(node.args) if isinstance(node, functions) else "")
            for node in ast.walk(tree) if isinstance(node, (*functions, ast.ClassDef))]


def _piece(cell, stub):
    """A further cell of an answer. It keeps the exercise's tag, so that it travels next time."""
    return {**cell, "metadata": copy.deepcopy(stub["metadata"])}


def _aside(cell, note, slug=None):
    """The text in a cell that does not run. With the slug it still finds its exercise elsewhere."""
    kind = "markdown" if cell["cell_type"] == "markdown" else "raw"
    metadata = {"dplab": {"answer_to": slug, "note": note}} if slug else {}
    return {"cell_type": kind, "id": cell["id"], "metadata": metadata,
            "source": f"{note}\n\n{cell['source']}"}


def _with_unique_ids(cells, taken):
    """The reader's cells, with new ids where theirs are those of other cells."""
    for cell in cells:
        name = cell["id"] if cell["id"] not in taken else uuid.uuid4().hex[:8]
        taken.add(name)
        yield cleared_cell({**cell, "id": name})
