"""How long until four ranks have done one all-reduce, and what of faults: dplab beside others.

Each launcher runs in a kernel of its own, from the cells that one would write in a notebook. What
it does when something goes wrong is tried there, too: rank 1 raises while the others wait for it;
the ■ button is pressed while all wait; and after either, the next call.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

import psutil

from dplab.bench.results import spread

# The launchers

FUNCTIONS = """
import os, torch, torch.distributed as dist

def all_reduce_once():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()

def raises_on_rank_1():
    if dist.get_rank() == 1:
        reason = "sample 7 is bad"
        raise ValueError(reason)
    return all_reduce_once()

def never_ends():
    if dist.get_rank() == 1:
        import time
        time.sleep(600)
    return all_reduce_once()
"""
_GROUP = """
def in_a_group(function, *where):
    dist.init_process_group("gloo", *where)
    value = function()
    dist.destroy_process_group()
    return value
"""


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks, as the cell that one would write in a notebook.

    The cell defines ``launch(function)``, which starts ranks from a warm kernel, joins them in a
    gloo group, and returns the list of what ``function`` gave on each. module: what must be
    installed. takes_files: whether functions must lie in a file.
    """

    name: str
    module: str
    cell: str
    takes_files: bool = False


_DPLAB = """
import dplab

def launch(function):
    return dplab.run(function, {ranks}, timeout=600)
"""

# A child imports the module that its function lies in; what it returns is lost.
_SPAWN = """
import sys, tempfile
import torch.multiprocessing as mp
sys.path.insert(0, os.getcwd())
from functions import *

def launch(function):
    with tempfile.TemporaryDirectory() as folder:
        values = mp.get_context("spawn").SimpleQueue()
        mp.spawn(spawned, (function, f"{{folder}}/store", values), nprocs={ranks})
        return [values.get() for _ in range({ranks})]
"""
_SPAWN_FILE = """
def spawned(rank, function, path, values):
    store = dist.FileStore(path, {ranks})
    dist.init_process_group("gloo", store=store, rank=rank, world_size={ranks})
    values.put(function())
    dist.destroy_process_group()
"""

# A program of its own; what it prints comes back.
_TORCHRUN = """
import subprocess, sys
from functions import *

def launch(function):
    printed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         "{ranks}", "functions.py", function.__name__], stdout=subprocess.PIPE, text=True,
        check=True).stdout
    return [float(line.removeprefix("value ")) for line in printed.splitlines()]
"""
_TORCHRUN_FILE = """
if __name__ == "__main__":
    import sys
    value = in_a_group(globals()[sys.argv[1]])
    print(f"value {{value}}\\n", end="", flush=True)
"""

# It forks; what a function returns is lost, but a queue made before is the children's as well.
_ACCELERATE = """
import socket
import torch.multiprocessing as mp
from accelerate import notebook_launcher

def launch(function):
    values = mp.get_context("fork").SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    notebook_launcher(lambda: values.put(in_a_group(function)), num_processes={ranks},
                      use_port=port)
    return [values.get() for _ in range({ranks})]
"""

# Processes that live on; where each is told its rank, any function of the notebook can be sent.
_IPYPARALLEL = """
import tempfile
import ipyparallel

def on_engine(in_a_group, function, rank, path):
    import torch.distributed as dist
    return in_a_group(function, None, None, {ranks}, rank, dist.FileStore(path, {ranks}))

def on_engines(engines, function):
    engines[:].use_cloudpickle()
    with tempfile.TemporaryDirectory() as folder:
        asked = [engines[rank].apply_async(on_engine, in_a_group, function, rank,
                                           f"{{folder}}/store") for rank in range({ranks})]
        return [each.get() for each in asked]
"""
_COLD = _IPYPARALLEL + """
def launch(function):
    with ipyparallel.Cluster(n={ranks}, log_level=40) as engines:
        return on_engines(engines, function)
"""
_WARM = _IPYPARALLEL + """
engines = ipyparallel.Cluster(n={ranks}, log_level=40).start_and_connect_sync()

def launch(function):
    return on_engines(engines, function)
"""

DPLAB = Launcher("dplab.run", "dplab", _DPLAB)
PEERS = [
    Launcher("torch.multiprocessing.spawn", "torch", _SPAWN, takes_files=True),
    Launcher("torchrun", "torch", _TORCHRUN, takes_files=True),
    Launcher("accelerate.notebook_launcher", "accelerate", _ACCELERATE),
    Launcher("ipyparallel, with its cluster", "ipyparallel", _COLD),
    Launcher("ipyparallel, cluster runs already", "ipyparallel", _WARM),
]


