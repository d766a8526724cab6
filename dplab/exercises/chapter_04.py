"""Exercises of chapter 04: DistributedDataParallel by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Exercise, Mistake
from dplab.measure import CallLog
from dplab.workloads.digits import digits_classifier, load_digits


def _replica(seed):
    """A small model with a frozen parameter and with buffers, one of them an integer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.uniform_()
    model[1].num_batches_tracked.fill_(100 + seed)
    return model


# 4.1


def broadcast_weights(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)


def _broadcast(tensors_of, src=lambda: 0, only_rank_0=False):
    """A broadcast with one thing wrong."""

    def attempt(model):
        if only_rank_0 and dist.get_rank() != 0:
            return
        for tensor in tensors_of(model):
            dist.broadcast(tensor, src=src())

    return attempt


def _trainable(model):
    return [parameter.data for parameter in model.parameters() if parameter.requires_grad]


def _parameters(model):
    return [parameter.data for parameter in model.parameters()]


def _state(model):
    return model.state_dict().values()


def _copies(model):
    return [tensor.clone() for tensor in _state(model)]


def _mean_of(tensor):
    tensor /= dist.get_world_size()
    dist.all_reduce(tensor)


def average_weights(model):
    for parameter in model.parameters():
        _mean_of(parameter.data)


class BroadcastWeights(Exercise):
    id = "4.1"
    title = "Broadcast the initial weights"
    name = "broadcast_weights"
    minutes = 5
    hints = (
        "`dist.broadcast(tensor, src=0)` overwrites `tensor` on every rank with rank 0's.",
        "A model's state is more than what the optimizer trains: frozen parameters, and buffers "
        "such as BatchNorm's running statistics.",
        "Loop over `model.parameters()` and `model.buffers()`. A parameter's `.data` can be "
        "overwritten without autograd objecting.",
    )
    solution = staticmethod(broadcast_weights)
    mistakes = (
        Mistake(_broadcast(_trainable), "You broadcast the trainable parameters only. Frozen "
                "parameters and buffers differ between ranks too, and the forward pass uses them."),
        Mistake(_broadcast(_parameters), "You broadcast the parameters and left out the buffers: "
                "BatchNorm's running statistics still differ."),
        Mistake(_broadcast(_state, src=dist.get_rank), "Every rank named itself as the source. All "
                "ranks must name the same one, `src=0`: the others receive in the same call."),
        Mistake(_broadcast(_state, only_rank_0=True), "Only rank 0 calls broadcast. A collective "
                "is called by every rank: the others must call it too, to receive."),
        Mistake(_broadcast(_copies), "You broadcast into copies: the received values never reach "
                "the model. Broadcast the tensor itself, or copy it back."),
        Mistake(average_weights, "You averaged the weights of all ranks. The ranks agree then, but "
                "not on rank 0's model, and an average of random weights is a poor start."),
    )

    def trial(self, attempt):
        model = _replica(seed=dist.get_rank())
        attempt(model)
        return {f"`{name}`": tensor for name, tensor in model.state_dict().items()}

    def expected(self, world_size):
        return {f"`{name}`": tensor for name, tensor in _replica(seed=0).state_dict().items()}


# 4.2


def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def _on_each(change, frozen_too=False, only_rank_0=False):
    """An attempt that does one thing to every parameter that has a gradient."""

    def attempt(model):
        if only_rank_0 and dist.get_rank() != 0:
            return
        for parameter in model.parameters():
            if frozen_too or parameter.grad is not None:
                change(parameter)

    return attempt


def _sum(parameter):
    dist.all_reduce(parameter.grad)


sum_gradients = _on_each(_sum)


def _divide(parameter):
    parameter.grad /= dist.get_world_size()


def _by_constant(divisor):
    def change(parameter):
        parameter.grad /= divisor
        dist.all_reduce(parameter.grad)

    return _on_each(change)


def _average_and_divide(parameter):
    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    _divide(parameter)


def _reduce_to_rank_0(parameter):
    _divide(parameter)
    dist.reduce(parameter.grad, dst=0)


