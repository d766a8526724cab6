"""Data-parallel training by hand beside PyTorch's DDP: same result, at what cost?

    python -m dplab.demos.simple_ddp --ranks 4 --plot shares.svg
    torchrun --nproc-per-node 4 dplab/demos/simple_ddp.py

Both train the same classifier of 8×8 digits from the same start on the same batches. Exit status:
0, or 1 if the two disagree or a rank fails, or 2 for arguments that make no sense.
"""

import contextlib
import copy
import itertools
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab import show
from dplab.demos import arguments
from dplab.measure import available_cores
from dplab.parallel import ManualDDP
from dplab.workloads.digits import TRAIN_SIZE, accuracy, digits_classifier, load_digits

PHASES = ("forward", "backward", "communication", "optimizer")
MANUAL, DDP, NO_SYNC = "ManualDDP", "torch DDP", "torch DDP, no_sync"
WRAPPERS = {MANUAL: ManualDDP, DDP: DistributedDataParallel, NO_SYNC: DistributedDataParallel}
ROUNDING = 1e-3  # differences above this are no rounding errors, however many steps there were


def train(digits, steps, batch, seed):
    """Trains the three replicas in turn, on each rank.

    Returns the backend and the device, and by replica: its parameters as one vector, its accuracy
    on the test set, and seconds, of shape (steps, phases).
    """
    digits = [tensor.to(dplab.device()) for tensor in digits]
    # A different start on each rank: both wrappers have to broadcast that of rank 0.
    model = digits_classifier(seed + dist.get_rank()).to(dplab.device())
    replicas = {name: wrap(copy.deepcopy(model)) for name, wrap in WRAPPERS.items()}
    optimizers = {name: torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
                  for name, replica in replicas.items()}
    times = {name: [] for name in replicas}
    for images, labels, weight in local_batches(digits, steps, batch, seed):
        for name, replica in replicas.items():
            dist.barrier()  # all ranks begin the step together: nobody's delay is carried over
            with replica.no_sync() if name == NO_SYNC else contextlib.nullcontext():
                times[name].append(timed_step(replica, optimizers[name], images, labels, weight))
    return f"{dist.get_backend()} on {dplab.device().type}", {
        name: {"parameters": torch.cat([p.detach().flatten() for p in replica.parameters()]).cpu(),
               "accuracy": accuracy(replica.module, *digits[2:]),
               "times": torch.tensor(times[name])} for name, replica in replicas.items()}


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


def summarize(results, warm_up):
    """The facts, from what every rank returned: seconds are medians over ranks and steps."""
    where, results = zip(*results, strict=True)
    seconds = {name: dict(zip(PHASES, torch.cat([rank[name]["times"][warm_up:] for rank in results])
                              .median(dim=0).values.tolist(), strict=True)) for name in WRAPPERS}
    for name in (DDP, NO_SYNC):
        seconds[name]["communication"] = 0.0  # no phase of its own, only the clock was read
    ours = torch.stack([rank[MANUAL]["parameters"] for rank in results])
    theirs = torch.stack([rank[DDP]["parameters"] for rank in results])
    communication = {MANUAL: seconds[MANUAL]["communication"],
                     DDP: seconds[DDP]["backward"] - seconds[NO_SYNC]["backward"]}
    return {"where": where[0], "seconds": seconds, "communication": communication,
            "share": {name: each / sum(seconds[name].values())
                      for name, each in communication.items()},
            "difference": (ours - theirs).abs().max().item(),
            "between_ranks": (ours - ours[0]).abs().max().item(),
            "accuracy": {name: results[0][name]["accuracy"] for name in (MANUAL, DDP)}}


def report(facts, args, warm_up):
    """Prints the facts."""
    print(f"{args.ranks} ranks on {available_cores()} cores, {facts['where']}; {args.steps} steps, "
          f"global batch {args.batch}, seed {args.seed}\n")
    print(f"Same start, same batches, same optimizer\n"
          f"  largest parameter difference, ManualDDP to torch DDP   {facts['difference']:.1e}\n"
          f"  largest parameter difference between ranks, ManualDDP  {facts['between_ranks']:.1e}")
    for name, correct in facts["accuracy"].items():
        print(f"  test accuracy, {name}   {100 * correct:.1f} %")
    print(f"\nMilliseconds per step, measured (medians over all ranks and {args.steps - warm_up} "
          f"steps, after {warm_up} to warm up)")
    print(" " * 22 + "".join(f"{title:>15}" for title in (*PHASES, "sum")))
    for name, parts in facts["seconds"].items():
        cells = [f"{1000 * seconds:.3f}" for seconds in (*parts.values(), sum(parts.values()))]
        if name != MANUAL:
            cells[PHASES.index("communication")] = "in backward" if name == DDP else "none"
        print(f"  {name:<20}" + "".join(f"{cell:>15}" for cell in cells))
    print("\nCommunication, with the wait for the slowest rank (of DDP what overlap does not hide: "
          "its backward's difference to no_sync)")
    for name, seconds in facts["communication"].items():
        print(f"  {name}   {1000 * seconds:.3f} ms, {100 * facts['share'][name]:.1f} % of the step")


def draw(facts):
    """The figure: the time shares of a step."""
    rows = {name: dict(facts["seconds"][name]) for name in (MANUAL, DDP)}
    # A difference of two medians may come out below zero; a bar cannot.
    rows[DDP]["communication"] = max(0.0, facts["communication"][DDP])
    rows[DDP]["backward"] -= rows[DDP]["communication"]
    by_hand, by_ddp = (100 * max(0.0, share) for share in facts["share"].values())
    return show.time_shares(
        {name: {phase: 1000 * seconds for phase, seconds in parts.items()}
         for name, parts in rows.items()},
        title=f"Communication takes {by_hand:.0f} % of a step by hand, {by_ddp:.0f} % in DDP")


def main(argv=None):
    parser = arguments.parser("simple_ddp", __doc__)
    parser.add_argument("--steps", type=arguments.positive, default=200,
                        help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=arguments.positive, default=256,
                        help="global batch, split over the ranks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0,
                        help="decides the start and the batches (default: %(default)s)")
    parser.add_argument("--plot", type=arguments.figure_file, metavar="FILE",
                        help="save the time shares as a .png or .svg")
    args = parser.parse_args(argv)
    if not args.ranks <= args.batch <= TRAIN_SIZE:
        parser.error(f"argument --batch: {args.batch} is not from {args.ranks} (one sample for "
                     f"each rank) to {TRAIN_SIZE} (the training set)")
    warm_up = min(20, args.steps // 2)
    facts = summarize(dplab.run(train, args.ranks, load_digits(), args.steps, args.batch, args.seed,
                                timeout=60.0 + args.steps), warm_up)
    arguments.leave_job()
    if arguments.prints():
        report(facts, args, warm_up)
        if args.plot:
            arguments.save(draw(facts), args.plot)
    return 0 if facts["difference"] < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
