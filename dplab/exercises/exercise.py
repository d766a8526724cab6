"""What an exercise is, and how an attempt is judged.

The attempt runs on real ranks at several world sizes; each rank returns facts (tensors, counts),
which are compared with what a single process computes. Where they differ, the known mistakes run on
the same inputs, and one with the same outcome, at this world size and the larger ones, is the
diagnosis.
"""

import dis
import inspect
import os
import textwrap
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dplab import RankError, run
from dplab.exercises.compare import COMMUNICATED, explained, first_difference, same_outcome
from dplab.measure import CallLog
from dplab.spawn.parent.output import headed

NOT_ATTEMPTED, PASSED, WRONG, CRASHED = "not attempted", "passed", "wrong", "crashed"


# Of calls that return at once, whatever the operation.
ASYNCHRONOUS = {"async_op", "isend", "irecv", "batch_isend_irecv"}


@dataclass
class Mistake:
    """A short wrong implementation, and the sentence that explains it to who wrote the same.

    One that ``hangs`` where it first fails is compared with attempts that are stuck there, and
    with no others: it takes a while to be found stuck.
    """

    attempt: Callable
    why: str
    hangs: bool = False


@dataclass
class Verdict:
    """An attempt's outcome. ``why`` is a known mistake's sentence, ``detail`` the evidence."""

    outcome: str
    why: str = ""
    detail: str = ""
    world_sizes: list[int] = field(default_factory=list)


