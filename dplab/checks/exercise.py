"""What an exercise is, and how an attempt is judged.

The attempt runs on real ranks at several world sizes; each rank returns facts (tensors, counts),
which are compared with what a single process computes. Where they differ, the reader is told why by
`Exercise._diagnose`: by the first of its sources that knows.
"""

import functools
import inspect
import math
import re
import signal
import textwrap
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dplab import RankError
from dplab.checks import observe, trials
from dplab.checks.attempt_code import names_in, unwaited, used_result, words_of
from dplab.checks.compare import COMMUNICATED, explained, first_difference, other_demands
from dplab.checks.composition import fewest, said
from dplab.checks.mistakes import AT_LEAST, KnownMistakes, Slip
from dplab.desk import course
from dplab.spawn.parent.output import headed
from dplab.spawn.parent.report import PAIRS

NOT_ATTEMPTED, PASSED, WRONG, CRASHED = "not attempted", "passed", "wrong", "crashed"
WITHOUT_GROUP = ("Among all ranks this is right; where two of the four are a group, it is not. "
                 "Pass `group` on to each call: its ranks are then all that there are.")
CALLED_AGAIN = ("The first call is right, and a later one in the same process is not: something "
                "is kept from one call to the next.")
UNWAITED = ("With `{}` a call returns at once: keep the handle and `wait()` on it before you use "
            "or change the tensor.")
GIVES_NONE = ("`dist.{0}` returns None. It leaves its result in a tensor that it gets: give that "
              "tensor a name, call `dist.{0}` on a line of its own, and go on with the tensor.")
TAGGED = ("A message meets only a receive with its own tag. Give both ends the same one, or leave "
          "the tags out.")
