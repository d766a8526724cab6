"""The launcher under fire: seeded runs with random faults; each ends rightly and leaves nothing.

    python tests/tools/soak --runs 170 --seed 1        # 500 runs take half an hour

Run number n is drawn from the seed n: ``--seed 100 --runs 50`` makes the runs 100 to 149, and
``--seed N`` repeats one that was listed as wrong. A run is right if it ends within its bound with
the report that the fault calls for; if a second later no process, folder, descriptor or port of it
is left; if the bystanders, a process with the fork server's command line and a file beside the
runs' own folders, are as they were; and if the next run of the same process works.
"""

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
from cases import CASES, Plan
from notebook import Notebook

ALLOWANCE = 5.0  # seconds that a loaded machine may add to each bound


class Place:
    """The notebook, and the bystanders, as a context manager."""

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="dplab-soak-"))
        self._notebook = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", "-m",
             "dplab.spawn.server.forkserver"],
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._file = Path(tempfile.mkdtemp(prefix="dplab-", dir="/dev/shm")) / "calls-0"
        self._file.write_text("a bystander's")
        return self

    def __exit__(self, *_):
        if self._notebook:
            self._notebook.end()
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._file.parent)
        shutil.rmtree(self._folder)

    def notebook(self) -> Notebook:
        if self._notebook is None or not self._notebook.process.is_running():
            self._notebook = Notebook(self._folder)
        return self._notebook

    def disturbed(self) -> list[str]:
        """What happened to the bystanders."""
        found = []
        if not self._file.exists() or self._file.read_text() != "a bystander's":
            found.append("the bystander's file is gone or changed")
        if self._process.poll() is not None:
            found.append("the bystanding process was ended")
        return found


def attempt(place: Place, plan: Plan) -> tuple[float, list[str]]:
    """Makes the run, and a healthy one after it: the seconds of the first, and what was wrong."""
    notebook = place.notebook()
    if plan.outside == "kill notebook":
        seconds, found = killed_with_its_notebook(notebook, plan)
    else:
        seconds, found = complete(notebook, plan)
        _, after = complete(notebook, Plan(2, bound=25.0))
        found += [f"the run after it: {text}" for text in after]
    return seconds, found + place.disturbed()


def complete(notebook, plan):
    """Makes a run to its end, and does to it what is planned: seconds, and what was wrong."""
    if "first run" in plan.outside and (server := notebook.server()):
        server.kill()
        while server.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    acts = [plan.moment] * bool(plan.outside)
    if plan.outside.endswith("twice"):
        acts.append(plan.moment + 0.1)
    bound = plan.bound + ALLOWANCE
    notebook.start(plan.task)
    began = since = time.monotonic()
    while (reply := notebook.finish(0.002)) is None and time.monotonic() < since + 2 * bound:
        if acts and time.monotonic() > began + acts[0] and is_done(notebook, plan):
            del acts[0]
            since = time.monotonic()
    seconds = time.monotonic() - since
    if reply is None:
        notebook.end()
        return seconds, [f"no end after {seconds:.1f} s"]
    found = []
    if not any(fits(reply, ends, plan) for ends in plan.ends):
        found.append(f"{reply['outcome']}, rank {reply['rank']}, {reply['text'][:900]!r}, and "
                     f"not {' or '.join(map(str, plan.ends))}")
    if seconds > bound:
        found.append(f"{seconds:.1f} s, and not {bound:.1f} s at most")
    return seconds, found + notebook.left(reply["made"])


def is_done(notebook, plan):
    """Does from outside what is planned, if it can be done now."""
    ranks, server = notebook.ranks(), notebook.server()
    with contextlib.suppress(psutil.Error, OSError):
        if plan.outside == "kill":
            if len(ranks) <= plan.which:
                return False
            ranks[plan.which].kill()
        elif plan.outside == "kill server":
            if server is None:
                return False
            notebook.killed_server = server.pid
            server.kill()
        else:
            notebook.interrupt()
        return True
    return False


def fits(reply, ends, plan):
    if ends.outcome != reply["outcome"]:
        return False
    if ends.outcome == "values":
        return reply["values"] == plan.values()
    return ends.rank == reply["rank"] and all(text in reply["text"] for text in ends.says)


def killed_with_its_notebook(notebook, plan):
    """Seconds until all that was below it is gone, and what is not."""
    notebook.start(plan.task)
    time.sleep(plan.moment)
    folders, started = notebook.folders(), time.monotonic()
    _, alive = psutil.wait_procs(notebook.end(), timeout=plan.bound + ALLOWANCE)
    found = [f"process {process.pid} outlived its notebook" for process in alive]
    found += [f"{folder} outlived its notebook" for folder in folders if folder.exists()]
    return time.monotonic() - started, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="number of the first run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    seconds, wrong = defaultdict(list), defaultdict(int)
    with Place() as place:
        for number in range(options.seed, options.seed + options.runs):
            rng = random.Random(number)
            [case] = rng.choices(list(CASES), [share for share, _ in CASES.values()])
            took, complaints = attempt(place, CASES[case][1](rng))
            seconds[case].append(took)
            wrong[case] += bool(complaints)
            for complaint in complaints:
                print(f"--seed {number}, {case}: {complaint}", flush=True)
    for case, times in seconds.items():
        print(f"{case:20}{len(times):4} tried{wrong[case]:4} wrong{max(times):7.2f} s at most")
    failed = sum(wrong.values())
    print(f"{options.runs - failed} of {options.runs} runs were right")
    sys.exit(bool(failed))


main()
