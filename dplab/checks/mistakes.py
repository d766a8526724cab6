"""Known mistakes: wrong answers, each with a sentence, most of them edits of a right answer.

Edits that lie on different lines can be made together, so two mistakes at once are found as well.
"""

import functools
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Mistake:
    """A wrong answer, and the sentence that explains it to who wrote the same.

    One that ``hangs`` where it first fails is compared with attempts that are stuck there, and
    with no others: it takes a while to be found stuck. ``edits``: those that make it from a right
    answer, where that is how it is made.
    """

    attempt: Callable
    why: str
    hangs: bool = False
    edits: dict[str, str] | None = None


class Slip:
    """A sentence, and ways to make the mistake that it explains: in each, edits of a right answer.

    A way's ``old: new`` are put in one after the other, each wherever its ``old`` stands. Of
    several lines in a ``new``, those below the first go as far in as the line that they are put
    into.
    """

    def __init__(self, why: str, *ways: dict[str, str], hangs: bool = False):
        self.why, self.ways, self.hangs = why, ways, hangs

    def made_in(self, answers: Iterable[Callable]) -> Iterator[Mistake]:
        """The mistake in each of its ways, in each right answer that has a place for it.

        Raises ValueError for edits that none has a place for: the answer has changed.
        """
        for edits in self.ways:
            made = [source.compiled(text) for source in map(_source_of, answers)
                    if (text := source.edited(edits)) is not None]
            if not made:
                raise ValueError(f"no right answer has a place for {edits}")
            yield from (Mistake(attempt, self.why, self.hangs, edits) for attempt in made)


def both(one: Mistake, other: Mistake, answers: Iterable[Callable]) -> Iterator[Callable]:
    """The two at once, in each right answer in which their edits lie on different lines."""
    if one.why != other.why and one.edits and other.edits:
        for source in map(_source_of, answers):
            if (text := source.edited_twice(one.edits, other.edits)) is not None:
                yield source.compiled(text)


class Source:
    """The source of a right answer, to be edited."""

    _count = itertools.count()

    def __init__(self, answer: Callable):
        self.answer = answer

    @cached_property
    def text(self) -> str:
        return textwrap.dedent(inspect.getsource(self.answer))

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

    def compiled(self, text: str) -> Callable:
        """What the source defines, beside the other names of its module."""
        file = f"<mistake {next(self._count)}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        names = vars(sys.modules[self.answer.__module__])
        names = {**names, "__name__": "__main__"}  # so that it travels to ranks by value
        exec(compile(text, file, "exec"), names)
        return names[self.answer.__name__]


_source_of = functools.cache(Source)
