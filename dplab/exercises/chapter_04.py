"""Exercises of chapter 04: DistributedDataParallel by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.trials import (
    GLOBAL_BATCH,
    STEPS,
    OnDigits,
    gradients,
    loop,
    optimizer_for,
    train_steps,
    weights_after,
)
from dplab.measure import CallLog
from dplab.workloads.digits import digits_classifier


def _replica(seed):
    """A small model with a frozen parameter and buffers: one an integer, one not persistent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.uniform_()
    model[1].num_batches_tracked.fill_(100 + seed)
    model.register_buffer("scale", torch.rand(3), persistent=False)
    return model


def _everything(model):
    return [tensor.data for tensor in (*model.parameters(), *model.buffers())]


def _by_name(model):
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"`{name}`": tensor.data for name, tensor in named}


# 4.1


def broadcast_weights(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)


def _broadcast(tensors_of, src=lambda: 0, who=lambda rank: True):
    """A broadcast with one thing wrong."""

    def attempt(model):
        if not who(dist.get_rank()):
            return
        for tensor in tensors_of(model):
            dist.broadcast(tensor, src=src())

    return attempt


def _trainable(model):
    return [parameter.data for parameter in model.parameters() if parameter.requires_grad]


def _trainable_and_buffers(model):
    return [*_trainable(model), *model.buffers()]


def _parameters(model):
    return [parameter.data for parameter in model.parameters()]


def _state(model):
    return model.state_dict().values()


def _copies(model):
    return [tensor.clone() for tensor in _everything(model)]


def _floats(model):
    return [tensor for tensor in _everything(model) if tensor.is_floating_point()]


def _draw_anew(model):
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _average_everything(model):
    for tensor in _floats(model):
        _mean_of(tensor)


def _mean_of(tensor):
    tensor /= dist.get_world_size()
    dist.all_reduce(tensor)


def average_weights(model):
    for parameter in model.parameters():
        _mean_of(parameter.data)


OWN_COLLECTIVE = "that you call a collective yourself"
_AVERAGED = ("You averaged the ranks' values. The ranks agree then, but not on rank 0's model, and "
             "an average of random weights is a poor start.")


class BroadcastWeights(Exercise):
    slug = "broadcast-weights"
    number = "4.1"
    title = "Broadcast the initial weights"
    name = "broadcast_weights"
    minutes = 5
    hints = (
        "`dist.broadcast(tensor, src=0)` overwrites `tensor` on every rank with rank 0's.",
        "A model's state is more than what the optimizer trains: frozen parameters, and buffers "
        "such as BatchNorm's running statistics.",
        "Loop over `model.parameters()` and `model.buffers()`, and broadcast each; a parameter's "
        "`.data` is the tensor without its history.",
    )
    solution = staticmethod(broadcast_weights)
    mistakes = (
        Mistake(_broadcast(_trainable), "You broadcast the trainable parameters only. Frozen "
                "parameters and buffers differ between ranks too, and the forward pass uses them."),
        Mistake(_broadcast(_parameters), "You broadcast the parameters and left out the buffers: "
                "BatchNorm's running statistics still differ."),
        Mistake(_broadcast(_trainable_and_buffers), "You left out the frozen parameters: they "
                "differ between ranks too, and the forward pass uses them."),
        Mistake(_broadcast(_state), "`state_dict()` leaves out buffers that are registered with "
                "`persistent=False`; `model.buffers()` has them."),
        Mistake(_broadcast(_everything, src=dist.get_rank), "Every rank named itself as the "
                "source. All ranks must name the same one, `src=0`: the others receive in the "
                "same call."),
        Mistake(_broadcast(_everything, src=lambda: dist.get_world_size() - 1), "The ranks agree, "
                "but on the last rank's values: the source is `src=0`."),
        Mistake(_broadcast(_everything, who=lambda rank: rank == 0), "Only rank 0 calls broadcast. "
                "A collective is called by every rank: the others must call it too, to receive.",
                hangs=True),
        Mistake(_broadcast(_everything, who=lambda rank: rank != 0), "Rank 0 does not call "
                "broadcast. A collective is called by every rank: the source has to send.",
                hangs=True),
        Mistake(_broadcast(_copies), "Rank 0's values never reach the other ranks' models (only "
                "copies?). Broadcast the tensors themselves, or copy what came back into them."),
        Mistake(_broadcast(_floats), "You left out what is not floating point: BatchNorm counts "
                "its batches in an integer buffer."),
        Mistake(_draw_anew, "You draw the weights anew. Equal seeds do not make them rank 0's, "
                "which may have been loaded or trained: send them with `dist.broadcast`."),
        Mistake(average_weights, _AVERAGED),
        Mistake(_average_everything, _AVERAGED),
        Mistake(lambda model: nn.parallel.DistributedDataParallel(model), "The values come out "
                "right, but PyTorch's DDP sent them. Here you write what it does: call "
                "`dist.broadcast` yourself."),
    )

    def trial(self, attempt):
        model = _replica(seed=dist.get_rank())
        with CallLog() as log:
            attempt(model)
        return {**_by_name(model), OWN_COLLECTIVE: dist.get_world_size() == 1 or log.count() > 0}

    def expected(self, world_size):
        return {**_by_name(_replica(seed=0)), OWN_COLLECTIVE: True}


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


