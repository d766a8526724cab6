"""Known mistakes: wrong answers, each with a sentence, most of them edits of a right answer.

Edits that lie on different lines can be made together, so two mistakes at once are found as well.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dplab.desk.edits import source_of


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
            made = [source.compiled(text) for source in map(source_of, answers)
                    if (text := source.edited(edits)) is not None]
            if not made:
                raise ValueError(f"no right answer has a place for {edits}")
            yield from (Mistake(attempt, self.why, self.hangs, edits) for attempt in made)


def both(one: Mistake, other: Mistake, answers: Iterable[Callable]) -> Iterator[Callable]:
    """The two at once, in each right answer in which their edits lie on different lines."""
    if one.why != other.why and one.edits and other.edits:
        for source in map(source_of, answers):
            if (text := source.edited_twice(one.edits, other.edits)) is not None:
                yield source.compiled(text)
