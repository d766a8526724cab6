"""How times are written, and where the results that chapters show are kept: in chapters/data."""

import json
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "chapters" / "data"


def spread(times: Sequence[float], digits: int = 1) -> str:
    """The median, then least and most in brackets."""
    return (f"{statistics.median(times):.{digits}f} "
            f"({min(times):.{digits}f} to {max(times):.{digits}f})")


def save(name: str, **parts) -> None:
    """Writes NAME.json: the command that made it, torch's version, then ``parts``.

    parts: settings, and tables as lists of dicts, which get a line for each row; ``command`` where
    it is another than that of the script beside the file, ``torch`` where another version ran.
    Raises FileNotFoundError where dplab does not lie in the course's repository.
    """
    parts = {"command": f"python chapters/data/{name}.py", "torch": version("torch"), **parts}
    text = ",\n".join(f" {_json(part)}: {_value(value)}" for part, value in parts.items())
    (FOLDER / f"{name}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _value(part):
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n  " + ",\n  ".join(map(_json, part)) + "\n ]"
    return _json(part)


def _json(part):
    return json.dumps(part, ensure_ascii=False)