def _average_copy(parameter):
    _mean_of(parameter.grad.clone())


def _broadcast_gradient(parameter, divide=False):
    dist.broadcast(parameter.grad, src=0)
    if divide:
        _divide(parameter)


def _until_frozen(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            return
        _mean_of(parameter.grad)


def _reduce_to_rank_0(before=(), after=()):
    """``before``, ``after``: the ranks that divide before the reduce, or after it."""

    def change(parameter):
        for ranks in (before, None, after):
            if ranks is None:
                dist.reduce(parameter.grad, dst=0)
            elif dist.get_rank() in ranks:
                _divide(parameter)

    return _on_each(change)


_FROZEN = ("A parameter's gradient is `None`: it is frozen, or the loss does not depend on it. "
           "Skip such parameters.")
_CONSTANT = ("You divided by a constant. The divisor is the number of ranks, whatever it is: "
             "`dist.get_world_size()`.")
_WEIGHTS = ("You all-reduced the parameters, not their gradients. The weights were equal already, "
            "and the gradients still differ from rank to rank.")


class AverageGradients(Exercise):
    slug = "average-gradients"
    number = "4.2"
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
                "many times too long as there are ranks. (`x / n` makes a new tensor; `x /= n` "
                "changes `x`.)"),
        Mistake(_on_each(_average_and_divide), "You divided by the world size twice "
                "(`ReduceOp.AVG` divides already)."),
        Mistake(_on_each(_divide), "You divided, but nothing was communicated: each rank still has "
                "the gradient of its own part."),
        Mistake(_on_each(_average_copy), "The means are right, but in new tensors: "
                "`parameter.grad` still holds this rank's own. Write in place."),
        *(Mistake(_on_each(change), "You broadcast rank 0's gradients: what the other ranks "
                  "computed is lost. Sum over the ranks with `all_reduce`.")
          for change in (_broadcast_gradient, lambda each: _broadcast_gradient(each, divide=True))),
        Mistake(_until_frozen, "You stop at the first parameter without a gradient: the ones after "
                "it are never averaged. Skip it, and go on."),
        Mistake(average_weights, _WEIGHTS),
        Mistake(_on_each(lambda parameter: _mean_of(parameter.data)), _WEIGHTS),
        *(Mistake(_reduce_to_rank_0(*who), "`reduce` gives the result to rank 0 alone. Every rank "
                  "takes the step, so every rank needs the mean: `all_reduce`.")
          for who in ((range(4),), ((), range(4)), ((), (0,)))),
        Mistake(_on_each(lambda parameter: _mean_of(parameter.grad), only_rank_0=True), "Only "
                "rank 0 calls the collective, and waits for ever: every rank has to call it.",
                hangs=True),
        Mistake(_by_constant(2), _CONSTANT),
        Mistake(_by_constant(4), _CONSTANT),
        Mistake(_on_each(_divide, frozen_too=True), _FROZEN),
        Mistake(_on_each(_sum, frozen_too=True), _FROZEN),
    )

    def trial(self, attempt):
        model = _gradients_of(_part(dist.get_rank()))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with CallLog() as log:
            attempt(model)
        untouched = all(map(torch.equal, before, model.parameters()))
        return {**_gradients(model), "that the weights are not changed": untouched,
                "the number of collectives": log.count()}

    def expected(self, world_size):
        whole = torch.cat([_part(rank) for rank in range(world_size)])
        model = _gradients_of(whole)
        limit = AtMost(2 * len(list(model.parameters())), "one for each gradient is enough")
        return {**_gradients(model), "that the weights are not changed": True,
                "the number of collectives": limit}


