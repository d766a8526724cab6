"""Small tables, as a chapter's cell computes them."""

from collections.abc import Iterable

from IPython.display import Markdown


def table(head: Iterable, *rows: Iterable) -> Markdown:
    """A Markdown table: the first column flush left, the others flush right.

    Raises ValueError for a row of another length than ``head``.
    """
    head = list(head)
    lines = [_line(head), "|".join(["", ":--", *["--:"] * (len(head) - 1), ""])]
    for row in map(list, rows):
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} under a head of {len(head)}: {row}")
        lines.append(_line(row))
    return Markdown("\n".join(lines))


def _line(cells):
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"
