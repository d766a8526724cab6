"""``dplab plan`` and ``python -m dplab.predict``: a plan in the terminal, without torch."""

import argparse
import io
import json
import os
import sys
from urllib.parse import urlencode

from dplab.predict import plan
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
    found = json.loads(plan.answer(_query(options), "all" if options.json else "plan"))
    if options.json:
        print(json.dumps(found, indent=2))
    for error in found["errors"]:
        name = error["field"]
        print(f"dplab plan: {f'{_option(name)}: ' if name in BY_NAME else ''}{error['why']}",
              file=sys.stderr)
    if found["errors"]:
        return 2
    if options.link:
        print(f"?{found['query']}")
    elif not options.json:
        recommendation, _ = plan.predicted(found["fields"])
        print(_page(found["plan"], recommendation))
        print(f"\nTo share it, add this to the planner's address:\n?{found['query']}")
    return 0


def _page(shown, recommendation):
    """What the run takes, which strategies there are, and how to start the one that is planned."""
    lines = [shown["title"], f"planned: {shown['name']}", ""]
    if shown["runs"]:
        rent = shown["rent"]
        lines.append(f"{'':25}{'tokens/s':>16}{'days':>14}{'GPU-hours':>16}{'cost':>16}")
        for name, words in (("allowed", "what kernels allow"),
                            ("middle", "runs like yours reached"),
                            ("high", "  at best"), ("low", "  at worst")):
            if shown["speeds"][name]:
                each = rent[name]
                cost = "–" if each["money"] is None else f"{each['money']:,.0f}"
                lines.append(f"{words:25}{shown['speeds'][name]:16,.0f}{each['days']:14,.1f}"
                             f"{each['gpu_hours']:16,.0f}{cost:>16}")
        lines.append(f"for {rent['tokens']:,.4g} tokens" + (
            "" if rent["price"] is not None else "; --price gives the cost"))
    launch = shown["launch"]
    return "\n".join([*lines, "", *shown["warnings"], str(recommendation), "", launch["torchrun"],
                      "", launch["torch"], *launch["notes"][:1],
                      "Memory by part, traffic, other numbers of GPUs, published runs near it and "
                      "DeepSpeed's file: --json."])


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
            needed = " ".join(f"{_option(name)} {value}" for name, value in field.needs.items())
            said.append(f"Only with {needed}.")
        if field.default is not None and not callable(field.default):
            said.append(f"(default: {field.text_of(field.default)})")
        groups[field.group].add_argument(
            _option(field.name), dest=field.name, help=" ".join(said).replace("%", "%%"),
            metavar={"choice": "NAME", "flag": "yes|no"}.get(field.kind, "N"))
    return parser


def _option(name):
    return f"--{name.replace('_', '-')}"


def _query(options):
    """The query that the address and the options make together."""
    page, mark, query = options.address.partition("#")[0].partition("?")
    if not mark and "=" in page:
        query = page  # and a page without a query shows the default plan
    given = urlencode({name: text for name, text in vars(options).items()
                       if name in BY_NAME and text is not None}, errors="replace")
    return "&".join(filter(None, (query, given)))


if __name__ == "__main__":
    sys.exit(main())