SILENT = "Nothing was communicated: no rank called a collective."
OVERWRITTEN = ("What a call returns is right at first, and a later call changes it. Give each "
               "result memory of its own.")


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
    returns is made once, in the notebook's process, and is ``self.given`` in both. An exercise
    that can say more of a wrong fact than any exercise can extends ``described`` (the evidence)
    or ``explanation`` (the reason).
    """

    number: str  # where it stands today, for display
    title: str
    minutes: int
    hints: tuple[str, ...]
    solution: Callable
    slips: tuple[Slip, ...] = ()
    also_right: tuple[Callable, ...] = ()  # in which the slips can be made, beside the solution
    stub: Callable | None = None  # where the reader repairs code: that code
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    on_ranks = True  # whether what the reader writes runs on ranks
    seconds = 6.0  # that an attempt may take at one world size; at larger ones, see `_limit`
    tolerance = 1e-5  # relative to the largest element of the expected tensor
    communicates = True  # whether an attempt without a collective of its own deserves that hint
    again = True  # whether a right attempt is tried twice on the same ranks, with other data
    with_groups = False  # whether four ranks call in groups of two as well
    too_long = ("A message is longer than the tensor that receives it, and gloo gives up. Both "
                "need the same length and the same dtype.")

    def __init__(self):
        self.given = None
        self._limit = self.seconds
        self._expectations = {}  # by world size, the same in every check

    def __getstate__(self):
        """What a rank gets: not what is known of other attempts."""
        return vars(self) | {"_expectations": {}, "known_mistakes": None}

    @cached_property
    def known_mistakes(self) -> KnownMistakes:
        return KnownMistakes(self)

    @property
    def slug(self) -> str:
        """Its own for good: the name of its file."""
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    @property
    def name(self) -> str:
        """That of the function or class that the reader writes."""
        return self.solution.__name__

    @property
    def right_answers(self) -> tuple[Callable, ...]:
        return (self.solution, *self.also_right)

    @property
    def has_trial(self) -> bool:
        """Whether attempts run in the common way: one trial on ranks that know nothing else."""
        return type(self).trial is not Exercise.trial

    @property
    def chapter(self) -> course.Key:
        key = self.number.split(".")[0]
        return int(key) if key.isdecimal() else key

    def prepare(self):
        return None

    def trial(self, attempt) -> dict:
        raise NotImplementedError

    def expected(self, world_size: int) -> dict | list[dict]:
        raise NotImplementedError

    def quantities(self, world_size: int, rank: int) -> dict[str, float]:
        """Numbers of this rank's data, by name, of which a wrong factor may be made."""
        return {}

    def parts(self, world_size: int, rank: int) -> dict[str, list | dict]:
        """By fact, where it is a sum: what each rank contributes to this rank's, in their order; or
        whatever may be in it, by name, such as "rank 1's chunk 2".
        """
        return {}

    def judge(self, *objects, tell: Callable[[int | None], object] = lambda step: None) -> Verdict:
        """Never raises, but for the reader's own interrupt.

        ``tell`` hears of each step: the world size that is tried, and None when the known mistakes
        are compared.
        """
        if len(objects) != 1 or not callable(objects[0]):
            return Verdict(NOT_ATTEMPTED, f'Call it as `dplab.check("{self.slug}", {self.name})`: '
                                          "the name itself, without brackets behind it.")
        attempt = objects[0]
        if misfit := self._misfit(attempt):
            return Verdict(NOT_ATTEMPTED, misfit)
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
            return words_of(attempt) == words_of(self.stub)
        return "NotImplementedError" in names_in(attempt)

    def _misfit(self, attempt) -> str:
        """Why this cannot be what the exercise asks for; empty if it can."""
        asked = inspect.signature(self.solution)
        try:
            given = inspect.signature(attempt)
        except (TypeError, ValueError):  # C code has none
            return ""
        kind = "class" if isinstance(self.solution, type) else "function"
        name = getattr(attempt, "__name__", "this")
        if kind == "class" and isinstance(attempt, types.FunctionType):
            return f"`{name}` is a function. This exercise asks for the class `{self.name}`."
        try:
            given.bind(*asked.parameters)
        except TypeError:
            return (f"`{name}{_shown(given)}` cannot be called with the arguments of this "
                    f"exercise, which asks for the {kind} `{self.name}{_shown(asked)}`.")
        return ""

    def _judge(self, attempt, tell):
        if self.given is None:
            self.given = self.prepare()
        self._limit = self.seconds
        for world_size in self.world_sizes:
            tell(world_size)
            begin = time.monotonic()
            got = self.observe(attempt, world_size)
            took = time.monotonic() - begin
            verdict = self._unexplained(got, world_size)
            if verdict is not None:
                tell(None)
                return self._diagnose(attempt, got, verdict, world_size)
            # What took a moment on fewer ranks hangs if it takes seconds on more.
            self._limit = round(min(self.seconds, max(4.0, 20 * took)), 1)
        sizes = sorted(self.world_sizes) if len(self.world_sizes) > 1 else []
        return self._wrong_later(attempt) or Verdict(PASSED, world_sizes=sizes)

    def _wrong_later(self, attempt):
        """The verdict on a right attempt that is wrong where it is called again; else None.

        The trial runs twice on the same ranks, the second time with other data.
        """
        if not (self.again and self.has_trial):
            return None
        world_size = sorted(self.world_sizes)[:2][-1]
        got = observe.alone(functools.partial(observe.twice, self.trial), attempt, world_size,
                            seconds=2 * self._limit, quiet=True)
        if isinstance(got, RankError):
            verdict = self.on_failure(got, world_size)
            return Verdict(CRASHED, f"{CALLED_AGAIN} {verdict.why}".strip(), verdict.detail)
        with trials.other_data():
            right = self._expected_anew(world_size)
        first, later, second = (
            [{fact: facts[when][fact] for fact in expected if fact in facts[when]}
             for facts, expected in zip(got, right, strict=True)] for when in observe.TWICE)
        for expected, found, why in ((right, second, CALLED_AGAIN), (first, later, OVERWRITTEN)):
            if difference := first_difference(expected, found, self.tolerance):
                return Verdict(WRONG, why, f"{_on(world_size)}, rank {difference.rank}: "
                               f"{difference}" if self.on_ranks else str(difference))
        return None

    def rerun(self, attempt, world_sizes) -> str:
        """Why the attempt is not right at these world sizes, in one line; "" where it is.

        It shows nothing, and compares with no known mistake.
        """
        if self.given is None:
            self.given = self.prepare()
        self._limit = self.seconds
        for world_size in world_sizes:
            try:
                got = self.observe(attempt, world_size, quiet=True)
                fault = got if isinstance(got, RankError) else first_difference(
                    self.expected_of_all(world_size), got, self.tolerance)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault is not None:
                return f"with {world_size} ranks, {str(fault).splitlines()[0]}"
        return ""

    def _unexplained(self, got, world_size):
        """What is wrong, in a verdict without a reason; None if nothing is."""
        if isinstance(got, RankError):
            return self.on_failure(got, world_size)
        expected = self.expected_of_all(world_size)
        difference = first_difference(expected, got, self.tolerance)
        if difference is None:
            return None
        beside = other_demands(difference, expected, got, self.tolerance)
        return Verdict(WRONG, "", "\n".join(
            [self.described(difference, got, world_size), *beside]))

    def described(self, difference, got, world_size) -> str:
        """The first difference in words, and where it was seen."""
        difference = explained(
            difference, self.expected_of_all(1)[0] if 1 in self.world_sizes else {},
            self.quantities(world_size, difference.rank),
            self.parts(world_size, difference.rank), self.tolerance)
        if not self.on_ranks:
            return str(difference)
        if world_size == 1 and self.communicates:
            return f"already on 1 rank, so no other rank has a part in it: {difference}"
        return f"{_on(world_size)}, rank {difference.rank}: {difference}"

    def on_failure(self, error, world_size):
        """The verdict on an attempt that raised, died or hung."""
        if error.kind == "unpicklable" and error.rank is None:
            return Verdict(CRASHED, "", str(error))
        detail, why = str(error), f"{_on(world_size)}:"
        if not self.on_ranks:
            detail, why = detail.removeprefix("rank 0 of 1 ").removeprefix("raised "), ""
            if error.kind == "stuck":
                where = "\n".join(error.reports).replace("  rank 0 ", "It ")
                detail = f"`{self.name}` gave no answer within {self._limit:g} s.\n{where}"
        detail, own = _without_own_frames(_MORE_TIME.sub("", detail))
        if own and error.kind == "raised":
            why = (f"{why} the check could not use what your `{self.name}` returned or left "
                   "behind. Its docstring says what it has to be.").strip()
        if any(rank.exit_code == -signal.SIGABRT and rank.peer is not None for rank in error.ranks):
            # It died in a send or receive. A check does not show the last words: they are gloo's.
            return Verdict(WRONG, self.too_long,
                           detail.replace("; its last words stand in the output", ""))
        return Verdict(CRASHED, why, detail)

    def _diagnose(self, attempt, got, verdict, world_size):
        """The same verdict, with what explains it, if anything does."""
        if isinstance(got, RankError) and got.kind == "unpicklable" and got.rank is None:
            return verdict
        if started := unwaited(attempt):
            return Verdict(WRONG, UNWAITED.format(started),
                           verdict.detail.replace(PAIRS, "").rstrip())  # there is a send
        why = self._reason(attempt, got, world_size)
        return Verdict(WRONG, why, verdict.detail) if why else verdict

    def _reason(self, attempt, got, world_size):
        """What the first source says that knows: the groups, the known mistakes, the code."""
        crashed = isinstance(got, RankError)
        in_a_group_only = self._fails_in_a_group_only(attempt, world_size)
        if in_a_group_only and not (crashed and got.kind == "raised"):
            return WITHOUT_GROUP
        why = self.explanation(attempt, got, world_size)
        if why and not why.startswith(AT_LEAST):
            return why
        if in_a_group_only:
            return WITHOUT_GROUP
        if self._met_none(got, world_size) and (name := used_result(attempt)):
            return GIVES_NONE.format(name)
        if (not crashed and self.stub is None and self.communicates and world_size > 1
                and not any(facts[COMMUNICATED] for facts in got)):
            return SILENT
        if not why and crashed and got.kind == "stuck" and "tag" in names_in(attempt):
            return TAGGED
        return why

    def _fails_in_a_group_only(self, attempt, world_size):
        """Whether it is right on these ranks, as long as no two of them are a group."""
        if not self.with_groups or world_size != 4:
            return False
        self.with_groups = False
        try:
            got = self.observe(attempt, world_size, quiet=True)
        finally:
            self.with_groups = True
        if isinstance(got, RankError):
            return False
        expected = [{fact: right[fact] for fact in found if fact in right} for right, found
                    in zip(self.expected_of_all(world_size), got, strict=True)]
        return first_difference(expected, got, self.tolerance) is None

    def _met_none(self, got, world_size):
        """Whether the attempt used None as a tensor, or left it in the place of one."""
        if isinstance(got, RankError):
            return "NoneType" in str(got)  # as Python's own TypeError and AttributeError say it
        return first_difference(self.expected_of_all(world_size), got, self.tolerance).got is None

    def explanation(self, attempt, got, world_size) -> str:
        """The sentence of the known mistake that explains what is wrong; empty if none does."""
        return self.known_mistakes.explanation(attempt, got, world_size)

    def observe(self, attempt, world_size, *, quiet=False) -> list[dict] | RankError:
        """The ranks' facts, or the RankError in place of them."""
        where = f", {_on(world_size)}" if self.on_ranks else ""
        with headed(f"Your code printed{where}:"):
            return observe.alone(self.trial, attempt, world_size, seconds=self._limit,
                                 quiet=quiet)

    def observe_all(self, attempts, world_size, *, until=math.inf) -> list[list[dict] | None]:
        """The ranks' facts of each attempt, quietly; None for one that its ranks do not survive."""
        return observe.in_turn(self.trial, attempts, world_size, seconds=3 * self._limit,
                               until=until)

    def expected_of_all(self, world_size) -> list[dict]:
        """What ``expected`` says, rank by rank."""
        if world_size not in self._expectations:
            self._expectations[world_size] = self._expected_anew(world_size)
        return self._expectations[world_size]

    def _expected_anew(self, world_size):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # these tensors are small: threads would wait for one another
        try:
            expected = self.expected(world_size)
        finally:
            torch.set_num_threads(threads)
        return [expected] * world_size if isinstance(expected, dict) else expected

    def solution_source(self) -> str:
        return textwrap.dedent(inspect.getsource(self.solution))