_FROZEN = ("A parameter's gradient is `None`: it is frozen, or the loss does not depend on it. "
           "Skip such parameters.")
_CONSTANT = ("You divided by a constant. The divisor is the number of ranks, whatever it is: "
             "`dist.get_world_size()`.")
_WEIGHTS = ("You all-reduced the parameters, not their gradients. The weights were equal already, "
            "and the gradients still differ from rank to rank.")


class AverageGradients(Exercise):
    id = "4.2"
    title = "All-reduce the gradients"
    name = "average_gradients"
    minutes = 10
    hints = (
        "After `loss.backward()`, `parameter.grad` holds the gradient of this rank's part of the "
        "batch. Which collective gives every rank the sum over all ranks?",
        "The whole batch's mean loss is the mean of the ranks' mean losses, so its gradient is "
        "the mean of their gradients: a sum, and a division.",
        "Loop over `model.parameters()`, skip those whose `.grad` is None, divide `.grad` by "
        "`dist.get_world_size()` and call `dist.all_reduce` on it.",
    )
    solution = staticmethod(average_gradients)
    mistakes = (
        Mistake(sum_gradients, "You summed and did not divide by the world size: each step is as "
                "many times too long as there are ranks."),
        Mistake(_on_each(_average_and_divide), "You divided twice: `ReduceOp.AVG` has divided by "
                "the world size already."),
        Mistake(_on_each(_divide), "You divided, but nothing was communicated: each rank still has "
                "the gradient of its own part."),
        Mistake(average_weights, _WEIGHTS),
        Mistake(_on_each(lambda parameter: _mean_of(parameter.data)), _WEIGHTS),
        Mistake(_on_each(_reduce_to_rank_0), "`reduce` gives the result to rank 0 alone. Every "
                "rank takes the step, so every rank needs the mean: `all_reduce`."),
        Mistake(_on_each(lambda parameter: _mean_of(parameter.grad), only_rank_0=True), "Only "
                "rank 0 calls the collective, and waits for ever: every rank has to call it."),
        Mistake(_by_constant(2), _CONSTANT),
        Mistake(_by_constant(4), _CONSTANT),
        Mistake(_on_each(_divide, frozen_too=True), _FROZEN),
        Mistake(_on_each(_sum, frozen_too=True), _FROZEN),
    )

    def trial(self, attempt):
        model = _gradients_of(_part(dist.get_rank()))
        with CallLog() as log:
            attempt(model)
        return {**_gradients(model), "the number of collectives": log.count()}

    def expected(self, world_size):
        whole = torch.cat([_part(rank) for rank in range(world_size)])
        model = _gradients_of(whole)
        limit = AtMost(2 * len(list(model.parameters())), "one for each gradient is enough")
        return {**_gradients(model), "the number of collectives": limit}


def _part(rank):
    """Rank r's three samples of seven features, different for each rank and element."""
    return torch.sin(torch.arange(21.0) * 1.7 + 5 * rank).reshape(3, 7)


def _gradients_of(samples):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].bias.requires_grad_(False)
    model(samples).square().mean().backward()
    return model


def _gradients(model):
    return {f"the gradient of `{name}`": parameter.grad
            for name, parameter in model.named_parameters() if parameter.grad is not None}


# 4.3 and 4.4 train on the digits

STEPS, GLOBAL_BATCH = 20, 24


class _OnDigits(Exercise):
    """Base of the exercises that train the digits' classifier; each batch is global."""

    seconds = 40.0
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
        train_steps(model, _sgd(model), *self.given)
        return _weights(model)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _weights(model):
    return {f"`{name}` after {STEPS} steps": tensor for name, tensor in model.state_dict().items()}