def cells(launcher: Launcher, ranks: int) -> list[str]:
    """The cells to run in a kernel before ``launch(function)`` can be called there."""
    functions = FUNCTIONS + _GROUP
    if not launcher.takes_files:
        return [functions, launcher.cell.format(ranks=ranks)]
    file = functions + (_SPAWN_FILE + _TORCHRUN_FILE).format(ranks=ranks)
    return [f"%%writefile functions.py\n{file}", "import os, torch, torch.distributed as dist",
            launcher.cell.format(ranks=ranks)]


# What is tried with each

PATIENCE = 30  # seconds, beyond what a launch takes, after which a call counts as stuck
_CALL = "launch(all_reduce_once)"
_TOLD = {"rank": r"(?i)\b(rank|process|engine)\b\W{0,9}1\b|\[1:",
         "error": "sample 7 is bad", "line": r"raise ValueError\(reason\)"}
_TIMED = """
import json, time
times = []
for _ in range({rounds}):
    start = time.perf_counter()
    values = launch({function})
    times.append(time.perf_counter() - start)
    assert values == {values}, values
print("seconds", json.dumps(times))
"""
_DDP_STEP = """
def ddp_step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
_FRESH = """
import time
import torch, torch.distributed as dist
from dplab import run
def all_reduce_once():
    dist.all_reduce(torch.ones(1))
