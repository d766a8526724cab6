"""What a rank has in the place of a terminal: its output goes to the parent, and so do warnings."""

import builtins
import io
import os
import sys
import warnings

from ..between.calls import is_learners, learner_line

_new_warnings: dict[tuple, None] = {}  # (category, text, file, line)


def connect(output: int) -> None:
    """From now on this descriptor takes what Python, C and children write; nothing can be read."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False), encoding="utf-8",
            errors="backslashreplace", line_buffering=True, write_through=True)
        setattr(sys, name, stream)


def install(in_ipython: bool) -> None:
    """Warnings are noted for the parent, which makes one of all ranks' copies.

    ``in_ipython``: the parent has `display` among its builtins. A rank shows text alone.
    """
    builtins.input = sys.breakpointhook = _no_keyboard
    warnings.showwarning = _noting(sys.stderr, warnings.showwarning)
    if in_ipython:
        builtins.display = print  # type: ignore[attr-defined]
    if "inline" in os.environ.get("MPLBACKEND", ""):  # it takes half a second, and has no notebook
        os.environ["MPLBACKEND"] = "agg"


def say_of_figures() -> None:
    """Says what becomes of the figures that `matplotlib.pyplot` has open, if there are any."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_fignums():
        print("a rank shows no figures: return what they are drawn from, or the figure itself")


def take_warnings() -> list[tuple]:
    """What this rank has warned of since the last time: (category, text, file, line) of each."""
    global _new_warnings
    taken, _new_warnings = _new_warnings, {}
    return list(taken)


def _noting(stream, original):
    def showwarning(message, category, filename, lineno, file=None, line=None):
        if file is not None or sys.stderr is not stream:
            original(message, category, filename, lineno, file, line)
        else:
            place = filename, lineno
            if not is_learners(filename) and is_learners(learner_line(depth=1)[0]):
                place = learner_line(depth=1)
            _new_warnings[category.__name__, str(message)[:600], *place] = None

    return showwarning


def _no_keyboard(*_, **__):
    raise EOFError("ranks have no keyboard, so input() and breakpoint() do not work there. Ask in "
                   "the notebook, and hand the answer to the ranks")
