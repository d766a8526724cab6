"""What the ranks wrote, as lines: which are kept, which a report makes superfluous, and warnings.

`display` shows them.
"""

import contextlib
import contextvars
import re

from .places import ipython, spot

KEPT = 16_000  # bytes kept of a rank's output, from its start and again from its end
_MOST_WARNINGS = 20  # different ones that a run shows
# what gloo and C++ say of a failure, with addresses and times; the report says it in words
GLOO_WORDS = re.compile(
    r"terminate called after throwing an instance of '(gloo|$)"  # $: it was cut off there
    r"|\s*what\(\):\s*(\[enforce fail at|$)|(\[rank\d+\]:)?\[[EWF]\d{4} .*ProcessGroupGloo")
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")

heading: contextvars.ContextVar[str] = contextvars.ContextVar("heading", default="")


@contextlib.contextmanager
def headed(words: str):
    """Puts ``words`` above what the ranks of a run in this block print, if they print at all."""
    before = heading.set(words)
    try:
        yield
    finally:
        heading.reset(before)


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
        notice = f"… {self._dropped / 1e6:.1f} MB not shown …\n".encode() * bool(self._dropped)
        return as_lines(notice + self._end + self._line)

    def lines(self) -> list[str]:
        return as_lines(bytes(self._start)) + self.end()


def _without_overwritten(data):
    """Each line without what a carriage return wrote over: of tqdm's bar, the last state."""
    if b"\r" not in data:
        return data
    return b"\n".join(line[line.rstrip(b"\r").rfind(b"\r") + 1:] for line in data.split(b"\n"))


def as_lines(data):
    text = _CURSOR.sub("", data.decode("utf-8", "replace"))
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def is_hidden(rank: int, line: str, failure: Exception | None) -> bool:
    """Whether a line only repeats, as gloo words it, what the failure's report says. What a rank
    said before it died is not hidden: the report has no more. Below a heading is only what the
    rank's own code printed."""
    died = (not heading.get() and getattr(failure, "kind", "") == "died"
            and getattr(failure, "rank", None) == rank)
    return failure is not None and not died and bool(GLOO_WORDS.match(line))


seen_warnings: set[tuple] = set()


class RankWarnings:
    """Python's warnings on the ranks of a run: equal ones are one, with the ranks it comes from.

    One that an earlier run has shown is not shown again, as Python does within a process; in a
    notebook each cell begins anew.
    """

    def __init__(self):
        self._ranks: dict[tuple, set[int]] = {}

    def add(self, rank: int, warnings: list[tuple]) -> None:
        """Takes in what this rank has warned of: (category, text, file, line) of each."""
        for warning in warnings:
            self._ranks.setdefault(warning, set()).add(rank)

    def close(self) -> list[tuple[str, str]]:
        """Those that nobody has seen yet: which ranks, and a line."""
        new = {warning: ranks for warning, ranks in self._ranks.items()
               if warning not in seen_warnings}
        seen_warnings.update(new)
        lines = [(_label(sorted(ranks)), f"{category}: {text} ({spot(file, line)})")
                 for (category, text, file, line), ranks in sorted(
                     new.items(), key=lambda item: (item[0][2:], item[0]))]  # by their place
        left = len(lines) - _MOST_WARNINGS
        return lines[:_MOST_WARNINGS] + [("ranks", f"… {left} more warnings …")] * (left > 0)


def _label(ranks):
    """``rank 1``, ``ranks 0-3``, ``ranks 0, 2``."""
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def in_notebook() -> bool:
    return hasattr(ipython(), "kernel")