time.sleep({pause})
start = time.perf_counter()
run(all_reduce_once, {ranks})
print(time.perf_counter() - start)
"""


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--rounds", type=int, default=15, help="warm runs of dplab (default 15)")
    parser.add_argument("--peer-rounds", type=int, default=3, help="runs of each peer (default 3)")


def main(options):
    if importlib.util.find_spec("ipykernel") is None:
        sys.exit("dplab.bench launchers: a notebook needs ipykernel: pip install ipykernel")
    print(f"from a notebook: {options.ranks} ranks start, join, all-reduce once, return the "
          f"result, end; median, least and most\n{'':54}{'seconds':>26}{'÷ dplab':>9}")
    ours = _tried(DPLAB, options.ranks, options.rounds)
    base = statistics.median(ours.times)
    _print_times("dplab.run", ours.times, base)
    for name, times in _more_of_dplab(options):
        _print_times(f"dplab.run, {name}", times, base)
    rows = {"dplab.run": ours}
    for peer in PEERS:
        if importlib.util.find_spec(peer.module) is None:
            print(f"{peer.name:54}not installed")
            continue
        try:
            rows[peer.name] = tried = _tried(peer, options.ranks, options.peer_rounds)
        except Failed as error:
            print(f"{peer.name:54}failed: {error}")
            continue
        _print_times(peer.name, tried.times, base)
    print(f"\n{'':34}{'function of a cell':20}{'rank 1 raises, others wait':42}■ while all wait")
    for name, tried in rows.items():
        print(f"{name:34}{tried.function:20}{tried.raised:42}{tried.interrupted}")


@dataclass(frozen=True)
class Tried:
    """Seconds of each launch, and in words what else was tried with a launcher."""

    times: list[float]
    function: str
    raised: str
    interrupted: str


class Failed(Exception):
    """A launcher does not do what it should; the text is the first line of its error."""


def _tried(launcher, ranks, rounds):
    with _started(launcher, ranks) as notebook:
        times = _seconds(notebook, rounds, "all_reduce_once", [float(ranks)] * ranks)
        usual = max(times)
        notebook.run("def of_a_cell():\n    return float(dist.get_rank())")
        own = notebook.run("launch(of_a_cell)", timeout=usual + PATIENCE).error
        function = "fails" if own else "runs"
        raised, works = _raises(notebook, usual)
        if works:
            return Tried(times, function, raised, _interrupted(notebook, usual))
    with _started(launcher, ranks) as notebook:
        return Tried(times, function, raised, _interrupted(notebook, usual))


@contextlib.contextmanager
def _started(launcher, ranks):
    """A notebook in which ``launch`` was called once."""
    with Notebook() as notebook:
        for cell in (*cells(launcher, ranks), _CALL):
            ran = notebook.run(cell, timeout=120)
            if ran.error:
                raise Failed(ran.error.splitlines()[0])
        yield notebook


def _seconds(notebook, rounds, function, values):
    ran = notebook.run(_TIMED.format(rounds=rounds, function=function, values=values))
    if ran.error:
        raise Failed(ran.error.splitlines()[0])
    return json.loads(ran.text.rpartition("seconds ")[2])


def _more_of_dplab(options):
    """(what, seconds of each): more ranks, a DDP step, and the first calls after a start."""
    ranks = options.ranks
    with _started(DPLAB, 2 * ranks) as notebook:
        yield f"{2 * ranks} ranks", _seconds(notebook, options.rounds, "all_reduce_once",
                                             [2.0 * ranks] * 2 * ranks)
    with _started(DPLAB, ranks) as notebook:
        notebook.run(_DDP_STEP)
        yield "a DDP step", _seconds(notebook, options.rounds, "ddp_step", [None] * ranks)
    for pause, when in ((0, "right"), (6, "six seconds")):
        script = _FRESH.format(pause=pause, ranks=ranks)
        yield f"first call, {when} after the imports", [
            float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True,
                                 text=True).stdout.split()[-1])
            for _ in range(options.peer_rounds)]


def _raises(notebook, usual):
    """In words what happened, and whether the notebook is good for more."""
    ran = notebook.run("launch(raises_on_rank_1)", timeout=usual + PATIENCE)
    if ran.error == "timeout":
        return f"no report in {PATIENCE} s", False
    told = [what for what, pattern in _TOLD.items() if re.search(pattern, ran.text)]
    then = _next(notebook, usual)
    return f"{ran.seconds:.1f} s: {', '.join(told) or 'nothing'}; {then}", then == "then works"


def _interrupted(notebook, usual):
    before, after = notebook.children(), usual + 2
    ran = notebook.run("launch(never_ends)", timeout=after + PATIENCE, interrupt_after=after)
    if ran.error == "timeout":
        return f"no end in {PATIENCE} s"
    time.sleep(2)
    left = len(notebook.children() - before)
    return f"{ran.seconds - after:.1f} s, {left} left; {_next(notebook, usual)}"


def _next(notebook, usual):
    ran = notebook.run(_CALL, timeout=usual + PATIENCE)
    if ran.error == "timeout":
        return "then stuck"
    return "then fails" if ran.error else "then works"


def _print_times(name, times, base):
    print(f"{name:54}{spread(times, 3):>26}{statistics.median(times) / base:8.1f}×", flush=True)


# The notebook in which it is tried

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ran:
    """How a cell ended: ``error`` is "", or the last line of its traceback, or "timeout".

    ``text``: all that it printed or that its traceback shows, in order.
    """

    seconds: float
    error: str
    text: str


class Notebook:
    """``with Notebook() as notebook: notebook.run("1 + 1")``: cells in a kernel of this Python.

    On leaving it, all processes that it had when `run` returned are ended.
    """

    def __enter__(self):
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        self._folder = tempfile.TemporaryDirectory(prefix="dplab-", ignore_cleanup_errors=True)
        # Without folders to look in, it starts this interpreter, whatever is installed.
        self._manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        self._manager.start_kernel(
            cwd=self._folder.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"DPLAB_LIVE": "0", "IPYTHONDIR": self._folder.name})
        self._process = psutil.Process(self._manager.provisioner.pid)
        self._seen = set()
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.children()
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._seen, timeout=10)
        self._folder.cleanup()

    def children(self) -> set[psutil.Process]:
        """The processes below the kernel, and those seen there before that are still alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(self._process.children(recursive=True))
        self._seen = {each for each in self._seen if _lives(each)}
        return set(self._seen)

    def run(self, source: str, timeout: float = 300, interrupt_after: float | None = None) -> Ran:
        """Runs a cell; ``interrupt_after``: as the ■ button does, so many seconds later."""
        shown: list[str] = []

        def keep(message):
            content = message["content"]
            shown.append(content.get("text") or "\n".join(content.get("traceback", []))
                         or content.get("data", {}).get("text/plain", ""))

        with contextlib.ExitStack() as stack:
            if interrupt_after is not None:
                timer = threading.Timer(interrupt_after, os.killpg,
                                        (self._process.pid, signal.SIGINT))
                timer.start()
                stack.callback(timer.cancel)
            start = time.perf_counter()
            try:
                reply = self._client.execute_interactive(
                    source, timeout=timeout, output_hook=keep, allow_stdin=False)["content"]
                failed = reply["status"] == "error"
                error = f"{reply['ename']}: {reply['evalue']}" if failed else ""
            except TimeoutError:
                error = "timeout" if self._manager.is_alive() else "the kernel died"
            seconds = time.perf_counter() - start
        self.children()
        return Ran(seconds, _ANSI.sub("", error), _ANSI.sub("", "".join(shown)))


def _lives(process):
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
