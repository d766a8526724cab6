"""The SLURM script that readers copy, as far as one machine can tell."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from skips import need_program
from torch.distributed.run import get_args_parser

FOLDER = Path(__file__).resolve().parents[2] / "chapters" / "launch"
SLURM = FOLDER / "slurm.sh"
# Stand-ins for SLURM's commands and torchrun, which note how they were called.
COMMANDS = {
    "scontrol": 'case "$1" in show) printf "node-a\\nnode-b\\n" ;; '
                '*) echo "$@" > "$NOTES/scontrol.called" ;; esac',
    "scancel": 'echo "$@" > "$NOTES/scancel.called"',
    "srun": 'while [[ $1 == --* ]]; do echo "$1" >> "$NOTES/srun.called"; shift; done\n'
            'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" & wait',
    "torchrun": 'printf "%s\\n" "$@" > "$NOTES/torchrun-$SLURM_NODEID"\n'
                'env > "$NOTES/environment"; sleep "$SECONDS_TO_TRAIN"',
}


@pytest.fixture
def options():
    """What sbatch reads: the ``#SBATCH`` lines before the first command."""
    head = re.match(r"(#.*\n|\n)*", SLURM.read_text())[0]
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", head, re.MULTILINE)
    assert len(found) == SLURM.read_text().count("#SBATCH"), "one comes after a command"
    return dict(found)


@pytest.fixture
def job(tmp_path):
    """A function that starts the script as on the first of two nodes; the folder of the notes."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return lambda seconds: subprocess.Popen(["bash", SLURM], env={
        "PATH": f"{tmp_path}:/usr/bin:/bin", "NOTES": str(tmp_path),
        "SECONDS_TO_TRAIN": str(seconds), "SLURM_JOB_ID": "43210",
        "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8"}), tmp_path


def test_shellcheck_accepts_the_script():
    need_program("shellcheck")
    done = subprocess.run(["shellcheck", SLURM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_options_for_sbatch_agree(options):
    assert int(options["nodes"]) > 1 and options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("B:USR1@") and options["open-mode"] == "append"
    assert "requeue" in options


def test_one_torchrun_starts_on_each_node(job, options, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import train

    start, notes = job
    assert start(seconds=0).wait(timeout=60) == 0
    for node in (0, 1):
        call = get_args_parser().parse_args((notes / f"torchrun-{node}").read_text().splitlines())
        assert (call.nnodes, call.nproc_per_node, call.max_restarts) == ("2", "8", 3)
        assert (call.rdzv_backend, call.rdzv_id) == ("c10d", "43210")
        assert call.rdzv_endpoint == "node-a:23210"
        assert (FOLDER / call.training_script).exists()
        assert train.parse(call.training_script_args).strategy == "hsdp"
    assert "--cpus-per-task=64" in (notes / "srun.called").read_text().split()
    environment = (notes / "environment").read_text()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in environment
    # The ranks have as long to save as the signal leaves, and the job some time for the queue.
    patience = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", environment)[1])
    assert 30 < patience <= int(options["signal"].partition("@")[2]) - 20
    assert not (notes / "scontrol.called").exists()


def test_before_its_time_is_up_it_puts_itself_into_the_queue(job):
    start, notes = job
    process = start(seconds=3)  # in which the ranks save
    deadline = time.monotonic() + 30
    while not (notes / "environment").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(timeout=30) == 0
    assert (notes / "scancel.called").read_text() == "--signal=USR1 43210\n"
    assert (notes / "scontrol.called").read_text() == "requeue 43210\n"