class Calculation(Exercise):
    """Base of the exercises whose function runs on no rank: numbers in, numbers out."""

    world_sizes = (1,)
    on_ranks = False
    communicates = False

    def terms(self) -> dict[str, dict[str, dict[str, float]]]:
        """Where answers are sums: of what an answer may be the sum.

        By what the cases have in common, such as "stage 2", or "" where that is nothing: by fact,
        the size of each term by its name, such as "the gradients". Names read as in "it holds 1/2
        of the gradients and the weights".
        """
        return {}

    def described(self, difference, got, world_size):
        """What the answers are sums of, seen over all cases."""
        words = super().described(difference, got, world_size)
        right, [found] = self.expected_of_all(world_size)[0], got
        for common, cases in self.terms().items():
            if difference.fact not in cases or not all(
                    isinstance(found.get(fact), int | float) for fact in cases):
                continue
            terms = {name: [each[name] for each in cases.values()]
                     for name in cases[difference.fact]}
            of_right = fewest([right[fact] for fact in cases], terms)
            of_found = fewest([found[fact] for fact in cases], terms)
            if of_right and (note := said(of_found, of_right)):
                where = f" of {common}" if common else ""
                words += f"\nIn all {len(cases)} cases{where}, {note}."
        return words


def _on(world_size):
    return f"on {world_size} rank{'s' * (world_size > 1)}"


def _shown(signature):
    return str(signature.replace(return_annotation=inspect.Signature.empty))


def _without_own_frames(text):
    """A report without the frames of dplab, and whether it had any.

    A report has them only where none of the frames is the reader's.
    """
    found, count = re.subn(r"^  dplab/\S+\.py, in .*\n(?:  [→ ] +\d+ .*(?:\n|$))*", "", text,
                           flags=re.M)
    return found.rstrip(), count > 0


# What a run's report advises, and nobody can give to a check.
_MORE_TIME = re.compile(r" A run that needs longer: timeout=SECONDS\."
                        r"| \(then give the run more time, with timeout=SECONDS\)")
