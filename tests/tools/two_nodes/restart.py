"""A rank of a job on two hosts dies: torchrun starts all again, from the last checkpoint."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from two_nodes.hosts import Hosts, start_job

SCRIPT = Path(__file__).resolve().parents[3] / "chapters" / "launch" / "train.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+)")
TIME_LIMIT = 300  # seconds


def one_process(steps: int) -> list[tuple[int, float]]:
    """(step, loss) as the chapter's training script prints them when nothing interrupts it."""
    with tempfile.TemporaryDirectory() as folder:
        make_shards(folder)
        done = subprocess.run([sys.executable, SCRIPT, *_arguments(steps, folder)], text=True,
                              check=True, capture_output=True, timeout=TIME_LIMIT,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
    return _losses(done.stdout.splitlines())


def killed(steps: int, after: int, rank: int) -> dict:
    """The same on two hosts, where the rank gets SIGKILL once ``after`` steps are printed.

    ``losses``: (step, loss) in the order in which they were printed; ``starts``: from which step
    each start of the ranks went on; ``status``: what each host's torchrun exits with.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        make_shards(folder)
        reader, writer = os.pipe()
        jobs = start_job(hosts, 2, ["--max-restarts", 2, SCRIPT, *_arguments(steps, folder)],
                         stdout=writer)
        os.close(writer)
        alarm = threading.Timer(TIME_LIMIT, hosts.end_all)
        alarm.start()
        try:
            lines = _read(reader, after, lambda: os.kill(pid_of(rank, hosts), signal.SIGKILL))
        finally:
            alarm.cancel()
        status = [job.wait() for job in jobs]
    starts = [int(start) for start in re.findall(r"from step (\d+)", "".join(lines))]
    return {"losses": _losses(lines), "starts": starts, "status": status}


def pid_of(rank: int, hosts: Hosts) -> int:
    """The process that torchrun started as this rank, on whichever host."""
    for pid in hosts.pids():
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            if psutil.Process(pid).environ().get("RANK") == str(rank):
                return pid
    raise LookupError(f"no process of the job is rank {rank}")


def _read(output, after, kill):
    """All lines; calls ``kill`` when the one of step ``after`` comes for the first time."""
    lines, is_alive = [], True
    with open(output) as output:
        for line in output:
            lines.append(line)
            if is_alive and line.startswith(f"step {after}:"):
                kill()
                is_alive = False
    return lines


def make_shards(folder):
    """The data of a training in this folder."""
    subprocess.run([sys.executable, SCRIPT.with_name("make_shards.py"), f"{folder}/data"],
                   check=True, stdout=subprocess.DEVNULL)


def _arguments(steps, folder):
    return ["--steps", str(steps), "--batch", "8", "--save-every", "10", "--print-every", "1",
            "--width", "32", "--layers", "2", "--fp32",
            "--data", f"{folder}/data", "--checkpoints", f"{folder}/run"]


def _losses(lines):
    found = map(LINE.match, lines)
    return [(int(match[1]), float(match[2])) for match in found if match]
