"""How long until four ranks have done one all-reduce: dplab beside torch's own launchers.

Each launcher runs in a kernel of its own, from the cells that one would write in a notebook.
"""

import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

from dplab.bench.results import spread

_FUNCTIONS = """
import os, torch, torch.distributed as dist

def all_reduce_once():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()

def ddp_step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
# A child imports the module that its function lies in; torchrun runs the file as a program.
_FILE = f"""%%writefile functions.py
{_FUNCTIONS}
def in_a_group(function, **where):
    dist.init_process_group("gloo", **where)
    value = function()
    dist.destroy_process_group()
    return value

def spawned(rank, ranks, function, path, values):
    store = dist.FileStore(path, ranks)
    values.put(in_a_group(function, store=store, rank=rank, world_size=ranks))

if __name__ == "__main__":
    import sys
    value = in_a_group(globals()[sys.argv[1]])
    print(f"value {{value}}\\n", end="", flush=True)
"""
_DPLAB = """
import dplab

def launch(function, ranks):
    return dplab.run(function, ranks, timeout=600)
"""
# What a spawned function returns is lost, so it goes through a queue.
_SPAWN = """
import sys, tempfile
import torch.multiprocessing as mp
sys.path.insert(0, os.getcwd())
from functions import *

def launch(function, ranks):
    with tempfile.TemporaryDirectory() as folder:
        values = mp.get_context("spawn").SimpleQueue()
        mp.spawn(spawned, (ranks, function, f"{folder}/store", values), nprocs=ranks)
        return [values.get() for _ in range(ranks)]
"""
_TORCHRUN = """
import subprocess, sys
from functions import *

def launch(function, ranks):
    printed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "functions.py", function.__name__], stdout=subprocess.PIPE, text=True,
        check=True).stdout
    return [float(line.removeprefix("value ")) for line in printed.splitlines()]
"""
DPLAB = [_FUNCTIONS, _DPLAB]
PEERS = {"torch.multiprocessing.spawn": [_FILE, _FUNCTIONS, _SPAWN],
         "torchrun": [_FILE, _FUNCTIONS, _TORCHRUN]}

_TIMED = """
import json, time
times = []
for _ in range({rounds}):
    start = time.perf_counter()
    values = launch({function}, {ranks})
    times.append(time.perf_counter() - start)
    assert values == {expected}, values
print("seconds", json.dumps(times))
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
    ranks, rounds = options.ranks, options.rounds
    print(f"from a notebook: {ranks} ranks start, join, all-reduce once, return the result, end; "
          f"median, least and most\n{'':54}{'seconds':>26}{'÷ dplab':>9}")
    ours = seconds_of(DPLAB, ranks, rounds)
    base = statistics.median(ours)
    _print("dplab.run", ours, base)
    _print(f"dplab.run, {2 * ranks} ranks", seconds_of(DPLAB, 2 * ranks, rounds), base)
    _print("dplab.run, a DDP step", seconds_of(DPLAB, ranks, rounds, "ddp_step"), base)
    for pause, when in ((0, "right"), (6, "six seconds")):
        _print(f"dplab.run, first call, {when} after the imports",
               [_first_call(pause, ranks) for _ in range(options.peer_rounds)], base)
    for name, cells in PEERS.items():
        try:
            _print(name, seconds_of(cells, ranks, options.peer_rounds), base)
        except RuntimeError as error:
            print(f"{name:54}failed: {error}")


def _first_call(pause, ranks):
    script = _FRESH.format(pause=pause, ranks=ranks)
    return float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True,
                                text=True).stdout.split()[-1])


def _print(name, times, base):
    print(f"{name:54}{spread(times, 3):>26}{statistics.median(times) / base:8.1f}×", flush=True)


def seconds_of(cells: list[str], ranks: int, rounds: int,
               function: str = "all_reduce_once") -> list[float]:
    """Seconds of each ``launch(function, ranks)`` in a kernel that ran the cells, after one more.

    RuntimeError with the last line of a cell's error, which a wrong result is as well.
    """
    expected = [float(ranks) if function == "all_reduce_once" else None] * ranks
    with kernel() as client:
        for cell in (*cells, f"launch({function}, {ranks})"):
            run_cell(client, cell)
        printed = run_cell(client, _TIMED.format(rounds=rounds, function=function, ranks=ranks,
                                                 expected=expected))
    return json.loads(printed.rpartition("seconds ")[2])


@contextlib.contextmanager
def kernel():
    """A client of a kernel of this Python, whose folder goes with it."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    with tempfile.TemporaryDirectory(prefix="dplab-", ignore_cleanup_errors=True) as folder:
        # Without folders to look in, it starts this interpreter, whatever is installed.
        manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        manager.start_kernel(cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=os.environ | {"DPLAB_LIVE": "0", "IPYTHONDIR": folder})
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield client
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def run_cell(client, source: str, timeout: float = 300) -> str:
    """What a cell prints. RuntimeError with the last line of its error."""
    printed: list[str] = []
    reply = client.execute_interactive(
        source, timeout=timeout, allow_stdin=False,
        output_hook=lambda message: printed.append(message["content"].get("text", "")))["content"]
    if reply["status"] == "error":
        text = f"{reply['ename']}: {reply['evalue']}".splitlines()[0]
        raise RuntimeError(re.sub(r"\x1b\[[0-9;]*m", "", text))
    return "".join(printed)
