"""Exercises of chapter 04: data-parallel training by hand, and what a real run needs besides.

The solutions of 4.1 to 4.3 stand in `dplab.exercises.stack.parts`, since later parts call them.
"""

import copy
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab.exercises.compare import AtMost
from dplab.exercises.composition import Held, made_of
from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.stack.parts import (
    average_gradients,
    broadcast_weights,
    pack,
    ring_all_reduce,
    train_by_hand,
    unpack,
)
from dplab.exercises.trials import gradients, optimizer_for, seeded
from dplab.measure import CallLog
from dplab.workloads.digits import digits_classifier, load_digits

IN_A_PAIR = ", in a group of two ranks"


def own_pair():
    """Of four ranks, 0 and 2 are a group, and 1 and 3 another one; this rank's."""
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


def named(facts, where):
    return {f"{fact}{where}": value for fact, value in facts.items()}


_NOT_GIVEN = ("Your loop trains on the notebook's own `images` and `labels`, as `backward_on` "
              "does. Compute the loss from the arguments `images` and `labels`: they hold other "
              "samples.")
_WITHOUT_GROUP = ("You left out the group. Pass it on to each call: where only some of the ranks "
                  "train, they are all that there are.")


# --- 4.1: the same start -------------------------------------------------------------------------

def broadcasts_the_trained(model, group=None):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, group_src=0, group=group)


def broadcasts_no_buffers(model, group=None):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, group_src=0, group=group)


def broadcasts_nothing_frozen(model, group=None):
    broadcasts_the_trained(model, group)
    for buffer in model.buffers():
        dist.broadcast(buffer, group_src=0, group=group)


def broadcasts_the_state_dict(model, group=None):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, group_src=0, group=group)


def broadcasts_floats(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            dist.broadcast(tensor.data, group_src=0, group=group)


def broadcasts_copies(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach().clone(), group_src=0, group=group)


def every_rank_is_the_source(model, group=None):
    rank = dist.get_rank(group)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=rank, group=group)


def last_rank_is_the_source(model, group=None):
    last = dist.get_world_size(group) - 1
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=last, group=group)


def only_rank_0_broadcasts(model, group=None):
    if dist.get_rank(group) == 0:
        broadcast_weights(model, group)


def only_the_others_broadcast(model, group=None):
    if dist.get_rank(group) != 0:
        broadcast_weights(model, group)


def draws_anew(model, group=None):
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def average_weights(model, group=None):
    for parameter in model.parameters():
        parameter.data /= dist.get_world_size(group)
        dist.all_reduce(parameter.data, group=group)


