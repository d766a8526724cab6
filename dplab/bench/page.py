"""All benches on one page."""

import argparse
import ast
import importlib.util
import shlex
import time
import traceback
from pathlib import Path

from dplab.bench.machine import machine

BENCHES = ("launch", "collectives", "ddp", "sharded", "step", "dryrun", "cluster", "chapters",
           "training", "infrequent", "nodes")
ON_PAGE = {  # in this order, with these options
    "launch": "--peer-rounds 2",
    "collectives": "--sizes 16 16384 --rounds 7",
    "ddp": "--ranks 4 --rounds 9",
    "sharded": "--ranks 4 --rounds 5",
    "step": "--ranks 2 --buckets 4",
    "dryrun": "--few --ranks 8 1024",
    "cluster": "--summary",
    "chapters": "",
}
TAKES = {  # what is not on the page unless all are asked for
    "training": "7 minutes of a core",
    "infrequent": "5 minutes of a core",
    "nodes": "2 minutes; root on Linux",
}


RULE = 100 * "─"


def summary(name: str) -> str:
    """The first line of a bench's docstring, without an import of it."""
    found = importlib.util.find_spec(f"dplab.bench.{name}")
    source = Path(str(found and found.origin)).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def run_bench(name: str, arguments: list[str], heading: str = "") -> None:
    """Prints the heading, if there is one, and runs one of BENCHES as its command line would."""
    bench = importlib.import_module(f"dplab.bench.{name}")
    parser = argparse.ArgumentParser(prog=_command(name), description=summary(name))
    bench.add_arguments(parser)
    options = parser.parse_args(arguments)
    if heading:
        print(heading, flush=True)
    bench.main(options)


def print_page(without=(), everything: bool = False) -> int:
    """Prints the page; the number of benches that failed.

    without: names to leave out. everything: the long ones, too, as they are without options.
    """
    print(machine())
    wanted = ON_PAGE | (dict.fromkeys(TAKES, "") if everything else {})
    began, failed = time.perf_counter(), []
    for name, options in wanted.items():
        if name not in without:
            start = time.perf_counter()
            print(f"\n\n{RULE}\n{name}: {summary(name)}\n{_command(name, options)}\n", flush=True)
            if not _ran(name, options):
                failed.append(name)
            print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"\n\n{RULE}")
    for name in BENCHES:
        if name in without or name not in wanted:
            print(f"not run: {_command(name):38}{TAKES.get(name, '')}".rstrip())
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes in all; failed: "
          f"{', '.join(failed) or 'none'}")
    return len(failed)


def _ran(name, options):
    """Runs the bench, and says so if it fails; whether it did not."""
    try:
        run_bench(name, shlex.split(options))
    except SystemExit as left:
        if left.code:
            print(f"FAILED: {left}")
        return not left.code
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED: {type(error).__name__}: {error}")
        return False
    return True


def _command(name, options=""):
    return f"python -m dplab.bench {name} {options}".rstrip()
