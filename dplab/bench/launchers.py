"""Ways to start ranks from a notebook, as the cells that one would write there.

Each does the same: N processes start from a warm kernel, join in a gloo group, do one all-reduce,
return its result, and end. ``launch(function)`` gives the list of what the ranks return.
"""

from dataclasses import dataclass

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
    """name, the module that it needs, its cell, and whether functions must lie in a file."""

    name: str
    module: str
    cell: str
    takes_files: bool = False


_DPLAB = """
import dplab

def launch(function, ranks={ranks}):
    return dplab.run(function, ranks, timeout=600)
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