def averages_everything(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data /= dist.get_world_size(group)
            dist.all_reduce(tensor.data, group=group)


def sums_everything_and_divides(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data, group=group)
        tensor.data /= dist.get_world_size(group)


def sums_everything_and_copies_the_mean(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data, group=group)
        tensor.data.copy_(tensor.data / dist.get_world_size(group))


def puts_copies_in_their_place(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        received = tensor.detach().clone()
        dist.broadcast(received, group_src=0, group=group)
        tensor.data = received


def leaves_it_to_ddp(model, group=None):
    nn.parallel.DistributedDataParallel(model, process_group=group)


def broadcasts_to_all(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)


def rank_0_of_all_ranks(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0, group=group)


OWN_COLLECTIVE = "that you call a collective yourself"
SAME_MEMORY = "that each value is overwritten where it lies in memory"
_AVERAGED = ("You averaged the ranks' values. The ranks agree then, but not on rank 0's model, and "
             "an average of random weights is a poor start.")


class BroadcastWeights(Exercise):
    slug = "broadcast-weights"
    number = "4.1"
    title = "Broadcast the initial weights"
    name = "broadcast_weights"
    minutes = 5
    with_groups = True
    hints = (
        "What does a forward pass read? Print the names in `model.named_parameters()`, and look "
        "for what is missing there.",
        "A model's state is more than what the optimizer trains: frozen parameters, and buffers "
        "such as BatchNorm's running statistics.",
        "Loop over `model.parameters()` and `model.buffers()`, and call `dist.broadcast(tensor, "
        "group_src=0, group=group)` for each. A parameter's `.data` is the tensor without its "
        "history.",
    )
    solution = staticmethod(broadcast_weights)
    mistakes = (
        Mistake(broadcasts_the_trained, "You broadcast the trainable parameters only. Frozen "
                "parameters and buffers differ between ranks too, and the forward pass uses them."),
        Mistake(broadcasts_no_buffers, "You broadcast the parameters and left out the buffers: "
                "BatchNorm's running statistics still differ."),
        Mistake(broadcasts_nothing_frozen, "You left out the frozen parameters: they differ "
                "between ranks too, and the forward pass uses them."),
        Mistake(broadcasts_the_state_dict, "`state_dict()` leaves out buffers that are registered "
                "with `persistent=False`; `model.buffers()` has them."),
        Mistake(every_rank_is_the_source, "Every rank named itself as the source. All ranks must "
                "name the same one, `group_src=0`: the others receive in the same call."),
        Mistake(last_rank_is_the_source, "The ranks agree, but on the last rank's values: the "
                "source is rank 0 of the group, `group_src=0`."),
        Mistake(only_rank_0_broadcasts, "Only rank 0 calls broadcast. A collective is called by "
                "every rank: the others must call it too, to receive.", hangs=True),
        Mistake(only_the_others_broadcast, "Rank 0 does not call broadcast. A collective is called "
                "by every rank: the source has to send.", hangs=True),
        Mistake(broadcasts_copies, "Rank 0's values never reach the other ranks' models (only "
                "copies?). Broadcast the tensors themselves, or copy what came back into them."),
        Mistake(broadcasts_floats, "You left out what is not floating point: BatchNorm counts its "
                "batches in an integer buffer."),
        Mistake(draws_anew, "You draw the weights anew. Equal seeds do not make them rank 0's, "
                "which may have been loaded or trained: send them with `dist.broadcast`."),
        Mistake(average_weights, _AVERAGED),
        *(Mistake(attempt, _AVERAGED) for attempt in (
            averages_everything, sums_everything_and_divides,
            sums_everything_and_copies_the_mean)),
        Mistake(puts_copies_in_their_place, "The values are right, but they lie in other memory "
                "now. A view of the old tensors keeps the old values: copy into them with "
                "`copy_`."),
        Mistake(leaves_it_to_ddp, "The values come out right, but PyTorch's DDP sent them. Here "
                "you write what it does: call `dist.broadcast` yourself."),
        Mistake(broadcasts_to_all, _WITHOUT_GROUP),
        Mistake(rank_0_of_all_ranks, "`src=0` is rank 0 of all ranks, which is not in each group. "
                "Rank 0 of the group is `group_src=0`."),
    )

    def trial(self, attempt):
        facts = _broadcast_facts(attempt, None)
        if dist.get_world_size() == 4 and self.with_groups:
            facts |= named(_broadcast_facts(attempt, own_pair()), IN_A_PAIR)
        return facts

    def expected(self, world_size):
        asked = {SAME_MEMORY: True, OWN_COLLECTIVE: True}
        facts = _by_name(_replica(seed=0)) | asked
        if world_size < 4:
            return facts
        return [facts | named(_by_name(_replica(seed=rank % 2)) | asked, IN_A_PAIR)
                for rank in range(4)]


def _broadcast_facts(attempt, group):
    model = _replica(seed=dist.get_rank())
    before = _by_name(model)
    with CallLog() as log:
        attempt(model, group)
    after = _by_name(model)
    in_place = all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in after.items())
    return after | {SAME_MEMORY: in_place,
                    OWN_COLLECTIVE: dist.get_world_size() == 1 or log.count() > 0}


def _replica(seed):
    """A small model with a frozen parameter and buffers: one an integer, one not persistent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.uniform_()
    model[1].num_batches_tracked.fill_(100 + seed)
    model.register_buffer("scale", torch.rand(3), persistent=False)
    return model


def _by_name(model):
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {f"`{name}`": tensor.data for name, tensor in tensors}


# --- 4.2: the mean of the gradients --------------------------------------------------------------

def sums_gradients(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            total = ring_all_reduce(pack([parameter.grad], ranks), group)
            parameter.grad.copy_(*unpack(total, [parameter.grad]))


def divides_twice(model, group=None):
    sums_gradients(model, group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size(group) ** 2


def divides_alone(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size(group)


def only_packs(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            flat = pack([parameter.grad], ranks)
            parameter.grad.copy_(*unpack(flat, [parameter.grad]))


def divides_what_it_packed(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            flat = pack([parameter.grad], ranks)
            ring_all_reduce(flat, group)
            parameter.grad.copy_(*unpack(flat / ranks, [parameter.grad]))


def leaves_the_mean_aside(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = ring_all_reduce(pack([parameter.grad], ranks), group) / ranks
            unpack(mean, [parameter.grad])


def rank_0s_gradients(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.broadcast(parameter.grad, group_src=0, group=group)


def rank_0s_gradients_divided(model, group=None):
    rank_0s_gradients(model, group)
    divides_alone(model, group)


def stops_at_the_frozen(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is None:
            return
        mean = ring_all_reduce(pack([parameter.grad], ranks) / ranks, group)
        parameter.grad.copy_(*unpack(mean, [parameter.grad]))


def averages_the_weights(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        mean = ring_all_reduce(pack([parameter], ranks) / ranks, group)
        parameter.data.copy_(*unpack(mean, [parameter]))


def averages_the_trained_weights(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = ring_all_reduce(pack([parameter], ranks) / ranks, group)
            parameter.data.copy_(*unpack(mean, [parameter]))


def reduces_to_rank_0(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size(group)
            dist.reduce(parameter.grad, group_dst=0, group=group)


def reduces_and_divides(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.reduce(parameter.grad, group_dst=0, group=group)
            parameter.grad /= dist.get_world_size(group)


def reduces_and_rank_0_divides(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.reduce(parameter.grad, group_dst=0, group=group)
            if dist.get_rank(group) == 0:
                parameter.grad /= dist.get_world_size(group)


def only_rank_0_averages(model, group=None):
    if dist.get_rank(group) == 0:
        average_gradients(model, group)


def halves(model, group=None):
    sums_gradients(model, group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


def quarters(model, group=None):
    sums_gradients(model, group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 4


def divides_what_is_not_there(model, group=None):
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size(group)


def packs_what_is_not_there(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        mean = ring_all_reduce(pack([parameter.grad], ranks) / ranks, group)
        parameter.grad.copy_(*unpack(mean, [parameter.grad]))


def unpacks_for_all_parameters(model, group=None):
    ranks = dist.get_world_size(group)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)
    for gradient, view in zip(gradients, unpack(mean, model.parameters()), strict=False):
        gradient.copy_(view)


def brings_zeros(model, group=None):
    _put_zeros(each for each in model.parameters() if each.requires_grad)
    average_gradients(model, group)


def brings_zeros_for_the_frozen(model, group=None):
    _put_zeros(model.parameters())
    average_gradients(model, group)


def _put_zeros(parameters):
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def leaves_the_padding_out(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = ring_all_reduce(parameter.grad.flatten() / ranks, group)
            parameter.grad.copy_(mean.view_as(parameter.grad))


def puts_another_tensor_there(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = ring_all_reduce(pack([parameter.grad], ranks) / ranks, group)
            [parameter.grad] = unpack(mean, [parameter.grad])


def leaves_it_to_torch(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size(group)
            dist.all_reduce(parameter.grad, group=group)


def sums_with_torch(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def averages_in_float32(model, group=None):
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = ring_all_reduce(pack([parameter.grad.float()], ranks) / ranks, group)
            parameter.grad.copy_(*unpack(mean, [parameter.grad]))


def averages_among_all(model, group=None):
    average_gradients(model)


def sums_in_the_group_divides_by_all(model, group=None):
    sums_gradients(model, group)
    divides_alone(model)


_SUMMED = ("You summed and did not divide by the world size: each step is as many times too long "
           "as there are ranks. (`x / n` makes a new tensor; `x /= n` changes `x`.)")
_FROZEN = ("A parameter's gradient is `None`: it is frozen, or the loss does not depend on it. "
           "Skip such parameters.")
_ZEROS = ("A `.grad` that was None became zeros. An optimizer leaves a parameter alone where "
          "`.grad` is None. With zeros it may move it, by weight decay for example. Skip such "
          "parameters.")
_CONSTANT = ("You divided by a constant, or by the number of all ranks. The divisor is the number "
             "of ranks in the group, whatever it is: `dist.get_world_size(group)`.")
_WEIGHTS = ("You all-reduced the parameters, not their gradients. The weights were equal already, "
            "and the gradients still differ from rank to rank.")
_RANK_0S = ("You broadcast rank 0's gradients: what the other ranks computed is lost. Sum over the "
            "ranks.")
_DROPPED = "The ring leaves its input as it is, and returns the sum in a *new* tensor."
_ON_RANK_0 = ("`reduce` gives the result to rank 0 alone. Every rank takes the step, so every rank "
              "needs the mean: `ring_all_reduce`.")


class AverageGradients(Exercise):
    slug = "average-gradients"
    number = "4.2"
    title = "Average the gradients with your ring"
    name = "average_gradients"
    minutes = 10
    with_groups = True
    too_long = (f"{Exercise.too_long} On a ring, chunks differ in length where the number of its "
                "ranks does not divide that of the elements: `pack` adds the zeros that are "
                "missing, for as many ranks as you tell it.")
    hints = (
        "After `loss.backward()`, `parameter.grad` holds the gradient of this rank's part of the "
        "batch. By what does the sum over the ranks differ from their mean? And which of the "
        "parameters has no gradient?",
        "The ring takes a flat tensor whose length N divides, leaves it as it is, and returns a "
        "new one. So each gradient goes through `pack`, `ring_all_reduce` and `unpack`; then copy "
        "what comes back.",
        "For each `parameter` whose `.grad` is not None: `flat = pack([parameter.grad], ranks)`, "
        "`total = ring_all_reduce(flat, group)`, `[mean] = unpack(total / ranks, "
        "[parameter.grad])`, `parameter.grad.copy_(mean)`, with `ranks = "
        "dist.get_world_size(group)`.",
    )
    solution = staticmethod(average_gradients)
    mistakes = (
        Mistake(sums_gradients, _SUMMED),
        Mistake(sums_with_torch, _SUMMED),
        Mistake(divides_twice, "You divided by the world size twice: once is the mean."),
        Mistake(divides_alone, "You divided, but nothing was communicated: each rank still has the "
                "gradient of its own part."),
        Mistake(only_packs, "Nothing was communicated: each rank still has the gradient of its own "
                "part. The sum over the ranks is what `ring_all_reduce` returns."),
        Mistake(divides_what_it_packed, f"{_DROPPED} You divided this rank's own gradient: go on "
                "with what the ring returned."),
        Mistake(leaves_the_mean_aside, "`parameter.grad` still holds this rank's own gradient, "
                f"since the mean never reached it. {_DROPPED} Copy the mean into `.grad`."),
        Mistake(rank_0s_gradients, _RANK_0S),
        Mistake(rank_0s_gradients_divided, _RANK_0S),
        Mistake(stops_at_the_frozen, "You stop at the first parameter without a gradient: the ones "
                "after it are never averaged. Skip it, and go on."),
        Mistake(averages_the_weights, _WEIGHTS),
        Mistake(averages_the_trained_weights, _WEIGHTS),
        Mistake(reduces_to_rank_0, _ON_RANK_0),
        Mistake(reduces_and_divides, _ON_RANK_0),
        Mistake(reduces_and_rank_0_divides, _ON_RANK_0),
        Mistake(only_rank_0_averages, "Only rank 0 calls the all-reduce, and waits for ever: every "
                "rank has to call it.", hangs=True),
        Mistake(halves, _CONSTANT),
        Mistake(quarters, _CONSTANT),
        Mistake(divides_what_is_not_there, _FROZEN),
        Mistake(packs_what_is_not_there, _FROZEN),
        Mistake(brings_zeros, _ZEROS),
        Mistake(brings_zeros_for_the_frozen, _ZEROS),
        Mistake(unpacks_for_all_parameters, "You packed the gradients that there are, and unpacked "
                "in the shapes of all parameters, the frozen one too. Give both the same list."),
        Mistake(leaves_the_padding_out, "The ring cuts the tensor into N equal chunks, and N does "
                "not divide the length of this gradient: `pack` adds the zeros that are missing."),
        Mistake(puts_another_tensor_there, "The means are right, but `.grad` is another tensor "
                "now. Code that holds the old one keeps the old numbers: copy into it with "
                "`copy_`."),
        Mistake(leaves_it_to_torch, "The means are right, but torch's all-reduce made them. Use "
                "your own, `ring_all_reduce`: the whole stack is to stand on it."),
        Mistake(averages_in_float32, "A float64 gradient went through float32, and lost its last "
                "digits. `pack` keeps the dtype of what you hand it."),
        Mistake(averages_among_all, _WITHOUT_GROUP),
        Mistake(sums_in_the_group_divides_by_all, _CONSTANT),
    )

    def trial(self, attempt):
        facts = _average_facts(attempt, None)
        if dist.get_world_size() == 4 and self.with_groups:
            facts |= named(_average_facts(attempt, own_pair()), IN_A_PAIR)
        return facts

    def expected(self, world_size):
        facts = _right_averages(range(world_size))
        if world_size < 4:
            return facts
        return [facts | named(_right_averages([rank % 2, rank % 2 + 2]), IN_A_PAIR)
                for rank in range(4)]


def _average_facts(attempt, group):
    model = _gradients_of(_part(dist.get_rank()))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    tensors = [parameter.grad for parameter in model.parameters()]
    expected = model.last.bias.grad / dist.get_world_size(group)
    dist.all_reduce(expected, group=group)
    with CallLog() as log:
        attempt(model, group)
    in_place = all(parameter.grad is tensor for parameter, tensor in zip(
        model.parameters(), tensors, strict=True))
    now = model.last.bias.grad
    # What is wrong in every digit is wrong in another fact.
    narrowed = 1e-12 < (now - expected).abs().max() < 1e-5 if now is not None else False
    return _average_names(model, all(map(torch.equal, weights, model.parameters())), in_place,
                          not narrowed, log.count() - log.count("send") - log.count("recv"),
                          dist.get_world_size(group) == 1 or log.count() > 0)


def _right_averages(ranks):
    model = _gradients_of(torch.cat([_part(rank) for rank in ranks]))
    return _average_names(model, True, True, True,
                          AtMost(0, "average with your `ring_all_reduce` alone", exact=False),
                          True)


def _average_names(model, untouched, in_place, digits, collectives, communicated):
    found = {fact: gradient for fact, gradient in gradients(model).items() if gradient is not None}
    return {**found, "the list of the gradients that there are": list(found),
            "that the weights are not changed": untouched,
            "that a float64 gradient keeps its digits": digits,
            "that each `.grad` is the same tensor as before": in_place,
            "the number of torch's collectives": collectives,
            "that the ranks communicate": communicated}


def _part(rank):
    """Rank r's three samples of seven features."""
    return seeded(f"samples of rank {rank}", 3, 7)


class _TwoDtypes(nn.Module):
    """One layer in float32, with a frozen bias, one in float64, and one that is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3).double()
        self.unused = nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).double())


def _gradients_of(samples):
    model = _TwoDtypes()
    model(samples).square().mean().backward()
    return model


# --- 4.3: the loop -------------------------------------------------------------------------------

STEPS, GLOBAL_BATCH = 8, 24
SAMPLES_OF_ALL = STEPS * GLOBAL_BATCH


def one_device(model, optimizer, images, labels, batches):
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def starts_apart(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def broadcasts_last(model, optimizer, images, labels, batches, group=None):
    starts_apart(model, optimizer, images, labels, batches, group)
    broadcast_weights(model, group)


def trains_apart(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


def averages_too_late(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        average_gradients(model, group)


def broadcasts_after_each_step(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        broadcast_weights(model, group)


def broadcasts_before_each_step(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for batch in batches:
        broadcast_weights(model, group)
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


def divides_the_loss_too(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine]) / ranks
        loss.backward()
        average_gradients(model, group)
        optimizer.step()


def trains_with_ddp(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    replica = nn.parallel.DistributedDataParallel(model, process_group=group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(replica(images[mine]), labels[mine]).backward()
        optimizer.step()


def sums_in_the_loop(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        sums_gradients(model, group)
        optimizer.step()


def averages_the_loss(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        dist.all_reduce(loss.data, group=group)
        (loss / ranks).backward()
        optimizer.step()


def averages_weights_after_the_step(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        average_weights(model, group)


def never_clears(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def clears_too_late(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.zero_grad(set_to_none=False)
        average_gradients(model, group)
        optimizer.step()


def shares_out_the_batches(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    steps = len(batches) // ranks * ranks
    for batch in batches[rank:steps:ranks]:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_the_whole_batch(model, optimizer, images, labels, batches, group=None):
    broadcast_weights(model, group)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_the_first_part(model, optimizer, images, labels, batches, group=None):
    ranks = dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[: len(batch) // ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_neighbours(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def trains_among_all(model, optimizer, images, labels, batches, group=None):
    train_by_hand(model, optimizer, images, labels, batches)


def cuts_by_all_ranks(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_its_rank_of_all(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def calls_its_parts_without_the_group(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model)
        optimizer.step()


def trains_on_the_notebooks_data(model, optimizer, images, labels, batches, group=None):
    digits = load_digits()
    train_by_hand(model, optimizer, digits.train_images, digits.train_labels, batches, group)


def both_cuts(attempt):
    """The attempt, which takes ``batch[rank::n]``, and the same with ``batch.chunk(n)[rank]``.

    Where the ranks' models differ, the weights depend on who computed which samples.
    """
    def in_pieces(model, optimizer, images, labels, batches, group=None):
        ranks = dist.get_world_size(group)
        dealt = [batch.view(ranks, -1).t().flatten() for batch in batches]
        attempt(model, optimizer, images, labels, dealt, group)

    return attempt, in_pieces


TAKEN = "the gradient of step 1", "the gradient of step 2"
SAMPLES = "the number of samples that this rank computed"
OF_ALL = "the number of different samples that all ranks together computed"
EVERY_STEP = "that you call a collective yourself in every step"
OWN_SAMPLES = "that rank r computes `batch[r::N]`"
_OVERWRITTEN = ("Rank 0's weights overwrite the others' in each step, so what the other ranks "
                "computed is lost. Average the gradients instead.")


class TrainByHand(Exercise):
    slug = "train-by-hand"
    number = "4.3"
    title = "A whole training loop that matches DDP"
    name = "train_by_hand"
    minutes = 10
    seconds = 20.0
    with_groups = True
    tolerance = 1e-4
    communicates = False  # DDP, in an attempt's place, does so unseen
    hints = (
        "A loop of one device has four lines. Which one changes, what comes between `backward` and "
        "`step`, and what has to be done once, before the first step?",
        "Each rank passes to the model only its own part of each global batch, as in step 2, so "
        "that together they compute every sample once.",
        "Once: `broadcast_weights(model, group)`. In each step: `mine = batch[rank::ranks]`, "
        "`zero_grad`, forward on `mine`, `backward`, `average_gradients(model, group)`, `step`.",
    )
    solution = staticmethod(train_by_hand)
    mistakes = (
        *(Mistake(attempt, "The ranks started from different weights and never agreed: broadcast "
                  "rank 0's before the first step.") for attempt in both_cuts(starts_apart)),
        *(Mistake(attempt, "The broadcast comes after the training. The ranks start from different "
                  "weights, so their gradients do not belong to one model.")
          for attempt in both_cuts(broadcasts_last)),
        *(Mistake(attempt, "The ranks trained apart: each step was taken with this rank's own "
                  "gradients. Average them between `backward` and `step`.")
          for attempt in both_cuts(trains_apart)),
        *(Mistake(attempt, "You call collectives in each step, and still each step was taken with "
                  "this rank's own gradients. Average them between `backward` and `step`, not "
                  "before and not after, and in `parameter.grad` itself, not in a copy.")
          for attempt in both_cuts(averages_too_late)),
        *(Mistake(attempt, _OVERWRITTEN) for attempt in (
            *both_cuts(broadcasts_after_each_step), *both_cuts(broadcasts_before_each_step))),
        Mistake(divides_the_loss_too, "The gradients were divided by the world size twice: the "
                "mean over the ranks needs no smaller loss."),
        Mistake(trains_with_ddp, "The weights come out right, but PyTorch's DDP did the work. Here "
                "you write what it does: call the broadcast and the all-reduces yourself."),
        Mistake(sums_in_the_loop, "The gradients were summed and not divided by the world size: "
                "each step was too long."),
        *(Mistake(attempt, "You averaged the loss. `backward` follows only this rank's own graph, "
                  "so the gradients still differ: all-reduce the gradients.")
          for attempt in both_cuts(averages_the_loss)),
        *(Mistake(attempt, "You averaged the weights after each rank's own step. With this "
                  "optimizer that is not the step of the averaged gradient.")
          for attempt in both_cuts(averages_weights_after_the_step)),
        Mistake(never_clears, "The gradients of all steps so far add up: `zero_grad` is missing."),
        Mistake(clears_too_late, "The gradients are cleared between `backward` and `step`, so the "
                "optimizer sees zeros and the model never changes."),
        Mistake(shares_out_the_batches, "Each rank took other global batches. All ranks work on "
                "the same global batch at a time, each on its own part of it."),
        Mistake(takes_the_whole_batch, "Every rank computed the whole batch, so nothing is faster "
                "than on one rank: each has to take its own part."),
        Mistake(takes_the_first_part, "Every rank took the same part of the batch, so most of it "
                "was never seen: the part must depend on the rank."),
        Mistake(takes_neighbours, "The weights come out right, but each rank took other samples of "
                "the batch than it was asked to: rank r of the group takes `batch[r::N]`."),
        Mistake(trains_among_all, _WITHOUT_GROUP),
        Mistake(cuts_by_all_ranks, _WITHOUT_GROUP),
        Mistake(takes_its_rank_of_all, _WITHOUT_GROUP),
        Mistake(calls_its_parts_without_the_group, _WITHOUT_GROUP),
        Mistake(trains_on_the_notebooks_data, _NOT_GIVEN),
    )

    def prepare(self):
        """The training set, and batches as indices, which 1, 2, 3 and 4 ranks divide equally.

        The samples are in another order than the notebook's, so that an index is another sample.
        """
        digits = load_digits()
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(len(digits.train_labels), generator=generator)
        batches = list(order[: STEPS * GLOBAL_BATCH].split(GLOBAL_BATCH))
        return digits.train_images.flip(0), digits.train_labels.flip(0), batches

    def trial(self, attempt):
        facts = self._trained(attempt, None)
        if dist.get_world_size() == 4 and self.with_groups:
            facts |= named(self._trained(attempt, own_pair()), IN_A_PAIR)
        return facts

    def _trained(self, attempt, group):
        model, seen = digits_classifier(seed=dist.get_rank()), []  # each pair has its own model
        models, taken, optimizer = [], [], optimizer_for(model)
        looking = model.register_forward_pre_hook(
            lambda _, inputs: seen.extend(inputs[0].detach().clone()))
        # A closure computes the gradient within the step, from the weights before it.
        optimizer.register_step_pre_hook(
            lambda *_: models.append(copy.deepcopy(model)) if len(models) < 2 else None)
        optimizer.register_step_post_hook(
            lambda *_: taken.append(_gradient_of(model)) if len(taken) < 2 else None)
        with CallLog() as log:
            attempt(model, optimizer, *self.given, group)
        looking.remove()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        everybodys = [None] * ranks
        dist.all_gather_object(everybodys, _distinct(seen), group)
        images, _, batches = self.given
        asked = _distinct(images[torch.cat([batch[rank::ranks] for batch in batches])])
        return {SAMPLES: len(seen), OF_ALL: len(set.union(*everybodys)),
                **self._made_of_samples(models, taken), **_weights_of(model),
                OWN_SAMPLES: everybodys[rank] == asked,
                EVERY_STEP: dist.get_world_size() == 1 or log.count() >= STEPS}

    def _made_of_samples(self, models, taken):
        """How often the gradient of each sample is in what the first two steps are taken with.

        Gradients are those of the weights that this rank has in that step, right or wrong.
        """
        images, labels, batches = self.given
        facts, before = {}, {}
        for fact, model, gradient, batch in zip(TAKEN, models, taken, batches, strict=False):
            parts = dict(before)
            for number, index in enumerate(batch):
                model.zero_grad()
                F.cross_entropy(model(images[index, None]), labels[index, None]).backward()
                parts[_sample(number)] = _gradient_of(model)
            facts[fact] = made_of(gradient, parts)
            before = {"the gradient of step 1": gradient}
        return facts

    def expected(self, world_size):
        facts = self._right(0, world_size)
        if world_size < 4:
            return facts
        pairs = [named(self._right(seed, 2), IN_A_PAIR) for seed in (0, 1)]
        return [facts | pairs[rank % 2] for rank in range(4)]

    def _right(self, seed, ranks):
        images, _, batches = self.given
        model = digits_classifier(seed=seed)
        one_device(model, optimizer_for(model), *self.given)
        samples = [_sample(number) for number in range(GLOBAL_BATCH)]
        held = Held(dict.fromkeys(samples, 1 / GLOBAL_BATCH), {
            "each of the batch's samples": samples,
            **{f"each of rank {rank}'s samples": samples[rank::ranks] for rank in range(ranks)}})
        return {SAMPLES: SAMPLES_OF_ALL // ranks,
                OF_ALL: len(images[torch.cat(batches)].unique(dim=0)),
                **dict.fromkeys(TAKEN, held), **_weights_of(model), OWN_SAMPLES: True,
                EVERY_STEP: True}


def _sample(number):
    return f"sample {number} of the batch"


def _gradient_of(model):
    """All gradients in one tensor; zeros where there is none."""
    return torch.cat([torch.zeros_like(each).flatten() if each.grad is None
                      else each.grad.flatten() for each in model.parameters()])


def _distinct(images):
    return {image.numpy().tobytes() for image in images}


def _weights_of(model):
    return {f"`{name}` at the end": tensor.clone() for name, tensor in model.state_dict().items()}


# --- 4.4: ranks with unequal data ----------------------------------------------------------------

def train_uneven(model, optimizer, images, labels, batches):
    # The ranks agree on the number of steps, so that nobody leaves while another still calls.
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for step in range(steps):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        # The average will divide by the number of ranks, so the loss is multiplied by it.
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def train_uneven_stub(model, optimizer, images, labels, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        average_gradients(model)
        optimizer.step()


def longest_of(batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return steps


def stops_with_the_shortest(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    for batch in batches[:steps]:
        samples = torch.tensor(len(batch))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def stops_with_the_shortest_by_means(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    train_uneven_stub(model, optimizer, images, labels, batches[:steps])


def divides_by_all_ranks(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        optimizer.zero_grad()
        if step < len(batches):
            loss = F.cross_entropy(model(images[batches[step]]), labels[batches[step]])
        else:
            loss = 0 * model(images[:1]).sum()
        loss.backward()
        average_gradients(model)
        optimizer.step()


def divides_by_those_left(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        left = torch.tensor(float(step < len(batches)))
        dist.all_reduce(left)
        optimizer.zero_grad()
        if step < len(batches):
            loss = F.cross_entropy(model(images[batches[step]]), labels[batches[step]])
        else:
            loss = 0 * model(images[:1]).sum()
        (loss * dist.get_world_size() / left).backward()
        average_gradients(model)
        optimizer.step()


def sums_over_the_samples(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine], reduction="sum").backward()
        average_gradients(model)
        optimizer.step()


def forgets_the_ranks(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss / samples).backward()
        average_gradients(model)
        optimizer.step()


def does_not_step_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        if len(mine) > 0:
            optimizer.step()


def repeats_its_last_batch(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = torch.tensor([], dtype=torch.int64)
        if batches:
            mine = batches[min(step, len(batches) - 1)]
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def begins_anew_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = torch.tensor([], dtype=torch.int64)
        if batches:
            mine = batches[step % len(batches)]
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def keeps_its_last_gradients(model, optimizer, images, labels, batches):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        if len(mine) > 0:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def goes_on_alone(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    stops_with_the_shortest(model, optimizer, images, labels, batches)
    one_device(model, optimizer, images, labels, batches[steps:])


def counts_all_samples_once(model, optimizer, images, labels, batches):
    samples = torch.tensor(sum(map(len, batches)))
    dist.all_reduce(samples)
    steps = longest_of(batches)
    for step in range(steps):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() * steps / samples).backward()
        average_gradients(model)
        optimizer.step()


def has_no_gradients_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        optimizer.zero_grad()
        if step < len(batches):
            F.cross_entropy(model(images[batches[step]]), labels[batches[step]]).backward()
        average_gradients(model)
        optimizer.step()


def counts_and_has_no_gradients_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        if len(mine) > 0:
            loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def averages_only_with_data(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        if step < len(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batches[step]]), labels[batches[step]]).backward()
            average_gradients(model)
            optimizer.step()


def waits_at_the_end(model, optimizer, images, labels, batches):
    train_uneven_stub(model, optimizer, images, labels, batches)
    dist.barrier()


def asks_in_each_step(model, optimizer, images, labels, batches):
    for batch in batches:
        samples = torch.tensor(len(batch))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def weighs_the_notebooks_data(model, optimizer, images, labels, batches):
    digits = load_digits()
    train_uneven(model, optimizer, digits.train_images, digits.train_labels, batches)


def indexes_past_the_end(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        batch = batches[step]
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        average_gradients(model)
        optimizer.step()


_STILL_LEAVES = ("A rank that is out of data still makes fewer calls than the others, and one of "
                 "them waits for it. All ranks have to take the same number of steps: let them "
                 "agree on it before the first.")
_NO_CALL = ("A rank that is out of data makes no call: it does not average, or its gradients are "
            "None, and `average_gradients` skips those. The others wait for it. It has to bring "
            "zeros, in as many steps as the longest list has.")
_REPEATS = ("A rank that is out of data trains on some of its samples again. The step's gradient "
            "must come from the ranks that still have a batch: bring zeros.")


class UnevenLoop(Exercise):
    slug = "uneven-loop"
    number = "4.4"
    title = "Repair a loop that hangs"
    name = "train_uneven"
    minutes = 20
    seconds = 10.0
    tolerance = 1e-4
    hints = (
        "How many times does each rank call `average_gradients`? What would a rank without data "
        "have to bring to that call, so that the others can go on?",
        "Two things have to be known on all ranks: the number of steps of the longest list, and "
        "in each step the number of samples of all ranks. Both are one small all-reduce. Without "
        "data, a rank brings zeros, and steps like the others.",
        "`steps` by MAX, `samples` by SUM in each step. A rank without data takes an empty tensor "
        "of indices: with `reduction=\"sum\"` its loss is 0, and `backward` gives zeros. Each rank "
        "runs `backward` on loss · world size / samples, then averages and steps.",
    )
    solution = staticmethod(train_uneven)
    stub = staticmethod(train_uneven_stub)
    mistakes = (
        Mistake(stops_with_the_shortest, "All ranks stop when the shortest list ends. What the "
                "others still have is never trained on: go on until the longest ends."),
        Mistake(stops_with_the_shortest_by_means, "All ranks stop when the shortest list ends, and "
                "each rank counts the same, however many samples it has. Go on until the longest "
                "list ends, and weigh each sample the same."),
        Mistake(divides_by_all_ranks, "Each rank's mean loss has the same weight, and ranks "
                "without data count as well. So a sample in a small batch counts more than one in "
                "a large batch. Divide by the number of samples of all ranks in this step."),
        Mistake(divides_by_those_left, "Each rank that has a batch counts the same. But the "
                "batches differ in size, and each *sample* has to count the same: divide by the "
                "number of samples of all ranks in this step."),
        Mistake(sums_over_the_samples, "You sum over the samples and do not divide by their number "
                "in this step."),
        Mistake(forgets_the_ranks, "The gradient is N times too small. You divide by all samples "
                "of this step, and `average_gradients` divides by the number of ranks once more: "
                "multiply by it."),
        Mistake(does_not_step_when_out, "A rank that is out of data takes part in the average, but "
                "not in the step, so its weights stay behind. Every rank takes every step."),
        Mistake(repeats_its_last_batch, _REPEATS),
        Mistake(begins_anew_when_out, _REPEATS),
        Mistake(keeps_its_last_gradients, "A rank that is out of data brings the gradients of the "
                "step before once more. Clear them first, so that it brings zeros."),
        Mistake(goes_on_alone, "When the first rank is out of data, the others go on without "
                "averaging. From there on each trains a model of its own."),
        Mistake(counts_all_samples_once, "You divide by the mean number of samples of a step. The "
                "steps differ: ask for the number in each one."),
        Mistake(has_no_gradients_when_out, _NO_CALL, hangs=True),
        Mistake(counts_and_has_no_gradients_when_out, _NO_CALL, hangs=True),
        Mistake(averages_only_with_data, _NO_CALL, hangs=True),
        Mistake(waits_at_the_end, "A barrier does not help: one rank waits in it, and the others "
                "wait in their next average. All ranks have to take the same number of steps.",
                hangs=True),
        Mistake(asks_in_each_step, _STILL_LEAVES, hangs=True),
        Mistake(weighs_the_notebooks_data, _NOT_GIVEN),
        Mistake(indexes_past_the_end, "This rank has no batch for this step. It has to take part "
                "all the same, with zeros."),
    )

    def prepare(self):
        digits = load_digits()
        return digits.train_images[-100:], digits.train_labels[-100:]  # not the notebook's first

    def trial(self, attempt):
        model, steps = digits_classifier(seed=0), []
        optimizer = optimizer_for(model)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        attempt(model, optimizer, *self.given, _uneven(dist.get_rank()))
        return {"the number of steps": len(steps), **_weights_of(model)}

    def expected(self, world_size):
        ranks = [_uneven(rank) for rank in range(world_size)]
        batches = [torch.cat([own[step] for own in ranks if step < len(own)])
                   for step in range(max(map(len, ranks)))]
        model = digits_classifier(seed=0)
        one_device(model, optimizer_for(model), *self.given, batches)
        return {"the number of steps": len(batches), **_weights_of(model)}


def _uneven(rank):
    """This rank's batches: their number and their sizes are its own, and rank 2 has none."""
    sizes = [[3, 7], [5, 2, 6, 4], [], [8]][rank]
    return list(torch.arange(25 * rank, 25 * rank + sum(sizes)).split(sizes)) if sizes else []


# --- 4.5: a resume that is exact -----------------------------------------------------------------

class Checkpoint:
    def __init__(self, path):
        # Ranks differ in their buffers and random numbers, so each has a file of its own.
        self.file = f"{path}.{dist.get_rank()}"

    def save(self, step, model, optimizer):
        torch.save({"step": step, "model": model.state_dict(), "random": torch.get_rng_state(),
                    "optimizer": optimizer.state_dict()}, self.file)

    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        return saved["step"]


class WeightsAlone(Checkpoint):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        return saved["step"]


class WithoutOptimizer(Checkpoint):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        torch.set_rng_state(saved["random"])
        return saved["step"]


class WithoutRandom(Checkpoint):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]


