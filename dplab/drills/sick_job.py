"""A sick job with its instruments, and what happens when the reader says what is wrong.

A chapter's drills are one subclass of `SickJob`: its instruments, the same for all its jobs; its
suspects; and its cases, each a part of the job with a fault in it. Whether a suspect fits is
computed from the readings of the job at hand, so each answer comes with a reading that is true.
"""

import difflib
import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dplab import RankError
from dplab.desk import cards, record
from dplab.desk.edits import source_of
from dplab.spawn.between.errors import Interrupted
from dplab.spawn.parent.output import in_notebook, ipython


@dataclass(frozen=True)
class Suspect:
    """What may be wrong. ``finding(readings)`` says whether it is, and a sentence that shows it.

    The sentence holds in both cases, and has this job's numbers in it. ``instrument`` is the one
    that shows them to the reader.
    """

    name: str
    line: str
    instrument: str
    finding: Callable[[Any], tuple[bool, str]]


@dataclass(frozen=True, eq=False)
class Fault:
    """Edits that make a part of the job sick, ``old: new``, and what a colleague writes of it.

    ``symptoms``: what of the readings the complaint tells; the tests hold each job to it. ``also``:
    the same complaint in other words, of which the seed takes one. ``part``: what is edited, where
    it is not the case's part.
    """

    edits: dict[str, str]
    complaint: str
    symptoms: set[str]
    world_sizes: tuple[int, ...] = (2, 3, 4)
    also: tuple[str, ...] = field(default=(), kw_only=True)
    part: Callable | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Case:
    """A job of a chapter: a part with one of the ``faults``, all of which one suspect explains.

    ``slug`` is permanent and tells nothing. Where the case is ``to_repair``, the reader writes the
    mended part.
    """

    slug: str
    suspect: str
    part: Callable
    faults: tuple[Fault, ...]
    to_repair: bool = False


def instrument(method):
    """Makes a method an instrument: the first one runs the job, and each is noted in the record."""

    @functools.wraps(method)
    def read(self, *args, **kwargs):
        if self._has_run():
            self._asked.add(method.__name__)
            self._keep(readings=sorted({*self._kept().get("readings", []), method.__name__}))
            method(self, *args, **kwargs)

    read.is_instrument = True
    return read


