"""Data-parallel training by hand beside PyTorch's DDP: same result, at what cost?

    python -m dplab.demos.simple_ddp --ranks 4 --plot shares.svg
    torchrun --nproc-per-node 4 dplab/demos/simple_ddp.py

Both train the same classifier of 8×8 digits from the same start on the same batches. The script
compares the parameters that come out, and where the time of a step goes. Exit status: 0, or 1 if
the two disagree or a rank fails, or 2 for arguments that make no sense.
"""

import contextlib
import copy
import itertools
import os
import statistics
import sys
import time

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":  # the imports take some seconds
    print("simple_ddp: loads PyTorch, then trains; --help says how", file=sys.stderr, flush=True)

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import dplab
from dplab import show
from dplab.demos.arguments import Parser, at_least, complains_as, prints, save, terminal_name
from dplab.measure import available_cores
from dplab.parallel import ManualDDP
from dplab.workloads.digits import TRAIN_SIZE, accuracy, digits_classifier, load_digits

PHASES = ("forward", "backward", "communication", "optimizer")
MANUAL, DDP, NO_SYNC = "ManualDDP", "torch DDP", "torch DDP, no_sync"
ROUNDING = 1e-3  # differences above this are no rounding errors, however many steps there were


def train(digits, steps, batch, seed, terminal):
    """Trains the three replicas in turn, on each rank.

    Returns the backend, the kind of device, and for each replica: its parameters as one vector,
    its accuracy on the test set, and the seconds of each step and phase, as a list of lists.
    """
    rank, device = dist.get_rank(), dplab.device()
    digits = [tensor.to(device) for tensor in digits]
    # A different start on each rank: both wrappers have to broadcast that of rank 0.
    model = digits_classifier(seed + rank).to(device)
    replicas = {
        MANUAL: ManualDDP(copy.deepcopy(model)),
        DDP: DistributedDataParallel(copy.deepcopy(model)),
        NO_SYNC: DistributedDataParallel(copy.deepcopy(model)),
    }
    optimizers = {name: torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
                  for name, replica in replicas.items()}
    times = {name: [] for name in replicas}

    for images, labels, weight in progress(local_batches(digits, steps, batch, seed), steps,
                                           terminal if rank == 0 else None):
        for name, replica in replicas.items():
            dist.barrier()  # all ranks begin the step together: nobody's delay is carried over
            with replica.no_sync() if name == NO_SYNC else contextlib.nullcontext():
                times[name].append(
                    timed_step(replica, optimizers[name], images, labels, weight))

    return dist.get_backend(), device.type, {
        name: {"parameters": torch.cat([p.detach().flatten() for p in replica.parameters()]),
               "accuracy": accuracy(replica.module, *digits[2:]),
               "times": times[name]} for name, replica in replicas.items()}


def local_batches(digits, steps, batch, seed):
    """For each step this rank's images, labels, and the weight of its mean loss.

    Every rank draws the same global batch and takes each N-th sample of it. Where ``batch`` is no
    multiple of N, local batches differ by one sample; with the weight N·nᵢ/batch, the mean of the
    gradients is still that of the whole batch.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        mine = torch.randperm(TRAIN_SIZE, generator=generator)[:batch][rank::world_size]
        yield digits[0][mine], digits[1][mine], world_size * len(mine) / batch


def timed_step(replica, optimizer, images, labels, weight):
    """One training step; returns the seconds of each of PHASES."""
    marks = [now()]
    loss = F.cross_entropy(replica(images), labels) * weight
    marks.append(now())
    loss.backward()
    marks.append(now())
    if isinstance(replica, ManualDDP):
        replica.finish_gradient_sync()
    marks.append(now())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(now())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def now():
    """Seconds, once this rank's accelerator has finished what it was given."""
    if dplab.device().type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def progress(batches, steps, terminal):
    """``batches`` behind a progress bar on the terminal of that name, if there is one."""
    if terminal is None:
        yield from batches
        return
    with open(terminal, "w") as screen:
        yield from tqdm(batches, total=steps, unit="step", file=screen, leave=False)


