"""The gradients of one step before and after synchronisation, and what six ways to do it cost.

    python -m dplab.demos.gradient_sync_visualizer --ranks 4 --save picture.png
    torchrun --nproc-per-node 2 -m dplab.demos.gradient_sync_visualizer --save picture.png

On each rank the same small network computes gradients from digits of its own. Each strategy makes
their mean of them: one message per parameter, buckets, buckets during backward (the course's and
torch's DDP), and DDP with two hooks that compress. Started with python -m, ranks talk over an
emulated link, so that there is something to hide; under torchrun over the job's own. Exit status:
0, or 1 if an exact strategy is wrong or a rank fails, or 2 for arguments that make no sense.
"""

import contextlib
import copy
import sys
import time
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab import show
from dplab.demos.arguments import Parser, complains_as, job_size, on_one_machine, prints, save
from dplab.measure import CallLog, EmulatedLink, WireMeter, available_cores
from dplab.parallel import BucketedDDP, ManualDDP, OverlappedDDP
from dplab.workloads.digits import TRAIN_SIZE, load_digits

LINK = EmulatedLink(bandwidth=0.05e9, latency=0.5e-3, name="link")
BUCKET_MB = 0.125
SAMPLES = 64  # per rank; fewer where the digits do not suffice
KEPT = 0.1
WARM_UP, ROUNDS = 3, 5  # steps; DDP has its final buckets from the second one on
ROUNDING = 1e-6  # of the largest gradient: what strategies that are exact may differ by

PER_PARAMETER, BUCKETS, OVERLAPPED = "per parameter", "buckets", "overlapped"
TORCH, FP16, LARGEST = "torch DDP", "DDP, fp16", f"DDP, top {100 * KEPT:.0f} %"
EXACT = (PER_PARAMETER, BUCKETS, OVERLAPPED, TORCH)


def keep_largest(state, bucket):
    """A hook for DDP that sends a tenth of a bucket, the largest gradients, as (value, index).

    The others count as zero (Aji and Heafield 2017), so what comes out is the same on all ranks,
    and not quite the mean. Indices travel as float32, which holds whole numbers up to 2²⁴ exactly.
    """
    flat, world_size = bucket.buffer(), dist.get_world_size()
    kept = flat.abs().topk(max(1, round(KEPT * flat.numel()))).indices
    message = torch.stack([flat[kept] / world_size, kept.to(flat.dtype)])
    gathered = message.new_empty(world_size * 2, len(kept))

    def add_up(_):
        values, indices = gathered[0::2].flatten(), gathered[1::2].flatten().long()
        return flat.zero_().index_add_(0, indices, values)

    return dist.all_gather_single(gathered, message, async_op=True).get_future().then(add_up)


def ddp_with(hook):
    """DDP that launches from Python, where `CallLog` looks, what C++ code launches otherwise."""
    def wrap(model):
        replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        replica.register_comm_hook(None, hook)
        return replica

    return wrap


SYNC_STRATEGIES = {
    PER_PARAMETER: ManualDDP,
    BUCKETS: lambda model: BucketedDDP(model, BUCKET_MB),
    OVERLAPPED: lambda model: OverlappedDDP(model, BUCKET_MB),
    TORCH: ddp_with(default_hooks.allreduce_hook),
    FP16: ddp_with(default_hooks.fp16_compress_hook),
    LARGEST: ddp_with(keep_largest),
}


def small_network():
    """(samples, 8, 8) to logits of shape (samples, 10); the same 96,714 parameters on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict([
        ("channel", nn.Unflatten(1, (1, 8))),
        ("conv1", nn.Conv2d(1, 32, 3, padding=1)), ("gelu1", nn.GELU()),
        ("conv2", nn.Conv2d(32, 64, 3, padding=1)), ("gelu2", nn.GELU()),
        ("conv3", nn.Conv2d(64, 64, 3, padding=1)), ("gelu3", nn.GELU()),
        ("flatten", nn.Flatten()), ("linear", nn.Linear(64 * 64, 10))]))
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so that the gradients of all layers are about equally large
            nn.init.kaiming_normal_(parameter)
    return model


def local_samples(digits):
    """This rank's images and labels; every rank has equally many, and none in common."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = slice(rank, world_size * min(SAMPLES, TRAIN_SIZE // world_size), world_size)
    return [tensor[mine].to(dplab.device()) for tensor in digits[:2]]


