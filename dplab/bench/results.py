"""Results of benches: how times are written, and where the results that chapters show are kept.

Those lie in the repository, in chapters/data: NAME.json is what ``dplab.bench NAME --save`` wrote.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "chapters" / "data"


def spread(times: Sequence[float], digits: int = 1) -> str:
    """The median, then least and most in brackets."""
    return (f"{statistics.median(times):.{digits}f} "
            f"({min(times):.{digits}f} to {max(times):.{digits}f})")


def check_folder() -> None:
    """Raises FileNotFoundError where dplab does not lie in the course's repository."""
    if not FOLDER.is_dir():
        raise FileNotFoundError(
            f"--save writes into chapters/data of the course's repository, and there is no "
            f"{FOLDER}: run the bench in a clone, with the dplab that lies there")


def save(name: str, program: str = "python -m dplab.bench", **parts) -> None:
    """Writes NAME.json: the command that runs now, torch's version, then ``parts``.

    parts: settings, and tables as lists of dicts, which get a line for each row.
    """
    check_folder()
    (FOLDER / f"{name}.json").write_text(_as_json({
        "command": " ".join([program, *sys.argv[1:]]),
        "torch": version("torch"), **parts}), encoding="utf-8")


def _as_json(parts):
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_value(part)}"
                              for name, part in parts.items()) + "\n}\n"


def _value(part):
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n  " + ",\n  ".join(map(json.dumps, part)) + "\n ]"
    return json.dumps(part)
