"""A process that stands for a notebook in the soak, and the look from outside at what it leaves.

Started as ``python notebook.py FD``. On the connection FD come tasks: the source of a cell that
defines ``work``, and how to run it. Back goes how the run ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil

SETTLED = 1.0  # seconds after a run by which nothing of it is left


class Notebook:
    """The process as the soak sees it."""

    def __init__(self, folder: Path):
        self.temporary = Path(tempfile.mkdtemp(dir=folder))
        self._connection, theirs = Pipe()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": str(self.temporary)})
        self.process = psutil.Process(self._popen.pid)
        self.killed_server = None  # a zombie until the next run looks for it
        self.start({"cell": "def work(_): torch.optim", "ranks": 2, "timeout": 60.0,
                    "elements": 0})  # the server loads all
        self.finish(120)
        self._descriptors = self.process.num_fds()
        self._in_temporary = {*os.listdir(self.temporary)}  # torch's cache

    def start(self, task: dict) -> None:
        """Sends a task; returns as the run begins."""
        self._connection.send(task)
        self._connection.recv()

    def finish(self, seconds: float) -> dict | None:
        """How the run ended; None if it still goes on, or the process has gone."""
        with contextlib.suppress(EOFError, OSError):
            return self._connection.recv() if self._connection.poll(seconds) else None
        return None

    def interrupt(self):
        os.killpg(self._popen.pid, signal.SIGINT)

    def server(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            return next((child for child in self.process.children()
                         if child.status() != psutil.STATUS_ZOMBIE
                         and "dplab.spawn.server.forkserver" in child.cmdline()), None)
        return None

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks so far, in rank order: the server starts them so."""
        server = self.server()
        with contextlib.suppress(psutil.Error):
            return sorted(server.children(), key=lambda rank: rank.pid) if server else []
        return []

    def folders(self) -> set[Path]:
        """The folders of the runs whose call logs are mapped."""
        with open(f"/proc/{self.process.pid}/maps") as maps:
            return {Path(line.split(maxsplit=5)[-1].strip()).parent
                    for line in maps if "/calls-" in line}

    def left(self, made: list[str]) -> list[str]:
        """What is left of a run that made these folders, ``SETTLED`` seconds after it at most."""
        deadline = time.monotonic() + SETTLED
        while (found := self._left(made)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [f"{each} is left" for each in found]

    def _left(self, made):
        server = self.server()
        found = [child for child in self.process.children(recursive=True)
                 if child != server and child.pid != self.killed_server]
        found += [path for path in made if os.path.exists(path)]
        found += {*os.listdir(self.temporary)} - self._in_temporary
        found += self.folders()  # still mapped
        if self.process.num_fds() != self._descriptors:
            found.append(f"{self.process.num_fds()} descriptors, not {self._descriptors}")
        for process in filter(None, (self.process, server)):
            with contextlib.suppress(psutil.Error):
                found += process.net_connections("inet")
        return found

    def end(self) -> list[psutil.Process]:
        """Kills it. Returns the processes that were below it."""
        below = []
        with contextlib.suppress(psutil.Error):
            below = self.process.children(recursive=True)
        self._popen.kill()
        self._popen.wait()
        self._connection.close()
        return below


def _serve(connection):
    import linecache

    import torch
    import torch.distributed as dist

    from dplab import run

    tempfile.gettempdir()  # chosen once; when it is full by then, Python chooses another
    made = []
    sys.addaudithook(lambda event, details: event == "tempfile.mkdtemp" and made.append(details[0]))
    names = {"__name__": "__main__", "torch": torch, "dist": dist}
    exec("import ctypes, os, signal, subprocess, sys, time", names)
    number = 0
    while True:
        _be_deaf()
        task = connection.recv()
        number += 1
        name = f"<ipython-input-{number}-soak>"
        linecache.cache[name] = (1, None, task["cell"].splitlines(keepends=True), name)
        exec(compile(task["cell"], name, "exec"), names)
        arguments = torch.full((task["elements"],), 7.0)
        made.clear()
        connection.send("running")
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            values = run(names["work"], task["ranks"], arguments, timeout=task["timeout"])
            _be_deaf()
            reply = {"outcome": "values", "values": [_summary(value) for value in values]}
            del values
        except BaseException as error:
            name = "Interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            reply = {"outcome": getattr(error, "kind", name), "text": str(error),
                     "rank": getattr(error, "rank", None)}
            sys.last_exc = error  # IPython keeps it too, and with it every frame's objects
        _be_deaf()
        del arguments
        connection.send({"text": "", "rank": None} | reply | {"made": list(made)})


def _be_deaf():
    """Interrupts that come too late are no longer the run's."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return


def _summary(value):
    rank, total, big = value or (None, None, None)
    if hasattr(big, "numel"):
        big = (big.numel(), big[0].item(), big[-1].item())
    return rank, total, big


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
