"""What plain torchrun prints about a script whose ranks fail."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_COMMAND = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class TorchrunLog:
    """The lines that name a rank and an error, as printed, and the rank that torchrun names.

    ``blamed`` is None where torchrun names no rank.
    """

    errors: tuple[str, ...]
    blamed: int | None

    def __str__(self):
        named = "no rank" if self.blamed is None else f"rank {self.blamed}"
        return "\n".join([*self.errors, f"Root Cause (first observed failure): {named}"])

    __repr__ = __str__


def torchrun_log(script: str, world_size: int, *, timeout: float = 120,
                 **variables: str) -> TorchrunLog:
    """Runs the script under plain torchrun on this many ranks, and reads what is printed.

    ``variables`` are added to its environment. A job that is still there after ``timeout`` seconds
    is ended, with all its processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.py").write_text(script)
        job = subprocess.Popen([*_COMMAND, str(world_size), "job.py"], cwd=folder, text=True,
                               env=os.environ | variables,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               start_new_session=True)
        try:
            said = job.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun passes the signal on to its ranks
            said = job.communicate()[1]
        finally:
            if job.poll() is None:  # the reader pressed stop
                os.killpg(job.pid, signal.SIGTERM)
                job.wait()
    return read(said)


def read(said: str) -> TorchrunLog:
    """The log in what torchrun has printed."""
    errors = re.findall(r"^\[rank\d+\]: (?:\w+\.)*\w*Error:.*", said, re.MULTILINE)
    blamed = re.search(r"Root Cause.*?rank +: (\d+)", said, re.DOTALL)
    return TorchrunLog(tuple(errors), int(blamed[1]) if blamed else None)
