"""``dplab plan`` and ``python -m dplab.predict``: a plan in the terminal, without torch."""

import argparse
import io
import json
import os
import sys
from urllib.parse import urlencode

from dplab.predict import plan, plan_as_text
from dplab.predict.fields import FIELDS

_GROUPS = {"model": "model", "hardware": "hardware", "run": "training"}
_EXAMPLE = 'dplab plan --model "Llama-3 8B" --gpus 64'


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
    if options.json and not options.link:
        print(json.dumps(found, indent=2))
    for error in found["errors"]:
        print(f"dplab plan: {_named(error['field'])}{error['why']}", file=sys.stderr)
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
        epilog=f"For example: {_EXAMPLE}")
    parser.add_argument("address", nargs="?", metavar="ADDRESS",
                        help="a plan that was shared, or the part of its address after the ?")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--link", action="store_true",
                        help="print only the end of the planner's address, to share the plan")
    for group, title in _GROUPS.items():
        listed = parser.add_argument_group(title)
        for field in FIELDS:
            if field.group == group:
                listed.add_argument(_option(field.name), dest=field.name, metavar=_metavar(field),
                                    help=_help(field).replace("%", "%%"))
    return parser


def _option(name):
    return f"--{name.replace('_', '-')}"


def _metavar(field):
    return {"whole": "N", "number": "N", "flag": "yes|no"}.get(field.kind, "NAME")


def _help(field):
    said = [field.help]
    if field.choices:
        said.append(f"One of: {', '.join(field.choices)}.")
    if field.needs:
        with_these = " ".join(f"{_option(name)} {value}" for name, value in field.needs.items())
        said.append(f"Only with {with_these}.")
    if field.default is not None:
        said.append(f"(default: {field.text_of(field.default)})")
    return " ".join(said)


def _query(options):
    """The query that the address and the options make together."""
    address = options.address or ""
    if "?" in address:
        address = address.partition("?")[2]
    given = [(field.name, getattr(options, field.name)) for field in FIELDS
             if getattr(options, field.name) is not None]
    return "&".join(part for part in (address, urlencode(given, errors="replace")) if part)


def _named(name):
    """The name of a field as the option that it is here."""
    if name in {field.name for field in FIELDS}:
        return f"{_option(name)}: "
    return ""


if __name__ == "__main__":
    sys.exit(main())
