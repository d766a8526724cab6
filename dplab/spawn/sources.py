"""Whose code a line is, and how the reader knows it: by the cell's number, or the file's name."""

import linecache
import os
import sys
from types import FrameType

from dplab.spawn.output import ipython

_LIBRARIES = tuple(os.path.join(folder, "") for folder in (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.__file__)))
_TYPED_IN = ("<ipython-input", "<stdin>")  # the cells of a terminal's IPython, Python's own prompt


def is_learners(file: str) -> bool:
    """Whether a source file is the learner's own: not dplab's, torch's or Python's."""
    if file.startswith("<"):
        return file.startswith(_TYPED_IN)
    return not (file.startswith(_LIBRARIES) or "site-packages" in file)


def learner_line() -> tuple[str, int]:
    """File and line of the learner's innermost frame; for `CallRecorder.record` alone."""
    inner = sys._getframe(3)  # the caller of the recorded method
    frame: FrameType | None = inner
    while frame is not None:
        if is_learners(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return inner.f_code.co_filename, inner.f_lineno


def learners(frames: list) -> list:
    """The learner's frames; where there are none, dplab's own but for the launcher's."""
    launcher = os.path.join("dplab", "spawn", "")
    mine = [frame for frame in frames if is_learners(frame.file)]
    return mine or [frame for frame in frames
                    if os.path.join("dplab", "") in frame.file and launcher not in frame.file]


def spot(file: str, line: int) -> str:
    """A line as the reader knows it, with its text where that is to be had."""
    text = linecache.getline(_whole_name(file), line).strip()
    return f"{place(file)}, line {line}" + (f": {text}" if text else "")


def _whole_name(file):
    """The file's full name, where a call log kept only its end."""
    if file in linecache.cache or os.path.exists(file):
        return file
    return next((name for name in linecache.cache if name.endswith(file)), file)


def place(file: str) -> str:
    """A source file as the reader knows it: the cell's number, or the file's name."""
    cells = getattr(getattr(ipython(), "compile", None), "_filename_map", {})
    for name, number in cells.items():
        if name == file or (len(file) >= 40 and name.endswith(file)):
            return f"cell In[{number}]"
    return os.path.basename(file)


def of_cells() -> dict[str, str]:
    """The sources of the notebook's cells, which exist in no file."""
    return {name: "".join(entry[2]) for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)}
