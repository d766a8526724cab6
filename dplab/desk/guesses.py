"""Guesses: a question before a measurement, the reader's answer, and the result beside it."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from dplab.desk import cards, course, record
from dplab.desk.quantities import NotUnderstood, read, written
from dplab.spawn.parent.output import in_notebook, ipython

RULE = ("A choice counts if it is right. A number counts if it is within a factor of 2 of the "
        "result; a percentage must also be within 25 percentage points.")


class Score(NamedTuple):
    """How many of a chapter's guesses were asked, answered, shown beside the result, and good."""

    asked: int
    answered: int
    revealed: int
    good: int  # as RULE says


def guess(slug: str, question: str, answer: Any = None, *,
          choices: Sequence | Mapping | None = None, unit: str | None = None) -> "Guess":
    """Asks for a guess at one of ``choices``, or at a number in ``unit``; never waits for it.

    ``choices`` are the possible results, or map each of them to the words for it. In a notebook a
    widget takes the answer; ``answer`` is for where there are no widgets. What the reader answers
    is kept under ``slug`` and can be changed until `Guess.reveal` has shown the result beside it.
    """
    made = Guess(slug, question, choices, unit)
    if answer is not None:
        made.note(answer)
    made.show()
    return made


def scores() -> dict[course.Key, Score]:
    """For each chapter that has guesses: how good the reader's are."""
    entries = record.entries("guesses")
    found = {}
    for chapter, slugs in course.guesses().items():
        answered = [entries[slug] for slug in slugs if "answer" in entries.get(slug, {})]
        found[chapter] = Score(len(slugs), len(answered),
                               sum("good" in entry for entry in answered),
                               sum(entry.get("good") is True for entry in answered))
    return found


