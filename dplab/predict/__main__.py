"""``dplab plan`` and ``python -m dplab.predict``: a plan in the terminal, without torch."""

import argparse
import json
import sys
import textwrap

from dplab.predict import plan
from dplab.predict.fields import FIELDS

WORDS = {"allowed": "what kernels allow", "middle": "runs like yours reached",
         "high": "  at best", "low": "  at worst"}


def main(arguments: list[str] | None = None) -> int:
    """Prints the plan; returns 0, or 2 where something asked for cannot be."""
    listed = "\n".join(textwrap.fill(
        f"{field.name}: {field.help} {', '.join(map(repr, field.choices))}", 96,
        initial_indent="  ", subsequent_indent="    ") for field in FIELDS)
    parser = argparse.ArgumentParser(
        prog="dplab plan", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Predicts how a model trains on a cluster: memory, time, days, the strategy "
        'to take.\nFor example: dplab plan "model=Llama-3 8B" gpus=64',
        epilog=f"what may be given:\n{listed}")
    parser.add_argument("given", nargs="*", metavar="NAME=VALUE",
                        help="one of those below, or the address of a plan that was shared")
    parser.add_argument("--json", action="store_true",
                        help="print all that the planner's page shows, as JSON")
    options = parser.parse_args(arguments)
    found = json.loads(plan.answer("&".join(map(_query, options.given))))
    for error in found["errors"]:
        print(f"dplab plan: {error['field']}: {error['why']}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=2))
    elif found["plan"]:
        print(_page(found))
    return 2 if found["errors"] else 0


def _query(given):
    """The query in an address, or what is one itself."""
    page, mark, query = given.partition("#")[0].partition("?")
    return query if mark else page if "=" in page else ""


def _page(found):
    shown, told = found["plan"], found["recommendation"]
    lines = [shown["title"], f"planned: {shown['name']}", ""]
    for row in told["options"]:
        speed = f"{row['tokens_per_second']:,.0f} tokens/s" if row["seconds"] else "does not run"
        lines.append(f"{row['name']:12}{row['bytes'] / 1e9:10,.1f} GB{speed:>26}  {row['mark']}")
    for name, words in WORDS.items() if shown["runs"] else ():
        if each := shown["rent"][name]:
            cost = "" if each["money"] is None else f", cost {each['money']:,.0f}"
            lines.append(f"{words:25}{shown['speeds'][name]:16,.0f} tokens/s, "
                         f"{each['days']:,.1f} days, {each['gpu_hours']:,.0f} GPU-hours{cost}")
    return "\n".join([*lines, "", *shown["warnings"], *told["advice"], "",
                      shown["launch"]["torchrun"], "", shown["launch"]["torch"],
                      f"The planner's address ends with ?{found['query']}"])


if __name__ == "__main__":
    sys.exit(main())
