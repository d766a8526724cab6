"""``python -m dplab.bench [NAME [options]]``: one bench, or in turn those that take seconds."""

import argparse
import ast
import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import dplab

BENCHES = {  # with the options that they have in turn; None: not then
    "launchers": "--peer-rounds 2",
    "sharded": "--ranks 4 --rounds 5",
    "cluster": "",
    "gpu": None,
}
MODULES = {"cluster": "published_runs"}
"""Of a bench whose name is taken: `predict` has it."""


def module_of(name: str) -> str:
    """The full name of a bench's module."""
    return f"dplab.bench.{MODULES.get(name, name)}"


def summary(name: str) -> str:
    """The first line of a bench's docstring, without an import of it."""
    file = Path(__file__).with_name(f"{MODULES.get(name, name)}.py")
    source = file.read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def run_bench(name: str, arguments: list[str]) -> None:
    """Runs one of BENCHES as its command line would."""
    bench = importlib.import_module(module_of(name))
    parser = argparse.ArgumentParser(f"python -m dplab.bench {name}", description=summary(name))
    bench.add_arguments(parser)
    options = parser.parse_args(arguments)
    print(dplab.measure.describe_machine(), flush=True)
    bench.main(options)


def in_turn() -> list[str]:
    """Runs each bench that takes seconds in a process of its own; the names of those that failed.
    """
    failed = []
    for name, options in BENCHES.items():
        if options is not None:
            print(f"\n{name} {options}: {summary(name)}", flush=True)
            command = [sys.executable, "-m", "dplab.bench", name, *shlex.split(options)]
            if subprocess.run(command).returncode:
                failed.append(name)
    return failed


def main(arguments: list[str]) -> int:
    """The exit status: 1 if a bench failed."""
    if arguments and arguments[0] in BENCHES:
        run_bench(arguments[0], arguments[1:])
        return 0
    benches = "\n".join(f"  {name:12}{summary(name)}" for name in BENCHES)
    parser = argparse.ArgumentParser(
        prog="python -m dplab.bench", usage="%(prog)s [NAME [options]]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{__doc__} NAME --help has the options.\n\n{benches}")
    if arguments and not arguments[0].startswith("-"):
        parser.error(f"there is no bench {arguments[0]!r}. There are:\n\n{benches}")
    parser.parse_args(arguments)
    failed = in_turn()
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
