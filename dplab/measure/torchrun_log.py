"""What plain torchrun prints about a script whose ranks fail."""

import html
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_COMMAND = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


_SCRIPT = "job.py"
_PATHS = re.compile(r"/\S*/(?:site-packages/|bin/|(?=job\.py))")  # not the same everywhere


@dataclass(frozen=True)
class TorchrunLog:
    """What torchrun printed: ``all``, and the ``lines`` that tell most of it.

    The lines are, of each traceback, the last line of the script and the error; what a process
    says that aborts; and of torchrun's summary the first failure. ``blamed`` is its rank, None
    where torchrun names none.
    """

    all: str
    lines: tuple[str, ...]
    blamed: int | None

    def __str__(self):
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self):
        """The lines, and folded below them everything that torchrun printed."""
        lines, everything = (
            f'<pre style="line-height:1.35;white-space:pre-wrap">{html.escape(text)}</pre>'
            for text in (str(self), self.all))
        return (f'{lines}<details><summary style="cursor:pointer">all that torchrun printed'
                f"</summary>{everything}</details>")


def torchrun_log(script: str, world_size: int, *, timeout: float = 120,
                 **variables: str) -> TorchrunLog:
    """Runs the script under plain torchrun on this many ranks, and reads what is printed.

    ``variables`` are added to its environment. A job that is still there after ``timeout`` seconds
    is ended, with all its processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _SCRIPT).write_text(script)
        job = subprocess.Popen([*_COMMAND, str(world_size), _SCRIPT], cwd=folder, text=True,
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
    """The log in what torchrun has printed, with the paths of files cut short."""
    said = _PATHS.sub("", said)
    ranks, _, first_failed = said.partition("Root Cause")
    lines: list[str] = []
    was_at: dict[str, list[str]] = {}  # the script's last line in each rank's traceback
    for line in ranks.splitlines():
        rank = line.partition(":")[0]
        if f'File "{_SCRIPT}", line' in line:
            was_at[rank] = [line]
        elif len(was_at.get(rank, ())) == 1:
            was_at[rank].append(line)
        elif re.match(r"\[rank\d+\]: (?:\w+\.)*\w*Error:", line):
            lines += [*was_at.pop(rank, ()), line]
        elif re.match(r"terminate called|  what\(\): ", line):
            lines.append(line)
    blamed = re.search(r"^  rank +: (\d+).*\n  exitcode.*", first_failed, re.MULTILINE)
    summary = f"Root Cause (first observed failure):\n{blamed[0]}" if blamed else "no rank failed"
    return TorchrunLog(said, (*lines, *summary.splitlines()), int(blamed[1]) if blamed else None)
