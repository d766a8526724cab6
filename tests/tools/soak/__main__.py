"""The launcher under fire: seeded runs with random faults; each ends rightly and leaves nothing.

    python tests/tools/soak --runs 170 --seed 1        # 500 runs take half an hour

Run number n is drawn from the seed n: ``--seed 100 --runs 50`` makes the runs 100 to 149, and
``--only CASE --seed N`` repeats one that was listed as wrong. A run is right if it ends within its
bound with the report that the fault calls for; if a second later no process, folder, descriptor or
port of it is left; if the bystanders, a process with the fork server's command line and files
beside the runs' own folders, are as they were; and if the next run of the same process works.
"""

import argparse
import random
import signal
import sys
from collections import defaultdict

from cases import CASES
from run import Place, attempt


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first run (default 0)")
    parser.add_argument("--only", choices=CASES, metavar="CASE",
                        help=f"one case alone: {', '.join(CASES)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    seconds, wrong = defaultdict(list), defaultdict(int)
    with Place() as place:
        for number in range(options.seed, options.seed + options.runs):
            case = options.only or random.Random(number).choices(
                list(CASES), [share for share, _ in CASES.values()])[0]
            took, complaints = attempt(
                place, CASES[case][1](random.Random(f"{number} {case}")))
            seconds[case].append(took)
            wrong[case] += bool(complaints)
            for complaint in complaints:
                print(f"--only {case!r} --seed {number}: {complaint}", flush=True)
    print(f"\n{'case':26}{'tried':>6}{'right':>6}{'worst s':>9}")
    for case, times in seconds.items():
        print(f"{case:26}{len(times):6}{len(times) - wrong[case]:6}{max(times):9.2f}")
    failed = sum(wrong.values())
    print(f"{'all':26}{options.runs:6}{options.runs - failed:6}")
    sys.exit(f"{failed} wrong" if failed else 0)


main()
