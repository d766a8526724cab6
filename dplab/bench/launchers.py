"""How long until ranks have done one all-reduce: dplab beside torch's own launchers."""

import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dplab
from dplab.bench.results import spread

FIRST_CALL = """
import time
from dplab.bench import launchers
start = time.perf_counter()
launchers.by_dplab(launchers.all_reduce_once, {ranks})
print(time.perf_counter() - start)
"""


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--rounds", type=int, default=15, help="warm runs of dplab (default 15)")
    parser.add_argument("--peer-rounds", type=int, default=3, help="runs of each peer (default 3)")


def main(options):
    ranks, rounds = options.ranks, options.rounds
    print(f"{ranks} ranks start, join, all-reduce once, return the result, end; "
          f"median, least and most\n{'':30}{'seconds':>26}{'÷ dplab':>9}")
    ours = seconds_of(by_dplab, ranks, rounds)

    def show(name, times):
        ratio = statistics.median(times) / statistics.median(ours)
        print(f"{name:30}{spread(times, 3):>26}{ratio:8.1f}×", flush=True)

    show("dplab.run", ours)
    show(f"dplab.run, {2 * ranks} ranks", seconds_of(by_dplab, 2 * ranks, rounds))
    show("dplab.run, a DDP step", seconds_of(by_dplab, ranks, rounds, ddp_step))
    show("dplab.run, first call", [first_call(ranks) for _ in range(options.peer_rounds)])
    show("torch.multiprocessing.spawn", seconds_of(by_spawn, ranks, options.peer_rounds))
    show("torchrun", seconds_of(by_torchrun, ranks, options.peer_rounds))


def all_reduce_once():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def ddp_step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return all_reduce_once()


def seconds_of(launch, ranks: int, rounds: int, function=all_reduce_once) -> list[float]:
    """Seconds of each launch, after one that is not counted. ValueError for a wrong result."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        values = launch(function, ranks)
        times.append(time.perf_counter() - start)
        if values != [float(ranks)] * ranks:
            raise ValueError(f"{launch.__name__} gave {values} on {ranks} ranks")
    return times[1:]


def first_call(ranks: int) -> float:
    """Seconds of dplab's first run in a process, which starts the server too."""
    words = [sys.executable, "-c", FIRST_CALL.format(ranks=ranks)]
    return float(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def by_dplab(function, ranks):
    return dplab.run(function, ranks, backend="gloo", timeout=600)


def by_spawn(function, ranks):
    with tempfile.TemporaryDirectory() as folder:
        values = mp.get_context("spawn").SimpleQueue()  # what a spawned function returns is lost
        mp.spawn(_spawned, (ranks, function, f"{folder}/store", values), nprocs=ranks)
        return [values.get() for _ in range(ranks)]


def _spawned(rank, ranks, function, path, values):
    store = dist.FileStore(path, ranks)
    values.put(in_a_group(function, store=store, rank=rank, world_size=ranks))


def by_torchrun(function, ranks):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "--module", "dplab.bench.launchers", function.__name__],
        check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_a_group(function, **where):
    dist.init_process_group("gloo", **where)
    value = function()
    dist.destroy_process_group()
    return value


if __name__ == "__main__":
    sys.stdout.write(f"{in_a_group(globals()[sys.argv[1]])}\n")  # in one piece