def summarize(results, warm_up):
    """The facts, from what every rank returned: seconds are medians over ranks and steps."""
    backends, devices, results = zip(*results, strict=True)
    seconds = {
        name: {phase: statistics.median(step[column] for rank in results
                                        for step in rank[name]["times"][warm_up:])
               for column, phase in enumerate(PHASES)}
        for name in results[0]}
    for name in (DDP, NO_SYNC):
        seconds[name]["communication"] = 0.0  # no phase of its own, only the clock was read
    ours = torch.stack([rank[MANUAL]["parameters"] for rank in results])
    theirs = torch.stack([rank[DDP]["parameters"] for rank in results])
    total = {name: sum(parts.values()) for name, parts in seconds.items()}
    hidden = seconds[DDP]["backward"] - seconds[NO_SYNC]["backward"]
    return {
        "backend": backends[0],
        "device": devices[0],
        "difference": (ours - theirs).abs().max().item(),
        "between_ranks": (ours - ours[0]).abs().max().item(),
        "accuracy": {name: results[0][name]["accuracy"] for name in (MANUAL, DDP)},
        "seconds": seconds,
        "total": total,
        "communication": {MANUAL: seconds[MANUAL]["communication"], DDP: hidden},
        "share": {MANUAL: seconds[MANUAL]["communication"] / total[MANUAL],
                  DDP: hidden / total[DDP]},
    }


def report(facts, args, warm_up):
    """The facts as the text that is printed."""
    cores = available_cores()
    lines = [
        f"{args.ranks} ranks on {cores} cores, {facts['backend']} on {facts['device']}; "
        f"{args.steps} steps, global batch {args.batch}, seed {args.seed}",
        "",
        "Same start, same batches, same optimizer",
        f"  largest parameter difference, ManualDDP to torch DDP   {facts['difference']:.1e}",
        f"  largest parameter difference between ranks, ManualDDP  {facts['between_ranks']:.1e}",
        f"  test accuracy, ManualDDP   {100 * facts['accuracy'][MANUAL]:.1f} %",
        f"  test accuracy, torch DDP   {100 * facts['accuracy'][DDP]:.1f} %",
        "",
        f"Milliseconds per step, measured (medians over all ranks and {args.steps - warm_up} "
        f"steps, after {warm_up} to warm up)",
        "  " + " " * 20 + "".join(f"{title:>15}" for title in (*PHASES, "sum")),
    ]
    for name, parts in facts["seconds"].items():
        cells = [f"{1000 * seconds:.3f}" for seconds in parts.values()]
        if name != MANUAL:
            cells[PHASES.index("communication")] = "in backward" if name == DDP else "none"
        cells.append(f"{1000 * facts['total'][name]:.3f}")
        lines.append(f"  {name:<20}" + "".join(f"{cell:>15}" for cell in cells))
    lines += [
        "",
        "Communication, with the wait for the slowest rank",
        f"  ManualDDP   {1000 * facts['communication'][MANUAL]:.3f} ms, "
        f"{100 * facts['share'][MANUAL]:.1f} % of the step",
        f"  torch DDP   {1000 * facts['communication'][DDP]:.3f} ms, "
        f"{100 * facts['share'][DDP]:.1f} % of the step "
        "(its backward's difference to no_sync: what overlap does not hide)",
    ]
    if args.ranks > cores and facts["device"] == "cpu":
        lines.append("  More ranks than cores: while one waits for its turn, all wait for it.")
    return "\n".join(lines)


def draw(facts):
    """The figure: the time shares of a step."""
    rows = {name: dict(facts["seconds"][name]) for name in (MANUAL, DDP)}
    # A difference of two medians may come out below zero; a bar cannot.
    rows[DDP]["communication"] = max(0.0, facts["communication"][DDP])
    rows[DDP]["backward"] -= rows[DDP]["communication"]
    rows = {name: {phase: 1000 * seconds for phase, seconds in parts.items()}
            for name, parts in rows.items()}
    shares = {name: round(100 * max(0.0, share)) for name, share in facts["share"].items()}
    return show.time_shares(rows, title=f"Communication takes {shares[MANUAL]} % of a step by "
                                        f"hand, {shares[DDP]} % in DDP")


def parse(argv):
    """The arguments, checked. Under torchrun, rank 0 alone complains."""
    parser = Parser("simple_ddp", __doc__)
    parser.add_ranks()
    parser.add_argument("--steps", type=at_least(1), default=200,
                        help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=at_least(1), default=256,
                        help="global batch, split over the ranks (default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0,
                        help="decides the start and the batches (default: %(default)s)")
    parser.add_figure("--plot", "the time shares")
    args = parser.parse(argv)
    if not args.ranks <= args.batch <= TRAIN_SIZE:
        parser.error(f"argument --batch: {args.batch} is not from {args.ranks} (one sample for "
                     f"each rank) to {TRAIN_SIZE} (the training set)")
    return args


@complains_as("simple_ddp")
def main(argv=None):
    args = parse(argv)
    warm_up = min(20, args.steps // 2)
    results = dplab.run(train, args.ranks, load_digits(), args.steps, args.batch, args.seed,
                        terminal_name(), timeout=60.0 + args.steps)
    facts = summarize(results, warm_up)
    if prints():
        print(report(facts, args, warm_up))
        if args.plot:
            save(draw(facts), args.plot)
    return 0 if facts["difference"] < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
