"""The files that readers copy to start a job on many machines, as far as one machine can tell."""

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

FOLDER = Path(__file__).resolve().parents[2] / "chapters" / "launch"
SLURM, TRAIN = FOLDER / "slurm.sh", FOLDER / "train.py"

# What sbatch knows, of https://slurm.schedmd.com/sbatch.html
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem",
          "exclusive", "time", "partition", "signal", "requeue", "open-mode", "output", "error"}


def sbatch_options():
    """What sbatch reads: the ``#SBATCH`` lines before the first command."""
    comments = itertools.takewhile(lambda line: not line or line[0] == "#",
                                   SLURM.read_text().splitlines())
    lines = [line for line in comments if line.startswith("#SBATCH")]
    assert len(lines) == SLURM.read_text().count("#SBATCH"), "one comes after a command"
    options = dict(re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line).groups("")
                   for line in lines)
    assert len(options) == len(lines) and options.keys() <= SBATCH
    return options


def train_arguments(arguments):
    """What the training script makes of its arguments."""
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    return train.parse(arguments)


@pytest.fixture
def cluster(tmp_path):
    """A folder with stand-ins for SLURM's commands and torchrun, and the environment of a job.

    They note how they were called: srun calls its command once for each of two nodes.
    """
    commands = {
        "scontrol": 'case "$1" in show) printf "node-a\\nnode-b\\n" ;; '
                    '*) echo "$@" > "$NOTES/scontrol.called" ;; esac',
        "scancel": 'echo "$@" > "$NOTES/scancel.called"',
        "srun": 'while [[ $1 == --* ]]; do echo "$1" >> "$NOTES/srun.called"; shift; done\n'
                'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" & wait',
        "torchrun": 'node=$SLURM_NODEID\n'
                    'printf "%s\\n" "$@" > "$NOTES/torchrun-$node"\n'
                    'env > "$NOTES/environment"; sleep "${SECONDS_TO_TRAIN:-0}"',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin", "NOTES": str(tmp_path),
                      "SLURM_JOB_ID": "43210", "SLURM_JOB_NODELIST": "node-[a-b]",
                      "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NAME": "train",
                      "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8"}


def torchrun_calls(folder):
    """For each node how torchrun was called, by torchrun's own parser."""
    calls = [(folder / f"torchrun-{node}").read_text().splitlines() for node in (0, 1)]
    return [get_args_parser().parse_args(call) for call in calls]


# SLURM


def test_bash_and_shellcheck_accept_the_slurm_script():
    if shutil.which("shellcheck") is None and "CI" not in os.environ:
        pytest.skip("shellcheck is not installed")
    for command in (["bash", "-n"], ["shellcheck"]):
        done = subprocess.run([*command, SLURM], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_slurm_options_are_known_and_agree():
    options = sbatch_options()
    assert int(options["nodes"]) > 1 and options["ntasks-per-node"] == "1"
    hours, minutes, seconds = map(int, options["time"].split(":"))
    assert 60 <= int(options["signal"].partition("@")[2]) < 3600 * hours + 60 * minutes + seconds
    assert options["signal"].startswith("B:USR1") and "trap requeue USR1" in SLURM.read_text()
    assert "requeue" in options and options["open-mode"] == "append"


def test_the_slurm_script_starts_one_torchrun_on_each_node(cluster):
    folder, environment = cluster
    subprocess.run(["bash", SLURM], env=environment, check=True, timeout=60)
    for call in torchrun_calls(folder):
        assert (call.nnodes, call.nproc_per_node, call.max_restarts) == ("2", "8", 3)
        assert (call.rdzv_backend, call.rdzv_id) == ("c10d", "43210")
        assert call.rdzv_endpoint == "node-a:23210"
        assert call.training_script == TRAIN.name
        assert train_arguments(call.training_script_args).strategy == "hsdp"
    assert "--cpus-per-task=64" in (folder / "srun.called").read_text().split()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (folder / "environment").read_text()
    # The ranks have as long to save as the signal leaves, and the job some time for the queue.
    patience = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)",
                         (folder / "environment").read_text())
    before = int(sbatch_options()["signal"].partition("@")[2])
    assert 30 < int(patience[1]) <= before - 20
    assert not (folder / "scontrol.called").exists()


def test_before_its_time_is_up_the_slurm_script_puts_itself_into_the_queue(cluster):
    folder, environment = cluster
    environment["SECONDS_TO_TRAIN"] = "3"  # in which the ranks save
    process = subprocess.Popen(["bash", SLURM], env=environment, stdout=subprocess.PIPE,
                               text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while not (folder / "environment").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(timeout=30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
    assert (folder / "scancel.called").read_text() == "--signal=USR1 43210\n"
    assert (folder / "scontrol.called").read_text() == "requeue 43210\n"
