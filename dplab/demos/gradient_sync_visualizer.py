"""The gradients of one step before and after synchronisation, and what five ways to do it cost.

    python -m dplab.demos.gradient_sync_visualizer --ranks 4 --save picture.png
    torchrun --nproc-per-node 2 -m dplab.demos.gradient_sync_visualizer --save picture.png

On each rank the same small network computes gradients from digits of its own. Each way makes their
mean of them: one message per parameter, buckets, buckets during backward (the course's and torch's
DDP), and DDP with a hook that sends them in half precision. Started with python -m, ranks talk over
an emulated link, so that there is something to hide; under torchrun over the job's own.
"""

import copy
import sys
import time
from collections import OrderedDict

import torch
import torch.distributed as dist
from matplotlib.colors import SymLogNorm
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab import show
from dplab.demos import command_line
from dplab.measure import CallLog, EmulatedLink, WireMeter
from dplab.parallel import BucketedDDP, ManualDDP, OverlappedDDP
from dplab.workloads.digits import load_digits

LINK = EmulatedLink(bandwidth=0.05e9, latency=0.5e-3, name="link")
BUCKET_MB = 0.125
SAMPLES = 64  # per rank
SHOWN = 16  # elements of a parameter
WARM_UP, ROUNDS = 3, 5  # steps; DDP has its final buckets from the second one on


def ddp_with(hook):
    """DDP that launches from Python, where `CallLog` looks, what C++ code launches otherwise."""
    def wrap(model):
        replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        replica.register_comm_hook(None, hook)
        return replica

    return wrap


WAYS = {
    "per parameter": ManualDDP,
    "buckets": lambda model: BucketedDDP(model, BUCKET_MB),
    "overlapped": lambda model: OverlappedDDP(model, BUCKET_MB),
    "torch DDP": ddp_with(default_hooks.allreduce_hook),
    "DDP, fp16": ddp_with(default_hooks.fp16_compress_hook),
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
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def synchronize(digits, rounds=ROUNDS):
    """Takes the step in each way, on each rank, on CPUs.

    Returns the gradients before, and for each way: the gradients after, how many collectives this
    rank called, bytes that it sent in a step, and the least exposed seconds of a step.
    """
    mine = slice(dist.get_rank(), SAMPLES * dist.get_world_size(), dist.get_world_size())
    images, labels = digits.train_images[mine], digits.train_labels[mine]
    model = small_network()
    F.cross_entropy(model(images), labels).backward()
    outcomes = {}
    for name, wrap in WAYS.items():
        module, ready = copy.deepcopy(model), []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, ready=ready: ready.append(time.perf_counter()))
        replica = wrap(module)

        def exposed_seconds(replica=replica, ready=ready):
            """Takes the step; what comes after the last gradient, until all are the mean."""
            replica.zero_grad()
            dist.barrier()
            F.cross_entropy(replica(images), labels).backward()
            if isinstance(replica, ManualDDP):
                replica.finish_gradient_sync()
            return time.perf_counter() - ready[-1]

        for _ in range(WARM_UP):
            with CallLog() as log:
                exposed_seconds()
        with WireMeter() as wire:
            exposed = min(exposed_seconds() for _ in range(rounds))
        outcomes[name] = {"after": gradients(module),
                          "calls": sum(call.operation != "barrier" for call in log.calls),
                          "sent": wire.bytes_per_rank / rounds, "exposed": exposed}
    return gradients(model), outcomes


def summarize(results, link=None):
    """The facts, from what every rank returned; of all steps the one that was disturbed least.

    ``exposed`` is that of the rank which waited least: it was the last one to compute, and the
    others waited for it as well. ``error`` is the largest distance to the mean, as a share of the
    largest gradient.
    """
    before, outcomes = zip(*results, strict=True)
    mean = {name: sum(rank[name] for rank in before) / len(before) for name in before[0]}
    largest = max(value.abs().max().item() for value in mean.values())
    facts = {"link": str(link or "real link"), "before": before, "after": {}, "ways": {}}
    for name in WAYS:
        ranks = [rank[name] for rank in outcomes]
        facts["after"][name] = [rank["after"] for rank in ranks]
        facts["ways"][name] = {
            "collectives": ranks[0]["calls"], "kB sent": ranks[0]["sent"] / 1e3,
            "ms exposed": 1e3 * min(rank["exposed"] for rank in ranks),
            "error": max((rank["after"][each] - mean[each]).abs().max().item()
                         for rank in ranks for each in mean) / largest}
    return facts


def report(facts):
    """Prints the facts."""
    print(f"{len(facts['before'])} ranks; {facts['link']}. One step, per rank:\n\n"
          f"  {'way':<15}{'collectives':>13}{'kB sent':>9}{'ms exposed':>12}{'off the mean':>14}")
    for name, row in facts["ways"].items():
        print(f"  {name:<15}{row['collectives']:>13}{row['kB sent']:>9,.0f}"
              f"{row['ms exposed']:>12.1f}{row['error']:>14.1e}")
    print("\n  kB sent: counted by the kernel, headers included\n"
          "  exposed: after the last gradient of the last rank to compute\n"
          "  off the mean: the largest error, as a share of the largest gradient")


def shown(gradients):
    """Some elements of each parameter's gradient, in the order in which backward makes them."""
    flat = [gradient.flatten() for gradient in reversed(gradients.values())]
    return torch.cat([each[torch.linspace(0, len(each) - 1, min(SHOWN, len(each))).round().long()]
                      for each in flat])


def draw(facts):
    """The figure: heat maps of the gradients before and after, with a row for each rank."""
    panels = {"before: each rank's own": facts["before"],
              "after: the mean": facts["after"]["overlapped"]}
    ranks, names = len(facts["before"]), [*reversed(facts["before"][0])]
    largest = max(shown(rank).abs().max().item() for rank in facts["before"])
    title = "Each rank has gradients of its own, and afterwards all have the same"
    with show.style():
        figure = show.CourseFigure(figsize=(7.5, 3), layout="constrained", alt=(
            f"{title}: elements of each parameter, on {ranks} ranks."))
        figure.suptitle(title, ha="left", x=0.02, weight="bold")
        both = figure.subplots(2, sharex=True)
        for axes, (panel, gradients_of) in zip(both, panels.items(), strict=True):
            axes.pcolormesh(torch.stack([shown(rank) for rank in gradients_of]), cmap="RdBu_r",
                            norm=SymLogNorm(largest / 20, vmin=-largest, vmax=largest))
            axes.set_title(panel, size=10.5)
            axes.set_yticks([rank + 0.5 for rank in range(ranks)],
                            [f"rank {rank}" for rank in range(ranks)])
            axes.invert_yaxis()
        axes.set_xticks([SHOWN * (place + 0.4) for place in range(len(names))],
                        [name.replace(".", "\n") for name in names])
    return figure


def main(argv=None):
    parser = command_line.parser("gradient_sync_visualizer", __doc__)
    parser.add_argument("--save", metavar="FILE", help="save the picture as a .png or .svg")
    args = parser.parse_args(argv)
    link = None if command_line.UNDER_TORCHRUN else LINK
    facts = summarize(dplab.run(synchronize, args.ranks, load_digits(), link=link, backend="gloo",
                                timeout=60.0 + 10 * args.ranks), link)
    command_line.leave()
    if command_line.prints():
        report(facts)
        if args.save:
            draw(facts).savefig(args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
