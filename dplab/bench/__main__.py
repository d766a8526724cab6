"""``python -m dplab.bench [NAME [options]]``: one bench, or in turn those that take seconds."""

import argparse
import importlib
import sys

import dplab

BENCHES = {  # by name: the module, and what it measures
    "launchers": ("launchers", "how long ranks take to start, beside torch's launchers"),
    "sharded": ("sharded", "a step of the course's ZeRO beside torch's and DeepSpeed's"),
    "cluster": ("published_runs", "the cluster simulator beside published runs"),
    "gpu": ("gpu", "rates of this GPU's kernels, and a block beside the prediction"),
}
IN_TURN = (["launchers", "--peer-rounds", "2"], ["sharded", "--ranks", "4", "--rounds", "5"],
           ["cluster"])


def main(arguments: list[str]) -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser("python -m dplab.bench", description=(
        "Runs one bench, or without a name all but `gpu`, one after another."))
    benches = parser.add_subparsers(metavar="NAME", title="benches")
    for name, (module, what) in BENCHES.items():
        bench = benches.add_parser(name, help=what, description=what)
        if arguments[:1] == [name]:
            found = importlib.import_module(f"dplab.bench.{module}")  # it may load torch
            found.add_arguments(bench)
            bench.set_defaults(run=found.main)
    options = parser.parse_args(arguments)
    if not arguments:
        for words in IN_TURN:
            print(f"\n{' '.join(words)}: {BENCHES[words[0]][1]}", flush=True)
            main(words)
        return
    print(dplab.measure.describe_machine(), flush=True)
    options.run(options)


if __name__ == "__main__":
    main(sys.argv[1:])