class WithoutStep(Checkpoint):
    def load(self, model, optimizer):
        super().load(model, optimizer)


class FromTheBeginning(Checkpoint):
    def load(self, model, optimizer):
        super().load(model, optimizer)
        return 0


class OneStepLate(Checkpoint):
    def load(self, model, optimizer):
        return super().load(model, optimizer) + 1


class ParametersAlone(Checkpoint):
    def save(self, step, model, optimizer):
        torch.save([step, dict(model.named_parameters()), optimizer.state_dict(),
                    torch.get_rng_state()], self.file)

    def load(self, model, optimizer):
        step, parameters, state, random = torch.load(self.file)
        model.load_state_dict(parameters, strict=False)
        optimizer.load_state_dict(state)
        torch.set_rng_state(random)
        return step


class MomentaAlone(Checkpoint):
    def save(self, step, model, optimizer):
        torch.save([step, model.state_dict(), optimizer.state_dict()["state"],
                    torch.get_rng_state()], self.file)

    def load(self, model, optimizer):
        step, tensors, state, random = torch.load(self.file)
        model.load_state_dict(tensors)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        torch.set_rng_state(random)
        return step


class Rank0ForAll(Checkpoint):
    def __init__(self, path):
        self.file = path

    def save(self, step, model, optimizer):
        if dist.get_rank() == 0:
            super().save(step, model, optimizer)
        dist.barrier()


