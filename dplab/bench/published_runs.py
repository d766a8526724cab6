"""The cluster simulator beside published measurements of pure data-parallel and FSDP runs.

Each run, with what it assumes and its source, as an interval from the slow to the fast pace of what
was measured; nothing is fitted.
Then what runs of each class reached of their predictions: the planner's ranges.
"""

import json
import textwrap
from pathlib import Path

from dplab.predict import reached
from dplab.predict.published import published_runs, summary


def add_arguments(parser):
    parser.add_argument("--write", metavar="FILE", type=Path,
                        help="only write what each run reached of its prediction: ratios.json")


def main(options):
    if options.write:
        lines = textwrap.wrap(json.dumps(reached.measured_ratios()), 118, break_on_hyphens=False)
        options.write.write_text("\n".join(lines) + "\n")
        return
    runs = published_runs()
    print(f"{'run':62}{'GPUs':>5}{'published':>10}{'low':>10}{'typical':>10}{'high':>10}")
    for run in runs:
        print_run(run)
    print(f"\n{'errors; more than 0 is too fast':32}{'runs':>5}{'median':>8}{'size':>6}"
          f"{'≤ 30 %':>8}{'inside':>8}  the worst")
    speeds = [run for run in runs if run.unit != "efficiency"]
    print_errors("all", speeds)
    print_errors("held out", [run for run in speeds if run.held_out])
    for name in ("unit", "gpu"):
        for value in dict.fromkeys(getattr(run, name) for run in speeds):
            print_errors(value, [run for run in speeds if getattr(run, name) == value])
    print_ranges()


def print_run(run):
    numbers = "".join(f"{'–' if value is None else format(value, '.4g'):>10}"
                      for value in (run.published, run.low, run.predicted, run.high))
    print(f"{run.what:62}{run.ranks:5}{numbers} {run.unit}\n"
          f"    {run.assumptions}; {run.source}")


def print_errors(name, group):
    """One line for a group that has runs in scope."""
    if any(run.predicted is not None for run in group):
        found = summary(group)
        print(f"  {name:30}{found.count:5}{found.error:+8.0%}{found.absolute_error:6.0%}"
              f"{found.within_30_percent:8.0%}{found.inside:8.0%}"
              f"  {found.worst.error:+.0%} {found.worst.what}")


def print_ranges():
    print(f"\n{'reached, of what is predicted':30}{'sources':>8}{'runs':>6}{'low':>7}{'middle':>8}"
          f"{'high':>7}{'held out, inside':>18}")
    for gpu, generation in reached.GENERATIONS.items():
        for size, ranks in (("below", 1), ("from", reached.LARGE)):
            if gpu != "H200" and (found := reached.reached(gpu, ranks)):  # it is a Hopper as well
                print(f"  {f'{generation}, {size} {reached.LARGE} GPUs':28}{found.sources:8}"
                      f"{found.runs:6}{found.low:7.2f}{found.middle:8.2f}{found.high:7.2f}"
                      f"{found.held_out:18.0%}")
