"""``python -m dplab.exercises.stack``: the table of the stack, for its reader."""

import textwrap

from dplab.exercises import every_exercise
from dplab.exercises.stack.table import EVERY_PART, PARTS

_COLUMNS = ("gives", "chunks", "padding", "dtypes", "overwrites", "group", "blocking")


def as_text() -> str:
    """What holds for every part, a line for each of them, and then each row whole.

    Of the chapters whose exercises ask for parts: those of others take none yet.
    """
    asked_for = {each.short or each.solution for each in every_exercise()}
    chapters = {part.chapter for part in PARTS if part.short in asked_for}
    parts = [part for part in PARTS if part.chapter in chapters]
    lines = [EVERY_PART, "The parts, by chapter:\n"]
    width = max(len(part.slug) for part in parts)
    for part in parts:
        lines.append(f"  {part.chapter}  {_whose(part)}  {part.slug:{width}}  {part.signature}")
    for part in parts:
        lines.append(f"\n{part.slug} ({_whose(part)}, chapter {part.chapter})")
        lines.append(f"    {part.signature}")
        lines.append(_line("uses", ", ".join(part.uses) or "torch alone"))
        lines.extend(_line(column, getattr(part, column)) for column in _COLUMNS)
    return "\n".join(lines)


def _whose(part):
    return {"reader": "yours", "course": "given"}[part.by]


def _line(column, text):
    return textwrap.fill(text, 100, initial_indent=f"    {column:12}", subsequent_indent=" " * 16)


if __name__ == "__main__":
    print(as_text())
