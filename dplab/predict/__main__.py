"""``dplab plan`` and ``python -m dplab.predict``: a plan in the terminal, without torch."""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlencode

from dplab.predict import plan, plan_as_text
from dplab.predict.fields import BY_NAME, FIELDS


def main(arguments: list[str] | None = None) -> int:
    """Prints the plan; returns 0, or 2 where something asked for cannot be."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no arrows shows "?"
    try:
        status = _print(options)
        sys.stdout.flush()
    except BrokenPipeError:  # what reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _print(options):
    found = json.loads(plan.answer(_query(options), "plan" if options.link else "all"))
    if options.json:
        print(json.dumps(found, indent=2))
    for error in found["errors"]:
        name = error["field"]
        why = f"needs {_options(error['needs'])}" if error["needs"] else error["why"]
        said = f"{_option(name)}{' ' if error['needs'] else ': '}{why}" if name in BY_NAME else why
        print(f"dplab plan: {said}", file=sys.stderr)
    if found["errors"]:
        return 2
    if options.link:
        print(f"?{found['query']}")
    elif not options.json:
        print(plan_as_text.page(found))
        print(f"\nTo share it, add this to the planner's address:\n?{found['query']}")
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="dplab plan", allow_abbrev=False,
        description="Predicts how a model trains on a cluster: memory, traffic, time of a step, "
        "scaling, the strategy to take, and the command and settings to copy.",
        epilog='For example: dplab plan --model "Llama-3 8B" --gpus 64')
    parser.add_argument("address", nargs="?", metavar="ADDRESS", default="",
                        help="a plan that was shared, or the part of its address after the ?")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the plan as JSON")
    shown.add_argument("--link", action="store_true",
                       help="print only the end of the planner's address, to share the plan")
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(
        field.group for field in FIELDS)}
    for field in FIELDS:
        said = [field.help]
        if field.choices:
            said.append(f"One of: {', '.join(map(repr, field.choices))}.")
        if field.needs:
            said.append(f"Only with {_options(field.needs)}.")
        if field.default is not None and not callable(field.default):
            said.append(f"(default: {field.text_of(field.default)})")
        groups[field.group].add_argument(
            _option(field.name), dest=field.name, help=" ".join(said).replace("%", "%%"),
            metavar={"choice": "NAME", "flag": "yes|no", "config": "FILE"}.get(field.kind, "N"))
    return parser


def _option(name):
    return f"--{name.replace('_', '-')}"


def _options(values):
    return " ".join(f"{_option(name)} {value}" for name, value in values.items())


def _query(options):
    """The query that the address and the options make together."""
    page, mark, query = options.address.partition("#")[0].partition("?")
    if options.config is not None:
        with contextlib.suppress(OSError):
            options.config = Path(options.config).read_text("utf-8", errors="replace")
    if not mark and "=" in page:
        query = page  # and a page without a query shows the default plan
    given = urlencode({name: text for name, text in vars(options).items()
                       if name in BY_NAME and text is not None}, errors="replace")
    return "&".join(filter(None, (query, given)))


if __name__ == "__main__":
    sys.exit(main())
