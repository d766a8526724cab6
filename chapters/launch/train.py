"""Trains a language model on one machine or on many, and keeps it alive: read it top to bottom.

    python make_shards.py data
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 8 train.py --data data --checkpoints checkpoints
    torchrun --nnodes 2:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 \\
        --max-restarts 3 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 train.py \\
        --strategy hsdp --data /shared/data --checkpoints /shared/run-1

For the reader of chapter 12 the class `Checkpoints` is new: the chapters before it teach the rest.

It needs torch and numpy. To make it yours, put your model in place of `Model`, and write your
tokens as `make_shards.py` does. A step depends on nothing but the weights, the optimizer's state,
its own number and the settings: a job that goes on from a checkpoint with the same settings takes
the same samples in the same order, at the same learning rates, on any number of ranks that divides
the global batch.
"""

import argparse
import collections
import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""FLOP/s of a GPU in bf16, without sparsity, as NVIDIA publishes them."""


# The model


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Token numbers, int64 of (batch, sequence), to logits of (batch, sequence, vocabulary)."""

    def __init__(self, vocabulary, width, layers, heads, sequence):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def initialize(model, seed):
    """Fills weights that are empty so far: each the same on any number of ranks.

    Each tensor is drawn whole from a generator of its own, and a rank keeps its shard: no more
    than one whole tensor is there at a time.
    """
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(seed + place)
        whole = torch.empty(parameter.shape).normal_(std=0.02, generator=generator)
        whole = whole.to(parameter.device)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements,
                                          src_data_rank=None))


# The data


