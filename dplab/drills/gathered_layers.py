"""Chapter 09's drills: training that no rank holds whole, gathered one layer ahead, and sick.

The job runs on two to four real ranks. Its layers lie in pairs, whose two products are added to a
stream, so that the order within a pair matters to nobody but the collectives.
"""

import random
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dplab import run
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument, print_table

WIDTH, STEPS, SAMPLES = 24, 8, 6  # N divides the elements of a layer


@dataclass(frozen=True)
class Settings:
    layers: int
    rate: float
    seed: int


@dataclass
class Seen:
    """Of one rank: the loss of each step; of step 1 its calls, with layers, and what it used."""

    losses: list[float] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    used: list[tuple[int, float]] = field(default_factory=list)  # layer and norm, in turn
    gradients: list[float] = field(default_factory=list)  # the norm of each layer's chunk
    most: int = 0  # whole layers, or memory for them, at once


# The job's parts


def order_of(layers, x):
    return list(range(layers))


class Store:
    """Chunks of layers, and memory for whole ones, which is used again."""

    def __init__(self, chunks, seen):
        self.chunks, self.seen = chunks, seen
        self.whole, self.spare, self.gradients = {}, [], {}

    def gather(self, layer):
        if layer not in self.whole:
            memory = self.spare.pop() if self.spare else torch.empty(WIDTH * WIDTH)
            self.seen.calls.append(("gather", layer))
            dist.all_gather_single(memory, self.chunks[layer])
            self.whole[layer] = memory
        self.seen.most = max(self.seen.most, len(self.whole) + len(self.spare))
        return self.whole[layer].view(WIDTH, WIDTH)

    def free(self, layer):
        self.spare.append(self.whole.pop(layer))

    def reduce(self, layer, gradient):
        flat = gradient.flatten() / dist.get_world_size()
        mean = torch.empty_like(self.chunks[layer])
        self.seen.calls.append(("reduce", layer))
        dist.reduce_scatter_single(mean, flat)
        self.gradients[layer] = self.gradients.get(layer, 0) + mean


