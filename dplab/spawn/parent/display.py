"""Shows what the ranks print, and says where they are when they are silent for long.

It stands below a notebook's cell, or in a terminal or a file.
"""

import contextlib
import html
import os
import sys
import time

from . import output
from .output import GLOO_WORDS, RankText, RankWarnings, as_lines, in_notebook, is_hidden

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
    """One display, in rank order, that is rewritten while the ranks run; its last state is kept."""

    def __init__(self, world_size):
        self.warnings = RankWarnings()
        self._texts = [RankText() for _ in range(world_size)]
        self._heading = output.heading.get()
        self._shown = _Display()
        self._said = _Display()  # of silent ranks
        self._changed = False
        self._next = time.monotonic() + _REFRESH

    def feed(self, rank, data):
        self._texts[rank].feed(data)
        self._changed = True

    def refresh(self):
        if self._changed and time.monotonic() > self._next and is_live():
            self._show(_NOT_ENDED)

    def say(self, lines: list[str], seconds: float = 0.0) -> None:
        """Says what ranks do that have been silent; with no lines, takes it away again."""
        text = "\n".join([f"{seconds:.0f} s …", *lines])
        page = f'<pre style="opacity:.75;line-height:1.35">{html.escape(text)}</pre>'
        self._said.show({"text/plain": text, "text/html": page} if lines else {})

    def close(self, failure=None):
        self.say([])
        self._show(failure, self.warnings.close())

    def _show(self, failure, warnings=()):
        rows = [(f"rank {rank}", output.rank_color(rank), line)
                for rank, text in enumerate(self._texts) for line in text.lines()
                if not is_hidden(rank, line, failure)]
        rows += [(ranks, _OF_MANY, line) for ranks, line in warnings]
        data = _data(rows, self._heading) if rows else {}
        self._shown.show(data)
        self._changed = False
        size = sum(map(len, data.values()))
        self._next = time.monotonic() + max(_REFRESH, size / _RATE)


def _data(rows, heading):
    """Rows (label, its colour, line) by kind, as Jupyter takes them. A long text is scrolled."""
    text = "\n".join(f"[{label}] {line}" for label, _, line in rows)
    lines = [f'<span style="background:{color};color:#fff;border-radius:3px;padding:0 5px">'
             f"{label}</span> {html.escape(line)}" for label, color, line in rows]
    page = '<pre style="line-height:1.35">' + "\n".join(lines) + "</pre>"
    if len(rows) > _LONG:
        page = (f'<div style="max-height:{_HEIGHT};overflow:auto;border:1px solid #8A929B;'
                f'padding:4px">{page}</div>')
    if heading:
        text, page = f"{heading}\n{text}", f"<div>{html.escape(heading)}</div>{page}"
    return {"text/plain": text, "text/html": page}


class _Display:
    """A place below the cell, which is made when there is something to show."""

    def __init__(self):
        self._handle = None
        self._data = {}

    def show(self, data: dict) -> None:
        """Shows ``data``, by kind, in the place of what is there; with none, takes it away."""
        if data == self._data:
            return
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._data = data


class Stream:
    """Lines go out as they come; of very much output, the last lines at the end."""

    def __init__(self, world_size):
        self.warnings = RankWarnings()
        self._texts = [RankText(_KEPT_IN_STREAM) for _ in range(world_size)]
        self._heading = f"{output.heading.get()}\n" if output.heading.get() else ""
        self._held = []  # (rank, line) that a report may make superfluous

    def feed(self, rank, data):
        self._write(rank, as_lines(self._texts[rank].feed(data)))

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
        for ranks, line in self.warnings.close():
            self._print(f"[{ranks}] {line}\n")

    def _write(self, rank, lines):
        held = [line for line in lines if GLOO_WORDS.match(line)]
        self._held += [(rank, line) for line in held]
        self._print("".join(f"[rank {rank}] {line}\n" for line in lines if line not in held))

    def _print(self, text):
        if not text or sys.stdout is None:
            return
        text, self._heading = self._heading + text, ""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # closed: the run and its report go on
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
