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
import os
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
from dplab.demos import arguments
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


def gradients(model):
    return {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()}


def synchronize(digits, rounds=ROUNDS):
    """Takes the step with each strategy, on each rank.

    Returns the buckets as lists of names, the gradients before, and for each strategy: the
    gradients after, collectives and bytes that this rank handed to them, bytes that it sent (None
    where they do not cross this machine's loopback), each step's seconds, all and exposed.
    """
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), dplab.device()
    mine = slice(rank, world_size * min(SAMPLES, TRAIN_SIZE // world_size), world_size)
    samples = [tensor[mine].to(device) for tensor in digits[:2]]
    on_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
    counts = device.type == "cpu" and on_one_machine
    model = small_network().to(device)
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
    return buckets, before, outcomes


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
    """A moment on this rank: seconds, or an event on its accelerator, which nothing waits for."""
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
    buckets, before, outcomes = zip(*results, strict=True)
    mean = {name: sum(rank[name] for rank in before) / len(before) for name in before[0]}
    largest = max(value.abs().max().item() for value in mean.values())
    facts = {"link": str(link or "real link"), "buckets": buckets[0], "before": before, "after": {},
             "between_ranks": largest_difference(before, before[0]), "strategies": {}}
    for name in SYNC_STRATEGIES:
        ranks = [rank[name] for rank in outcomes]
        after = facts["after"][name] = [rank["after"] for rank in ranks]
        facts["strategies"][name] = {
            "calls": ranks[0]["calls"], "bytes": ranks[0]["bytes"], "sent": ranks[0]["sent"],
            "exposed": min(min(rank["exposed"]) for rank in ranks),
            "step": min(map(max, zip(*(rank["step"] for rank in ranks), strict=True))),
            "error": largest_difference(after, mean) / largest,
            "between_ranks": largest_difference(after, after[0])}
    return facts


def largest_difference(ranks, other):
    return max((rank[name] - other[name]).abs().max().item() for rank in ranks for name in other)


def report(facts):
    """Prints the facts."""
    rows, parameters = facts["strategies"], facts["before"][0].values()
    print(f"{len(facts['before'])} ranks on {available_cores()} cores; {facts['link']}; "
          f"{len(parameters)} parameters, {sum(4 * each.numel() for each in parameters):,} bytes "
          f"of gradients, {len(facts['buckets'])} buckets\n\n"
          f"Largest difference between two ranks' gradients\n"
          f"  before synchronisation  {facts['between_ranks']:.1e}\n"
          f"  after                   {max(row['between_ranks'] for row in rows.values()):.1e}\n\n"
          f"One step, per rank\n  {'strategy':<15}{'collectives':>13}{'kB handed over':>16}"
          f"{'kB sent':>9}{'ms exposed':>12}{'ms':>7}{'off the mean':>14}")
    for name, row in rows.items():
        sent = "–" if row["sent"] is None else f"{row['sent'] / 1e3:,.0f}"
        print(f"  {name:<15}{row['calls']:>13}{row['bytes'] / 1e3:>16,.0f}{sent:>9}"
              f"{1e3 * row['exposed']:>12.1f}{1e3 * row['step']:>7.1f}{row['error']:>14.1e}")
    print(f"\n  kB sent: counted by the kernel, headers included; – where they do not cross the "
          f"loopback alone\n  ms: the least of {ROUNDS} steps. Exposed is what the last rank to "
          "compute still waits after its last\n    gradient, and all others with it.\n"
          "  off the mean: largest error, as a share of the largest gradient")


def draw(facts):
    """The figure: heat maps before and after, and the strategies' costs."""
    rows = facts["strategies"]
    panels = {"before: each rank's own": facts["before"],
              "after, exact: the mean": facts["after"][OVERLAPPED],
              f"after, compressed to the largest {100 * KEPT:.0f} %": facts["after"][LARGEST]}
    bars = {"collectives (counted)": {name: row["calls"] for name, row in rows.items()},
            "kB sent (kernel's counters)": {
                name: row["sent"] and row["sent"] / 1e3 for name, row in rows.items()},
            f"ms exposed ({facts['link'].partition(':')[0]})": {
                name: 1e3 * row["exposed"] for name, row in rows.items()}}
    return show.heat_maps(
        {panel: [{name: values.numpy() for name, values in rank.items()} for rank in ranks]
         for panel, ranks in panels.items()},
        facts["buckets"], bars=bars,
        title="Each rank has gradients of its own, and afterwards all have the same",
        note=f"Real gradients, up to 16 elements of each parameter; {facts['link']}.")


def main(argv=None):
    parser = arguments.parser("gradient_sync_visualizer", __doc__)
    parser.add_argument("--save", type=arguments.figure_file, metavar="FILE",
                        help="save the picture as a .png or .svg")
    args = parser.parse_args(argv)
    link = None if arguments.job_size() else LINK
    facts = summarize(dplab.run(synchronize, args.ranks, load_digits(), link=link,
                                timeout=60.0 + 10 * args.ranks), link)
    arguments.leave_job()
    if arguments.prints():
        report(facts)
        if args.save:
            arguments.save(draw(facts), args.save)
    return 0 if max(facts["strategies"][name]["error"] for name in EXACT) < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
