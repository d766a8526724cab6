"""All benches on one page."""

import argparse
import ast
import importlib.util
import shlex
import time
import traceback
from pathlib import Path

import dplab
from dplab.bench.results import check_folder

ON_PAGE = {  # in this order, with these options
    "launchers": "--peer-rounds 2",
    "gloo": "--sizes 16 16384 --rounds 7",
    "ddp": "--ranks 4 --rounds 9",
    "sharded": "--ranks 4 --rounds 5",
    "predicted_steps": "--ranks 2 --buckets 4",
    "dryrun": "--few --ranks 8 1024",
    "memory": "--models 'Llama-3 8B'",
    "nccl": "--summary",
    "cluster": "--summary",
}
TAKES = {  # what is not on the page unless all are asked for
    "training": "7 minutes of a core",
    "infrequent": "5 minutes of a core",
    "eight_ranks": "a minute",
    "gpu": "2 minutes of a GPU",
}
BENCHES = (*ON_PAGE, *TAKES)
MODULES = {"cluster": "published_runs", "memory": "predicted_memory",
           "nccl": "published_collectives"}
"""The modules of benches whose names say less, or are taken: `predict` has two of them."""
RULE = 100 * "─"


def summary(name: str) -> str:
    """The first line of a bench's docstring, without an import of it."""
    found = importlib.util.find_spec(module_of(name))
    source = Path(str(found and found.origin)).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def module_of(name: str) -> str:
    """The full name of a bench's module."""
    return f"dplab.bench.{MODULES.get(name, name)}"


def run_bench(name: str, arguments: list[str], heading: bool = False) -> None:
    """Runs one of BENCHES as its command line would; ``heading``: below the machine's line."""
    bench = importlib.import_module(module_of(name))
    parser = argparse.ArgumentParser(prog=_command(name), description=summary(name))
    bench.add_arguments(parser)
    options = parser.parse_args(arguments)
    if getattr(options, "save", False):  # says before the minutes of measuring if it cannot
        try:
            check_folder()
        except FileNotFoundError as error:
            parser.error(str(error))
    if heading:
        print(dplab.measure.describe_machine(), flush=True)
    bench.main(options)


def print_page(without=(), everything: bool = False) -> int:
    """Prints the page; the number of benches that failed.

    without: names to leave out. everything: the long ones, too, as they are without options.
    """
    print(dplab.measure.describe_machine())
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
            print(f"not run: {_command(name):43}{TAKES.get(name, '')}".rstrip())
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