class Exercise:
    """Base of all exercises: data as class attributes, and two methods.

    ``trial(attempt)`` runs on each rank and returns the facts, a dict of tensors and numbers by
    name; ``expected(world_size)`` runs in one process and returns the right facts, one dict for
    each rank (or one for all). A fact may be expected as ``AtMost(limit, why)``. What ``prepare()``
    returns is made once, in the notebook's process, and is ``self.given`` in both.
    """

    slug: str  # its own for good
    number: str  # where it stands today, for display
    title: str
    name: str  # of the function or class that the reader writes
    minutes: int
    hints: tuple[str, ...]
    solution: Callable
    mistakes: tuple[Mistake, ...]
    short: Callable | None = None  # the idea of the solution alone, where that is another
    stub: Callable | None = None  # where the reader repairs code: that code
    world_sizes = (1, 2, 3, 4)
    seconds = 20.0  # that an attempt may take at one world size
    tolerance = 1e-5  # relative to the largest element of the expected tensor
    communicates = True  # whether an attempt without a collective of its own deserves that hint

    def __init__(self):
        self.given = None
        # What is the same in every check, by world size:
        self._expectations = {}
        self._outcomes = {}  # of the known mistakes

    def __getstate__(self):
        """What a rank gets: not what is known of other attempts."""
        return vars(self) | {"_expectations": {}, "_outcomes": {}}

    @property
    def chapter(self) -> int:
        return int(self.number.split(".")[0])

    def prepare(self):
        return None

    def trial(self, attempt) -> dict:
        raise NotImplementedError

    def expected(self, world_size: int) -> dict | list[dict]:
        raise NotImplementedError

    def quantities(self, world_size: int, rank: int) -> dict[str, float]:
        """Numbers of this rank's data, by name, of which a wrong factor may be made."""
        return {}

    def parts(self, world_size: int, rank: int) -> dict[str, list]:
        """By fact, where it is a sum over the ranks: what each rank contributes to this rank's."""
        return {}

    def judge(self, *objects, tell: Callable[[int | None], object] = lambda step: None) -> Verdict:
        """Never raises, but for the reader's own interrupt.

        ``tell`` hears of each step: the world size that is tried, and None when the known mistakes
        are compared.
        """
        if len(objects) != 1 or not callable(objects[0]):
            return Verdict(CRASHED, f'Call it as dplab.check("{self.slug}", {self.name}): the name '
                                    "itself, without brackets behind it.")
        attempt = objects[0]
        if self.is_untouched(attempt):
            return Verdict(NOT_ATTEMPTED)
        try:
            return self._judge(attempt, tell)
        except Exception:
            return Verdict(CRASHED, "The check itself failed; this is a fault of the course.",
                           traceback.format_exc(limit=-3))

    def is_untouched(self, attempt) -> bool:
        """Whether this is still the stub: it raises NotImplementedError, or is the broken code."""
        if self.stub is not None:
            return _words_of(attempt) == _words_of(self.stub)
        return "NotImplementedError" in _names_in(attempt)

    def _judge(self, attempt, tell):
        if self.given is None:
            self.given = self.prepare()
        for world_size in self.world_sizes:
            tell(world_size)
            expected = self._expected(world_size)
            got = self._observe(attempt, world_size)
            difference = got if isinstance(got, RankError) else first_difference(
                expected, got, self.tolerance)
            if difference is not None:
                if not isinstance(got, RankError):
                    difference = explained(
                        difference, self._expected(1)[0] if 1 in self.world_sizes else {},
                        self.quantities(world_size, difference.rank),
                        self.parts(world_size, difference.rank), self.tolerance)
                tell(None)
                return self._diagnose(attempt, difference, got, expected, world_size)
        return Verdict(PASSED, world_sizes=list(self.world_sizes))

    def rerun(self, attempt, world_sizes) -> str:
        """Why the attempt is not right at these world sizes, in one line; "" where it is.

        It shows nothing, and compares with no known mistake.
        """
        if self.given is None:
            self.given = self.prepare()
        for world_size in world_sizes:
            try:
                got = self._observe(attempt, world_size, quiet=True)
                fault = got if isinstance(got, RankError) else first_difference(
                    self._expected(world_size), got, self.tolerance)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault is not None:
                return f"with {world_size} ranks, {str(fault).splitlines()[0]}"
        return ""

    def _observe(self, attempt, world_size, *, quiet=False):
        """The ranks' facts, or the RankError in place of them."""
        try:
            with headed(f"Your code printed, on {world_size} rank{'s' * (world_size > 1)}:"):
                return run(self._facts, world_size, attempt, quiet, timeout=self.seconds,
                           backend="gloo")
        except RankError as error:
            return error

    def _facts(self, attempt, quiet):
        if quiet:
            _silence()
        with CallLog() as log:
            facts = self.trial(attempt)
        arrived = {fact: _arrived(value) for fact, value in facts.items()}
        return {**arrived, COMMUNICATED: log.count() > 0}

    def _diagnose(self, attempt, difference, got, expected, world_size):
        where = f"on {world_size} rank{'s' * (world_size > 1)}"
        crashed = isinstance(got, RankError)
        if crashed and difference.kind == "unpicklable" and difference.rank is None:
            return Verdict(CRASHED, "", str(difference))
        detail = str(difference) if crashed else f"{where}, {difference}"
        started = sorted(_names_in(attempt) & ASYNCHRONOUS)
        if started and "wait" not in _names_in(attempt):
            return Verdict(WRONG, f"With `{started[0]}` a call returns at once: keep the handle "
                                  "and `wait()` on it before you use or change the tensor.", detail)
        stuck = crashed and difference.kind == "stuck"
        alike = self._alike([mistake for mistake in self.mistakes if mistake.hangs == stuck],
                            got, expected, world_size)
        if not crashed:
            alike = self._still_alike(alike, attempt, world_size)
        if alike:
            return Verdict(WRONG, alike[0].why, detail)
        if (not crashed and self.stub is None and self.communicates and world_size > 1
                and not any(facts[COMMUNICATED] for facts in got)):
            return Verdict(WRONG, "Nothing was communicated: no rank called a collective.", detail)
        return Verdict(CRASHED if crashed else WRONG, f"{where}:" if crashed else "", detail)

    def _still_alike(self, mistakes, attempt, world_size):
        """Those of the mistakes that end as the attempt does on more ranks, too."""
        for larger in self.world_sizes:
            if larger > world_size and mistakes:
                later = self._observe(attempt, larger)
                mistakes = self._alike(mistakes, later, self._expected(larger), larger)
        return mistakes

    def _alike(self, mistakes, got, expected, world_size):
        """The mistakes that end as the attempt did."""
        return [mistake for mistake in mistakes if same_outcome(
            got, self._outcome_of(mistake, world_size), expected, self.tolerance)]

    def _outcome_of(self, mistake, world_size):
        place = self.mistakes.index(mistake), world_size
        if place not in self._outcomes:
            self._outcomes[place] = self._observe(mistake.attempt, world_size, quiet=True)
        return self._outcomes[place]

    def _expected(self, world_size):
        if world_size not in self._expectations:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # these tensors are small: threads would wait for one another
            try:
                expected = self.expected(world_size)
            finally:
                torch.set_num_threads(threads)
            self._expectations[world_size] = (
                [expected] * world_size if isinstance(expected, dict) else expected)
        return self._expectations[world_size]

    def solution_source(self) -> str:
        return self._source_of(self.solution)

    def short_source(self) -> str:
        return self._source_of(self.short or self.solution)

    def _source_of(self, definition):
        source = textwrap.dedent(inspect.getsource(definition))
        return source.replace(definition.__name__, self.name)