class Tokens:
    """Shards of tokens, memory-mapped, as ``sequence`` + 1 tokens to a sample.

    Sample i of the training is always the same one. An epoch takes each sample once, in an order
    that is computed and not stored: i goes to (stride · i + epoch) modulo the number of samples,
    with a stride that has no factor in common with it.
    """

    def __init__(self, folder, sequence):
        index = json.loads((folder / "index.json").read_text())
        self.shards, self.sequence = [], sequence
        for name, length in index.items():
            found = (folder / name).stat().st_size // 2 if (folder / name).exists() else None
            if found != length:
                raise SystemExit(f"{folder / name} should have {length:,} tokens and "
                                 f"{'is missing' if found is None else f'has {found:,}'}: "
                                 "bring it back, or write the shards anew")
            self.shards.append(numpy.memmap(folder / name, dtype=numpy.uint16, mode="r"))
        self.samples = [len(shard) // (sequence + 1) for shard in self.shards]
        self.total = sum(self.samples)
        if not self.total:
            raise SystemExit(f"no shard in {folder} has {sequence + 1} tokens: give a shorter "
                             "--sequence, or more tokens")
        self.stride = next(stride for stride in range(int(0.618 * self.total) + 1, 2**62)
                           if math.gcd(stride, self.total) == 1)
        # What tells one data set from another: names, lengths, and how each shard begins.
        told = [json.dumps(index), *(shard[:65536].tobytes().hex() for shard in self.shards)]
        self.fingerprint = hashlib.sha256("".join(told).encode()).hexdigest()[:16]

    def sample(self, number):
        epoch, place = divmod(number, self.total)
        place = (self.stride * place + epoch) % self.total
        for shard, samples in zip(self.shards, self.samples, strict=True):
            if place < samples:
                start = place * (self.sequence + 1)
                return torch.from_numpy(shard[start:start + self.sequence + 1].astype(numpy.int64))
            place -= samples

    def batch(self, first, count, device):
        rows = torch.stack([self.sample(first + each) for each in range(count)])
        return rows.to(device, non_blocking=True)


# The job


def join_job(timeout):
    """Joins torchrun's job, or makes one of this process alone; returns this rank's device."""
    if sys.platform == "linux":  # a rank whose torchrun is killed would train on: it dies with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if (os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))):
        raise SystemExit("after a restart, ranks would look for dead ones (torch 2.13 keeps one "
                         "store): export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    local_rank, here = (int(os.environ.get(name, default)) for name, default in (
        ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= here:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    alone = {} if "WORLD_SIZE" in os.environ else {
        "store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                            timeout=timedelta(seconds=timeout),
                            device_id=device if device.type == "cuda" else None, **alone)
    return device


def keep_products(_context, op, *_args, **_kwargs):
    """Selective recomputation: matrix products and attention are kept, all else is done again."""
    kept = ("aten.mm", "aten.addmm", "aten._scaled_dot_product")
    return (CheckpointPolicy.MUST_SAVE if str(op).startswith(kept)
            else CheckpointPolicy.PREFER_RECOMPUTE)


def build(options, device):
    """The model: empty first, recomputed block by block, sharded, and only then filled."""
    with torch.device("meta"):
        model = Model(options.vocabulary, options.width, options.layers, options.heads,
                      options.sequence)
    ranks, in_node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if options.strategy == "hsdp":  # ranks are numbered node by node: a row of this mesh is a node
        mesh = init_device_mesh(device.type, (ranks // in_node, in_node),
                                mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh(device.type, (ranks,))
    precision = MixedPrecisionPolicy(param_dtype=None if options.fp32 else torch.bfloat16,
                                     reduce_dtype=torch.float32)
    contexts = {"selective": {"context_fn": functools.partial(
        create_selective_checkpoint_contexts, keep_products)}, "full": {}}
    for place, block in enumerate(model.blocks):
        if options.recompute != "none":  # first, so that a unit is gathered before it recomputes
            block = checkpoint_wrapper(block, **contexts[options.recompute])
            model.blocks[place] = block
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=device)
    initialize(model, options.seed)
    return model


def learning_rate(options, step):
    """Rises in a line, then falls as a cosine to a tenth: of the step and the settings alone."""
    if step < options.warmup:
        return options.rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


# Checkpoints


class Checkpoints:
    """A folder of ``step-…``: each whole, because a folder gets its name when all is written.

    The name says that on all ranks every write has ended without an error, and that the file system
    has put DCP's files on its disk (DCP calls fsync). ``whole.json`` is not put there: where it is
    empty, the checkpoint is torn. The sizes in it show what is lost or cut off later. Nothing here
    shows a byte that has changed: there are no checksums.

    describes: settings in which a checkpoint and the job must agree. schedule: those that may
    change, which is said, because from there on it is another training.

    Saving copies what is saved, and writes it while training goes on, in a process group of its
    own: collectives of two threads in one group would take each other's messages. Names count
    steps, so that no clock decides which is the last.
    """

    def __init__(self, folder, describes, schedule, keep, timeout):
        self.folder, self.describes, self.schedule = folder, describes, schedule
        self.keep = keep
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.saving = None  # (step, the future of its write)
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step, model, optimizer):
        """Begins to save; what was begun before is finished first."""
        self.finish()
        part = self.folder / f"unfinished-{step:08}"
        if dist.get_rank() == 0:
            for old in self.folder.glob("unfinished-*"):
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier(self.group)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        self.saving = step, dcp.async_save({"model": model_state, "optimizer": optimizer_state},
                                           checkpoint_id=part, process_group=self.group)

    def finish(self, wait=True):
        """Gives a checkpoint its name once it is written. A write that failed costs no training."""
        if self.saving is None or not (wait or self.saving[1].done()):
            return
        (step, future), self.saving = self.saving, None
        failed = future.exception()
        if dist.get_rank():
            return
        part = self.folder / f"unfinished-{step:08}"
        try:
            if failed:
                raise failed
            files = {path.name: path.stat().st_size for path in part.iterdir()}
            (part / "whole.json").write_text(json.dumps(
                {**self.describes, **self.schedule, "files": files}))
            part.rename(self.folder / f"step-{step:08}")
        except (Exception, CheckpointException) as error:  # a full disk, say
            say(f"step {step}: NOT SAVED, {first_cause(error)}. Training goes on; the last whole "
                f"checkpoint is {max(self.whole(), default=None) or 'none'}")
            shutil.rmtree(part, ignore_errors=True)
            return
        say(f"step {step}: saved")
        for old in self.whole()[:-self.keep]:
            shutil.rmtree(old)

    def whole(self):
        """Those that have all of their files, the oldest first; a torn one loses its name."""
        found = []
        for path in sorted(self.folder.glob("step-*")):
            try:
                files = json.loads((path / "whole.json").read_text())["files"]
                for name, size in files.items():
                    have = (path / name).stat().st_size
                    if have != size:
                        raise ValueError(f"{name} has {have:,} of {size:,} bytes")
                found.append(path)
            except (OSError, ValueError, KeyError) as error:
                aside = path.with_name(f"torn-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                say(f"{path} is torn ({error}): kept as {aside.name}, the one before is tried")
        return found

    def last(self):
        """The last that is whole; SystemExit if it is of another training."""
        path = max(self.whole(), default=None)
        if path is None:
            return None
        found = json.loads((path / "whole.json").read_text())
        differs, changed = (
            "; ".join(f"{name} was {found.get(name)} and is {value}"
                      for name, value in settings.items() if found.get(name) != value)
            for settings in (self.describes, self.schedule))
        if differs:
            raise SystemExit(f"{path} is of another training: {differs}. Give the "
                             "same again, or another --checkpoints folder")
        if changed:
            say(f"{path.name}: {changed}. Training goes on, with other losses than before")
        return path

    def resume(self, model, optimizer):
        """Loads the last one, on any number of ranks; returns how many steps are done."""
        told = [None]
        if dist.get_rank() == 0:  # one rank looks: a shared folder may be late on another node
            try:
                told = [self.last()]
            except SystemExit as error:
                told = [error]
        dist.broadcast_object_list(told, src=0, group=self.group)
        if isinstance(told[0], SystemExit):
            raise told[0]
        if told[0] is None:
            return 0
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=told[0], process_group=self.group)
        set_state_dict(model, optimizer, model_state_dict=states["model"],
                       optim_state_dict=states["optimizer"])
        return int(told[0].name.removeprefix("step-"))


def first_cause(error):
    """What went wrong first, in a line. DCP has the errors by rank; a full disk is an OSError."""
    for failed in getattr(error, "failures", {}).values():
        error = failed[0] if isinstance(failed, tuple) else failed
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return " ".join(f"{type(error).__name__}: {error}".split("\n", 1)[0].split())


# The loop


def say(text):
    print(text, flush=True)


class Report:
    """Loss, speed and memory of each step, and whether any rank was told to stop.

    A step's report is read while the next one computes, so that no GPU waits for it.
    """

    def __init__(self, options, parameters, device, log):
        self.options, self.parameters, self.device, self.log = options, parameters, device, log
        self.told_to_stop, self.pending, self.seconds = False, None, collections.deque(maxlen=20)
        self.before = time.perf_counter()
        for each in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, self.stop)

    def stop(self, *_):
        self.told_to_stop = True

    def send(self, step, loss, norm):
        """Sends this step's, and reads the one before: whether to stop."""
        values = torch.stack([loss, torch.tensor(float(self.told_to_stop), device=self.device)])
        now = time.perf_counter()
        before, self.pending = self.pending, (
            step, values, norm, now - self.before, dist.all_reduce(values, async_op=True))
        self.before = now
        return self.read(before) if before else False

    def read(self, report):
        step, values, norm, seconds, work = report
        work.wait()
        loss, stops = values.tolist()
        usual = statistics.median(self.seconds) if len(self.seconds) >= 5 else math.inf
        self.seconds.append(seconds)
        if dist.get_rank() == 0:
            if seconds > 2 * usual:
                say(f"step {step}: SLOW, {seconds:.2f} s where {usual:.2f} s are usual")
            if step % self.options.print_every == 0:
                self.print(step, loss, float(norm), seconds)
        return stops > 0

    def print(self, step, loss, norm, seconds):
        tokens = self.options.batch * self.options.sequence / seconds
        memory = (torch.cuda.max_memory_allocated() if self.device.type == "cuda"
                  else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        found = {"step": step, "loss": loss, "norm": norm, "tokens_per_second": tokens,
                 "memory": memory}
        peak = next((peak for name, peak in PEAK.items() if self.device.type == "cuda"
                     and name in torch.cuda.get_device_name()), None)
        if peak:
            attention = 12 * self.options.layers * self.options.width * self.options.sequence
            found["mfu"] = (tokens * (6 * self.parameters + attention)
                            / (peak * dist.get_world_size()))
        mfu = f", MFU {found['mfu']:.1%}" if peak else ""
        say(f"step {step}: loss {loss:.6f}, norm {norm:.3f}, {tokens:,.0f} tokens/s{mfu}, "
            f"{memory / 1e9:.2f} GB")
        with self.log.open("a") as log:
            log.write(json.dumps(found) + "\n")


def one_step(step, model, optimizer, data, options, device):
    """The global batch, in micro-batches; returns this rank's part of its mean loss, and the norm.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed + step * ranks + rank)  # for dropout, where a model has it
    share = options.batch // ranks
    micro = max(size for size in range(1, share + 1)
                if share % size == 0 and size <= max(1, options.micro_batch))
    total = torch.zeros((), device=device)
    for start in range(0, share, micro):
        model.set_is_last_backward(start + micro == share)
        # HSDP reduces in the node for each micro-batch, and between copies for the last.
        model.set_requires_all_reduce(start + micro == share)
        rows = data.batch(step * options.batch + rank * share + start, micro, device)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(),
                               reduction="sum") / (options.batch * options.sequence)
        (loss * ranks).backward()  # gradients are averaged over ranks, and this is a sum
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(options, step)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.full_tensor() if isinstance(norm, DTensor) else norm


def train(options, device):
    data = Tokens(options.data, options.sequence)
    model = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95),
                                  weight_decay=0.1)
    describes = {"data": data.fingerprint, **{name: getattr(options, name) for name in (
        "vocabulary", "width", "layers", "heads", "sequence", "batch", "seed")}}
    schedule = {name: getattr(options, name) for name in (
        "steps", "rate", "warmup", "clip", "fp32")}
    checkpoints = Checkpoints(options.checkpoints, describes, schedule, options.keep,
                              options.timeout)
    done = checkpoints.resume(model, optimizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        say(f"{parameters:,} parameters, {dist.get_world_size()} ranks on {device.type}, "
            f"{options.strategy}, from step {done}, sample {done * options.batch:,}")
    report = Report(options, parameters, device, options.checkpoints / "log.jsonl")
    profile = contextlib.nullcontext()
    stops, step = False, done
    while step < options.steps and not stops:
        if step == options.profile:
            profile = torch.profiler.profile()
        with profile:
            loss, norm = one_step(step, model, optimizer, data, options, device)
        if step == options.profile:
            profile.export_chrome_trace(
                str(options.checkpoints / f"trace-{dist.get_rank()}.json"))
            profile = contextlib.nullcontext()
        step += 1
        stops = report.send(step, loss, norm)
        checkpoints.finish(wait=False)
        if step % options.save_every == 0 or stops or step == options.steps:
            checkpoints.save(step, model, optimizer)
    if report.pending:
        report.read(report.pending)
    checkpoints.finish()
    dist.barrier(checkpoints.group)  # srun ends the job when a node's ranks leave: the name first
    if stops and dist.get_rank() == 0:
        say(f"told to stop: saved at step {step}, and ending")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="of make_shards.py")
    add("--checkpoints", type=Path, default=Path("checkpoints"), help="one that all nodes see")
    add("--strategy", choices=["fsdp", "hsdp"], default="fsdp")
    add("--steps", type=int, default=100, help="of the whole training")
    add("--batch", type=int, default=32, help="samples in a step of all ranks together")
    add("--micro-batch", type=int, default=8, help="that a rank computes at a time, at most")
    add("--sequence", type=int, default=64, help="tokens")
    add("--vocabulary", type=int, default=256)
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--rate", type=float, default=1e-3, help="the highest learning rate")
    add("--warmup", type=int, default=10, help="steps")
    add("--clip", type=float, default=1.0, help="the largest norm of all gradients together")
    add("--seed", type=int, default=0)
    add("--fp32", action="store_true", help="compute in fp32 in place of bf16")
    add("--recompute", choices=["none", "selective", "full"], default="selective")
    add("--save-every", type=int, default=20, metavar="STEPS")
    add("--keep", type=int, default=2, metavar="CHECKPOINTS")
    add("--print-every", type=int, default=10, metavar="STEPS")
    add("--timeout", type=float, default=600, help="seconds that a collective may wait")
    add("--profile", type=int, metavar="STEP", help="record this step with torch.profiler")
    return parser.parse_args(arguments)


@record  # torchrun shows the first error of all ranks, with its traceback
def main():
    options = parse()
    device = join_job(options.timeout)
    ranks = dist.get_world_size()
    if options.batch % ranks:
        raise SystemExit(f"{ranks} ranks do not divide a batch of {options.batch}: take a number "
                         "that does")
    train(options, device)
    gc.collect()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads may hold a tensor for a moment


if __name__ == "__main__":
    sys.exit(main())
