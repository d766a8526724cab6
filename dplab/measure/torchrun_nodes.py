"""A job under torchrun, on nodes that are all on this machine: to start, to follow, to break."""

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import psutil

from dplab.measure.wire import LOOPBACK

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
        self.command = [script, *arguments]
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.at_least = at_least or nodes
        self.shown = re.compile(shown)
        self.lines: list[Line] = []
        self._torchruns: list[subprocess.Popen] = []
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
        for process in self._all_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for torchrun in self._torchruns:
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
        for process in self._all_processes():
            with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
                if (process.environ().get("RANK") == str(rank)
                        and "torch.distributed.run" not in " ".join(process.cmdline())):
                    process.kill()
                    return
        raise LookupError(f"no process of the job is rank {rank}")

    def start_node(self, node: int) -> None:
        """Starts the node's torchrun: when a node that was killed is repaired, say."""
        self._torchruns[node:node + 1] = [self._torchrun(node)]
        self._ends += 1
        threading.Thread(target=self._read, args=[node, self._torchruns[node]],
                         daemon=True).start()

    def kill_node(self, node: int) -> None:
        """Kills the node's torchrun and its ranks at once. (Their connections are closed.)"""
        for process in self._processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _torchrun(self, node):
        command = [sys.executable, "-c", _TORCHRUN, "--nnodes", f"{self.at_least}:{self.nodes}",
                   "--nproc-per-node", self.ranks_per_node, "--max-restarts", 3,
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}",
                   "--rdzv-conf", f"is_host={int(node == 0)},{_PATIENCE}", *self.command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                       "GLOO_SOCKET_IFNAME": LOOPBACK,
                       "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        # A session of its own: an interrupt of the notebook's cell reaches this class first.
        return subprocess.Popen([*map(str, command)], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                start_new_session=True)

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

    def _all_processes(self):
        return [process for node in range(len(self._torchruns))
                for process in self._processes(node)]

    def _last(self):
        return "\n".join(line.text for line in self.lines[-15:])