class Rank0ForAllWithoutRandom(Rank0ForAll):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]


class Rank0sBuffers(Checkpoint):
    def load(self, model, optimizer):
        step = super().load(model, optimizer)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        return step


class BroadcastsBuffers(Checkpoint):
    def save(self, step, model, optimizer):
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        super().save(step, model, optimizer)


class Rank0sRandom(Checkpoint):
    def load(self, model, optimizer):
        step = super().load(model, optimizer)
        random = torch.get_rng_state()
        dist.broadcast(random, src=0)
        torch.set_rng_state(random)
        return step


class OnlyRank0Loads(Checkpoint):
    def load(self, model, optimizer):
        step = torch.load(self.file)["step"]
        if dist.get_rank() == 0:
            super().load(model, optimizer)
        broadcast_weights(model)
        return step


class SeedsAnew(Checkpoint):
    def save(self, step, model, optimizer):
        torch.manual_seed(step)
        super().save(step, model, optimizer)


class SeedsAfterLoad(Checkpoint):
    def load(self, model, optimizer):
        step = super().load(model, optimizer)
        torch.manual_seed(step)
        return step


_OTHER_RANDOM = ("Dropout draws other numbers than the run that went on. A seed does not help: the "
                 "generator has to go on where it stopped. Save `torch.get_rng_state()` on each "
                 "rank, and set it again.")
