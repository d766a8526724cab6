"""How long until four ranks have done one all-reduce: dplab, torch.multiprocessing, torchrun."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dplab import run

_PEER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
_FRESH = """
import time
import torch, torch.distributed as dist
from dplab import run
def all_reduce_once():
    dist.all_reduce(torch.ones(1))
time.sleep({pause})
start = time.perf_counter()
run(all_reduce_once, 4)
print(time.perf_counter() - start)
"""


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=15, help="warm runs of dplab (default 15)")
    parser.add_argument("--peer-rounds", type=int, default=3, help="runs of each peer (default 3)")


def main(options):
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; seconds, median of each")
    run(all_reduce_once, 4)
    rows = {
        "dplab.run, 4 ranks": _times(options.rounds, lambda: run(all_reduce_once, 4)),
        "dplab.run, 8 ranks": _times(options.rounds, lambda: run(all_reduce_once, 8)),
        "dplab.run, 4 ranks, a DDP step": _times(options.rounds, lambda: run(ddp_step, 4)),
        "torch.multiprocessing.spawn, 4 ranks": _times(options.peer_rounds, _mp_spawn),
        "torchrun, 4 ranks": _times(options.peer_rounds, _torchrun),
        "dplab.run, 4 ranks, first call after the imports":
            [_fresh(0) for _ in range(options.peer_rounds)],
        "dplab.run, 4 ranks, first call six seconds later":
            [_fresh(6) for _ in range(options.peer_rounds)],
    }
    base = statistics.median(rows["dplab.run, 4 ranks"])
    print(f"\n{'':54}{'median':>8}{'least':>8}{'most':>8}{'ratio':>8}")
    for name, times in rows.items():
        middle = statistics.median(times)
        print(f"{name:54}{middle:8.3f}{min(times):8.3f}{max(times):8.3f}{middle / base:7.1f}×")


def all_reduce_once():
    dist.all_reduce(torch.ones(1))


def ddp_step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def _times(rounds, call):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _mp_spawn():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, (4, os.path.join(folder, "store")), nprocs=4)


def _spawned(rank, world_size, path):
    dist.init_process_group("gloo", rank=rank, world_size=world_size,
                            store=dist.FileStore(path, world_size))
    all_reduce_once()
    dist.destroy_process_group()


def _torchrun():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "peer.py"
        script.write_text(_PEER)
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                        "--nproc-per-node", "4", str(script)], check=True, capture_output=True)


def _fresh(pause):
    done = subprocess.run([sys.executable, "-c", _FRESH.format(pause=pause)], check=True,
                          capture_output=True, text=True)
    return float(done.stdout.split()[-1])