class Guess:
    """What `guess` returns: ``note`` takes an answer, ``reveal`` shows the result beside it."""

    def __init__(self, slug: str, question: str, choices: Sequence | Mapping | None = None,
                 unit: str | None = None):
        self.slug, self.question, self.unit = slug, question, unit
        self._choices: dict[str, Any] | None = None  # the possible results by their words
        if choices is not None:
            words = choices.values() if isinstance(choices, Mapping) else choices
            self._choices = dict(zip(map(str, words), choices, strict=True))
        self._entry = self._recalled()
        self._asks_back = ""  # what the reader is asked about an answer that was not understood
        self._measured: Any = None  # the result, once `reveal` has told it
        self._is_kept = True
        self._box: Any = None
        self._in_place: Any = None  # what stands in place of a box that JupyterLab cannot find
        self._shown_by: int | None = None  # the number of the cell that showed it last

    def _recalled(self):
        """The entry that is kept, if its answer still answers the question.

        It has ``answer`` as the reader wrote it, its ``value``, which is the words of a choice or
        a number in the unit, and ``when``; once revealed, ``measured`` and whether it was ``good``.
        """
        entry = record.entries("guesses").get(self.slug, {})
        with contextlib.suppress(NotUnderstood, KeyError):
            return entry | {"value": self._understood(str(entry["answer"]))}
        return {}

    @property
    def _revealed(self):
        return "good" in self._entry

    def note(self, answer: Any) -> None:
        """Keeps the answer, or asks what it means. Once the result was shown, nothing changes."""
        typed = str(answer).strip()
        if self._revealed or not typed:
            return
        try:
            value = self._understood(typed)
        except NotUnderstood as question:
            self._asks_back = str(question)
        else:
            self._asks_back = ""
            if (typed, value) != (self._entry.get("answer"), self._entry.get("value")):
                now = datetime.now().astimezone().isoformat(timespec="seconds")
                self._keep({"answer": typed, "value": value, "when": now})
        self._refresh()

    def reveal(self, measured: Any) -> None:
        """Shows the result: one of the choices, or a number in the unit. If there is a guess, shows
        it beside the result and says how far off it is; from then on the guess stays as it is. A
        guess that comes later is compared in its box.
        """
        measured = measured.item() if hasattr(measured, "item") else measured
        if self._choices is None:
            result: Any = float(measured)
        else:
            result = next((words for words, choice in self._choices.items() if measured == choice),
                          None)
            if result is None:
                cards.card(f"Result: {measured}", "This is none of the choices.")
                return
        self._measured = result
        if not self._entry:
            cards.card(f"Result: {self._written(result)}")
            return
        self._compare()
        cards.card(f"Your guess: {self._written(self._entry['value'])} · "
                   f"Result: {self._written(result)}", self._compared(result)[1],
                   color=cards.GREEN if self._entry["good"] else cards.ORANGE)

    def show(self) -> None:
        """Shows the question again; `guess` has shown it once."""
        self._shown_by = _running_cell()
        if not in_notebook():
            print(self._plain())
            return
        from IPython.display import display

        from dplab.desk.buttons import InPlace
        from dplab.desk.guess_box import GuessBox

        if self._box is None:
            self._box = GuessBox(cards.inline(self.question), list(self._choices or ()), self.unit,
                                 self._in_field(), self.note, self._compare)
            self._in_place = InPlace()
            self._refresh_box()
        # A page without widgets shows the HTML or the text: it says how to answer there.
        display(self._box._repr_mimebundle_() | {
            "text/plain": self._plain(), "text/html": self._rich(self._how_to_answer())}, raw=True)
        self._in_place.show(self._without_box())

    def _ipython_display_(self):
        """As the last line of the cell that made it, nothing: it is there already."""
        if self._shown_by is None or self._shown_by != _running_cell():
            self.show()

    def _understood(self, typed):
        if self._choices is None:
            return read(typed, self.unit)
        alike = [words for words in self._choices if words.casefold() == typed.casefold()] or [
            words for words in self._choices if words.casefold().startswith(typed.casefold())]
        if len(alike) != 1:
            raise NotUnderstood(f'Which choice is "{typed}"? Write one of: '
                                f"{', '.join(self._choices)}.")
        return alike[0]

    def _compared(self, result):
        """Whether the guess was good, as `RULE` says, and a sentence that says how far off."""
        if self._choices is None:
            return _beside(self._entry["value"], result, self.unit)
        good = result == self._entry["value"]
        return good, f"Your guess is {'right' if good else 'wrong'}."

    def _written(self, value):
        return value if self._choices is not None else written(value, self.unit)

    def _keep(self, entry):
        def replace(kept):
            kept.clear()
            kept.update(entry)

        self._entry = entry
        self._is_kept = record.update("guesses", self.slug, replace)

    def _compare(self):
        """Keeps the guess with the result beside it. From then on it stays as it is."""
        self._asks_back = ""
        self._keep(self._entry | {"measured": self._measured,
                                  "good": self._compared(self._measured)[0]})
        self._refresh()

    def _status(self, then="Run the next cells."):
        """One line: what was noted, or what the reader is asked; empty at first."""
        value = self._written(self._entry["value"]) if self._entry else ""
        if self._asks_back:
            return self._asks_back + (f" (Noted so far: {value}.)" if value else "")
        if not value:
            return ""
        if self._revealed:
            result = self._entry["measured"]
            then = (f"Result: {self._written(result)}. {self._compared(result)[1]} The result was "
                    "shown, so this guess stands.")
        lost = "" if self._is_kept else (
            f" (It could not be written to {record.folder()}: DPLAB_HOME in the environment names "
            "another folder.)")
        return f"Your guess: {value}. {then}{lost}"

    def _how_to_answer(self):
        return self._status() or 'To guess, write answer="…" into this call, and run it again.'

    def _plain(self):
        choices = " | ".join(self._choices or ())
        return "\n".join(filter(None, [self.question, choices, self._how_to_answer()]))

    def _rich(self, status):
        choices = "".join(f"<li>{cards.inline(words)}</li>" for words in self._choices or ())
        return cards.frame("Your guess", f"<div>{cards.inline(self.question)}</div>"
                           + (f"<ul>{choices}</ul>" if choices else "")
                           + f"<div>{cards.inline(status)}</div>", cards.GREY)

    def _without_box(self):
        """The question where JupyterLab cannot find the box."""
        return self._rich(self._status("Run this cell again to go on.")
                          or "Run this cell again to answer.")

    def _refresh(self):
        if self._box is not None:
            self._refresh_box()
            self._in_place.change(self._without_box())

    def _refresh_box(self):
        is_offered = bool(self._entry) and self._measured is not None and not self._revealed
        then = "The result was measured already." if is_offered else "Run the next cells."
        self._box.say(cards.inline(self._status(then)))
        self._box.offer_result(is_offered)
        if self._revealed:
            self._box.lock(self._in_field())

    def _in_field(self):
        return self._entry.get("value" if self._choices else "answer")


def _running_cell():
    shell = ipython()
    return shell.execution_count if shell else None


def _beside(guessed, result, unit):
    """Whether a number is a good guess, as `RULE` says, and a sentence that says how far off."""
    if guessed == result:
        return True, "Your guess is exactly right."
    if not math.isfinite(result):
        return False, "The result is not a finite number."
    if guessed * result <= 0:
        off, more = written(abs(result - guessed), unit), "more" if result > guessed else "less"
        return False, f"The result is {off} {more} than your guess."
    ratio = result / guessed
    factor = max(ratio, 1 / ratio)
    good = factor <= 2 and not (unit in ("%", "percent") and abs(result - guessed) > 25)
    if good and factor < 1.05:
        return True, "Your guess is right to within 5 %."
    larger, smaller = ("The result", "your guess") if ratio > 1 else ("Your guess", "the result")
    return good, (f"{'Close: ' + larger.lower() if good else larger} is "
                  f"{written(float(f'{factor:.2g}'))} times {smaller}.")
