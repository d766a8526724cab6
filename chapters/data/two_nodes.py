"""What crosses the link between two nodes in a step, by strategy, beside the prediction.

    python chapters/data/two_nodes.py

For Linux, as root, with iproute2's `ip` and `tc`. The nodes are hosts on this machine: network
namespaces, each with its own loopback, host name and ``/etc/hosts``. A veth pair joins the two, and
tc's token bucket limits what each end sends. They share the disk, as the nodes of a cluster do.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab import run
from dplab.bench.results import save
from dplab.bench.training_step import training_step
from dplab.predict import traffic
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.standard_library import VOCABULARY, load_source, sample
from dplab.workloads.transformer import Transformer

NODES, PER_NODE = 2, 2
NAMES, ADDRESSES = ("node-0", "node-1"), ("10.77.0.1", "10.77.0.2")
RATE = 400e6  # of the link in each direction, in bits/s
INTERFACE, MTU = "eth0", 9000
HEADERS = 14 + 20 + 20 + 12  # of a packet: Ethernet, IPv4, TCP, and TCP's time stamps
# The last one: torch 2.13's torchrun keeps one store for all restarts, and in it a new rank may
# find the address of a dead one; with this, each restart gets a store of its own.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
               "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
CONFIG = TransformerConfig(
    layers=4, d_model=192, heads=4, d_ff=384, vocabulary=VOCABULARY, context=64, gated=True,
    biases=False, norm="rmsnorm", learned_positions=False, tied=False)
GLOBAL_BATCH, LENGTH, LEARNING_RATE = 8, 32, 0.1
KINDS = {  # by name: what `predict.traffic` and `training_step` call it
    "DDP": "DDP",
    "ShardedOptimizer (ZeRO-1)": "ShardedOptimizer, reduce_gradients=True",
    "FullyShardedModel (ZeRO-3)": "FullyShardedModel",
    "fully_shard": "fully_shard",
    "fully_shard, HSDP": "HSDP",
}


# The hosts


def missing() -> str | None:
    """Why there can be no hosts here, or None if they can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"no {' and no '.join(absent)}: install iproute2 and util-linux" if absent else None


