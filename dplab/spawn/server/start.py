"""How ranks come into being: forked from a warm server, or each started on its own.

`warm_up` starts the server in the background; `start_ranks` starts ranks and returns a handle
that tells how they end and ends what is left of them.
"""

import atexit
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

from ..between.errors import ServerEnded, advice_on
from ..rank import device, life
from . import forkserver
from .forkserver import EXIT_RECORD, exit_code

preload: tuple[str, ...] = ()  # see `configure`

MOST_RANKS = 120  # a message between processes carries at most 253 descriptors, a rank needs two
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "256", "DPLAB_INSIDE": "1"}
_RANK = f"import sys; from {life.__name__} import main; sys.exit(main(*map(int, sys.argv[1:])))"
_HEAVY = ("optim", "parallel", "fsdp", "DTensor", "device_mesh", "compile", "DataLoader")
_PATIENCE, _BEFORE_IT_SERVES = 10.0, 0.3  # seconds that the server has to end a run's ranks
_lock = threading.Lock()
_server = None


def forks() -> bool:
    """Whether ranks are forked. On macOS, forking a process that has used Objective-C may crash."""
    return sys.platform == "linux" and os.environ.get("DPLAB_START") != "spawn"


def warm_up() -> None:
    """Starts the fork server in the background, unless it runs or this process is itself a rank."""
    global _server
    if (not forks() or "DPLAB_INSIDE" in os.environ or device.in_rank()
            or device.under_torchrun()):
        return
    with _lock:
        if _server is not None and not _server.alive():
            _server.forget()
            _server = None
        if _server is None:
            _server = _Server()


def needs_all(payload) -> bool:
    """Whether a function, as bytes, names what a rank would take seconds to load by itself.

    Its names stand before its arguments, so that large ones need not be searched.
    """
    words = {*_HEAVY, *(name.partition(".")[0] for name in preload)}
    return re.search("|".join(map(re.escape, words)).encode(), payload[:1 << 16]) is not None


def start_ranks(folder: str, pairs: list[tuple[int, int]], payload):
    """Starts one rank for each pair of descriptors (connection, output), to run the payload."""
    if not forks():
        return _Spawned(folder, pairs)
    warm_up()
    server = _server
    assert server is not None
    try:
        return server.fork(folder, pairs, needs_all(payload))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.EAGAIN):  # the server is well
            raise
        raise ServerEnded(server.last_words()) from None


class _Server:
    def __init__(self):
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = open(os.memfd_create("dplab-server"), "w+b", buffering=0)
        self._words = None
        self._serves = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m",
                 forkserver.__name__, str(theirs.fileno()), str(os.getpid()), *preload],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _with_this_package()},
                pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors)
        self._owner = os.getpid()
        atexit.register(self.close)

    def alive(self):
        return self._owner == os.getpid() and self._process.poll() is None

    def serves(self):
        with contextlib.suppress(BlockingIOError):
            self._serves = self._serves or bool(
                self._requests.recv(1, socket.MSG_DONTWAIT))
        return self._serves

    def fork(self, folder, pairs, needs_all):
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [theirs.fileno(), *(fd for pair in pairs for fd in pair)]
            with _lock:
                socket.send_fds(
                    self._requests,
                    [json.dumps({"folder": folder, "needs_all": needs_all}).encode()], descriptors)
        return _Forked(channel, self, folder)

    def last_words(self):
        if self._words is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip()[-2000:]
            self._words = advice_on(words) or words or (
                "without a word. Run the cell again: another one is started")
        return f"the process that ranks are forked from has ended: {self._words}"

    def forget(self):
        """It has ended, or is another process's: nothing of it stays open here."""
        if self._owner == os.getpid():
            self.last_words()
        atexit.unregister(self.close)
        self._requests.close()
        self._errors.close()

    def close(self):
        if self._owner == os.getpid():
            self._requests.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)


class _Forked:
    """Ranks that the server forked."""

    def __init__(self, channel, server, folder):
        self.channel = channel
        self._server, self._folder = server, folder

    def exits(self) -> list[tuple[int, int]]:
        """(rank, exit code or minus the signal) of each rank that has ended since the last call."""
        ended = []
        with contextlib.suppress(BlockingIOError):
            while True:
                record = self.channel.recv(EXIT_RECORD.size, socket.MSG_DONTWAIT)
                if not record:
                    raise ServerEnded(self._server.last_words())
                ended.append(EXIT_RECORD.unpack(record))
        return ended

    def end(self) -> bool:
        """Ends every rank and its children; whether they are gone when it returns. A server that
        does not serve yet ends them as soon as it has started them."""
        gone = False
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)
            self.channel.settimeout(_PATIENCE if self._server.serves() else _BEFORE_IT_SERVES)
            while self.channel.recv(EXIT_RECORD.size):
                pass
            gone = True
        self.channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # a dead server could not
        return gone


class _Spawned:
    """Ranks that were each started as a fresh Python: slower, and safe everywhere."""

    channel = None

    def __init__(self, folder, pairs):
        self._folder = folder
        self._ranks = []
        try:
            for pair in pairs:
                self._ranks.append(subprocess.Popen(
                    [sys.executable, "-c", _RANK, *map(str, pair)],
                    env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _with_this_package()},
                    pass_fds=pair, start_new_session=True))
        except BaseException:
            self.end()
            raise
        self._running = dict(enumerate(self._ranks))

    def exits(self):
        ended = []
        for rank, process in list(self._running.items()):
            # where the system can, without reaping: the number stays ours
            code = exit_code(process.pid) if hasattr(os, "waitid") else process.poll()
            if code is not None:
                del self._running[rank]
                ended.append((rank, code))
        return ended

    def end(self):
        for process in self._ranks:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._ranks:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return True


def _with_this_package():
    """PYTHONPATH by which a fresh Python finds the very modules that run here."""
    here = os.path.abspath(__file__)
    for _ in __name__.split("."):
        here = os.path.dirname(here)
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
