"""Data-parallel training by hand beside PyTorch's DDP: same result, at what cost?

    python -m dplab.demos.simple_ddp --ranks 4
    torchrun --nproc-per-node 4 dplab/demos/simple_ddp.py

Both train the same classifier of 8×8 digits from the same start on the same batches. Exit status:
0, or 1 if the two disagree or a rank fails.
"""

import copy
import itertools
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab.demos import command_line
from dplab.measure import available_cores
from dplab.parallel import ManualDDP
from dplab.workloads.digits import TRAIN_SIZE, accuracy, digits_classifier, load_digits

GLOBAL_BATCH = 256  # split over the ranks
WARM_UP = 20  # steps that are not timed
PHASES = ("forward", "backward", "communication", "optimizer")
WRAPPERS = {"ManualDDP": ManualDDP, "torch DDP": DistributedDataParallel}
ROUNDING = 1e-3  # differences above this are no rounding errors, however many steps there were


def train(digits, steps):
    """Trains both replicas, step by step in turn, on each rank.

    Returns for each: its parameters as one vector, its accuracy on the test set, and seconds, of
    shape (steps, phases).
    """
    digits = [tensor.to(dplab.device()) for tensor in digits]
    # A different start on each rank: both wrappers have to broadcast that of rank 0.
    model = digits_classifier(seed=dist.get_rank()).to(dplab.device())
    replicas = {name: wrap(copy.deepcopy(model)) for name, wrap in WRAPPERS.items()}
    optimizers = {name: torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
                  for name, replica in replicas.items()}
    times = {name: [] for name in replicas}
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same global batch
    for _ in range(steps):
        batch = torch.randperm(TRAIN_SIZE, generator=generator)[:GLOBAL_BATCH]
        mine = batch[dist.get_rank()::dist.get_world_size()]
        for name, replica in replicas.items():
            dist.barrier()  # all ranks begin the step together: nobody's delay is carried over
            times[name].append(timed_step(replica, optimizers[name], digits[0][mine],
                                          digits[1][mine]))
    return {name: {"parameters": torch.nn.utils.parameters_to_vector(
                       replica.parameters()).detach().cpu(),
                   "accuracy": accuracy(replica.module, *digits[2:]),
                   "times": torch.tensor(times[name])} for name, replica in replicas.items()}


def timed_step(replica, optimizer, images, labels):
    """One training step; returns the seconds of each of PHASES."""
    marks = [now()]
    loss = F.cross_entropy(replica(images), labels)
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


def report(results):
    """Prints what every rank returned; gives the largest difference between the two replicas."""
    by_hand, by_ddp = (torch.stack([rank[name]["parameters"] for rank in results])
                       for name in WRAPPERS)
    difference = (by_hand - by_ddp).abs().max().item()
    if not command_line.prints():
        return difference
    print(f"{len(results)} ranks on {available_cores()} cores\n\n"
          "Same start, same batches, same optimizer\n"
          f"  largest parameter difference, ManualDDP to torch DDP   {difference:.1e}\n"
          "  largest parameter difference between ranks, ManualDDP  "
          f"{(by_hand - by_hand[0]).abs().max().item():.1e}")
    for name in WRAPPERS:
        print(f"  test accuracy, {name}   {100 * results[0][name]['accuracy']:.1f} %")
    print("\nMilliseconds per step, measured (medians over all ranks and steps, after "
          f"{WARM_UP} to warm up)\n" + " " * 12 + "".join(f"{name:>15}" for name in PHASES))
    for name in WRAPPERS:
        seconds = torch.cat([rank[name]["times"][WARM_UP:] for rank in results]).median(dim=0)[0]
        print(f"  {name:<10}" + "".join(f"{1000 * each:>15.3f}" for each in seconds))
    print("\nManualDDP communicates after backward, with the wait for the slowest rank; DDP in "
          "backward.")
    return difference


def main(argv=None):
    parser = command_line.parser("simple_ddp", __doc__)
    parser.add_argument("--steps", type=int, default=200,
                        help="training steps, more than the warm-up's (default: %(default)s)")
    args = parser.parse_args(argv)
    results = dplab.run(train, args.ranks, load_digits(), args.steps, timeout=60.0 + args.steps)
    command_line.leave()
    return 0 if report(results) < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
