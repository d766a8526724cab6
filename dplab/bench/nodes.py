"""What crosses the link between two nodes in a step, by strategy, beside the prediction."""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab import run
from dplab.bench import restart
from dplab.bench.hosts import HEADERS, INTERFACE, Hosts, missing, start_job
from dplab.bench.results import save
from dplab.bench.training_step import training_step
from dplab.predict import traffic
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.standard_library import VOCABULARY, load_source, sample
from dplab.workloads.transformer import Transformer

NODES, PER_NODE = 2, 2
CONFIG = TransformerConfig(
    layers=4, d_model=192, heads=4, d_ff=384, vocabulary=VOCABULARY, context=64, gated=True,
    biases=False, norm="rmsnorm", learned_positions=False, tied=False)
GLOBAL_BATCH, LENGTH, LEARNING_RATE = 8, 32, 0.1
KINDS = {
    "DDP": ("DDP", "DDP"),
    "ManualDDP": ("DDP", "ManualDDP"),
    "ShardedOptimizer (ZeRO-1)": ("ShardedOptimizer, reduce_gradients=True",) * 2,
    "FullyShardedModel (ZeRO-3)": ("FullyShardedModel",) * 2,
    "fully_shard": ("fully_shard",) * 2,
    "fully_shard, HSDP": ("HSDP",) * 2,
}
"""By name: what `predict.traffic` calls it, and what `strategies.training_step` does."""


def add_arguments(parser):
    parser.add_argument("--rate", type=float, default=400e6,
                        help="of the link, in bits/s (default 400e6)")
    parser.add_argument("--steps", type=int, default=3, help="measured (default 3)")
    parser.add_argument("--save", action="store_true",
                        help="keep the results, which chapter 10 shows")


def main(options):
    if missing():
        sys.exit(f"dplab.bench nodes: {missing()}")
    rows = measure(options.rate, options.steps)
    print(f"gloo; {NODES} nodes × {PER_NODE} ranks, {options.rate / 1e6:.0f} Mbit/s between them; "
          f"{CONFIG.parameters:,} parameters in fp32\n"
          f"{'bytes of a step, one way':36}{'predicted':>12}{'measured':>12}{'ratio':>8}"
          f"{'with headers':>14}{'link alone':>12}{'a step':>9}")
    for row in rows:
        print(f"{row['strategy']:36}{row['predicted']:12,.0f}{row['payload']:12,.0f}"
              f"{row['payload'] / row['predicted']:8.4f}{row['bytes']:14,.0f}"
              f"{8 * row['predicted'] / options.rate:10.3f} s{row['seconds']:7.2f} s")
    whole, broken = restart.one_process(30), restart.killed(30, after=24, rank=3)
    print(f"\nRank 3 of {NODES} × {PER_NODE} killed after step 24 of 30: starts from steps "
          f"{broken['starts']}; last loss {broken['losses'][-1][1]:.4f}, in one process "
          f"{whole[-1][1]:.4f}")
    if options.save:
        save("nodes", rate=options.rate, parameters=CONFIG.parameters, rows=rows,
                     one_process=whole, killed=broken)


def measure(rate: float = 400e6, steps: int = 3) -> list[dict]:
    """Makes two hosts, runs `train` on them for each of KINDS, and puts the prediction beside it.

    Of a row, ``predicted``, ``bytes``, ``payload`` and ``packets`` are those that the first node
    sends to the other in a step; ``local`` is what crosses its own loopback interface.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts(rate=rate) as hosts:
        result = Path(folder) / "result.json"
        jobs = start_job(hosts, PER_NODE, ["-m", "dplab.bench.nodes", result, "--steps", steps])
        if any([job.wait(timeout=600) for job in jobs]):
            raise RuntimeError("the job on two hosts failed: see above")
        found = json.loads(result.read_text())
    rows = []
    for kind, ranks in found.items():
        first = ranks[0]
        row = {name: first["after"][name] - first["before"][name] for name in first["before"]}
        row = {name: count / steps for name, count in row.items()}
        rows.append({"strategy": kind, "predicted": crossing_bytes(KINDS[kind][0]), **row,
                     "payload": row["bytes"] - HEADERS * row["packets"],
                     "seconds": first["seconds"],
                     "losses": [statistics.mean(step) for step in
                                zip(*(rank["losses"] for rank in ranks), strict=True)]})
    return rows


def crossing_bytes(strategy: str, nodes: int = NODES, per_node: int = PER_NODE,
                   units=CONFIG.units) -> float:
    """Bytes that a node sends to the next one in a step, in fp32 over gloo, by arithmetic.

    Ranks are numbered node by node. A ring through all ranks then leaves each node on one of its
    edges, and an edge carries what a rank sends. Of HSDP's rings, those of a node's own ranks never
    leave it, and those across the nodes leave it ``per_node`` times.
    """
    hybrid = strategy == "HSDP"
    collectives = traffic.collectives(strategy, nodes * per_node, units, parameter_bytes=4,
                                      gradient_bytes=4, gloo=True,
                                      shard_ranks=per_node if hybrid else None)
    if not hybrid:
        return sum(each.bytes_sent for each in collectives)
    return per_node * sum(each.bytes_sent for each in collectives
                          if each.of == "shards of gradients")


# On the ranks


def train(kind, steps):
    """Trains under one of KINDS: this rank's losses, and its node's counters before and after.

    The first of the ``steps`` + 1 steps is not counted: in it, groups connect to one another.
    """
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    step = training_step(KINDS[kind][1], model, next_byte_loss, torch.optim.SGD,
                         units=list(model.blocks), lr=LEARNING_RATE)
    text, losses, seconds = load_source(), [], []
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for number in range(steps + 1):
        if number == 1:
            before = _counters()
        start = time.perf_counter()
        losses.append(step(*(part[mine] for part in sample(text, GLOBAL_BATCH, LENGTH, number))))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"before": before, "after": _counters(), "losses": losses,
            "seconds": statistics.median(seconds[1:])}


def _counters():
    """What this host has sent so far, by the kernel; read while every rank waits."""
    dist.barrier()
    interfaces = psutil.net_io_counters(pernic=True)
    dist.barrier()
    out = interfaces.get(INTERFACE, interfaces["lo"])
    return {"bytes": out.bytes_sent, "packets": out.packets_sent,
            "local": interfaces["lo"].bytes_sent}


def next_byte_loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _on_each_rank():
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    found = {kind: run(train, int(os.environ["WORLD_SIZE"]), kind, options.steps, backend="gloo",
                       timeout=300) for kind in KINDS}
    if os.environ["RANK"] == "0":
        options.result.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_each_rank()
