"""A notebook file as plain data: read, written, and without what a run left in it."""

import json
import uuid
from pathlib import Path


class Refused(Exception):
    """What the reader asked for cannot be done; the text says why."""


class UnreadableNotebook(Refused):
    """The file is no notebook of format 4."""


def read(path: Path, data: bytes | None = None) -> dict:
    """The notebook; each cell has an ``id`` and ``metadata``, and its ``source`` is one text.

    ``data``: where it is not the file's content. Raises UnreadableNotebook, which names the file.
    """
    try:
        notebook = json.loads(path.read_bytes() if data is None else data)
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
            cell.setdefault("id", uuid.uuid4().hex[:8])
            cell.setdefault("metadata", {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableNotebook(f"{path} is no notebook of format 4: {error}") from None
    return notebook


def dumps(notebook: dict) -> bytes:
    """The file's bytes, laid out as Jupyter does."""
    cells = [{**cell, "source": cell["source"].splitlines(keepends=True)}
             for cell in notebook["cells"]]
    text = json.dumps({**notebook, "cells": cells}, indent=1, sort_keys=True, ensure_ascii=False)
    return (text + "\n").encode()


def cleared(notebook: dict) -> dict:
    """The same cells, without outputs and the numbers of their runs."""
    return {**notebook, "cells": [cleared_cell(cell) for cell in notebook["cells"]]}


def cleared_cell(cell: dict) -> dict:
    if cell["cell_type"] != "code":
        return cell
    return {**cell, "outputs": [], "execution_count": None}


def sources(notebook: dict) -> list[tuple[str, str]]:
    """Kind and text of each cell: what a reader can edit."""
    return [(cell["cell_type"], cell["source"]) for cell in notebook["cells"]]


def has_outputs(notebook: dict) -> bool:
    return any(cell.get("outputs") for cell in notebook["cells"])