def _part(rank):
    """Rank r's three samples of seven features, different for each rank and element."""
    return torch.sin(torch.arange(21.0) * 1.7 + 5 * rank).reshape(3, 7)


def _gradients_of(samples):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    model(samples).square().mean().backward()
    return model


def _gradients(model):
    found = {fact: gradient for fact, gradient in gradients(model).items() if gradient is not None}
    return {**found, "the list of the gradients that there are": list(found)}


# 4.3


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


SAMPLES = "the number of samples that this rank computed"
OF_ALL = "the number of different samples that all ranks together computed"
_TOO_LATE = ("The gradients are cleared between `backward` and `step`, so the optimizer sees zeros "
             "and the model never changes.")


def _however_cut(**wrong):
    """The loop for each way to cut a batch: as ``batch[rank::n]``, and as ``batch.chunk(n)[rank]``.

    Where the ranks' models differ, the weights depend on who computed which samples.
    """
    return [loop(part=part, **wrong) for part in ("own", "own piece")]


def _of_all_ranks(images):
    """How many different images are among those that the ranks have."""
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, {image.numpy().tobytes() for image in images})
    return len(set.union(*seen))


def _with_torch(model, *rest):
    loop(broadcast=False, average="none")(nn.parallel.DistributedDataParallel(model), *rest)


