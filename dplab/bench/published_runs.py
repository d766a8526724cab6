"""The cluster simulator beside published measurements of pure data-parallel and FSDP runs.

Each run as an interval, from the slow to the fast pace of what was measured; nothing is fitted.
Then the planner's ranges.
"""

import json
import textwrap
from pathlib import Path

from dplab.predict import reached
from dplab.predict.published import published_runs, summary


def add_arguments(parser):
    parser.add_argument("--runs", action="store_true",
                        help="each run as well, what it assumes, and its source")
    parser.add_argument("--write", metavar="FILE",
                        help="only write what each run reached of its prediction: ratios.json")


def main(options):
    if options.write:
        ratios = json.dumps(reached.measured_ratios())
        Path(options.write).write_text("\n".join(
            textwrap.wrap(ratios, 118, break_long_words=False, break_on_hyphens=False)) + "\n")
        return
    runs = published_runs()
    if options.runs:
        print_runs(runs)
    speeds = [run for run in runs if run.unit != "efficiency"]
    groups = {"all": speeds, "held out": [run for run in speeds if run.held_out],
              "not held out": [run for run in speeds if not run.held_out]}
    for name in ("unit", "gpu"):
        for value in dict.fromkeys(getattr(run, name) for run in speeds):
            groups[value] = [run for run in speeds if getattr(run, name) == value]
    print_errors("nothing fitted", groups)
    print_ranges()


def print_ranges():
    """What runs of each class reached of their predictions, and how well that held."""
    print(f"\n{'reached, of what is predicted':30}{'sources':>8}{'runs':>6}{'low':>7}{'middle':>8}"
          f"{'high':>7}{'held out, inside':>18}")
    for gpu, generation in reached.GENERATIONS.items():
        for ranks in (1, reached.LARGE) if gpu != "H200" else ():
            name = f"  {generation}, {'from' if ranks > 1 else 'below'} {reached.LARGE} GPUs"
            found = reached.reached(gpu, ranks)
            print(f"{name:30}" + ("  fewer than three sources" if found is None else
                  f"{found.sources:8}{found.runs:6}{found.low:7.2f}{found.middle:8.2f}"
                  f"{found.high:7.2f}{found.held_out:18.0%}"))


def print_runs(runs):
    print(f"{'run':62}{'GPUs':>5}{'published':>11}{'low':>10}{'typical':>10}{'high':>10}{'error':>7}"
          "  unit")
    for run in runs:
        if run.predicted is None:
            print(f"{run.what:62}{run.ranks:5}{run.published:11.4g}{'–':>37}  {run.unit}")
        else:
            print(f"{run.what:62}{run.ranks:5}{run.published:11.4g}{run.low:10.4g}"
                  f"{run.predicted:10.4g}{run.high:10.4g}{run.error:+7.0%}  {run.unit}")
        print(f"    {run.assumptions}; {run.source}")
    print()


def print_errors(title, groups):
    """One line for each group that has runs in scope; a positive error is too fast."""
    print(f"{title:41}{'runs':>5}{'median':>8}{'size':>6}{'≤ 30 %':>8}{'inside':>8}  the worst")
    for name, group in groups.items():
        if any(run.predicted is not None for run in group):
            found = summary(group)
            print(f"  {name:39}{found.count:5}{found.error:+8.0%}{found.absolute_error:6.0%}"
                  f"{found.within_30_percent:8.0%}{found.inside:8.0%}"
                  f"  {found.worst.error:+.0%} {found.worst.what}")
    print()