class Hosts:
    """Two hosts, as a context manager; on leaving it their processes and namespaces are gone."""

    def __init__(self):
        tag = f"dplab-{os.getpid()}-{secrets.token_hex(3)}"
        self.spaces = [f"{tag}-{number}" for number in range(NODES)]
        # `ip netns exec` lays this folder's `hosts` over /etc/hosts.
        self.folders = [Path("/etc/netns") / space for space in self.spaces]
        self.started: list[subprocess.Popen] = []

    def __enter__(self):
        try:
            for space in self.spaces:
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            one, other = self.spaces
            ip("link", "add", INTERFACE, "netns", one, "type", "veth",
               "peer", "name", INTERFACE, "netns", other)
            for space, folder, address in zip(self.spaces, self.folders, ADDRESSES, strict=True):
                ip("-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
                ip("-n", space, "link", "set", INTERFACE, "mtu", str(MTU), "up")
                # A queue longer than what TCP has in flight: nothing is dropped or sent twice.
                ip("netns", "exec", space, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                   "rate", f"{RATE:.0f}bit", "burst", "256kb", "limit", "64mb")
                folder.mkdir(parents=True)
                (folder / "hosts").write_text("".join(
                    f"{address} {name}\n" for address, name in zip(
                        ("127.0.0.1", *ADDRESSES), ("localhost", *NAMES), strict=True)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        while pids := self.pids():  # again, for those that were just being started
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self.started:
            process.wait()
        for space, folder in zip(self.spaces, self.folders, strict=True):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """The processes on both hosts: their namespaces hold nobody else's."""
        found = [subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
                 for space in self.spaces]
        return [int(pid) for each in found for pid in each.stdout.split()]

    def start_job(self, *words, **options) -> list[subprocess.Popen]:
        """torchrun on each host, as one would type it there. words: its options, and the script."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", NODES,
                    "--nproc-per-node", PER_NODE, "--rdzv-backend", "c10d",
                    "--rdzv-endpoint", f"{NAMES[0]}:29500", *words]
        for space, name in zip(self.spaces, NAMES, strict=True):
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
            self.started.append(subprocess.Popen(
                ["ip", "netns", "exec", space, *named, *map(str, torchrun)],
                env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, text=True, **options))
        return self.started[-NODES:]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


# What is measured, and what is predicted


def measure(steps: int) -> list[dict]:
    """Trains on two hosts by each of KINDS, and puts the prediction beside it.

    Of a row, ``predicted``, ``bytes``, ``payload`` and ``packets`` are those that the first node
    sends to the other in a step; ``local`` is what crosses its own loopback interface.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        result = Path(folder) / "result.json"
        if any([job.wait(timeout=600) for job in hosts.start_job(__file__, result, steps)]):
            raise RuntimeError("the job on two hosts failed: see above")
        found = json.loads(result.read_text())
    rows = []
    for kind, ranks in found.items():
        first = ranks[0]
        row = {name: (first["after"][name] - first["before"][name]) / steps
               for name in first["before"]}
        rows.append({"strategy": kind, "predicted": crossing_bytes(KINDS[kind]), **row,
                     "payload": row["bytes"] - HEADERS * row["packets"],
                     "seconds": first["seconds"],
                     "losses": [statistics.mean(step) for step in
                                zip(*(rank["losses"] for rank in ranks), strict=True)]})
    return rows


def crossing_bytes(strategy: str) -> float:
    """Bytes that a node sends to the next one in a step, in fp32 over gloo, by arithmetic.

    Ranks are numbered node by node. A ring through all ranks then leaves each node on one of its
    edges, and an edge carries what a rank sends. Of HSDP's rings, those of a node's own ranks never
    leave it, and those across the nodes leave it once for each of the node's ranks.
    """
    hybrid = strategy == "HSDP"
    collectives = traffic.collectives(strategy, NODES * PER_NODE, CONFIG.units, parameter_bytes=4,
                                      gradient_bytes=4, gloo=True,
                                      shard_ranks=PER_NODE if hybrid else None)
    if not hybrid:
        return sum(each.bytes_sent for each in collectives)
    return PER_NODE * sum(each.bytes_sent for each in collectives
                          if each.of == "shards of gradients")


# What every rank runs


def train(kind, steps):
    """Trains under one of KINDS: this rank's losses, and its node's counters before and after.

    The first of the ``steps`` + 1 steps is not counted: in it, groups connect to one another.
    """
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    step = training_step(KINDS[kind], model, next_byte_loss, torch.optim.SGD,
                         units=list(model.blocks), lr=LEARNING_RATE)
    text, losses, seconds = load_source(), [], []
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for number in range(steps + 1):
        if number == 1:
            before = counters()
        start = time.perf_counter()
        losses.append(step(*(part[mine] for part in sample(text, GLOBAL_BATCH, LENGTH, number))))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"before": before, "after": counters(), "losses": losses,
            "seconds": statistics.median(seconds[1:])}


def counters():
    """What this host has sent so far, by the kernel; read while every rank waits."""
    dist.barrier()
    interfaces = psutil.net_io_counters(pernic=True)
    dist.barrier()
    out = interfaces[INTERFACE]
    return {"bytes": out.bytes_sent, "packets": out.packets_sent,
            "local": interfaces["lo"].bytes_sent}


def next_byte_loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def of_rank(result, steps):
    """Rank 0 writes the file ``result``."""
    found = {kind: run(train, NODES * PER_NODE, kind, int(steps), backend="gloo", timeout=300)
             for kind in KINDS}
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    if missing():
        sys.exit(f"two_nodes: {missing()}")
    rows = measure(steps=3)
    print(f"{'bytes of a step, one way':36}{'predicted':>12}{'measured':>12}")
    for row in rows:
        print(f"{row['strategy']:36}{row['predicted']:12,.0f}{row['payload']:12,.0f}")
    save("two_nodes", rate=RATE, parameters=CONFIG.parameters, rows=rows)


if __name__ == "__main__":
    of_rank(*sys.argv[1:]) if "RANK" in os.environ else main()