_FOR_ALL = ("All ranks go on with rank 0's buffers and random numbers. (Does only one file remain, "
            "or does rank 0 write its own state alone?) Ranks differ in both: each has to save its "
            "own.")


class ExactResume(Exercise):
    slug = "exact-resume"
    number = "4.5"
    title = "A resume that is exact"
    name = "Checkpoint"
    minutes = 15
    seconds = 10.0
    tolerance = 0.0  # equal means ==
    communicates = False
    stop, steps = 2, 4
    hints = (
        "Write down everything that a step reads. Which of it has changed since the start of the "
        "job? And which of that differs from rank to rank?",
        "The optimizer has momenta and a learning rate. Dropout draws from torch's generator, "
        "which each rank has its own of. BatchNorm has buffers, which each rank computes from its "
        "own samples.",
        "Let each rank write a file of its own: f\"{path}.{dist.get_rank()}\". In it: `step`, "
        "`model.state_dict()`, `optimizer.state_dict()`, `torch.get_rng_state()`. `load` gives all "
        "of it back, the last with `torch.set_rng_state`, and returns the step.",
    )
    solution = Checkpoint
    mistakes = (
        Mistake(WeightsAlone, "You give back the model and nothing else: the optimizer begins "
                "without momenta, and dropout draws other numbers."),
        Mistake(WithoutOptimizer, "The optimizer begins anew: its momenta and its learning rate "
                "are not those of the stop. Save and load `optimizer.state_dict()`."),
        Mistake(MomentaAlone, "The momenta are there, but the learning rate is that of a new "
                "optimizer. It stands in the `param_groups` of `optimizer.state_dict()`: save that "
                "whole."),
        Mistake(WithoutRandom, _OTHER_RANDOM),
        Mistake(WithoutStep, "`load` returns None: return the step that was saved, so that the "
                "loop knows where to go on."),
        Mistake(FromTheBeginning, "`load` returns 0, so the run trains on its first batches again. "
                "Return the step that was saved."),
        Mistake(OneStepLate, "`load` returns the step after the one that was saved, so one batch "
                "is left out. Return the number that `save` was given."),
        Mistake(ParametersAlone, "The parameters are there, the buffers are not: BatchNorm's "
                "running statistics begin anew. `state_dict()` has both."),
        Mistake(Rank0ForAll, _FOR_ALL),
        Mistake(Rank0ForAllWithoutRandom, "Rank 0 saves its own state alone, and no random "
                "numbers. Ranks differ in their buffers and random numbers: each has to save its "
                "own."),
        Mistake(Rank0sBuffers, "All ranks go on with rank 0's buffers. Each rank computes its "
                "running statistics from its own samples: save them on each rank."),
        Mistake(BroadcastsBuffers, "`save` overwrites the other ranks' buffers with rank 0's, so "
                "it changes the run that goes on, and loses their statistics. That is for a model "
                "which you save for use. A run that is to go on needs each rank's own."),
        Mistake(Rank0sRandom, "All ranks go on with rank 0's random numbers, so they drop the same "
                "units. Each rank has a generator of its own: save its state on each rank."),
        Mistake(OnlyRank0Loads, "Only rank 0 has its optimizer and its random numbers back. Every "
                "rank takes the steps, so every rank loads."),
        Mistake(SeedsAnew, "`save` sets a seed, so it changes the run that goes on after it. Only "
                "read the generator's state: `torch.get_rng_state()`."),
        Mistake(SeedsAfterLoad, _OTHER_RANDOM),
    )

    def prepare(self):
        digits = load_digits()
        return digits.train_images[:64], digits.train_labels[:64]

    def trial(self, attempt):
        with tempfile.TemporaryDirectory() as folder:
            names = [folder]
            dist.broadcast_object_list(names, src=0)
            facts = self._stop_and_resume(attempt, os.path.join(names[0], "checkpoint"))
            dist.barrier()
        return facts

    def _stop_and_resume(self, attempt, path):
        model, optimizer = self._new_job(seed=0)
        self._train(model, optimizer, range(self.stop))
        at_stop = _state_of(model, optimizer)
        time.sleep(0.05 * (dist.get_world_size() - dist.get_rank()))  # rank 0 saves last
        attempt(path).save(self.stop, model, optimizer)
        undisturbed = _same(at_stop, _state_of(model, optimizer))
        dist.barrier()
        losses = self._train(model, optimizer, range(self.stop, self.steps))
        at_end = _state_of(model, optimizer)

        model, optimizer = self._new_job(seed=100)
        step = attempt(path).load(model, optimizer)
        found = _state_of(model, optimizer)
        goes_on = step == self.stop and type(step) is int
        resumed = self._train(model, optimizer, range(step, self.steps)) if goes_on else []
        return {
            "the step that `load` returns": step,
            **{f"that this rank's {what} after `load` are those of the stop":
               torch.equal(at_stop[what], found[what]) for what in at_stop},
            "that `save` changes nothing": undisturbed,
            "that each loss of the resumed run is that of the run which went on":
                resumed == losses,
            "that the resumed run ends where the other one did":
                goes_on and _same(at_end, _state_of(model, optimizer))}

    def expected(self, world_size):
        return {
            "the step that `load` returns": self.stop,
            **{f"that this rank's {what} after `load` are those of the stop": True
               for what in _state_of(*self._new_job(seed=0))},
            "that `save` changes nothing": True,
            "that each loss of the resumed run is that of the run which went on": True,
            "that the resumed run ends where the other one did": True}

    def _new_job(self, seed):
        """A model and its optimizer; the ranks have equal weights, and random numbers of their own.
        """
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16),
                              nn.Dropout(0.3), nn.Linear(16, 10))
        torch.manual_seed(seed + 1 + (dist.get_rank() if dist.is_initialized() else 0))
        return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def _train(self, model, optimizer, steps):
        """Trains with a falling learning rate; the losses of this rank."""
        images, labels = self.given
        losses = []
        for step in steps:
            mine = torch.arange(16 * step, 16 * step + 16)[dist.get_rank()::dist.get_world_size()]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            flat = parameters_to_vector([each.grad for each in model.parameters()])
            dist.all_reduce(flat)
            for parameter, mean in zip(model.parameters(), unpack(
                    flat / dist.get_world_size(), model.parameters()), strict=True):
                parameter.grad.copy_(mean)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            losses.append(loss.item())
        return losses


def _state_of(model, optimizer):
    """A copy of all that a step reads, a tensor for each kind."""
    momenta = [optimizer.state[each].get("momentum_buffer", torch.zeros_like(each))
               for each in model.parameters()]
    return {"weights": parameters_to_vector(model.parameters()).detach().clone(),
            "buffers": torch.cat([each.flatten().double() for each in model.buffers()]),
            "momenta": parameters_to_vector(momenta).detach().clone(),
            "learning rates": torch.tensor([group["lr"] for group in optimizer.param_groups]),
            "random numbers": torch.get_rng_state()}


def _same(one, other):
    return all(torch.equal(one[what], other[what]) for what in one)


EXERCISES = (BroadcastWeights, AverageGradients, TrainByHand, UnevenLoop, ExactResume)
