"""What the ranks print: shown live, each line labelled with its rank, and left in rank order."""

import html
import os
import re
import sys
import time

KEPT = 16_000  # bytes kept of a rank's output, from its start and again from its end
_REFRESH = 0.2  # seconds between two live refreshes
_OVERWRITTEN = re.compile(rb"[^\n]*\r(?=[^\r\n])")  # what a carriage return wrote over: tqdm's bar
# what gloo and C++ say of a failure, with addresses and times; the report says it in words
_GLOO_WORDS = re.compile(
    r"terminate called after throwing an instance of 'gloo|\s*what\(\):\s+\[enforce fail at"
    r"|\[[EW]\d{4} .*ProcessGroupGloo")
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7F3C8D", "#666666")


class RankText:
    """The start and the end of what one rank wrote, however much it was."""

    def __init__(self):
        self._head, self._tail, self._line = b"", b"", b""
        self._dropped = 0

    def feed(self, data: bytes) -> bytes:
        """Takes in what was read; returns the lines that became complete."""
        data = self._line + data
        cut = data.rfind(b"\n") + 1
        lines, self._line = data[:cut], data[cut:]
        lines = _OVERWRITTEN.sub(b"", lines)
        self._line = _OVERWRITTEN.sub(b"", self._line)[-KEPT:]
        self._keep(lines)
        return lines

    def _keep(self, lines):
        if not self._tail and len(self._head) + len(lines) <= KEPT:
            self._head += lines
            return
        both = self._tail + lines
        if not self._tail:
            room = KEPT - len(self._head)
            cut = both.rfind(b"\n", 0, room) + 1
            self._head, both = self._head + both[:cut], both[cut:]
        cut = both.find(b"\n", len(both) - KEPT) + 1 if len(both) > KEPT else 0
        self._dropped += cut
        self._tail = both[cut:]

    def lines(self) -> list[str]:
        notice = b""
        if self._dropped:
            notice = f"… {_size(self._dropped)} not shown …\n".encode()
        raw = self._head + notice + self._tail + self._line
        text = _CURSOR.sub("", raw.decode("utf-8", "replace"))
        return [line.rstrip("\r") for line in text.split("\n")[: None if self._line else -1]]


def _size(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def show(world_size: int):
    """The display that suits where we are: a notebook's cell, or a terminal or file."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return _Cell(world_size) if hasattr(shell, "kernel") else _Stream(world_size)


class _Stream:
    """Lines go out as they come."""

    def __init__(self, world_size):
        self._texts = [RankText() for _ in range(world_size)]

    def feed(self, rank, data):
        self._write(rank, self._texts[rank].feed(data))

    def refresh(self):
        pass

    def close(self, failed=False):
        for rank, text in enumerate(self._texts):
            self._write(rank, text.feed(b"\n") if text._line else b"")

    def _write(self, rank, lines):
        for line in lines.decode("utf-8", "replace").splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
        if lines:
            sys.stdout.flush()


class _Cell:
    """One output of the cell, rewritten while the ranks print; a notebook keeps its last state."""

    def __init__(self, world_size):
        self._texts = [RankText() for _ in range(world_size)]
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
        return "\n".join(f"[rank {rank}] {line}" for rank, line in self._lines())

    def _html(self):
        rows = [f'<span style="color:{_COLORS[rank % len(_COLORS)]};font-weight:600">rank {rank}'
                f"</span> │ {html.escape(line)}" for rank, line in self._lines()]
        return '<pre style="line-height:1.35">' + "\n".join(rows) + "</pre>"