class SickJob:
    """A sick job. Ask its instruments, and say what is wrong: ``job.diagnose("…")``.

    A subclass has the class attributes ``chapter``, ``suspects_known`` and ``cases``, instruments,
    the methods `_draw_settings`, `_description` and `_run`, and where a case is to be repaired
    `_is_healthy`.
    """

    chapter: int
    minutes = 10  # that a reader needs for one
    answer = 'job.diagnose("…")'  # as the reader writes it
    running = "Running the job on {n} ranks …"
    suspects_known: tuple[Suspect, ...]
    cases: tuple[Case, ...]

    def __init__(self, seed: int):
        self.seed = seed
        chances = random.Random(f"{self.chapter} {seed}")
        self._case: Case = chances.choice(self.cases)
        self._fault: Fault = chances.choice(self._case.faults)
        self._healthy = self._fault.part or self._case.part
        self._world_size: int = chances.choice(self._fault.world_sizes)
        self._settings = self._draw_settings(chances)
        self._complaint: str = chances.choice((self._fault.complaint, *self._fault.also))
        self._asked: set[str] = set()  # the instruments that were read
        self._readings: Any = None
        self._is_found = False
        self._shown_by: int | None = None  # the number of the cell

    # What a subclass fills in.

    def _draw_settings(self, chances: random.Random):
        """The sizes of this job and what else its seed decides."""
        raise NotImplementedError

    def _description(self) -> str:
        """What the colleague tells of every job: its size and what it does."""
        raise NotImplementedError

    def _run(self, part: Callable):
        """The readings of the job with this function in the place of the case's part."""
        raise NotImplementedError

    def _is_healthy(self, readings) -> tuple[bool, str]:
        """Whether a job does what one process would, and a sentence that shows it."""
        raise NotImplementedError

    # What the reader does.

    @property
    def suspects(self) -> dict[str, str]:
        """What may be wrong, by name, with a line on each."""
        return {suspect.name: suspect.line for suspect in self.suspects_known}

    def diagnose(self, suspect: str = "") -> None:
        """Says whether this suspect is what is wrong, with the reading that shows it."""
        known = self._suspect_named(suspect)
        if known is None or not self._has_run():
            return
        fits, sentence = known.finding(self._readings)
        sentence += f" (`job.{known.instrument}()` shows it.)"
        if not fits:
            self._is_wrong(f"not “{known.name}”", sentence)
            return
        asked = f"You asked {len(self._asked)} of {len(self._instruments())} instruments."
        self._is_right(f", “{known.name}” it is", f"{sentence} {asked}")

    def repair(self, part: Callable | None = None) -> None:
        """Runs the job with the reader's function in the place of the sick one."""
        if not self._is_found:
            cards.card("First say what is wrong", 'With `job.diagnose("…")`; where the job asks '
                       "you to mend it, the code appears then.")
        elif not self._case.to_repair:
            self._say("it is solved", "It does not ask you to mend its code: `job.solution()` "
                      f"shows the mended lines. {self._another()} hands out another job.")
        elif not callable(part):
            cards.card("Which function?", f"`job.repair({self._part_name})`: the name of your "
                       "function, without brackets behind it.")
        else:
            try:
                healthy, sentence = self._is_healthy(self._run(part))
            except RankError as error:
                self._say(f"your {self._part_name} failed", "", str(error), cards.RED)
                return
            if healthy:
                self._is_solved("solved", sentence)
            else:
                self._say("not mended yet", sentence, color=cards.ORANGE)

    def solution(self) -> None:
        """Shows what is wrong, and the mended lines: a try that does not solve the job."""
        self._counted(False)
        self._say(self._case.suspect, self._legend, self._difference())

    def __repr__(self):
        return "\n".join([self._head(), self._text(), self._guide()]).replace("`", "")

    def _ipython_display_(self):
        """As the last line of the cell that took the job, nothing: its card is there already."""
        shell = ipython()
        if shell is None or shell.execution_count != self._shown_by:
            self._show()

    def __dir__(self):
        return [*self._instruments(), "diagnose", "repair", "seed", "solution", "suspects"]

    # How it is done.

    def _show(self):
        shell = ipython()
        self._shown_by = shell.execution_count if shell else None
        cards.card(self._head(), self._text(), self._guide())

    def _head(self):
        return f"On call, chapter {self.chapter:02d}: job {self.seed}"

    def _text(self):
        return f"“{self._complaint.format(n=self._world_size)}” {self._description()}"

    def _guide(self):
        """What the reader can type, and the suspects."""
        rows = {f"job.{name}()": inspect.getdoc(method).splitlines()[0].rstrip(".")
                for name, method in self._instruments().items()}
        rows[self.answer] = "your answer: one of the suspects below"
        rows["job.solution()"] = "the answer, if you give up"
        again = f'dplab.drill("{self.chapter:02d}", seed={self.seed}) gives this job again'
        return "\n".join([*_beside(rows), "", "Suspects", *_beside(self.suspects), "", again])

    @classmethod
    def _instruments(cls):
        return {name: method for name, method in vars(cls).items()
                if getattr(method, "is_instrument", False)}

    def _another(self):
        return f'`dplab.drill("{self.chapter:02d}")`'

    def _say(self, head, text, block="", color=cards.GREY):
        cards.card(f"Job {self.seed}: {head}", text, block, color)

    def _suspect_named(self, name):
        named = {suspect.name: suspect for suspect in self.suspects_known}
        text = " ".join(name.lower().strip("… ").split()) if isinstance(name, str) else ""
        if text not in named:
            head = f"There is no suspect {name!r}" if text else "Which suspect?"
            calls = {each: self.answer.replace("…", each, 1) for each in named}
            cards.card(head, cards.did_you_mean(text, calls)
                       or f"Write `{self.answer}` with one of these names in place of the dots.",
                       "\n".join(_beside(self.suspects)))
        return named.get(text)

    def _has_run(self):
        """Runs the job the first time; False, with a card, where it could not be run."""
        if self._readings is None:
            print(self.running.format(n=self._world_size), flush=True)
            try:
                self._readings = self._run(self._sick_part())
            except (RankError, OSError) as error:
                # Not the error's text: it may quote the code that is to be found.
                kind = getattr(error, "kind", type(error).__name__)
                self._say("it did not run here", f"Its {self._world_size} ranks failed ({kind}), "
                          "which is not the fault to find. Try again, or take another job: "
                          f"{self._another()}.", color=cards.RED)
            except KeyboardInterrupt:
                raise Interrupted("The job was stopped before its readings were complete.\n"
                                  "The next instrument runs it again.") from None
        return self._readings is not None

    def _kept(self):
        return record.entries("drills").get(key(self.chapter, self._case), {})

    def _keep(self, **entries):
        record.update("drills", key(self.chapter, self._case), lambda kept: kept.update(entries))

    def _counted(self, fits):
        """Notes a try, until one has found the fault; says in words which one this was."""
        kept = self._kept()
        if kept.get("diagnosed"):
            return " again"
        tries = kept.get("tries", 0) + 1
        self._keep(tries=tries, diagnosed=fits)
        return f" at the {_ordinal(tries)} try"

    def _is_wrong(self, head, sentence):
        self._counted(False)
        self._say(head, sentence, color=cards.ORANGE)

    def _is_right(self, what, sentence):
        """The fault is found; ``what`` it is ends the headline."""
        at_try = self._counted(True)
        self._is_found = True
        if self._case.to_repair:
            self._say(f"“{self._case.suspect}” it is{at_try}", f"{sentence} This is the code. "
                      f"Write `{self._part_name}` anew, without the fault, and run "
                      f"`job.repair({self._part_name})`.",
                      self._named(self._sick_text), cards.GREEN)
        else:
            self._is_solved(f"solved{at_try}{what}", sentence)

    def _is_solved(self, head, sentence):
        self._keep(solved=True)
        self._say(head, f"{sentence} {self._legend}", self._difference(), cards.GREEN)

    @property
    def _legend(self):
        """What the lines of `_difference` are."""
        return "The lines with `-` ran; those with `+` mend it."

    @property
    def _part_name(self):
        return self._case.part.__name__

    @property
    def _sick_text(self):
        text = source_of(self._healthy).edited(self._fault.edits)
        if text is None:
            raise ValueError(f"{self._healthy.__name__} has no place for {self._fault.edits}")
        return text

    def _sick_part(self):
        return source_of(self._healthy).compiled(self._sick_text)

    def _named(self, text):
        """A function's text as the reader sees it: with the name of the part that it stands for."""
        return text.replace(f"def {self._healthy.__name__}", f"def {self._part_name}", 1).strip()

    def _difference(self):
        """Both versions of the part, line by line, as a patch has them."""
        return self._as_patch(*map(self._named, (self._sick_text, source_of(self._healthy).text)))

    @staticmethod
    def _as_patch(sick, mended):
        sick, mended = sick.splitlines(), mended.splitlines()
        _, _, _, *lines = difflib.unified_diff(sick, mended, n=len(sick), lineterm="")
        return "\n".join(lines)


def _beside(rows):
    width = max(map(len, rows))
    return [f"{name:{width}}  {what}" for name, what in rows.items()]


def _ordinal(number):
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def key(chapter: int, case: Case) -> str:
    """The slug of the record."""
    return f"{chapter:02d}/{case.slug}"


def print_table(head, *rows):
    """Columns as wide as they must be, the first flush left, the others flush right."""
    rows = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print(f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(
            others, widths[1:], strict=True)), sep="  ")


def draw(figure: Callable, *args, **options) -> bool:
    """Shows what this function draws, in a notebook; returns whether there is one."""
    if in_notebook():
        from IPython.display import display

        display(figure(*args, **options))
    return in_notebook()
