"""Lines of source as the reader knows them: a cell of the notebook and its number, or a file."""

import linecache
import os
import sys

from ..between.calls import PACKAGE


def ipython():
    """The IPython shell that this process runs in, or None; in a notebook it has a ``kernel``."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def spot(file: str, line: int) -> str:
    """A line as the reader knows it, with its text where that is to be had."""
    return ": ".join(filter(None, place_and_source(file, line)))


def place_and_source(file: str, line: int) -> tuple[str, str]:
    """Where a line is, as the reader knows it, and its text, which may be empty."""
    return f"{place(file)}, line {line}", linecache.getline(_whole_name(file), line).strip()


def _whole_name(file):
    """The file's full name, where a call log kept only its end."""
    if file in linecache.cache or os.path.exists(file):
        return file
    return next((name for name in linecache.cache if name.endswith(file)), file)


def place(file: str) -> str:
    """A source file as the reader knows it: the cell's number, or the file's name.

    One of this package has its path, so that nobody takes it for theirs.
    """
    cells = getattr(getattr(ipython(), "compile", None), "_filename_map", {})
    for name, number in cells.items():
        if name == file or (len(file) >= 40 and name.endswith(file)):
            return f"cell In[{number}]"
    if file.startswith(os.path.join(PACKAGE, "")):
        return os.path.relpath(file, os.path.dirname(PACKAGE))
    return os.path.basename(file)


def sources_of_cells() -> dict[str, str]:
    """The sources of the notebook's cells, which exist in no file."""
    return {name: "".join(entry[2]) for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)}
