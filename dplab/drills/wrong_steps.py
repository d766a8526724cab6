"""Chapter 07's drills: a recipe that went to more GPUs, and trains something else there.

The job trains digits by a recipe for one global batch: SGD, a peak rate, some steps in which the
rate rises. Real ranks share each batch, and each accumulates the gradients of micro-batches, the
last of which is smaller. One of its parts has a fault. The instruments show the rate of each step,
the samples behind it, and how much of each micro-batch's gradient the optimizer gets.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from dplab import run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, draw, instrument, print_table
from dplab.workloads.digits import TRAIN_SIZE, digits_classifier, load_digits

NEAR = 0.02  # relative: far above rounding, far below what a fault changes
STEPS = 24  # that the recipe takes
LOOKED_AT = (0, 7, 15)  # the steps in which the gradients are taken apart


@dataclass(frozen=True)
class Recipe:
    """For one global batch. ``local``: samples that a GPU takes at once; ``seed``: of the order."""

    batch: int
    peak: float
    rising: int
    local: int
    seed: int


# The parts


def rate_at(step, recipe):
    return recipe.peak * min(1, (step + 1) / recipe.rising)


def own_samples(order, step, recipe):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_all = order[step * recipe.batch : (step + 1) * recipe.batch]
    return of_all[rank::ranks]


def accumulate(model, mine, recipe, loss_of):
    for few in mine.split(recipe.local):
        loss = loss_of(model, few) * len(few) / len(mine)
        loss.backward()


def average(model):
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


@dataclass(frozen=True)
class Parts:
    """What `train` is made of."""

    rate_at: Callable = rate_at
    own_samples: Callable = own_samples
    accumulate: Callable = accumulate
    average: Callable = average


# The loop


@dataclass
class Recording:
    """What one rank did. ``times``: by step that was looked at, for each micro-batch of this rank,
    how often its right share is in the gradient that the optimizer got.
    """

    rates: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)


def train(parts: Parts, recipe: Recipe) -> Recording:
    """Trains on each rank for the samples of `STEPS` of the recipe's batches."""
    digits = load_digits()

    def loss_of(model, indices):
        return F.cross_entropy(model(digits.train_images[indices]), digits.train_labels[indices])

    record, model = Recording(), digits_classifier(recipe.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    generator, step = torch.Generator().manual_seed(recipe.seed), 0
    epochs = [torch.randperm(TRAIN_SIZE, generator=generator) for _ in range(STEPS)]
    order = torch.cat(epochs)[: STEPS * recipe.batch]
    while len(mine := parts.own_samples(order, step, recipe)):
        optimizer.param_groups[0]["lr"] = parts.rate_at(step, recipe)
        with torch.no_grad():
            loss = loss_of(model, mine)
            dist.all_reduce(loss)
        record.losses.append(loss.item() / dist.get_world_size())
        record.rates.append(optimizer.param_groups[0]["lr"])
        record.samples.append(mine.tolist())
        shares = own_shares(model, mine, recipe, loss_of) if step in LOOKED_AT else None
        optimizer.zero_grad()
        parts.accumulate(model, mine, recipe, loss_of)
        parts.average(model)
        if shares is not None:
            gradient = parameters_to_vector([each.grad for each in model.parameters()
                                             if each.grad is not None])
            record.times[step] = how_often(gradient, shares)
        optimizer.step()
        step += 1
    return record


def own_shares(model, mine, recipe, loss_of):
    """The gradient of each of this rank's micro-batches, as it should be in the global one."""
    rows: list[torch.Tensor] = []
    for few in mine.split(recipe.local):
        gradient = torch.autograd.grad(loss_of(model, few), list(model.parameters()))
        rows.append(parameters_to_vector(gradient) * len(few) / len(mine) / dist.get_world_size())
    return torch.stack(rows)


def how_often(gradient, shares) -> list[float]:
    """How often each of this rank's shares is in the gradient, by least squares over all ranks'."""
    every = [torch.empty_like(shares) for _ in range(dist.get_world_size())]
    dist.all_gather(every, shares)
    basis = torch.cat(every).double().T
    found = torch.linalg.lstsq(basis, gradient.double()[:, None], driver="gelsd").solution[:, 0]
    return found.view(dist.get_world_size(), -1)[dist.get_rank()].tolist()


# Readings


@dataclass
class Readings:
    """What the ranks of a job did, and what one rank does with the same recipe."""

    ranks: list[Recording]
    one_rank: Recording
    recipe: Recipe

    @property
    def sizes(self) -> list[int]:
        """Of a rank's micro-batches in a step."""
        return [len(few) for few in torch.arange(len(self.ranks[0].samples[0])).split(
            self.recipe.local)]

    @property
    def in_a_step(self) -> int:
        """Different samples behind the first step."""
        return len({sample for rank in self.ranks for sample in rank.samples[0]})

    @property
    def rates(self) -> list[float]:
        """Of each step, beside the recipe's."""
        return [rate / rate_at(step, self.recipe) for step, rate in enumerate(self.ranks[0].rates)]

    def times_like(self, pattern) -> bool:
        """Whether each micro-batch is in each gradient that was looked at as often as this says."""
        return all(abs(found - wanted) < NEAR * max(1, wanted)
                   for rank in self.ranks for times in rank.times.values()
                   for found, wanted in zip(times, pattern, strict=True))

    def said_of_times(self) -> str:
        times = self.ranks[0].times[0]
        return (f"In step 1 rank 0's micro-batches of {', '.join(map(str, self.sizes))} samples "
                f"are in the gradient {', '.join(map(in_digits, times))} times as much "
                "as they should be.")


def in_digits(times):
    """With three digits, since 0.875 is common, and no sign before a zero."""
    return f"{round(times, 3) + 0.0:.3f}"


# Suspects


def rate_times_ranks(readings):
    ranks, rates = len(readings.ranks), readings.rates
    fits = all(abs(rate - ranks) < NEAR * ranks for rate in rates)
    span = dict.fromkeys(f"{rate:.2f}" for rate in (min(rates), max(rates)))
    return fits, f"On {ranks} ranks the rate is {' to '.join(span)} times that of the recipe."


def sum_of_micro_batches(readings):
    whole = sum(readings.sizes)
    return (readings.times_like([whole / size for size in readings.sizes]),
            readings.said_of_times())


def sum_of_ranks(readings):
    ranks = len(readings.ranks)
    return readings.times_like([ranks] * len(readings.sizes)), readings.said_of_times()


def peak_too_early(readings):
    rates = readings.ranks[0].rates
    first = 1 + next(step for step, rate in enumerate(rates) if rate > 0.999 * max(rates))
    fits = first < readings.recipe.rising and abs(max(rates) / readings.recipe.peak - 1) < NEAR
    return fits, (f"The rate is at its largest from step {first} on, where it is "
                  f"{max(rates):.3g}; by the recipe it is {readings.recipe.peak:g} from step "
                  f"{readings.recipe.rising} on.")


def only_the_last(readings):
    return (readings.times_like([0] * (len(readings.sizes) - 1) + [1]), readings.said_of_times())


def more_samples(readings):
    return readings.in_a_step > readings.recipe.batch, (
        f"Behind step 1 there are {readings.in_a_step} samples, and the recipe's batch has "
        f"{readings.recipe.batch}.")


def each_counts_alike(readings):
    alike = sum(readings.sizes) / len(readings.sizes)
    differ = len(set(readings.sizes)) > 1
    return (differ and readings.times_like([alike / size for size in readings.sizes]),
            readings.said_of_times())


SUSPECTS = (
    Suspect("needless scaling", "The rate grew with the ranks, though the batch did not.", "rates",
            rate_times_ranks),
    Suspect("undivided accumulation", "The micro-batches' gradients are summed up, not averaged.",
            "gradients", sum_of_micro_batches),
    Suspect("undivided all-reduce", "The ranks' gradients are summed up, not averaged.",
            "gradients", sum_of_ranks),
    Suspect("hasty warm-up", "The rate reaches its peak before the recipe's step.", "rates",
            peak_too_early),
    Suspect("dropped accumulation", "Only the last micro-batch's gradient is left.", "gradients",
            only_the_last),
    Suspect("unintended growth", "A step has more samples than the recipe's batch.", "samples",
            more_samples),
    Suspect("lopsided mean", "Micro-batches count alike, though their sizes differ.", "gradients",
            each_counts_alike),
)

_LOSS = "loss_of(model, few) * len(few) / len(mine)"
CASES = (
    Case("a", "needless scaling", rate_at, (
        Fault({"recipe.peak *": "dist.get_world_size() * recipe.peak *"},
              "On one GPU the recipe trained without a jump. On {n} the loss leaves that of one "
              "GPU after a few steps. We changed nothing but the launcher.",
              {"after a few steps"}),)),
    Case("b", "undivided accumulation", accumulate, (
        Fault({_LOSS: "loss_of(model, few)"},
              "With {n} GPUs the first loss is the right one, to all digits. Then it goes its own "
              "way. The recipe is the one that everybody uses.", {"after a few steps"}),)),
    Case("c", "undivided all-reduce", average, (
        Fault({"parameter.grad /= dist.get_world_size()": "pass"},
              "The first loss on {n} GPUs is that of one GPU, and a few steps later it is not. Can "
              "it be the order of the sums? They say that floats are not exact.",
              {"after a few steps"}),)),
    Case("d", "hasty warm-up", rate_at, (
        Fault({"(step + 1) /": "dist.get_world_size() * (step + 1) /"},
              "The paper's settings, {n} GPUs in place of one, the same batch. The early losses "
              "are not those of one GPU. Is it our data?", {"after a few steps"}),)),
    Case("e", "dropped accumulation", accumulate, (
        Fault({"loss = ": "model.zero_grad()\nloss = "},
              "It trains on {n} GPUs, the loss falls, everybody is happy. But it is not the curve "
              "of one GPU, after a few steps.", {"after a few steps"}),)),
    Case("f", "unintended growth", own_samples, (
        Fault({"order[step * recipe.batch : (step + 1) * recipe.batch]":
               "order[step * ranks * recipe.batch : (step + 1) * ranks * recipe.batch]"},
              "On {n} GPUs the job is done much earlier than on one, as it should be. Only the "
              "model is worse.", {"fewer steps"}),)),
    Case("g", "lopsided mean", accumulate, (
        Fault({_LOSS: "loss_of(model, few) / len(mine.split(recipe.local))"},
              "Nearly the curve of one GPU, but not quite: on {n} GPUs the losses differ a little "
              "after a few steps. A reviewer wants to know why.",
              {"after a few steps"}),)),
)


class WrongSteps(SickJob):
    """A recipe on several ranks whose steps are not those of the recipe."""

    chapter = 7
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Recipe:
        local = 2 * chances.randrange(3, 6)
        mine = 3 * local + local // 2  # three whole micro-batches and a half
        return Recipe(self._world_size * mine, peak=0.15, rising=chances.randrange(6, 10),
                      local=local, seed=chances.randrange(1000, 1_000_000))

    def _description(self):
        recipe = self._settings
        return (f"The recipe: batches of {recipe.batch}, SGD with momentum, a rate that rises to "
                f"{recipe.peak:g} until step {recipe.rising}, {STEPS} steps. It runs on "
                f"{self._world_size} ranks, which share each batch. A rank takes {recipe.local} "
                "samples at once, and adds up the gradients of several such micro-batches for one "
                "step.")

    def _run(self, part):
        parts = replace(Parts(), **{self._part_name: part})
        [one] = run(train, 1, Parts(), self._settings, backend="gloo")
        return Readings(run(train, self._world_size, parts, self._settings, backend="gloo"), one,
                        self._settings)

    @instrument
    def losses(self) -> None:
        """The loss of each step, on these ranks and on one."""
        readings = self._readings
        curves = {"one rank": readings.one_rank.losses, "these ranks": readings.ranks[0].losses}
        draw(show.loss_curves, curves, title="Loss of each step's samples", note="")
        steps = (0, 1, 2, 3, *range(5, STEPS, 6))
        print_table(["step", *(step + 1 for step in steps)], *(
            [name, *(f"{losses[step]:.4f}" if step < len(losses) else "" for step in steps)]
            for name, losses in curves.items()))

    @instrument
    def rates(self) -> None:
        """The rate of each step, and that of the recipe."""
        readings = self._readings
        steps = (0, 1, 2, 3, *range(5, STEPS, 3))
        rows = {f"rank {rank}": each.rates for rank, each in enumerate(readings.ranks)}
        rows["recipe"] = [rate_at(step, readings.recipe) for step in range(STEPS)]
        print_table(["step", *(step + 1 for step in steps)], *(
            [name, *(f"{rates[step]:.4f}" if step < len(rates) else "" for step in steps)]
            for name, rates in rows.items()))

    @instrument
    def samples(self) -> None:
        """How many samples each rank takes in a step, and in which micro-batches."""
        readings = self._readings
        for rank, each in enumerate(readings.ranks):
            print(f"rank {rank}: {len(each.samples[0])} samples in step 1, as "
                  f"{' + '.join(map(str, readings.sizes))}; {len(each.samples)} steps")
        print(f"different samples in step 1, of all: {readings.in_a_step}")

    @instrument
    def gradients(self) -> None:
        """How much of each micro-batch's gradient the optimizer gets, where 1 is right."""
        readings = self._readings
        print("1 is what a micro-batch has in the gradient of all the step's samples")
        for step in readings.ranks[0].times:
            print_table([f"step {step + 1}", *map(str, range(1, 1 + len(readings.sizes)))], *(
                [f"rank {rank}", *map(in_digits, recording.times[step])]
                for rank, recording in enumerate(readings.ranks)))
