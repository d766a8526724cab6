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
    return f"{place(file)}, line {line}", linecache.getline(file, line).strip()


def place(file: str) -> str:
    """A source file as the reader knows it: the cell's number, or the file's name.

    One of this package has its path, so that nobody takes it for theirs.
    """
    cells = getattr(getattr(ipython(), "compile", None), "_filename_map", {})
    if file in cells:
        return f"cell In[{cells[file]}]"
    if file.startswith(os.path.join(PACKAGE, "")):
        return os.path.relpath(file, os.path.dirname(PACKAGE))
    return os.path.basename(file)


def sources_of_cells() -> dict[str, str]:
    """The sources of the notebook's cells, which exist in no file."""
    return {name: "".join(entry[2]) for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)}
