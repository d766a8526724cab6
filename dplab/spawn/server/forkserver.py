"""The process that ranks are forked from: torch preloaded, one thread, no CUDA.

Started with ``FD PARENT [MODULE ...]``: a socket, the parent's process id, and what to load beside
torch. It serves as soon as torch itself is there, and loads the rest while it has nothing else to
do: who only sends and receives need not wait for optimizers.

On the socket come requests: a JSON object with the run's folder and whether its ranks need the
rest, and with it the descriptors ``[run socket, rank 0's connection, its output, rank 1's
connection, ...]``. On the run's socket the server reports how each rank ended (rank, and its exit
code or minus its signal, two integers); when the other side closes it, the server ends what is left
of the ranks, with their children, removes the run's folder and closes its own end. A byte that the
server sends on FD says that it serves. The parent's death closes all these sockets.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time

from ..rank import life, recording

EXIT_RECORD = struct.Struct("ii")
_FIRST = ("torch", "torch.distributed", "numpy")
_REST = (
    # the first torch.optim or DDP constructor imports _dynamo: two seconds in every rank
    "torch._dynamo", "torch.optim", "torch.nn.parallel", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.distributed.optim", "torch.distributed.algorithms.join",
    "torch.utils.data", "torch.utils.data.distributed",
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE = 5.0  # seconds that ranks have to be gone after their parent
_HUGE_PAGE, _MADV_COLLAPSE = 1 << 21, 25
_IDLE = 0.02  # seconds without a request, after which there is time for a module or a huge page


def prctl(option, value):
    """Linux's process control."""
    _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None)


class _Run:
    """The ranks of one run. Each leads a process group, which its children belong to.

    A rank is reaped only at the end, so that its number cannot pass to a process of someone else's.
    """

    def __init__(self, channel, folder):
        self.channel, self.folder = channel, folder
        self.ranks = {}  # process id: rank, while it lives
        self.pids = []
        self.is_killed = False

    def report_exits(self):
        for pid in list(self.ranks):
            if (code := exit_code(pid)) is not None:
                with contextlib.suppress(OSError):
                    self.channel.send(EXIT_RECORD.pack(self.ranks.pop(pid), code))

    def kill(self):
        self.is_killed = True
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # should it have left its group
                os.killpg(pid, signal.SIGKILL)

    def reaped(self):
        """Reaps what has ended; true once every process of the run is gone."""
        for pid in list(self.pids):
            if _reaped(-pid) and _reaped(pid):
                self.pids.remove(pid)
        return not self.pids


def exit_code(pid):
    """Of a child, or minus its signal; None while it runs. It is not reaped: its number stays."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _reaped(pid):
    """Reaps this child, or where negative, this group's; true once there is none."""
    try:
        while os.waitpid(pid, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _no_strays():
    """Ends what the ranks' children left behind in sessions of their own; true once there is none.
    Only when no run is at work, since a child does not tell whose it was.
    """
    with contextlib.suppress(FileNotFoundError):
        pid = os.getpid()
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            strays = [int(child) for child in children.read().split()]
        for stray in strays:
            os.kill(stray, signal.SIGKILL)
            _reaped(stray)
        return not strays
    return True


def _huge_pages():
    """Gathers what is loaded into huge pages, one at each step, of some milliseconds.

    A fork copies the page table, and one of small pages takes most of a fork's time.
    """
    with open("/proc/self/maps") as maps:
        mappings = [line.split() for line in maps]
    for addresses, rights, _, _, inode, *_ in mappings:
        if rights == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1,
                              _HUGE_PAGE):
                # a kernel that cannot leaves it as it is
                yield _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE),
                                    _MADV_COLLAPSE)


class _Chores:
    """What is done while there is nothing else to do, in steps: modules, then huge pages."""

    def __init__(self, modules):
        self._modules = list(modules)
        self._pages = None

    def step(self) -> bool:
        """Does one; whether there was one left."""
        if self._modules:
            importlib.import_module(self._modules.pop(0))
            return True
        if self._pages is None:
            gc.collect()
            gc.freeze()
            self._pages = _huge_pages()
        return next(self._pages, None) is not None

    def load(self):
        """Does all that is left but for the huge pages."""
        while self._modules:
            self.step()


def serve(requests: socket.socket, parent: int, modules) -> None:
    """Serves until the parent is gone; loads the modules meanwhile."""
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    runs: dict[socket.socket, _Run] = {}
    chores = _Chores(modules)
    patience = _IDLE
    with contextlib.suppress(OSError):
        requests.send(b"!")  # it serves
    while True:
        watched: list[int | socket.socket] = [requests, wake, *runs]
        readable, _, _ = select.select(watched, [], [], patience)
        if not readable and not runs and not chores.step():
            patience = 1.0
        if requests in readable:
            message, descriptors = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):  # the parent's end, like no message
                message, descriptors, _, _ = socket.recv_fds(requests, 65536, 253)
            if not message:
                break
            request = json.loads(message)
            if request["needs_all"]:
                chores.load()
            run = _Run(socket.socket(fileno=descriptors[0]), request["folder"])
            _fork_ranks(run, descriptors[1:], [requests, *runs], (wake, wake_writer))
            runs[run.channel] = run
        elif os.getppid() != parent:  # only after its last requests: their folders must go
            break
        for channel in [channel for channel in runs if channel in readable]:
            runs[channel].kill()
        if wake in readable:
            os.read(wake, 4096)
        for run in list(runs.values()):
            if not run.is_killed:
                run.report_exits()
            elif run.reaped() and (len(runs) > 1 or _no_strays()):
                shutil.rmtree(run.folder, ignore_errors=True)
                del runs[run.channel]
                run.channel.close()
    for run in runs.values():
        run.kill()
    deadline = time.monotonic() + _PATIENCE
    while (not all([run.reaped() for run in runs.values()]) or not _no_strays()) and (
            time.monotonic() < deadline):
        time.sleep(0.01)
    for run in runs.values():  # once no rank is left that removes it too
        shutil.rmtree(run.folder, ignore_errors=True)


def _fork_ranks(run, descriptors, sockets, wakeup):
    pairs = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    for rank, (connection, output) in enumerate(pairs):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                others = {fd for pair in pairs for fd in pair} - {connection, output}
                for fd in [*others, *wakeup, run.channel.fileno(),
                           *(sock.fileno() for sock in sockets)]:
                    os.close(fd)
                status = life.main(connection, output)
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        run.ranks[pid] = rank
        run.pids.append(pid)
    for fd in descriptors:
        os.close(fd)


def _main():
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _FIRST:
        importlib.import_module(name)
    recording.install()
    serve(requests, int(sys.argv[2]), [*_REST, *sys.argv[3:]])


if __name__ == "__main__":
    _main()
