"""Functions and classes made from others by edits of their source: ``old: new``."""

import functools
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable
from functools import cached_property


class Source:
    """The source of a function or class, to be edited."""

    _count = itertools.count()

    def __init__(self, definition: Callable):
        self.definition = definition

    @cached_property
    def text(self) -> str:
        return textwrap.dedent(inspect.getsource(self.definition))

    def edited(self, edits: dict[str, str], text: str | None = None) -> str | None:
        """The source with these edits; None where it has no place for one of them."""
        text = self.text if text is None else text
        for old, new in edits.items():
            if old not in text:
                return None
            edited, *others = text.split(old)
            for rest in others:
                line = edited[edited.rfind("\n") + 1 :] + old
                indent = line[: len(line) - len(line.lstrip())]
                edited += new.replace("\n", f"\n{indent}") + rest
            text = edited
        return text

    def edited_twice(self, one: dict[str, str], other: dict[str, str]) -> str | None:
        """The source with the edits of both; None where they do not stand apart.

        They do if they change different lines, and come to the same in either order.
        """
        first, second = self.edited(one), self.edited(other)
        if first is None or second is None or self._changed(one) & self._changed(other):
            return None
        text = self.edited(other, first)
        return text if text is not None and text == self.edited(one, second) else None

    def _changed(self, edits):
        """The numbers of the lines that the edits change."""
        lines, place = set(), 0
        for old in edits:
            place = self.text.find(old)
            while place >= 0:
                first = self.text.count("\n", 0, place)
                lines.update(range(first, first + old.strip("\n").count("\n") + 1))
                place = self.text.find(old, place + 1)
        return lines

    def compiled(self, text: str, others: dict | None = None) -> Callable:
        """What the source defines, beside the other names of its module, or ``others`` for them."""
        # A name that the launcher takes for a learner's file, so that its reports show the lines.
        file = f"{self.definition.__name__}-{next(self._count)}"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        names = {**vars(sys.modules[self.definition.__module__]), **(others or {})}
        names["__name__"] = "__main__"  # so that it travels to ranks by value
        exec(compile(text, file, "exec"), names)
        return names[self.definition.__name__]


source_of = functools.cache(Source)