class FirstFault(Exercise):
    """Where no known mistake ends as the attempt did, one with the same first wrong fact is named.

    So one of two mistakes is found; and what an attempt sends beyond what it needs does not count
    where it is alone, or where the exercise asks for no collective.
    """

    def _facts(self, attempt, *how):
        facts = super()._facts(attempt, *how)
        style = dist.get_world_size() == 1 or not self.communicates
        return {**facts, COMMUNICATED: facts[COMMUNICATED] or style}

    def _alike(self, mistakes, got, expected, world_size):
        alike = super()._alike(mistakes, got, expected, world_size)
        fault = first_difference(expected, got, self.tolerance) if isinstance(got, list) else None
        if fault and not alike:
            until = list(expected[0]).index(fault.fact) + 1
            expected = [dict(list(right.items())[:until]) for right in expected]
            alike = super()._alike(mistakes, got, expected, world_size)
        return alike or self._overlaid(mistakes)

    def _overlaid(self, mistakes):
        """A mistake found already that shows on one rank; on more, another one lies over it."""
        if len(mistakes) == len(self.mistakes) or len({each.why for each in mistakes}) != 1:
            return []
        alone = self._expected(1)
        return [each for each in mistakes
                if first_difference(alone, self._outcome_of(each, 1), self.tolerance)]


def _arrived(value):
    """The values of a functional collective, whose tensor may still be under way."""
    return value.wait() if hasattr(value, "trigger_wait") else value


def _silence():
    """Nobody sees what this rank writes from here on, be it Python's or gloo's last words."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _names_in(attempt) -> set[str]:
    """The names that code uses, those of keyword arguments too."""
    names = set()
    for code in _codes(attempt):
        names.update(code.co_names)
        for constant in code.co_consts:
            names.update(constant if isinstance(constant, tuple) else ())
    return names


def _words_of(attempt):
    """The names and constants in the order of use: what code says, whoever compiled it."""
    return [item.argval for code in _codes(attempt) for item in dis.get_instructions(code)
            if item.opname.startswith(("LOAD_", "STORE_"))
            and not isinstance(item.argval, types.CodeType)]


def _codes(attempt):
    """The code objects of a function, or of every method of a class."""
    functions = [attempt]
    if isinstance(attempt, type):
        functions = [value for value in vars(attempt).values()
                     if isinstance(value, types.FunctionType)]
    found = [function.__code__ for function in functions if hasattr(function, "__code__")]
    for code in found:
        found.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
    return found
