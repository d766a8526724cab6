"""What is said while a run takes long: the time, and where the ranks are that say nothing.

In a notebook it is a line below the cell, for as long as the cell runs: one for all its runs, and
for what it does without ranks. The line goes when the cell ends. Elsewhere it is a line on stderr,
once a run, when some ranks wait for others. ``DPLAB_LIVE=0`` turns both off.
"""

import contextvars
import html
import os
import sys
import threading
import time

PATIENCE = 5.0  # seconds without output until something is said
_EVERY = 1.0  # seconds between two updates
heard_at = 0.0  # when ranks last showed something, by `time.monotonic`
_cell: "_Cell | None" = None  # that runs in this notebook now


def watch_cells(shell) -> None:
    """Shows the time below each cell of this shell that takes long."""
    if hasattr(shell, "kernel") and is_live():
        shell.events.register("pre_run_cell", _begin)
        shell.events.register("post_run_cell", _end)


def is_live() -> bool:
    return os.environ.get("DPLAB_LIVE") != "0"


def heard() -> None:
    """Ranks have shown something, so nothing needs to be said for a while."""
    global heard_at
    heard_at = time.monotonic()


def say(words: list[str]) -> None:
    """Where the ranks are that say nothing: lines below the time in a notebook's cell, or else on
    stderr."""
    if _cell is not None:
        _cell.words = words
    elif words and sys.stderr is not None:
        print(f"no output and no call for {PATIENCE:g} s:", *words, sep="\n  ", file=sys.stderr,
              flush=True)


def in_cell() -> bool:
    return _cell is not None


def _begin(_=None):
    global _cell
    _end()
    _cell = _Cell()


def _end(_=None):
    global _cell
    if _cell is not None:
        _cell.end()
        _cell = None


class _Cell:
    """The line below one cell, written by a thread of its own while the cell's code runs."""

    def __init__(self):
        self.words: list[str] = []
        self._handle = None
        self._is_shown = False
        self._started = time.monotonic()
        self._ended = threading.Event()
        # in this context, the kernel knows which cell the thread writes for
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=[self._watch],
                                        daemon=True)
        self._thread.start()

    def end(self):
        self._ended.set()
        self._thread.join(2.0)

    def _watch(self):
        wait = PATIENCE
        while not self._ended.wait(wait):
            silent = time.monotonic() - max(heard_at, self._started)
            wait = _EVERY if silent >= PATIENCE else PATIENCE - silent
            self._show(self._text() if silent >= PATIENCE else "")
        self._show("")

    def _text(self):
        seconds = time.monotonic() - self._started
        return "\n".join([f"{seconds:.0f} s …", *self.words])

    def _show(self, text):
        from IPython.display import display

        if not text and not self._is_shown:
            return
        self._is_shown = bool(text)
        data = {} if not text else {
            "text/plain": text,
            "text/html": f'<pre style="opacity:.75;line-height:1.35">{html.escape(text)}</pre>'}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