def train_by_hand(model, optimizer, images, labels, batches):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)
    for batch in batches:
        mine = batch[rank::world_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= world_size
            dist.all_reduce(parameter.grad)
        optimizer.step()


def _loop(*, broadcast=True, part="own", average="mean", zero="each step"):
    """The training loop with one thing wrong."""

    def attempt(model, optimizer, images, labels, batches):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if broadcast:
            broadcast_weights(model)
        for batch in batches:
            shares = {"own": batch[rank::world_size], "all": batch,
                      "first": batch[: len(batch) // world_size]}
            if zero == "each step" or (zero == "once" and batch is batches[0]):
                optimizer.zero_grad()
            F.cross_entropy(model(images[shares[part]]), labels[shares[part]]).backward()
            if zero == "too late":
                optimizer.zero_grad()
            if average != "none":
                {"mean": average_gradients, "sum": sum_gradients}[average](model)
            optimizer.step()

    return attempt


class TrainByHand(_OnDigits):
    id = "4.3"
    title = "A whole training loop that matches DDP"
    name = "train_by_hand"
    minutes = 20
    hints = (
        "Four things: rank 0's weights once, before the first step; then for each batch this "
        "rank's part, the gradients' mean, the optimizer's step.",
        "`batch[rank::world_size]` is one way to give every rank a part of its own.",
        "In each step: `zero_grad`, forward on your part, `backward`, average the gradients, "
        "`step`. You may call your own functions from above.",
    )
    solution = staticmethod(train_by_hand)
    mistakes = (
        Mistake(_loop(broadcast=False), "The ranks started from different weights and never "
                "agreed: broadcast rank 0's before the first step."),
        Mistake(_loop(average="none"), "The ranks trained apart: their gradients were never "
                "averaged."),
        Mistake(_loop(average="sum"), "The gradients were summed and not divided by the world "
                "size: each step was too long."),
        Mistake(_loop(zero="never"), "The gradients of all steps so far add up: `zero_grad` is "
                "missing."),
        Mistake(_loop(part="all"), "Every rank computed the whole batch. The weights come out "
                "right, but nothing is faster: each rank has to take its own part."),
        Mistake(_loop(part="first"), "Every rank took the same part of the batch, so most of it "
                "was never seen: the part must depend on the rank."),
    )

    def trial(self, attempt):
        model = digits_classifier(seed=dist.get_rank())
        seen = []
        model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        attempt(model, _sgd(model), *self.given)
        return {**_weights(model), "the number of samples that this rank computed": sum(seen)}

    def expected(self, world_size):
        return {**self.reference(), "the number of samples that this rank computed":
                STEPS * GLOBAL_BATCH // world_size}


def train_steps(model, optimizer, images, labels, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()


def train_steps_broken(model, optimizer, images, labels, batches):
    for batch in batches:
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()


def _within_ddp(**wrong):
    """The loop where the model is DDP's and the batches are this rank's parts already."""
    return _loop(**{"broadcast": False, "part": "all", "average": "none", **wrong})


class SpotTheBug(_OnDigits):
    id = "4.4"
    title = "Spot the bug in a DDP training loop"
    name = "train_steps"
    minutes = 5
    hints = (
        "Nothing is wrong with the data parallelism: the same loop is wrong on one device.",
        "What does `loss.backward()` do to a `.grad` that is already there?",
        "It adds. Something has to clear the gradients, once in every step.",
    )
    solution = staticmethod(train_steps)
    stub = staticmethod(train_steps_broken)
    mistakes = (
        Mistake(_within_ddp(zero="once"), "The gradients are never cleared between the steps: "
                "from the second one on they add up."),
        Mistake(_within_ddp(zero="too late"), "The gradients are cleared between `backward` and "
                "`step`, so the optimizer sees zeros and the model never changes."),
        Mistake(_within_ddp(zero="never", average="sum"), "DDP has averaged the gradients already; "
                "and they still add up from step to step."),
    )

    def trial(self, attempt):
        images, labels, batches = self.given
        model = digits_classifier(seed=0)
        parts = [batch[dist.get_rank() :: dist.get_world_size()] for batch in batches]
        attempt(nn.parallel.DistributedDataParallel(model), _sgd(model), images, labels, parts)
        return _weights(model)

    def expected(self, world_size):
        return self.reference()


EXERCISES = (BroadcastWeights, AverageGradients, TrainByHand, SpotTheBug)