def gradients(model):
    return {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()}


def synchronize(digits, rounds=ROUNDS):
    """Takes the step with each strategy, on each rank.

    Returns the backend, the kind of device, the buckets as lists of names, the gradients before,
    and for each strategy: the gradients after, collectives and bytes that this rank handed to them,
    bytes that it sent (None where nobody counts them), and each step's seconds, all and exposed.
    """
    samples = local_samples(digits)
    counts = dplab.device().type == "cpu" and on_one_machine()  # what crosses its loopback
    model = small_network().to(dplab.device())
    F.cross_entropy(model(samples[0]), samples[1]).backward()
    before, outcomes = gradients(model), {}
    for name, wrap in SYNC_STRATEGIES.items():
        module, last = copy.deepcopy(model), {}
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, last=last: last.update(at=now()))
        replica = wrap(module)
        for _ in range(WARM_UP):
            with CallLog() as log:
                timed_step(replica, samples, last)
        with WireMeter() if counts else contextlib.nullcontext() as wire:
            times = [timed_step(replica, samples, last) for _ in range(rounds)]
        calls = [call for call in log.calls if call.operation != "barrier"]
        outcomes[name] = {
            "after": gradients(module),
            "calls": len(calls), "bytes": sum(call.bytes for call in calls),
            "sent": wire and wire.bytes_per_rank / rounds,
            "exposed": [exposed for exposed, _ in times], "step": [step for _, step in times]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    buckets = [[names[parameter] for parameter in bucket.parameters]
               for bucket in BucketedDDP(model, BUCKET_MB).buckets]
    return dist.get_backend(), dplab.device().type, buckets, before, outcomes


def timed_step(replica, samples, last):
    """Forward, backward and synchronisation; returns seconds: the exposed ones, and all.

    Exposed is what comes after the last gradient: from ``last["at"]``, until all are the mean.
    """
    replica.zero_grad()
    dist.barrier()
    begin = now()
    F.cross_entropy(replica(samples[0]), samples[1]).backward()
    if isinstance(replica, ManualDDP):
        replica.finish_gradient_sync()
    end = now()
    return seconds(last["at"], end), seconds(begin, end)


def now():
    """A moment on this rank: seconds, or an event on its accelerator."""
    if dplab.device().type == "cpu":
        return time.perf_counter()
    event = torch.Event(dplab.device(), enable_timing=True)
    event.record()
    return event


def seconds(begin, end):
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def summarize(results, link=None):
    """The facts, from what every rank returned. Bytes per rank and step, the least seconds of all
    steps: those that other programs disturbed least.

    ``exposed`` is that of the rank which waited least: it was the last one to compute, and the
    others waited for it as well. ``step`` is that of the slowest rank. ``error`` is the largest
    distance to the mean, as a share of the largest gradient.
    """
    backends, devices, buckets, before, outcomes = zip(*results, strict=True)
    mean = {name: sum(rank[name] for rank in before) / len(before) for name in before[0]}
    largest = max(value.abs().max().item() for value in mean.values())
    strategies = {}
    for name in SYNC_STRATEGIES:
        ranks = [rank[name] for rank in outcomes]
        after = [rank["after"] for rank in ranks]
        strategies[name] = {
            "calls": ranks[0]["calls"], "bytes": ranks[0]["bytes"], "sent": ranks[0]["sent"],
            "exposed": min(min(rank["exposed"]) for rank in ranks),
            "step": min(map(max, zip(*(rank["step"] for rank in ranks), strict=True))),
            "error": largest_difference(after, mean) / largest,
            "between_ranks": largest_difference(after, after[0])}
    return {"ranks": len(results), "device": devices[0], "link": link, "buckets": buckets[0],
            "backend": "gloo" if link else backends[0], "before": before,
            "after": {name: [rank[name]["after"] for rank in outcomes] for name in SYNC_STRATEGIES},
            "between_ranks": largest_difference(before, before[0]), "strategies": strategies}


def largest_difference(ranks, other):
    return max((rank[name] - other[name]).abs().max().item() for rank in ranks for name in other)


def lens(facts):
    return str(facts["link"]) if facts["link"] else f"real link, {facts['backend']}"


def report(facts):
    """The facts as the text that is printed."""
    before = facts["before"][0]
    nbytes = sum(4 * gradient.numel() for gradient in before.values())
    lines = [
        f"{facts['ranks']} ranks on {available_cores()} cores, {facts['backend']} on "
        f"{facts['device']}; {lens(facts)}",
        f"{len(before)} parameters, {nbytes:,} bytes of gradients, {len(facts['buckets'])} buckets",
        "",
        "Largest difference between two ranks' gradients",
        f"  before synchronisation  {facts['between_ranks']:.1e}",
        "  after                   "
        f"{max(row['between_ranks'] for row in facts['strategies'].values()):.1e}",
        "",
        "One step, per rank",
        f"  {'strategy':<15}{'collectives':>13}{'handed over':>13}{'sent':>11}{'exposed':>11}"
        f"{'step':>11}{'off the mean':>14}",
    ]
    counted = any(row["sent"] is not None for row in facts["strategies"].values())
    for name, row in facts["strategies"].items():
        sent = "none" if row["sent"] is None else f"{row['sent'] / 1e3:,.0f} kB"
        lines.append(
            f"  {name:<15}{row['calls']:>13}{row['bytes'] / 1e3:>10,.0f} kB{sent:>11}"
            f"{1e3 * row['exposed']:>8.1f} ms{1e3 * row['step']:>8.1f} ms{row['error']:>14.1e}")
    lines += [
        "",
        "  collectives, handed over: real, counted where they are launched",
        "  sent: real, counted by the kernel, headers included" if counted else
        "  sent: not counted, since it does not cross this machine's loopback alone",
        f"  exposed, step: {lens(facts)}; the least of {ROUNDS} steps. Exposed is what the last",
        "    rank to compute still waits after its last gradient, and all others with it.",
        "  off the mean: largest error, as a share of the largest gradient",
    ]
    if facts["ranks"] > available_cores() and facts["device"] == "cpu":
        lines.append("  More ranks than cores: while one computes, another one waits for its turn.")
    return "\n".join(lines)


def draw(facts):
    """The figure: heat maps before and after, and the strategies' costs."""
    rows, link = facts["strategies"], "emulated link" if facts["link"] else "real link"
    panels = {"before: each rank's own": facts["before"],
              "after, exact: the mean": facts["after"][OVERLAPPED],
              f"after, compressed to the largest {100 * KEPT:.0f} %": facts["after"][LARGEST]}
    bars = {"collectives (counted)": {name: row["calls"] for name, row in rows.items()},
            "kB sent (kernel's counters)": {
                name: row["sent"] and row["sent"] / 1e3 for name, row in rows.items()},
            f"ms exposed ({link})": {name: 1e3 * row["exposed"] for name, row in rows.items()}}
    return show.heat_maps(
        {panel: [{name: values.numpy() for name, values in rank.items()} for rank in ranks]
         for panel, ranks in panels.items()},
        facts["buckets"], bars=bars,
        title="Each rank has gradients of its own, and afterwards all have the same",
        note=f"Real gradients, up to 16 elements of each parameter; {lens(facts)}.")


def parse(argv):
    """The arguments, checked. Under torchrun, rank 0 alone complains."""
    parser = Parser("gradient_sync_visualizer", __doc__)
    parser.add_ranks()
    parser.add_argument("--link", choices=("emulated", "real"),
                        default="real" if job_size() else "emulated",
                        help=f"{LINK}; or the real one (default: emulated; under torchrun: real)")
    parser.add_figure("--save", "the picture")
    args = parser.parse(argv)
    if job_size() and args.link == "emulated":
        parser.error("argument --link: torchrun's job has its own link, and no other is "
                     "emulated: leave --link out, or start with python -m")
    return args


@complains_as("gradient_sync_visualizer")
def main(argv=None):
    args = parse(argv)
    link = LINK if args.link == "emulated" else None
    facts = summarize(dplab.run(synchronize, args.ranks, load_digits(), link=link,
                                timeout=60.0 + 10 * args.ranks), link)
    if prints():
        print(report(facts))
        if args.save:
            save(draw(facts), args.save)
    wrong = max(facts["strategies"][name]["error"] for name in EXACT)
    return 0 if wrong < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
