"""What the ranks print: shown live, each line labelled with its rank, and left in rank order."""

import contextlib
import contextvars
import html
import os
import re
import sys
import time

KEPT = 16_000  # bytes kept of a rank's output, from its start and again from its end
_KEPT_IN_STREAM = 1_000_000  # bytes from a rank's start that a terminal or a file shows
_REFRESH = 0.2  # seconds between two live refreshes
# what gloo and C++ say of a failure, with addresses and times; the report says it in words
_GLOO_WORDS = re.compile(
    r"terminate called after throwing an instance of '(gloo|$)"  # $: it was cut off there
    r"|\s*what\(\):\s*(\[enforce fail at|$)|\[[EW]\d{4} .*ProcessGroupGloo")
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")


_heading = contextvars.ContextVar("heading", default="")


@contextlib.contextmanager
def headed(words: str):
    """Puts ``words`` above what the ranks of a run in this block print, if they print at all."""
    before = _heading.set(words)
    try:
        yield
    finally:
        _heading.reset(before)


def rank_color(rank: int) -> str:
    """The background of a rank's label, ``#RRGGBB``; `configure` puts another in its place."""
    return ("#1F4E79", "#7A3B00")[rank % 2]


class RankText:
    """The start and the end of what one rank wrote, however much it was."""

    def __init__(self, start=KEPT):
        self._room = start  # bytes that the start may still take in
        self._start, self._end, self._line = bytearray(), b"", b""
        self._dropped = 0

    def feed(self, data: bytes) -> bytes:
        """Takes in what was read; returns the lines that became complete and are in the start."""
        data = _without_overwritten(self._line + data)
        cut = data.rfind(b"\n") + 1
        lines, self._line = data[:cut], self._last_of(data[cut:])
        cut = len(lines) if len(lines) <= self._room else lines.rfind(b"\n", 0, self._room) + 1
        self._start += lines[:cut]
        self._room = self._room - cut if cut == len(lines) else 0
        self._end = self._last_of(self._end + lines[cut:])
        return lines[:cut]

    def _last_of(self, data):
        if len(data) <= KEPT:
            return data
        cut = data.find(b"\n", len(data) - KEPT - 1, -1) + 1 or len(data) - KEPT
        self._dropped += cut
        return data[cut:]

    def end(self) -> list[str]:
        """The lines after the start, with a notice where some are left out."""
        notice = f"… {_size(self._dropped)} not shown …\n".encode() if self._dropped else b""
        return _lines(notice + self._end + self._line)

    def lines(self) -> list[str]:
        return _lines(bytes(self._start)) + self.end()


def _without_overwritten(data):
    """Each line without what a carriage return wrote over: of tqdm's bar, the last state."""
    if b"\r" not in data:
        return data
    return b"\n".join(line[line.rstrip(b"\r").rfind(b"\r") + 1:] for line in data.split(b"\n"))


def _lines(data):
    text = _CURSOR.sub("", data.decode("utf-8", "replace"))
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _size(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def show(world_size: int):
    """The display that suits where we are: a notebook's cell, or a terminal or file."""
    return _Cell(world_size) if in_notebook() else _Stream(world_size)


def in_notebook() -> bool:
    return hasattr(ipython(), "kernel")


def ipython():
    """The IPython shell that this process runs in, or None; in a notebook it has a ``kernel``."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


class _Stream:
    """Lines go out as they come; of very much output, the last lines at the end."""

    def __init__(self, world_size):
        self._texts = [RankText(_KEPT_IN_STREAM) for _ in range(world_size)]
        self._heading = f"{_heading.get()}\n" if _heading.get() else ""

    def feed(self, rank, data):
        self._write(rank, _lines(self._texts[rank].feed(data)))

    def refresh(self):
        pass

    def close(self, failed=False):
        for rank, text in enumerate(self._texts):
            self._write(rank, text.end())

    def _write(self, rank, lines):
        if not lines or sys.stdout is None:
            return
        text = self._heading + "".join(f"[rank {rank}] {line}\n" for line in lines)
        self._heading = ""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # closed: the run and its report go on
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()


class _Cell:
    """One output of the cell, rewritten while the ranks print; a notebook keeps its last state."""

    def __init__(self, world_size):
        self._texts = [RankText() for _ in range(world_size)]
        self._heading = _heading.get()
        self._handle = None
        self._changed = self._failed = False
        self._next = time.monotonic() + _REFRESH
        self._live = os.environ.get("DPLAB_LIVE") != "0"

    def feed(self, rank, data):
        self._texts[rank].feed(data)
        self._changed = True

    def refresh(self):
        if self._live and self._changed and time.monotonic() > self._next:
            self._show()

    def close(self, failed=False):
        self._failed = failed
        if self._changed and any(text for _, text in self._lines()):
            self._show()

    def _show(self):
        from IPython.display import display

        data = {"text/plain": self._plain(), "text/html": self._html()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._changed = False
        self._next = time.monotonic() + _REFRESH

    def _lines(self):
        for rank, text in enumerate(self._texts):
            for line in text.lines():
                if not (self._failed and _GLOO_WORDS.match(line)):
                    yield rank, line

    def _plain(self):
        lines = [self._heading] if self._heading else []
        return "\n".join(lines + [f"[rank {rank}] {line}" for rank, line in self._lines()])

    def _html(self):
        rows = [f'<span style="background:{rank_color(rank)};color:#fff;border-radius:3px;'
                f'padding:0 5px">rank {rank}</span> {html.escape(line)}'
                for rank, line in self._lines()]
        heading = f"<div>{html.escape(self._heading)}</div>" if self._heading else ""
        return f'{heading}<pre style="line-height:1.35">' + "\n".join(rows) + "</pre>"
