"""``dplab plan`` and ``python -m dplab.predict``: a plan in the terminal, without torch."""

import argparse
import io
import json
import os
import sys
from urllib.parse import urlencode

from dplab.predict import plan, plan_as_text
from dplab.predict.fields import BY_NAME, FIELDS

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
    if options.json:
        print(json.dumps(found, indent=2))
    for error in found["errors"]:
        print(f"dplab plan: {_wrong(**error)}", file=sys.stderr)
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
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the plan as JSON")
    shown.add_argument("--link", action="store_true",
                       help="print only the end of the planner's address, to share the plan")
    for group in dict.fromkeys(field.group for field in FIELDS):
        listed = parser.add_argument_group(group)
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
        said.append(f"One of: {', '.join(map(repr, field.choices))}.")
    if field.needs:
        said.append(f"Only with {_options(field.needs)}.")
    if field.default_by is not None:
        said.append(f"(default: follows {_option(field.default_by[0])})")
    elif field.default is not None:
        said.append(f"(default: {field.text_of(field.default)})")
    return " ".join(said)


def _query(options):
    """The query that the address and the options make together."""
    address = (options.address or "").partition("#")[0]
    page, mark, query = address.partition("?")
    if mark:
        address = query
    elif "=" not in page and ("/" in page or page.endswith(".html")):
        address = ""  # the page without a query, which shows the default plan
    given = [(field.name, getattr(options, field.name)) for field in FIELDS
             if getattr(options, field.name) is not None]
    return "&".join(part for part in (address, urlencode(given, errors="replace")) if part)


def _options(values):
    return " ".join(f"{_option(name)} {value}" for name, value in values.items())


def _wrong(field, why, needs):
    """The line on an error, with the name of its field as the option that it is here."""
    if needs:
        return f"{_option(field)} needs {_options(needs)}"
    return f"{_option(field)}: {why}" if field in BY_NAME else why


if __name__ == "__main__":
    sys.exit(main())
