"""The launcher under fire: seeded runs with random faults; each ends rightly and leaves nothing.

Run number n is drawn from the seed n: ``--seed 100 --runs 50`` makes the runs 100 to 149, and
``--only CASE --seed N`` repeats one that was listed as wrong. A run is right if it ends within its
bound with the report that the fault calls for; if a second later no process, folder, descriptor or
port of it is left; if the bystanders, a process with the fork server's command line and files
beside the runs' own folders, are as they were; and if the next run of the same process works.

    python tests/tools/soak --runs 170 --seed 1

500 runs take half an hour. The runs with a full temporary folder need root on Linux.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict

from soak.cases import CASES, draw
from soak.run import Attempt, Place

ALLOWANCE = 5.0  # seconds that a loaded machine may add to each bound


def main(arguments: list[str]) -> None:
    """Makes the runs that the command line asks for; exits with a text if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="python tests/tools/soak",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="runs (default 500; with --only, 1)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first run (default 0)")
    parser.add_argument("--only", choices=CASES, metavar="CASE",
                        help=f"one case alone: {', '.join(CASES)}")
    parser.add_argument("--allowance", type=float, default=ALLOWANCE, metavar="SECONDS",
                        help=f"added to each bound (default {ALLOWANCE:g})")
    options = parser.parse_args(arguments)

    runs = options.runs or (1 if options.only else 500)
    print(f"runs {options.seed} to {options.seed + runs - 1}; bounds with {options.allowance:g} s "
          "for a loaded machine", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    rows, wrong = soak(range(options.seed, options.seed + runs), options.only, options.allowance)
    print(f"\n{'case':26}{'tried':>6}{'right':>6}{'worst s':>9}{'bound s':>9}")
    for row in rows:
        if row["tried"]:
            print(f"{row['case']:26}{row['tried']:6}{row['right']:6}{row['worst']:9.2f}"
                  f"{row['bound']:9.1f}")
        else:
            print(f"{row['case']:26}  {row['note']}")
    print(f"{'all':26}{sum(row['tried'] for row in rows):6}{sum(row['right'] for row in rows):6}")
    if wrong:
        sys.exit(f"{len(wrong)} wrong")


def soak(numbers, only=None, allowance=ALLOWANCE) -> tuple[list[dict], list[str]]:
    """Makes the runs with these numbers. Returns a row for each case, and what was wrong."""
    seconds: dict[str, list[float]] = defaultdict(list)
    right: dict[str, int] = defaultdict(int)
    bounds: dict[str, float] = {}
    wrong: list[str] = []
    skipped = {} if can_be_cramped() else {"full temporary folder": "not tried here: needs root"}
    with Place() as place:
        for number in numbers:
            rng = random.Random(number)
            case = only or rng.choices(list(CASES), [share for share, _ in CASES.values()])[0]
            if case in skipped:
                continue
            plan = draw(random.Random(f"{number} {case}"), case)
            attempt = Attempt(place, plan, allowance)
            complaints = attempt.complaints()
            seconds[case].append(attempt.seconds)
            bounds[case] = max(bounds.get(case, 0.0), attempt.bound)
            right[case] += not complaints
            for complaint in complaints:
                wrong.append(f"--only {case!r} --seed {number}: {complaint}")
                print(wrong[-1], flush=True)
    rows = [{"case": case, "tried": len(seconds[case]), "right": right[case],
             "worst": round(max(seconds[case]), 2), "bound": round(bounds[case], 1)}
            if seconds[case] else
            {"case": case, "tried": 0, "right": 0, "note": skipped.get(case, "not drawn")}
            for case in CASES if not only or case == only]
    return rows, wrong


def can_be_cramped() -> bool:
    """Whether a tiny temporary folder can be mounted for one process alone."""
    return (sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") is not None
            and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0)
