"""Jobs under torchrun on this machine: what is printed when they fail, and nodes to break.

`torchrun_log` runs a script to its end; `TorchrunNodes` starts a torchrun for each of several nodes
and follows what they print.
"""

import contextlib
import html
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from dplab.measure.wire import LOOPBACK

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
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(world_size), _SCRIPT], cwd=folder, env=os.environ | variables, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
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


# A torchrun whose notebook is gone would train on: on Linux, it dies with it (PR_SET_PDEATHSIG).
_TORCHRUN = ("import ctypes, runpy, sys\n"
             "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 9)\n"
             "runpy.run_module('torch.distributed.run', run_name='__main__')")
# A node that says nothing for three seconds is taken for dead, and nobody is waited for who has
# not come within two: short times, since all nodes are on one machine.
_PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2,join_timeout=120"


class Line(NamedTuple):
    """What a node printed, and how many seconds after the start of the job."""

    seconds: float
    node: int
    text: str


class TorchrunNodes:
    """A torchrun for each node, on the loopback; as a context manager, for as long as it is open.

    script: with its ``arguments``, what each rank runs. at_least: how many nodes the job goes on
    with; all of them by default. shown: a pattern; of lines that match, the match is printed.
    The first node hosts the rendezvous: the job cannot lose it. When the block is left, also by an
    interrupt, all processes of the job are killed.
    """

    def __init__(self, nodes: int, ranks_per_node: int, script, *arguments,
                 at_least: int | None = None, shown: str = ".*"):
        self.command, self.shown = [script, *arguments], re.compile(shown)
        self.nodes, self.ranks_per_node, self.at_least = nodes, ranks_per_node, at_least or nodes
        self.lines: list[Line] = []
        self._torchruns: dict[int, subprocess.Popen] = {}
        self._arriving: queue.Queue = queue.Queue()

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self._start, self._ends = time.monotonic(), 0
        try:
            for node in range(self.nodes):
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for node in self._torchruns:
            self.kill_node(node)
        for torchrun in self._torchruns.values():
            torchrun.wait()

    def follow(self, until: str | None = None, seconds: float = 100) -> list[Line]:
        """The lines that come, up to the first that begins with ``until``; without it, to the end.

        Raises TimeoutError after so many seconds, and EOFError where the job ends before.
        """
        first, deadline = len(self.lines), time.monotonic() + seconds
        while self._ends:
            try:
                line = self._arriving.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the job printed no line {until or 'of its end'!r} within "
                                   f"{seconds:g} s; its last:\n{self._last()}") from None
            if line is None:
                self._ends -= 1
                continue
            self.lines.append(line)
            if found := self.shown.search(line.text):
                print(f"node {line.node} | {found[0]}", flush=True)
            if until and line.text.startswith(until):
                return self.lines[first:]
        if until:
            raise EOFError(f"the job ended without a line {until!r}; its last:\n{self._last()}")
        return self.lines[first:]

    def kill_rank(self, rank: int) -> None:
        """Kills the process of this rank, and no other. Raises LookupError if there is none."""
        for process in [each for node in self._torchruns for each in self._processes(node)]:
            with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
                if (process.environ().get("RANK") == str(rank)
                        and "torch.distributed.run" not in " ".join(process.cmdline())):
                    process.kill()
                    return
        raise LookupError(f"no process of the job is rank {rank}")

    def start_node(self, node: int) -> None:
        """Starts the node's torchrun: when a node that was killed is repaired, say."""
        command = [sys.executable, "-c", _TORCHRUN, "--nnodes", f"{self.at_least}:{self.nodes}",
                   "--nproc-per-node", self.ranks_per_node, "--max-restarts", 3,
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}",
                   "--rdzv-conf", f"is_host={int(node == 0)},{_PATIENCE}", *self.command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                       "GLOO_SOCKET_IFNAME": LOOPBACK,
                       "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        # A session of its own: an interrupt of the notebook's cell reaches this class first.
        self._torchruns[node] = torchrun = subprocess.Popen(
            [*map(str, command)], env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._ends += 1
        threading.Thread(target=self._read, args=[node, torchrun], daemon=True).start()

    def kill_node(self, node: int) -> None:
        """Kills the node's torchrun and its ranks at once. (Their connections are closed.)"""
        for process in self._processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _read(self, node, torchrun):
        for text in torchrun.stdout:
            self._arriving.put(Line(time.monotonic() - self._start, node, text.rstrip()))
        torchrun.stdout.close()
        self._arriving.put(None)

    def _processes(self, node):
        """The node's torchrun and all that it has started; none if it has ended."""
        try:
            torchrun = psutil.Process(self._torchruns[node].pid)
            return [torchrun, *torchrun.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _last(self):
        return "\n".join(line.text for line in self.lines[-15:])
