"""The cluster simulator beside published measurements of pure data-parallel and FSDP runs.

Once with nothing fitted, and once with the share of the peak fitted to the first run of each
series. Also: how fast the simulator is.
"""

import statistics
import time

from dplab.predict.catalogue import MODELS
from dplab.predict.cluster import Job, predict
from dplab.predict.published import CLUSTERS, published_runs, runs_with_fitted_share


def add_arguments(parser):
    parser.add_argument("--assumptions", action="store_true", help="below each run, and its source")
    parser.add_argument("--summary", action="store_true", help="the errors alone, not each run")


def main(options):
    for title, runs in (("nothing fitted", published_runs()),
                        ("the share of the peak from the first run of a series",
                         runs_with_fitted_share())):
        if options.summary:
            print_errors(title, runs)
        else:
            print_runs(title, runs, options.assumptions)
        print()
    for strategy, ranks, seconds in speeds():
        print(f"{strategy:5} of 126 layers on {ranks:7,} ranks: simulated in {seconds:.3f} s")


def print_errors(title, runs):
    print(f"{title:53}{'runs':>5}{'median error':>14}{'least':>8}{'most':>8}")
    for unit in dict.fromkeys(run.unit for run in runs):
        errors = [run.error for run in runs if run.unit == unit and run.error is not None]
        if errors:
            print(f"  {unit:51}{len(errors):5}{statistics.median(errors):+14.0%}{min(errors):+8.0%}"
                  f"{max(errors):+8.0%}")


def print_runs(title, runs, assumptions):
    print(f"{title}\n{'run':58}{'GPUs':>5}{'published':>11}{'predicted':>11}{'error':>7}"
          f"  {'unit':13}bound")
    for run in runs:
        numbers = (f"{'–':>11}{'–':>7}" if run.predicted is None
                   else f"{run.predicted:11.4g}{run.error:+7.0%}")
        print(f"{run.what:58}{run.ranks:5}{run.published:11.4g}{numbers}  {run.unit:13}"
              f"{run.bound or (run.assumptions if run.predicted is None else '')}")
        if assumptions:
            print(f"    {run.assumptions}; {run.source}")


def speeds() -> list[tuple[str, int, float]]:
    """(strategy, ranks, seconds) that it takes here to predict a step of Llama-3.1 405B."""
    found = []
    for strategy in ("DDP", "FSDP", "HSDP"):
        for ranks in (8, 16384, 100_000):
            job = Job(MODELS["Llama-3.1 405B"], 1, 8192, strategy, recompute="full")
            start = time.perf_counter()
            _ = predict(job, CLUSTERS["H100, 8 × 400 Gb/s a node"].of(ranks)).mfu
            found.append((strategy, ranks, time.perf_counter() - start))
    return found
