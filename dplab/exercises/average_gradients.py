"""Each gradient becomes its mean over the ranks, on a ring whose chunks are equally long."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import WITHOUT_GROUP, Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import gradients, seeded
from dplab.exercises.broadcast_weights import InPairsToo
from dplab.exercises.ring_all_gather import ring_all_reduce
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
            # One at a time, so that each travels in its own dtype.
            flat = pack([parameter.grad], ranks) / ranks
            total = ring_all_reduce(flat, group)
            [mean] = unpack(total, [parameter.grad])
            parameter.grad.copy_(mean)


def all_at_once(model, group=None):
    """The same in one message, of the widest dtype."""
    number = dist.get_world_size(group)
    there = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    means = ring_all_reduce(pack(there, number) / number, group)
    for gradient, its_mean in zip(there, unpack(means, there), strict=False):
        gradient.copy_(its_mean)


# As they stand in the right answer, and what comes in their place.
RING = "ring_all_reduce(flat, group)"
SCALED, UNSCALED = "pack([parameter.grad], ranks) / ranks", "pack([parameter.grad], ranks)"
BY_TORCH = "flat\ndist.all_reduce(flat, group=group)"
FROM_RANK_0 = "flat\ndist.broadcast(flat, group_src=0, group=group)"
TO_RANK_0 = "flat\ndist.reduce(flat, group_dst=0, group=group)"
WITH_ZEROS = "parameter.grad = parameter.data * 0 if parameter.grad is None else parameter.grad"
IF_THERE = "if parameter.grad is not None:"


class AverageGradients(InPairsToo):
    number = "4.2"
    title = "Average the gradients with your ring"
    minutes = 10
    world_sizes = (2, 3, 4, 1)  # one rank last: a ring of one sends nothing
    too_long = (f"{Exercise.too_long} On a ring, chunks differ in length where the number of its "
                "ranks does not divide that of the elements: `pack` adds the zeros that are "
                "missing, for as many ranks as you tell it.")
    solution = staticmethod(average_gradients)
    also_right = (all_at_once,)

    def facts_of(self, attempt, group):
        model = _with_means([dist.get_rank()])
        weights, places = _copies(model), _places(model)
        with CallLog() as log:
            attempt(model, group)
        return _facts(model, all(map(torch.equal, weights, model.parameters())),
                      _places(model) == places,
                      log.count() - log.count("send") - log.count("recv"),
                      dist.get_world_size(group) == 1 or log.count() > 0)

    def right(self, ranks):
        return _facts(_with_means(ranks), True, True,
                      AtMost(0, "average with your `ring_all_reduce` alone", exact=False), True)

    def parts_of(self, ranks):
        model = _with_means(ranks)
        return {f"the gradient of `{name}`":
                {f"rank {rank}'s gradient": _gradient(name, parameter, rank) for rank in ranks}
                | {"the weights": parameter.detach()}
                for name, parameter in model.named_parameters()}

    hints = (
        "After `loss.backward()`, `parameter.grad` holds the gradient of this rank's part of the "
        "batch. By what does the sum over the ranks differ from their mean? And which of the "
        "parameters has no gradient?",
        "The ring takes a flat tensor whose length N divides, leaves it as it is, and returns a "
        "new one. So the gradients go through `pack`, `ring_all_reduce` and `unpack`; then copy "
        "what comes back.",
        "With `there`, the list of the gradients that are not None, and `ranks = "
        "dist.get_world_size(group)`: `total = ring_all_reduce(pack(there, ranks), group)`. Then "
        "`copy_` each tensor of `unpack(total / ranks, there)` into its gradient.",
    )
    slips = (
        Slip("You summed and did not divide by the world size: each step is as many times too long "
             "as there are ranks. (`x / n` makes a new tensor; `x /= n` changes `x`.)",
             {SCALED: UNSCALED}, {SCALED: UNSCALED, RING: BY_TORCH}),
        Slip("You divided by the world size twice: once is the mean.",
             {"copy_(mean)": "copy_(mean / ranks)"}),
        Slip("You divided, but nothing was communicated: each rank still has the gradient of its "
             "own part.", {RING: "flat"}),
        Slip("Nothing was communicated: each rank still has the gradient of its own part. The sum "
             "over the ranks is what `ring_all_reduce` returns.",
             {SCALED: UNSCALED, RING: "flat"}),
        Slip("The ring leaves its input as it is, and returns the sum in a *new* tensor. You "
             "divided this rank's own gradient: go on with what the ring returned.",
             {f"total = {RING}": f"total = flat\n{RING}"}),
        Slip("`parameter.grad` still holds this rank's own gradient, since the mean never reached "
             "it. The ring leaves its input as it is, and returns the sum in a *new* tensor. Copy "
             "the mean into `.grad`.", {"parameter.grad.copy_(mean)": "pass"}),
        Slip("You broadcast rank 0's gradients: what the other ranks computed is lost. Sum over "
             "the ranks.", {RING: FROM_RANK_0}, {SCALED: UNSCALED, RING: FROM_RANK_0}),
        Slip("You stop at the first parameter without a gradient: the ones after it are never "
             "averaged. Skip it, and go on.",
             {IF_THERE: "if parameter.grad is None:\n    return\nelse:"}),
        Slip("You all-reduced the parameters, not their gradients. The weights were equal already, "
             "and the gradients still differ from rank to rank.",
             {"parameter.grad": "parameter.data"},
             {"[parameter.grad]": "[parameter]", "parameter.grad.copy_": "parameter.data.copy_"}),
        Slip("`reduce` gives the result to rank 0 alone. Every rank takes the step, so every rank "
             "needs the mean: `ring_all_reduce`.",
             {RING: TO_RANK_0},
             *({SCALED: UNSCALED, RING: TO_RANK_0, "copy_(mean)": f"copy_({mean})"}
               for mean in ("mean / ranks", "mean if dist.get_rank(group) else mean / ranks"))),
        Slip("Only rank 0 calls the all-reduce, and waits for ever: every rank has to call it.",
             {IF_THERE: "if parameter.grad is not None and dist.get_rank(group) == 0:"},
             hangs=True),
        Slip("You divided by a constant. The divisor is the number of ranks in the group, whatever "
             "it is: `dist.get_world_size(group)`.",
             {SCALED: f"{UNSCALED} / 2"}, {SCALED: f"{UNSCALED} / 4"}),
        Slip("A parameter's gradient is `None`: it is frozen, or the loss does not depend on it. "
             "Skip such parameters.",
             {IF_THERE: "if True:"}, {IF_THERE: "if parameter.grad.copy_:"},
             {IF_THERE: "parameter.grad /= ranks\nif True:"}),
        Slip("A `.grad` that was None became zeros. An optimizer leaves a parameter alone where "
             "`.grad` is None. With zeros it may move it, by weight decay for example. Skip such "
             "parameters.", {IF_THERE: f"{WITH_ZEROS}\n{IF_THERE}"},
             {IF_THERE: f"if parameter.requires_grad:\n    {WITH_ZEROS}\n{IF_THERE}"}),
        Slip("You leave out a gradient that is all zeros. It may be so on one rank alone, and then "
             "the ranks' calls no longer belong together: average what is not None.",
             {IF_THERE: "if parameter.grad is not None and parameter.grad.any():"}, hangs=True),
        Slip("You packed the gradients that there are, and unpacked in the shapes of all "
             "parameters, the frozen one too. Give both the same list.",
             {"unpack(means, there)": "unpack(means, model.parameters())"}),
        Slip("The ring cuts the tensor into N equal chunks, and N does not divide the length of "
             "this gradient: `pack` adds the zeros that are missing.",
             {"pack([parameter.grad], ranks)": "parameter.grad.flatten()"},
             {"pack(there, number)": "torch.cat([each.flatten() for each in there])"}),
        Slip("A `.grad` is another tensor now, or lies in other memory. Code that holds the old "
             "one keeps the old numbers: copy into it with `copy_`.",
             {"parameter.grad.copy_(mean)": "parameter.grad = mean"},
             {"gradient.copy_(its_mean)": "gradient.data = its_mean.to(gradient.dtype)"}),
        Slip("`pack` makes one tensor of gradients of two dtypes, in the wider one, and so a mean "
             "can have another dtype than its parameter. `parameter.grad.copy_(…)` takes it all "
             "the same, and `.grad` stays the same tensor.",
             {"gradient.copy_(its_mean)": "owner = next(each for each in model.parameters() "
                                          "if each.grad is gradient)\nowner.grad = its_mean"}),
        Slip("A collective of torch's communicates here. Use your own, `ring_all_reduce`: the "
             "whole stack is to stand on it.", {RING: BY_TORCH}),
        Slip("A float64 gradient went through float32, and lost its last digits. `pack` keeps the "
             "dtype of what you hand it.",
             {"pack([parameter.grad]": "pack([parameter.grad.float()]"},
             {"pack(there": "pack([each.float() for each in there]"}),
        Slip(WITHOUT_GROUP, {"(flat, group)": "(flat)"},
             {SCALED: f"{UNSCALED} / dist.get_world_size()"},
             {"(flat, group)": "(flat)", "size(group)": "size()"}),
    )


def _with_means(ranks):
    """A model of two dtypes, equal on all ranks, with the means of these ranks' gradients.

    One parameter is frozen, and the last two are used nowhere: these have no gradients.
    """
    model = nn.Sequential(nn.Linear(7, 5).double(), nn.Linear(5, 7), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.data = seeded(name, *parameter.shape, dtype=parameter.dtype)
        if name in ("0.weight", "1.weight", "1.bias"):
            parameter.grad = sum(_gradient(name, parameter, rank) for rank in ranks) / len(ranks)
    return model


def _gradient(name, parameter, rank):
    if (name, rank) == ("1.bias", 0):
        return torch.zeros_like(parameter)  # as where no unit of this rank's samples was active
    return seeded(f"gradient of {name} on rank {rank}", *parameter.shape, dtype=parameter.dtype)


def _copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def _places(model):
    """Each gradient's identity, and where it lies."""
    return [(id(each.grad), each.grad is not None and each.grad.data_ptr())
            for each in model.parameters()]


def _facts(model, untouched, in_place, collectives, communicated):
    found = {fact: gradient for fact, gradient in gradients(model).items() if gradient is not None}
    digits = {f"what a float32 lacks of {fact}": gradient - gradient.float()
              for fact, gradient in found.items() if "`0.weight`" in fact}
    return {**found, **digits, "the list of the gradients that there are": list(found),
            "that the weights are not changed": untouched,
            "that each `.grad` is the same tensor as before": in_place,
            "the number of torch's collectives": collectives,
            "that the ranks communicate": communicated}
