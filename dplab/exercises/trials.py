"""What trials of several chapters are made of: facts of gradients and cases, and training.

The training is that of the digits' classifier: data, the loop, and ways to get it wrong. The
optimizer is Adam with a large epsilon on purpose: it is not linear in the gradients, so that
averaging weights in their place shows, nor blind to their scale, so that a forgotten division does.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab import parallel
from dplab.exercises.exercise import Exercise
from dplab.workloads.digits import digits_classifier, load_digits

STEPS, GLOBAL_BATCH = 8, 24


def gradients(model: nn.Module, when: str = "") -> dict[str, torch.Tensor | None]:
    """The gradients as facts; a copy of each, since the next step changes it."""
    return {f"the gradient of `{name}`{when}":
            None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()}


def of_cases(facts_of: Callable[[tuple, object], dict], cases: Iterable[tuple],
             function: Callable) -> dict:
    """What ``facts_of(case, answer)`` makes of the function's answer to each case, together."""
    facts: dict = {}
    for case in cases:
        facts |= facts_of(case, function(*case))
    return facts


def reduced(tensor: torch.Tensor, group=None, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """The same tensor, after an all-reduce of it in place."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def optimizer_for(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=0.01)


def weights_after(model):
    return {f"`{name}` after {STEPS} steps": tensor for name, tensor in model.state_dict().items()}


def train_steps(model, optimizer, images, labels, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()


class OnDigits(Exercise):
    """Base of the exercises that train; every batch is a global one."""

    seconds = 20.0
    tolerance = 1e-4

    def prepare(self):
        """The training set, and batches as indices, which 1, 2, 3 and 4 ranks divide equally."""
        digits = load_digits()
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(len(digits.train_labels), generator=generator)
        batches = list(order[: STEPS * GLOBAL_BATCH].split(GLOBAL_BATCH))
        return digits.train_images, digits.train_labels, batches

    def reference(self):
        """The weights of a single process that sees the global batches."""
        model = digits_classifier(seed=0)
        train_steps(model, optimizer_for(model), *self.given)
        return weights_after(model)


def loop(*, broadcast=True, part="own", average="mean", zero="each step", unwrap=False,
         divided=False):
    """The training loop with one thing wrong."""

    def attempt(model, optimizer, images, labels, batches):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        model = model.module if unwrap else model
        if broadcast is True:
            parallel.broadcast_module(model)
        for batch in batches[rank::world_size] if part == "batches" else batches:
            mine = {"own": batch[rank::world_size], "own piece": batch.chunk(world_size)[rank],
                    "first": batch[: len(batch) // world_size]}
            mine = mine.get(part, batch)
            if broadcast == "each step":
                parallel.broadcast_module(model)
            if zero == "each step" or (zero == "once" and batch is batches[0]):
                optimizer.zero_grad()
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            loss = loss / world_size if divided else loss
            if average == "loss":
                dist.all_reduce(loss.data)
                loss = loss / world_size
            loss.backward()
            if zero == "too late":
                optimizer.zero_grad()
            if average == "mean":
                parallel.average_gradients(model)
            elif average == "sum":
                _sum_over_ranks(parameter.grad for parameter in model.parameters())
            optimizer.step()
            if average == "too late":
                parallel.average_gradients(model)
            elif average == "weights":
                _sum_over_ranks(parameter.data.div_(world_size) for parameter in model.parameters())
            elif average == "rank 0's weights":
                parallel.broadcast_module(model)
        if broadcast == "last":
            parallel.broadcast_module(model)

    return attempt


def _sum_over_ranks(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
