"""The results that came with the course: NAME.json is what ``dplab.bench NAME --save`` wrote."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent


def save(name: str, **parts) -> None:
    """Writes NAME.json: the command that runs now, torch's version, then ``parts``.

    parts: settings, and tables as lists of dicts, which get a line for each row.
    """
    (FOLDER / f"{name}.json").write_text(_as_json({
        "command": " ".join(["python -m dplab.bench", *sys.argv[1:]]),
        "torch": version("torch"), **parts}), encoding="utf-8")


def committed(name: str) -> dict:
    """What `save` wrote: "command", "torch", and the parts by their names."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _as_json(parts):
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_value(part)}"
                              for name, part in parts.items()) + "\n}\n"


def _value(part):
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n  " + ",\n  ".join(map(json.dumps, part)) + "\n ]"
    return json.dumps(part)
