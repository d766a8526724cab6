"""Shows what the ranks print and show, and says where they are when they are silent for long.

It stands below a notebook's cell, or in a terminal or a file.
"""

import contextlib
import html
import os
import sys
import time

from ..between.messages import Shown, as_text
from . import output
from .output import (
    GLOO_WORDS,
    RankText,
    RankWarnings,
    as_lines,
    in_notebook,
    is_hidden,
    shown_in,
)

_REFRESH = 0.2  # seconds between two live refreshes, or more:
_RATE = 400_000  # bytes/s, of which a Jupyter server takes a million
_LONG, _HEIGHT = 30, "36em"  # lines, from which on a text is scrolled, and the height it has then
_OF_MANY = "#57606A"  # the label's colour of what several ranks say
_KEPT_IN_STREAM = 1_000_000  # bytes from a rank's start that a terminal or a file shows
_NOT_ENDED = RuntimeError("whether the run fails is not known yet")


def show(world_size: int):
    """The display that suits where we are."""
    return CellOutput(world_size) if in_notebook() else Stream(world_size)


def is_live() -> bool:
    """Whether anything is shown that does not stay: ``DPLAB_LIVE=0`` turns it off."""
    return os.environ.get("DPLAB_LIVE") != "0"


class CellOutput:
    """In rank order: texts, and between them what the ranks show as figures, Markdown and so on.

    Each text and each thing shown is a display of its own. They are rewritten while the ranks run;
    a notebook keeps their last state.
    """

    def __init__(self, world_size):
        self._texts = [RankText() for _ in range(world_size)]
        self._shown: list[dict[int, Shown]] = [{} for _ in range(world_size)]  # by number
        self._heading = output.heading.get()
        self._warnings = RankWarnings()
        self._displays: list[list] = []  # [handle, its data]
        self._failure: BaseException | None = _NOT_ENDED
        self._changed = False
        self._next = time.monotonic() + _REFRESH
        self._said = None  # the display of what is said of silent ranks

    def feed(self, rank, data):
        self._texts[rank].feed(data)
        self._warnings.add(rank, self._texts[rank])
        self._changed = True

    def take(self, rank, shown):
        self._shown[rank][shown.number] = shown
        self._changed = True

    def refresh(self):
        if self._changed and time.monotonic() > self._next and is_live():
            self._show()

    def say(self, lines: list[str], seconds: float = 0.0) -> None:
        """Says what ranks do that have been silent; with no lines, takes it away again."""
        if not lines and not self._said:
            return
        text = "\n".join([f"{seconds:.0f} s …", *lines])
        data = {"text/plain": text, "text/html": '<pre style="opacity:.75;line-height:1.35">'
                f"{html.escape(text)}</pre>"} if lines else {}
        if self._said is None:
            self._said = _display(data, {})
        else:
            self._said.update(data, raw=True)

    def close(self, failure=None):
        self.say([])
        self._failure = failure
        self._show(self._warnings.close())  # also where a refresh has just shown all text

    def _show(self, warnings=()):
        size, parts = 0, self._parts(warnings)
        parts += [({}, {})] * (len(self._displays) - len(parts))  # what is there no more
        for index, (data, metadata) in enumerate(parts):
            if index == len(self._displays):
                self._displays.append([_display(data, metadata), data])
            elif self._displays[index][1] != data:
                self._displays[index][0].update(data, raw=True, metadata=metadata)
                self._displays[index][1] = data
            else:
                continue
            size += sum(len(value) for value in data.values())
        self._changed = False
        self._next = time.monotonic() + max(_REFRESH, size / _RATE)

    def _parts(self, warnings):
        """(data, metadata) of each display."""
        parts, rows = [], []
        for rank, text in enumerate(self._texts):
            label = f"rank {rank}", output.rank_color(rank)
            left = dict(self._shown[rank])
            for line in text.lines():
                number, line = shown_in(line) or (None, line)
                if shown := left.pop(number, None):
                    rows = _add(shown, parts, rows, label)
                elif not is_hidden(rank, line, self._failure):
                    rows.append((*label, line, line))
            if self._failure is not _NOT_ENDED:  # else the mark may be on its way
                for shown in left.values():  # its mark lay where so much output was cut
                    rows = _add(shown, parts, rows, label)
        rows += [(ranks, _OF_MANY, line, line) for ranks, line in warnings]
        parts += _as_display(rows)
        if parts and self._heading:
            first = parts[0][0]
            first["text/plain"] = f"{self._heading}\n{first['text/plain']}"
            first["text/html"] = f"<div>{html.escape(self._heading)}</div>{first['text/html']}"
        return parts


def _add(shown, parts, rows, label):
    """Appends what is shown, below its rank's label; the rows that follow it."""
    text = as_text(shown.data)
    if set(shown.data) <= {"text/plain"}:
        return rows + [(*label, line, line) for line in text.splitlines()]
    parts += _as_display([*rows, (*label, "", text)])
    parts.append((shown.data, shown.metadata))
    return []


def _as_display(rows):
    """The one display of rows (label, its colour, line, line where there is no HTML), if any.

    A long text is scrolled.
    """
    if not rows:
        return []
    lines = [f'<span style="background:{color};color:#fff;border-radius:3px;padding:0 5px">'
             f"{label}</span> {html.escape(line)}" for label, color, line, _ in rows]
    text = '<pre style="line-height:1.35">' + "\n".join(lines) + "</pre>"
    if len(rows) > _LONG:
        text = (f'<div style="max-height:{_HEIGHT};overflow:auto;border:1px solid #8A929B;'
                f'padding:4px">{text}</div>')
    return [({"text/plain": "\n".join(f"[{label}] {line}" for label, _, _, line in rows),
              "text/html": text}, {})]


def _display(data, metadata):
    from IPython.display import display

    return display(data, raw=True, metadata=metadata, display_id=True)


class Stream:
    """Lines go out as they come; of very much output, the last lines at the end."""

    def __init__(self, world_size):
        self._texts = [RankText(_KEPT_IN_STREAM) for _ in range(world_size)]
        self._heading = f"{output.heading.get()}\n" if output.heading.get() else ""
        self._warnings = RankWarnings()
        self._held = []  # (rank, line) that a report may make superfluous

    def feed(self, rank, data):
        self._write(rank, as_lines(self._texts[rank].feed(data)))
        self._warnings.add(rank, self._texts[rank])

    def take(self, rank, shown):
        """Its text comes with the mark in the output."""

    def refresh(self):
        pass

    def say(self, lines: list[str], seconds: float = 0.0) -> None:
        """Nothing: a terminal or a file takes nothing back, and the report says it in the end."""

    def close(self, failure=None):
        for rank, text in enumerate(self._texts):
            self._write(rank, text.end())
        for rank, line in self._held:
            if not is_hidden(rank, line, failure):
                self._print(f"[rank {rank}] {line}\n")
        for ranks, line in self._warnings.close():
            self._print(f"[{ranks}] {line}\n")

    def _write(self, rank, lines):
        held = [line for line in lines if GLOO_WORDS.match(line)]
        self._held += [(rank, line) for line in held]
        shown = ((line, shown_in(line)) for line in lines if line not in held)
        self._print("".join(f"[rank {rank}] {found[1] if found else line}\n"
                            for line, found in shown))

    def _print(self, text):
        if not text or sys.stdout is None:
            return
        text, self._heading = self._heading + text, ""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # closed: the run and its report go on
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
