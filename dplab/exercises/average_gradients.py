"""Exercise 4.2: average the gradients with your ring."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import gradients, seeded
from dplab.exercises.broadcast_weights import _WITHOUT_GROUP, IN_A_PAIR, named, own_pair
from dplab.exercises.ring_all_reduce import ring_all_reduce
from dplab.measure import CallLog


def pack(tensors, ranks):
    """A copy of all tensors in one flat tensor, with zeros at the end so that N divides its length.
    """
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % ranks))


def unpack(flat, tensors):
    """Views into a flat tensor, one in the shape of each tensor; the padding is left out."""
    tensors = list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def average_gradients(model, group=None):
    """Replaces each gradient by its mean over the ranks."""
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            # One at a time: a flat tensor has one dtype, and gradients may have several.
            flat = pack([parameter.grad], ranks)
            total = ring_all_reduce(flat / ranks, group)
            [mean] = unpack(total, [parameter.grad])
            parameter.grad.copy_(mean)


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
    number = "4.2"
    title = "Average the gradients with your ring"
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
