"""The reader's progress, in a small file of their own: ``~/.dplab/progress.json``."""

import contextlib
import json
import os
import tempfile
from pathlib import Path


def folder() -> Path:
    """Where the file lies; the environment variable DPLAB_HOME names another folder."""
    if named := os.environ.get("DPLAB_HOME"):
        return Path(named)
    try:
        return Path.home() / ".dplab"
    except RuntimeError:  # a container's user without a name, and no HOME
        return Path(os.sep, ".dplab")


def outcomes() -> dict[str, str]:
    """The last outcome of each exercise that was checked; a pass stays a pass."""
    return {id: entry["outcome"] for id, entry in _read().items() if "outcome" in entry}


def save_outcome(id: str, outcome: str) -> bool:
    """Returns whether it could be written down."""
    entries = _read()
    entry = entries.setdefault(id, {})
    if entry.get("outcome") == "passed" or outcome == "not attempted":
        return True
    entry["outcome"] = outcome
    return _write(entries)


def next_hint(id: str, count: int) -> int:
    """Which hint to show now, from 0; after the last one it stays there."""
    entries = _read()
    entry = entries.setdefault(id, {})
    number = entry.get("hints", 0)
    entry["hints"] = min(number + 1, count - 1)
    _write(entries)
    return min(number, count - 1)


def _read():
    with contextlib.suppress(OSError, ValueError):
        entries = json.loads((folder() / "progress.json").read_text())
        if isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values()):
            return entries
    return {}


def _write(entries):
    """Through a second file, so that a stop midway leaves the old one whole."""
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), delete=False) as file:
            json.dump(entries, file, indent=1, sort_keys=True)
        os.replace(file.name, folder() / "progress.json")
        return True
    return False