def train_step(store, order, x, target):
    stream, outputs = [x] * (len(order) // 2 + 1), {}
    for layer, following in zip(order, [*order[1:], None], strict=True):
        weight = store.gather(layer)
        if following is not None:
            store.gather(following)
        outputs[layer] = torch.tanh(stream[layer // 2] @ weight)
        store.seen.used.append((layer, weight.norm().item()))
        store.free(layer)
        if layer ^ 1 in outputs:  # both of the pair
            stream[layer // 2 + 1] = stream[layer // 2] + outputs[layer] + outputs[layer ^ 1]

    back = order[::-1]
    to_stream = [2 * (stream[-1] - target) / target.numel()] * len(stream)
    for layer, following in zip(back, [*back[1:], None], strict=True):
        weight = store.gather(layer)
        if following is not None:
            store.gather(following)
        to_product = to_stream[layer // 2 + 1] * (1 - outputs[layer] ** 2)
        before = to_stream[layer // 2] if layer ^ 1 not in outputs else to_stream[layer // 2 + 1]
        to_stream[layer // 2] = before + to_product @ weight.T
        store.seen.used.append((layer, weight.norm().item()))
        store.reduce(layer, stream[layer // 2].T @ to_product)
        store.free(layer)
        del outputs[layer]  # its pair's other one comes next
    return (stream[-1] - target).square().mean().item()


def train(parts, settings):
    """Runs the job on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = [weight.flatten().chunk(ranks)[rank].clone() for weight in weights_of(settings)]
    losses, first = [], None
    for number in range(STEPS):
        store = parts["Store"](chunks, Seen())
        x, target = batch_of(settings, number, rank)
        order = parts["order_of"](settings.layers, x)
        losses.append(parts["train_step"](store, order, x, target))
        if first is None:
            first = store.seen
            first.gradients = [store.gradients[layer].norm().item()
                               for layer in range(settings.layers)]
        for layer, gradient in store.gradients.items():
            chunks[layer] -= settings.rate * gradient
    first.losses = losses
    return first


def weights_of(settings):
    generator = torch.Generator().manual_seed(settings.seed)
    return [torch.randn(WIDTH, WIDTH, generator=generator) * (0.1 + 0.02 * layer)
            for layer in range(settings.layers)]


def batch_of(settings, number, rank):
    """A rank's samples: those of odd ranks are negative, as where data are sorted."""
    generator = torch.Generator().manual_seed(1000 * settings.seed + 10 * number + rank)
    x = torch.rand(SAMPLES, WIDTH, generator=generator) * (-1) ** rank
    return x, torch.sin(3 * x).roll(1, dims=1)


# Readings


@dataclass
class Readings:
    ranks: list[Seen]
    settings: Settings
    losses: list[float]  # of one process that trains on all ranks' samples
    gradients: list[list[float]]  # by rank, what `Seen.gradients` should be
    norms: list[float]  # of each layer's weights in step 1

    def sequences(self):
        return [rank.calls for rank in self.ranks]

    def first_apart(self):
        """The first call that is not of the same layer on all ranks, or None."""
        return next((place for place, calls in enumerate(zip(*self.sequences(), strict=False))
                     if len(set(calls)) > 1), None)

    def sent(self):
        """How many reductions there are for each layer, on rank 0."""
        calls = [layer for what, layer in self.ranks[0].calls if what == "reduce"]
        return len(calls) / self.settings.layers

    def factors(self):
        """How many times as long each gradient is as it should be, over ranks and layers."""
        return [have / right for rank, rights in zip(self.ranks, self.gradients, strict=True)
                for have, right in zip(rank.gradients, rights, strict=True)]

    def strange(self):
        """On each rank, of how many computations the weights are not their layer's."""
        return [sum(abs(norm / self.norms[layer] - 1) > 1e-3 for layer, norm in rank.used)
                for rank in self.ranks]


def in_one_process(settings, ranks):
    """The losses, the gradients of step 1 as each rank should have them, and the weights' norms."""
    weights = [weight.requires_grad_() for weight in weights_of(settings)]
    norms = [weight.norm().item() for weight in weights]
    losses, first = [], []
    for number in range(STEPS):
        x, target = (torch.cat(part) for part in zip(*(
            batch_of(settings, number, rank) for rank in range(ranks)), strict=False))
        for one, other in zip(weights[::2], weights[1::2], strict=True):
            x = x + torch.tanh(x @ one) + torch.tanh(x @ other)
        loss = (x - target).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        losses.append(loss.item())
        first = first or [[each.flatten().chunk(ranks)[rank].norm().item() for each in gradients]
                          for rank in range(ranks)]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= settings.rate * gradient
    return losses, first, norms


# Suspects


def sent_in_words(readings):
    return f"{readings.sent():g} reduction{'s' * (readings.sent() != 1)}"


def swapped(readings):
    place = readings.first_apart()
    if place is None:
        return False, (f"All ranks make the same {len(readings.ranks[0].calls)} calls, for the "
                       "same layers, in the same sequence.")
    found = " and ".join(f"layer {calls[place][1]} on rank {rank}"
                         for rank, calls in enumerate(readings.sequences()))
    return True, f"Call {place} in the sequence is for {found}."


def doubled(readings):
    return readings.sent() == 2, (f"{sent_in_words(readings)} for each layer in a step, and "
                                  f"gradients {min(readings.factors()):.2f} to "
                                  f"{max(readings.factors()):.2f} times as long as they should be.")


def early(readings):
    strange = max(readings.strange())
    return strange > 0 and readings.first_apart() is None, (
        f"Of {len(readings.ranks[0].used)} computations, a rank makes {strange} with weights that "
        "are not those of their layer.")


def undivided(readings):
    factors, ranks = readings.factors(), len(readings.ranks)
    fits = all(abs(factor - ranks) < 1e-2 for factor in factors) and readings.sent() == 1
    return fits, (f"Gradients are {min(factors):.2f} to {max(factors):.2f} times as long as they "
                  f"should be, on {ranks} ranks, with {sent_in_words(readings)} a layer.")


def hoarded(readings):
    most = max(rank.most for rank in readings.ranks)
    return most >= readings.settings.layers, (
        f"A rank has memory for {most} whole layers at once, of {readings.settings.layers}.")


SUSPECTS = (
    Suspect("swapped gathers", "Ranks ask for the layers in different orders.", "calls", swapped),
    Suspect("doubled reduction", "Each gradient goes to its owners twice.", "calls", doubled),
    Suspect("early reuse", "A layer's memory is used again before the layer has computed.",
            "weights", early),
    Suspect("undivided sum", "Owners get the sum over the ranks in place of the mean.",
            "gradients", undivided),
    Suspect("hoarded layers", "Layers stay whole after they have computed.", "memory", hoarded),
)

_SEND = "store.reduce(layer, stream[layer // 2].T @ to_product)"
_AHEAD = "if following is not None:\n            store.gather(following)\n        "
CASES = (
    Case("a", "swapped gathers", order_of, (
        Fault({"list(range(layers))":
               "sorted(range(layers), key=lambda layer: (layer // 2, layer * x.sum().sign()))"},
              "Since our last release, training on {n} GPUs is worse than on one. No error, no "
              "warning.", {"apart"}),
        Fault({"return list(range(layers))":
               "order = list(range(layers))\nif dist.get_rank() == 1:\n"
               "    order[2], order[3] = order[3], order[2]\nreturn order"},
              "All {n} GPUs are busy and nothing fails. The loss is not the one of a single GPU.",
              {"apart"}))),
    Case("b", "doubled reduction", train_step, (
        Fault({_SEND: f"{_SEND}\n{_SEND}"},
              "On {n} GPUs we get another curve than on one GPU, as if somebody had touched the "
              "rate. No error, no warning.", {"apart"}),
        Fault({"return (stream": "for layer in back:\n    store.reduce(layer, store.kept[layer])\n"
                                 "return (stream",
               "stream, outputs = [x] * (len(order) // 2 + 1), {}":
               "stream, outputs = [x] * (len(order) // 2 + 1), {}\nstore.kept = {}",
               _SEND: "store.kept[layer] = stream[layer // 2].T @ to_product\n"
                      "store.reduce(layer, store.kept[layer])"},
              "The loss on {n} GPUs moves in larger steps than on one. No error, no warning.",
              {"apart"}))),
    Case("c", "early reuse", train_step, (
        Fault({f"{_AHEAD}outputs[layer] = torch.tanh(stream[layer // 2] @ weight)":
               "store.free(layer)\nif following is not None:\n    store.gather(following)\n"
               "outputs[layer] = torch.tanh(stream[layer // 2] @ weight)",
               "weight.norm().item()))\n        store.free(layer)\n        if layer ^ 1 in outputs":
               "weight.norm().item()))\nif layer ^ 1 in outputs"},
              "Since our last release, the loss on {n} GPUs is another one than on one GPU, from "
              "step 1 on.", {"apart", "from step 1"}),
        Fault({f"{_AHEAD}to_product =":
               "store.free(layer)\nif following is not None:\n    store.gather(following)\n"
               "to_product =",
               f"{_SEND}\n        store.free(layer)": _SEND},
              "On {n} GPUs the first loss is right to the last digit, and the others are not. No "
              "error, no warning.", {"apart", "right in step 1"}))),
    Case("d", "undivided sum", Store, (
        Fault({"gradient.flatten() / dist.get_world_size()": "gradient.flatten()"},
              "On {n} GPUs we get another curve than on one GPU, as if somebody had touched the "
              "rate.", {"apart", "right in step 1"}),
        Fault({"self.gradients.get(layer, 0) + mean":
               "self.gradients.get(layer, 0) + mean * dist.get_world_size()"},
              "The loss on {n} GPUs moves in larger steps than on one. Nothing else has changed.",
              {"apart", "right in step 1"}))),
    Case("e", "hoarded layers", Store, (
        Fault({"self.spare.append(self.whole.pop(layer))": "pass"},
              "We bought {n} GPUs, and they are not worth their price. No error, no warning.",
              set()),
        Fault({"self.spare.pop() if self.spare else ": "",
               "self.spare.append(self.whole.pop(layer))":
               "self.spare.append(self.whole[layer])\nself.whole.pop(layer)"},
              "Since our last release, training on {n} GPUs is not what we planned. No error, no "
              "warning.", set()))),
)


# The jobs


class GatheredLayers(SickJob):
    """Training whose layers are gathered, used and freed."""

    chapter = 9
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Settings:
        return Settings(layers=2 * chances.randrange(4, 6), rate=chances.uniform(0.05, 0.08),
                        seed=chances.randrange(1000))

    def _description(self):
        layers = self._settings.layers
        return (f"The job runs on {self._world_size} ranks. The model has {layers} layers of "
                f"{WIDTH} × {WIDTH} weights. They lie in {layers // 2} pairs of parallel branches, "
                "0 and 1, 2 and 3, and so on; within a pair, either may come first. A layer is "
                "gathered in forward and in backward, one ahead, so two are whole at a time. The "
                f"optimizer is SGD, and there are {STEPS} steps.")

    def _run(self, part):
        parts = {each.__name__: each for each in (order_of, Store, train_step)}
        ranks = run(train, self._world_size, parts | {self._part_name: part}, self._settings,
                    backend="gloo")
        return Readings(ranks, self._settings, *in_one_process(self._settings, self._world_size))

    @instrument
    def losses(self) -> None:
        """The loss of each step: on each rank, their mean, and in one process."""
        ranks = self._readings.ranks
        print_table(["step", *(f"rank {rank}" for rank in range(len(ranks))), "mean",
                     "one process"],
                    *([number + 1, *(f"{rank.losses[number]:.6f}" for rank in ranks),
                       f"{sum(rank.losses[number] for rank in ranks) / len(ranks):.6f}",
                       f"{self._readings.losses[number]:.6f}"] for number in range(STEPS)))

    @instrument
    def calls(self) -> None:
        """The collectives of each rank in step 1, in sequence, with their layers."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}:", " ".join(f"{what}-{layer}" for what, layer in each.calls))

    @instrument
    def gradients(self) -> None:
        """The norm of each layer's gradient on its owners in step 1, beside one process."""
        ranks = self._readings.ranks
        print_table(["layer", *(f"rank {rank}{what}" for rank in range(len(ranks))
                                for what in ("", " alone"))],
                    *([layer, *(f"{value:.6f}" for rank, right in zip(
                        ranks, self._readings.gradients, strict=True)
                        for value in (rank.gradients[layer], right[layer]))]
                      for layer in range(self._readings.settings.layers)))
        print("alone: the same chunk in one process that has all samples")

    @instrument
    def weights(self) -> None:
        """The norm of the weights that each computation of step 1 used, beside its layer's own."""
        readings = self._readings
        print_table(["computation", "layer", "its weights",
                     *(f"rank {rank}" for rank in range(len(readings.ranks)))],
                    *([f"{'forward' if place < readings.settings.layers else 'backward'} {place}",
                       layer, f"{readings.norms[layer]:.4f}",
                       *(f"{rank.used[place][1]:.4f} ({rank.used[place][0]})"
                         for rank in readings.ranks)]
                      for place, (layer, _) in enumerate(readings.ranks[0].used)))
        print("in brackets: the layer that the rank computed")

    @instrument
    def memory(self) -> None:
        """For how many whole layers each rank has memory at once in step 1."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}: {each.most} of {self._readings.settings.layers}")