class TrainByHand(OnDigits):
    slug = "train-by-hand"
    number = "4.3"
    title = "A whole training loop that matches DDP"
    name = "train_by_hand"
    minutes = 20
    communicates = False  # DDP, in an attempt's place, does so unseen
    hints = (
        "Four things: rank 0's weights once, before the first step; then for each batch this "
        "rank's part, the gradients' mean, the optimizer's step.",
        "Each rank passes to the model only its own part of each global batch, as in step 2, so "
        "that together they compute every sample once.",
        "In each step: `zero_grad`, forward on your part, `backward`, average the gradients, "
        "`step`. You may call your own functions from above.",
    )
    solution = staticmethod(train_by_hand)
    mistakes = (
        *(Mistake(attempt, "The ranks started from different weights and never agreed: broadcast "
                  "rank 0's before the first step.")
          for attempt in _however_cut(broadcast=False)),
        *(Mistake(attempt, "The broadcast comes after the training. The ranks start from different "
                  "weights, so their gradients do not belong to one model.")
          for attempt in _however_cut(broadcast="last")),
        *(Mistake(attempt, "The ranks trained apart: each step was taken with this rank's own "
                  "gradients. Average them between `backward` and `step`.")
          for attempt in _however_cut(average="none")),
        *(Mistake(attempt, "You call collectives in each step, and still each step was taken with "
                  "this rank's own gradients. Average them between `backward` and `step`, not "
                  "before and not after, and in `parameter.grad` itself, not in a copy.")
          for attempt in _however_cut(average="too late")),
        *(Mistake(attempt, "Rank 0's weights overwrite the others' in each step, so what the other "
                  "ranks computed is lost. Average the gradients instead.")
          for attempt in (*_however_cut(average="rank 0's weights"),
                          *_however_cut(average="none", broadcast="each step"))),
        Mistake(loop(divided=True), "The gradients were divided by the world size twice: the mean "
                "over the ranks needs no smaller loss."),
        Mistake(_with_torch, "The weights come out right, but PyTorch's DDP did the work. Here "
                "you write what it does: call the broadcast and the all-reduces yourself."),
        Mistake(loop(average="sum"), "The gradients were summed and not divided by the world "
                "size: each step was too long."),
        *(Mistake(attempt, "You averaged the loss. `backward` follows only this rank's own graph, "
                  "so the gradients still differ: all-reduce the gradients.")
          for attempt in _however_cut(average="loss")),
        *(Mistake(attempt, "You averaged the weights after each rank's own step. With this "
                  "optimizer that is not the step of the averaged gradient.")
          for attempt in _however_cut(average="weights")),
        Mistake(loop(zero="never"), "The gradients of all steps so far add up: `zero_grad` is "
                "missing."),
        Mistake(loop(zero="too late"), _TOO_LATE),
        Mistake(loop(part="batches"), "Each rank took other global batches. All ranks work on the "
                "same global batch at a time, each on its own part of it."),
        Mistake(loop(part="all"), "Every rank computed the whole batch, so nothing is faster than "
                "on one rank: each has to take its own part."),
        Mistake(loop(part="first"), "Every rank took the same part of the batch, so most of it "
                "was never seen: the part must depend on the rank."),
    )

    def trial(self, attempt):
        model = digits_classifier(seed=dist.get_rank())
        seen = []
        model.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0].detach().clone()))
        with CallLog() as log:
            attempt(model, optimizer_for(model), *self.given)
        return {SAMPLES: len(seen), OF_ALL: _of_all_ranks(seen), **weights_after(model),
                "that you call a collective yourself in every step":
                    dist.get_world_size() == 1 or log.count() >= STEPS}

    def expected(self, world_size):
        images, _, batches = self.given
        different = len(images[torch.cat(batches)].unique(dim=0))
        return {SAMPLES: STEPS * GLOBAL_BATCH // world_size, OF_ALL: different, **self.reference(),
                "that you call a collective yourself in every step": True}


# 4.4


def train_steps_broken(model, optimizer, images, labels, batches):
    for batch in batches:
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()


def _within_ddp(**wrong):
    """The loop where the model is DDP's and the batches are this rank's parts already."""
    return loop(**{"broadcast": False, "part": "all", "average": "none", **wrong})


class SpotTheBug(OnDigits):
    slug = "spot-the-bug"
    number = "4.4"
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
    communicates = False
    mistakes = (
        Mistake(_within_ddp(zero="once"), "The gradients are never cleared between the steps: "
                "from the second one on they add up."),
        Mistake(_within_ddp(zero="too late"), _TOO_LATE),
        Mistake(_within_ddp(divided=True), "DDP's average divides by the world size already: leave "
                "the loss as it is."),
        Mistake(_within_ddp(part="own"), "The batches are this rank's parts already: you split "
                "them again, and most samples were never seen."),
        Mistake(_within_ddp(unwrap=True), "You went around DDP's wrapper: unless the forward pass "
                "goes through `model(...)`, nobody averages the gradients."),
        Mistake(_within_ddp(zero="never", average="sum"), "DDP has averaged the gradients already; "
                "and they still add up from step to step."),
    )

    def trial(self, attempt):
        images, labels, batches = self.given
        model, steps, seen = digits_classifier(seed=0), [], []
        model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        optimizer = optimizer_for(model)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        parts = [batch[dist.get_rank() :: dist.get_world_size()] for batch in batches]
        attempt(nn.parallel.DistributedDataParallel(model), optimizer, images, labels, parts)
        return {"the number of steps": len(steps), SAMPLES: sum(seen), **weights_after(model)}

    def expected(self, world_size):
        return {"the number of steps": STEPS, SAMPLES: STEPS * GLOBAL_BATCH // world_size,
                **self.reference()}


EXERCISES = (BroadcastWeights, AverageGradients, TrainByHand, SpotTheBug)
