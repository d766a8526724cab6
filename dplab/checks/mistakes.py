"""Known mistakes: wrong answers, each with a sentence, most of them edits of a right answer.

Which one does what an attempt does, or which two at once? Each runs on the same inputs as the
attempt. One that is right at the world sizes before, and has the same outcome at this one and the
larger ones, is the diagnosis; or else one that has the same first wrong fact at each of them, and
that no other fact speaks against. Edits that lie on different lines can be made together.
"""

import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dplab import RankError
from dplab.checks.compare import Overlap, first_difference, overlap, wrong_facts
from dplab.desk.edits import source_of

FOR_TWO, MOST_PAIRS = 5.0, 600  # seconds to try two mistakes at once, and how many pairs
AT_LEAST = "First: "  # before a mistake that explains the first wrong fact, and not all
SEVERAL = " And: "  # between the sentences of two mistakes


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


class KnownMistakes:
    """The known mistakes of an exercise, and what each does at the world sizes tried so far."""

    def __init__(self, exercise):
        self.exercise = exercise
        self.all: tuple[Mistake, ...] = tuple(
            made for slip in exercise.slips for made in slip.made_in(exercise.right_answers))
        self._outcomes: dict = {}  # by mistake and world size: facts, a RankError, or None for one

    def explanation(self, attempt: Callable, got, world_size: int) -> str:
        """The sentence of the one that explains most of what is wrong; empty if none does.

        ``got`` is the attempt's outcome at ``world_size``, the first at which it is wrong. A
        mistake that explains the first wrong fact and at least half of them, and not all, begins
        with `AT_LEAST`.
        """
        crashed = isinstance(got, RankError)
        stuck = crashed and got.kind == "stuck"
        outcome_at = functools.cache(lambda size: got if size == world_size else (
            self.exercise.observe(attempt, size, quiet=True)))
        fitting: dict[Mistake, list[Overlap]] = {
            each: [] for each in self.all if each.hangs == stuck}
        wrong = 0
        for size in self._sizes(world_size)[1]:
            mine = outcome_at(size)
            for mistake, shared in self._overlaps(fitting, mine, size).items():
                if _refuted(shared, isinstance(mine, RankError), size == world_size):
                    del fitting[mistake]
                else:
                    fitting[mistake].append(shared)
            wrong += 1 if isinstance(mine, RankError) else len(
                wrong_facts(self.exercise.expected_of_all(size), mine, self.exercise.tolerance))
            if crashed or not fitting:
                break
        for mistake in self._wrong_before(fitting, world_size):
            del fitting[mistake]
        for mistake, shared in fitting.items():
            if not any(each.unexplained for each in shared):
                return mistake.why
        if not crashed and (two := self._two_at_once(outcome_at, world_size)):
            return two
        return _for_most(fitting, wrong)

    def outcomes(self, mistakes: Iterable[Mistake], world_size: int, *,
                 failures: bool = False) -> dict:
        """By mistake: the ranks' facts, or None where its ranks fail; with ``failures``, how."""
        mistakes = list(mistakes)
        unknown = [each for each in mistakes
                   if not each.hangs and (each, world_size) not in self._outcomes]
        if unknown:
            facts = self.exercise.observe_all([each.attempt for each in unknown], world_size)
            self._outcomes |= {(each, world_size): outcome
                               for each, outcome in zip(unknown, facts, strict=True)}
        for each in mistakes if failures else ():
            if self._outcomes.get((each, world_size)) is None:
                self._outcomes[each, world_size] = self.exercise.observe(
                    each.attempt, world_size, quiet=True)
        return {each: self._outcomes.get((each, world_size)) for each in mistakes}

    def _overlaps(self, mistakes, mine, size):
        """By mistake, what it explains of the attempt's outcome at this world size."""
        outcomes = self.outcomes(mistakes, size, failures=isinstance(mine, RankError))
        return {mistake: overlap(self.exercise.expected_of_all(size), mine, theirs,
                                 self.exercise.tolerance,
                                 communicates=self.exercise.communicates and size > 1)
                for mistake, theirs in outcomes.items()}

    def _sizes(self, world_size):
        """The world sizes tried before this one; then this one, and the larger ones after it."""
        sizes = self.exercise.world_sizes
        place = sizes.index(world_size)
        return sizes[:place], [size for size in sizes[place:] if size >= world_size]

    def _wrong_before(self, mistakes, world_size):
        """Those that are wrong at a world size before this one, where the attempt is right."""
        tried = [each for each in mistakes if not each.hangs]
        return {mistake for size in self._sizes(world_size)[0]
                for mistake, outcome in self.outcomes(tried, size).items()
                if not self._is_right(outcome, size)}

    def _is_right(self, outcome, world_size):
        return isinstance(outcome, list) and not first_difference(
            self.exercise.expected_of_all(world_size), outcome, self.exercise.tolerance)

    def _two_at_once(self, outcome_at, world_size):
        """The sentences of two mistakes that together do what the attempt does; "" if none do.

        Where several pairs do, the sentence that all have in common.
        """
        if not self.exercise.has_trial:  # it runs attempts in a way of its own
            return ""
        left, until = self._pairs(outcome_at(world_size), world_size), time.monotonic() + FOR_TWO
        before, onward = self._sizes(world_size)
        for size in (*onward, *before):
            found = self.exercise.observe_all([attempt for _, attempt in left], size, until=until)
            left = [each for each, theirs in zip(left, found, strict=False) if (
                self._is_right(theirs, size) if size in before
                else self._are_alike(outcome_at(size), theirs, size))]
            until = math.inf  # few are left
        whys = list(dict.fromkeys(whys for whys, _ in left))
        if len(whys) == 1:
            return SEVERAL.join(whys[0])
        in_all = [why for why in whys[0] if all(why in each for each in whys)] if whys else []
        return AT_LEAST + in_all[0] if in_all else ""

    def _pairs(self, mine, world_size):
        """Two mistakes at once: their sentences, and the attempt. Those come first which get wrong
        what the attempt gets wrong, and of each two sentences one way before the others.
        """
        def wrong_in(outcome):
            return wrong_facts(self.exercise.expected_of_all(world_size), outcome,
                               self.exercise.tolerance)

        wrong = {mistake: wrong_in(outcome) for mistake, outcome
                 in self.outcomes(self.all, world_size).items() if isinstance(outcome, list)}
        mine_wrong = wrong_in(mine)
        pairs = sorted(itertools.combinations(wrong, 2), key=lambda pair: len(
            (wrong[pair[0]] | wrong[pair[1]]) ^ mine_wrong))
        ways: Counter = Counter()
        numbered = []
        for one, other in pairs[:MOST_PAIRS]:
            whys = one.why, other.why
            for attempt in both(one, other, self.exercise.right_answers):
                ways[whys] += 1
                numbered.append((ways[whys], whys, attempt))
        return [(whys, attempt) for _, whys, attempt in sorted(numbered, key=lambda each: each[0])]

    def _are_alike(self, mine, theirs, world_size):
        """Whether two outcomes are alike; theirs is None where its ranks fail."""
        if isinstance(mine, RankError) or theirs is None:
            return isinstance(mine, RankError) and theirs is None
        shared = overlap(self.exercise.expected_of_all(world_size), mine, theirs,
                         self.exercise.tolerance)
        return not shared.unexplained and not shared.contradicted


def _refuted(shared, crashed, is_first_size):
    """Whether what a mistake does at a world size shows that it is not the attempt's."""
    has_other_facts = shared.unexplained and not crashed
    return shared.contradicted or (not shared.first and (is_first_size or has_other_facts))


def _for_most(fitting, wrong):
    """The sentence that explains most, if it alone does, and at least half of what is wrong."""
    explained = {mistake: sum(each.explained for each in shared)
                 for mistake, shared in fitting.items()}
    best = max(explained.values(), default=0)
    whys = {mistake.why for mistake, count in explained.items() if count == best}
    return AT_LEAST + whys.pop() if len(whys) == 1 and 2 * best >= wrong else ""
