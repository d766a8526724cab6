"""What every rank runs under torchrun: some steps by each strategy, and the bytes that they send.

Started as ``training.py RESULT --steps N``; rank 0 writes the file RESULT.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab import run
from dplab.bench.training_step import training_step
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.standard_library import VOCABULARY, load_source, sample
from dplab.workloads.transformer import Transformer

PER_NODE = 2
CONFIG = TransformerConfig(
    layers=4, d_model=192, heads=4, d_ff=384, vocabulary=VOCABULARY, context=64, gated=True,
    biases=False, norm="rmsnorm", learned_positions=False, tied=False)
GLOBAL_BATCH, LENGTH, LEARNING_RATE = 8, 32, 0.1
KINDS = {  # by name: what `predict.traffic` calls it, and what `training_step` does
    "DDP": ("DDP", "DDP"),
    "ManualDDP": ("DDP", "ManualDDP"),
    "ShardedOptimizer (ZeRO-1)": ("ShardedOptimizer, reduce_gradients=True",) * 2,
    "FullyShardedModel (ZeRO-3)": ("FullyShardedModel",) * 2,
    "fully_shard": ("fully_shard",) * 2,
    "fully_shard, HSDP": ("HSDP",) * 2,
}


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
    out = interfaces[os.environ["GLOO_SOCKET_IFNAME"]]
    return {"bytes": out.bytes_sent, "packets": out.packets_sent,
            "local": interfaces["lo"].bytes_sent}


def next_byte_loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main():
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
    main()
