"""Trains a small language model of bytes on one machine or on many, and goes on after a restart.

    python train.py
    torchrun --nproc-per-node 8 train.py --strategy fsdp
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 \\
        --max-restarts 3 train.py --strategy hsdp --checkpoints /shared/folder

It needs torch alone. Copy it, and put your model and data in place of `ByteModel` and `batch_of`.
A step depends on nothing but the parameters, the optimizer's state and its number, so a job that
resumes from a checkpoint goes on as if nothing had happened, also on another number of ranks.
"""

import argparse
import gc
import os
import shutil
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 64  # bytes in a sequence


class ByteModel(nn.Module):
    """Predicts the next byte: inputs and targets, int64 of (batch, sequence), to the mean loss."""

    def __init__(self, width=128, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True,
                                       norm_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, inputs, targets):
        length, device = inputs.shape[1], inputs.device
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        x = self.embedding(inputs) + self.positions(torch.arange(length, device=device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def load_text():
    """The source of Python's own standard library, as bytes in a tensor."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, modules))), dtype=torch.uint8)


def batch_of(text, step, batch, device):
    """This rank's inputs and targets at a step: every N-th sample of the global batch."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (batch, 1), generator=generator)
    mine = starts[dist.get_rank()::dist.get_world_size()]
    windows = text[mine + torch.arange(CONTEXT + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def ranks_here():
    """How many ranks this machine has: torchrun and DeepSpeed have different names for it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", 1))


def join_job():
    """Joins torchrun's job, or makes one of this process alone; returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.device_count() >= ranks_here():
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def distribute(model, strategy, device):
    """The model under DDP, sharded over all ranks, or sharded within a node and copied across."""
    model = model.to(device)
    if strategy == "ddp":
        return DistributedDataParallel(model)
    ranks, in_node = dist.get_world_size(), ranks_here()
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (ranks,))
    else:  # ranks are numbered node by node, so each row of this mesh is a node
        mesh = init_device_mesh(device.type, (ranks // in_node, in_node),
                                mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def finished(folder):
    return sorted(folder.glob("step-*"))


def save(folder, step, model, optimizer):
    """Each rank writes its part; the folder gets a checkpoint's name once all of it is there."""
    unfinished = folder / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=unfinished)  # returns when every rank has written
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step:08}")
        for old in finished(folder)[:-2]:
            shutil.rmtree(old)


def resume(folder, model, optimizer):
    """Loads the last checkpoint, if there is one; returns the number of steps that are done."""
    told = [max(finished(folder), default=None)]
    dist.broadcast_object_list(told, src=0)  # a shared folder may look different on each node
    if told[0] is None:
        return 0
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=told[0])
    set_state_dict(model, optimizer, model_state_dict=states["model"],
                   optim_state_dict=states["optimizer"])
    return int(told[0].name.removeprefix("step-"))


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "hsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=100, help="of the whole training")
    parser.add_argument("--batch", type=int, default=32, help="global: it is split over the ranks")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), metavar="FOLDER",
                        help="one that all nodes see")
    return parser.parse_args(arguments)


def train(args, device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = distribute(ByteModel(), args.strategy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, done = load_text(), resume(args.checkpoints, model, optimizer)
    if rank == 0:
        print(f"{ranks} ranks on {device.type}, {args.strategy}, from step {done}", flush=True)

    for step in range(done, args.steps):
        loss = model(*batch_of(text, step, args.batch, device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.print_every == 0:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.checkpoints, step + 1, model, optimizer)


def main():
    args = parse()
    device = join_job()
    if args.batch % dist.get_world_size():
        raise SystemExit(f"{dist.get_world_size()} ranks do not divide a batch of {args.batch}")
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    train(args, device)
    # Only now, when the model is gone: a DDP that outlives its group can hang on leaving gloo.
    gc.collect()
    dist.destroy_process_group()
    # fully_shard keeps gloo's threads; one that lets go of a tensor too late would abort the end.
    time.sleep(0.1)


if __name__ == "__main__":
    main()
