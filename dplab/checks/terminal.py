"""``dplab progress``, ``dplab hint`` and ``dplab check``: the exercises in a terminal.

``dplab check`` does not run the file: only the statements that define the attempt and what it uses
run, so that no training starts.
"""

import argparse
import ast
import json
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from dplab import checks
from dplab.checks.exercise import PASSED
from dplab.desk import kept
from dplab.desk.definition import Statement

TELLS = {"progress": "Shows how far you are, and which exercise comes next.",
         "hint": "Shows the next hint to an exercise.",
         "check": "Checks your answer to an exercise, as dplab.check does in a notebook."}


class NoAttempt(Exception):
    """The file holds no attempt that can be checked; the text says why."""


def main(command: str, arguments: list[str]) -> int:
    """Runs the command. Returns 1 where an answer does not pass, and 2 where none was found."""
    parser = argparse.ArgumentParser(prog=f"dplab {command}", description=TELLS[command])
    if command != "progress":
        parser.add_argument("id", metavar="SLUG", help="the exercise's name or number, such as "
                            "global-mean or 0.2")
    if command == "check":
        parser.add_argument("file", metavar="FILE", type=Path, help="a Python file or a notebook "
                            "that defines your answer")
    options = parser.parse_args(arguments)
    if command == "progress":
        checks.progress()
        return 0
    exercise = checks.find(options.id)
    if exercise is None:
        return 2
    if command == "hint":
        checks.hint(exercise.slug)
        return 0
    try:
        attempt = attempt_in(options.file, exercise.name)
    except (NoAttempt, kept.Broken) as error:
        print(f"dplab check: {error}.")
        return 2
    if checks.judge(exercise, attempt).outcome == PASSED:
        return 0
    print(f"For a hint: dplab hint {exercise.slug}")
    return 1


def attempt_in(file: Path, name: str):
    """What the file defines as ``name``. Raises `NoAttempt`, or `kept.Broken` where that fails."""
    text = "\n".join(_until_defined(_cells(file), file, name))
    statements = [Statement(node, text) for node in ast.parse(text).body
                  if not _is_of_a_script(node)]
    needed = {name}
    for _ in statements:  # what they use may use more
        needed.update(*(each.uses for each in statements if each.binds & needed))
    wanted = {number for each in statements
              if each.binds & needed or _is_of_all(each.node, file) for number in each.lines}
    # The others are left empty, so that an error names the right line of a Python file.
    lines = [line if number in wanted else "" for number, line in enumerate(text.split("\n"), 1)]
    return kept.define("\n".join(lines), name, file)


def _cells(file):
    """The code cells of a notebook as Python; of another file, its text."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".ipynb":
            return [text]
        return [_as_python("".join(cell["source"])) for cell in json.loads(text)["cells"]
                if cell["cell_type"] == "code"]
    except OSError as error:
        raise NoAttempt(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise NoAttempt(f"{file} cannot be read ({error})") from None


def _as_python(cell):
    """A notebook's cell without magics; as it stands where it is no Python."""
    try:
        return TransformerManager().transform_cell(cell)
    except SyntaxError:  # `_until_defined` says so, where it matters
        return cell


def _until_defined(cells, file, name):
    """The cells as far as the last that defines ``name``.

    What stands below may bind the name to something else, such as what `dplab.mine` gives.
    """
    whole, end = [], 0
    for cell in cells:
        try:
            compile(cell, str(file), "exec")
        except SyntaxError as error:
            if name in cell:
                raise NoAttempt(f"{file} is no Python where it has `{name}`: {error}") from None
            continue
        whole.append(cell)
        if any(getattr(node, "name", None) == name for node in ast.parse(cell).body):
            end = len(whole)
    if not end:
        raise NoAttempt(f"{file} defines no `{name}` with `def` or `class`")
    return whole[:end]


def _is_of_a_script(node):
    """Whether it runs only where the file is run: ``if __name__ == "__main__"``."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_of_all(node, file):
    """Whether it is an import that serves what does not name it.

    In a notebook, whose cells are joined, one from ``__future__`` would not stand first.
    """
    return isinstance(node, ast.ImportFrom) and (
        node.names[0].name == "*" or (node.module == "__future__" and file.suffix != ".ipynb"))
