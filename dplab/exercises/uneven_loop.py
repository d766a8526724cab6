"""Ranks whose lists of batches differ in length, and what one out of data has to bring."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.checks.composition import Held
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import optimizer_for
from dplab.exercises.average_gradients import average_gradients
from dplab.exercises.train_by_hand import (
    FROM_THE_NOTEBOOK,
    NOT_GIVEN,
    Steps,
    classifier,
    one_device,
    weights_of,
)
from dplab.workloads.digits import load_digits


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


# As they stand in the right answer.
WEIGHT = "dist.get_world_size() / samples"
LOSS = f"(loss * {WEIGHT})"
COUNTED, AVERAGED = "dist.all_reduce(samples)", "average_gradients(model)"
MINE = "batches[step] if step < len(batches) else"

# Of each rank the sizes of its batches; and the steps whose gradients are looked into: the first,
# and the first that a rank which has begun sits out.
SIZES: tuple[list[int], ...] = [3, 5], [4, 2, 5, 3], [], [6]
LOOKED_AT = 0, 2
STEPS = "the number of steps, of which each rank takes as many as the longest list has batches"


class UnevenLoop(Exercise):
    number = "4.5"
    title = "Repair a loop that hangs"
    minutes = 15
    seconds = 10.0
    tolerance = 1e-4
    too_long = (f"{Exercise.too_long} Does a rank without data bring zeros for a parameter for "
                "which the others have None, as for a frozen one? The ranks then average different "
                "lists of gradients. Bring zeros where the others have a gradient, and nowhere "
                "else.")
    solution = staticmethod(train_uneven)
    stub = staticmethod(train_uneven_stub)

    def prepare(self):
        digits = load_digits()
        return digits.train_images[-100:], digits.train_labels[-100:]  # not the notebook's first

    def trial(self, attempt):
        model = classifier(seed=0)
        optimizer = optimizer_for(model)
        steps = Steps(model, optimizer, LOOKED_AT)
        attempt(model, optimizer, *self.given, _batches(dist.get_rank()))
        samples = {name: index for rank in range(dist.get_world_size())
                   for names in _samples(rank) for name, index in names.items()}
        return {STEPS: len(steps.gradients),
                **steps.made_of(*self.given, dict.fromkeys(LOOKED_AT, samples)),
                **weights_of(model)}

    def expected(self, world_size):
        batches = [_batches(rank) for rank in range(world_size)]
        number = max(map(len, batches))
        model = classifier(seed=0)
        one_device(model, optimizer_for(model), *self.given,
                   [torch.cat([own[step] for own in batches if step < len(own)])
                    for step in range(number)])
        return {STEPS: number, **self._held(world_size, number),
                **weights_of(model)}

    def _held(self, world_size, number):
        """Each sample of a step has the same part in its gradient."""
        of_ranks = [_samples(rank) for rank in range(world_size)]
        groups = {f"each of the samples in rank {rank}'s batch {step}": list(names)
                  for rank, own in enumerate(of_ranks) for step, names in enumerate(own)}
        facts = {}
        for step in LOOKED_AT:
            right = [name for own in of_ranks if step < len(own) for name in own[step]]
            if step < number:
                facts[f"the gradient of step {step + 1}"] = Held(
                    dict.fromkeys(right, 1 / len(right)), groups)
        return facts

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
    slips = (
        Slip("All ranks stop when the shortest list ends. What the others still have is never "
             "trained on: go on until the longest ends.", {"ReduceOp.MAX": "ReduceOp.MIN"}),
        Slip("Each rank's mean loss has the same weight, and ranks without data count as well. So "
             "a sample in a small batch counts more than one in a large batch. Divide by the "
             "number of samples of all ranks in this step.", {WEIGHT: "1 / max(1, len(mine))"}),
        Slip("Each rank that has a batch counts the same. But the batches differ in size, and each "
             "*sample* has to count the same: divide by the number of samples of all ranks in this "
             "step.",
             {COUNTED: "left = torch.tensor(float(len(mine) > 0))\ndist.all_reduce(left)",
              WEIGHT: "dist.get_world_size() / left / max(1, len(mine))"}),
        Slip("You sum over the samples and do not divide by their number in this step.",
             {LOSS: "loss"}, {" / samples": ""}),
        Slip("The gradient is N times too small. You divide by all samples of this step, and "
             "`average_gradients` divides by the number of ranks once more.",
             {WEIGHT: "1 / samples"}),
        Slip("A rank that is out of data takes part in the average, but not in the step, so its "
             "weights stay behind. Every rank takes every step.",
             {"optimizer.step()": "if len(mine) > 0:\n    optimizer.step()"}),
        Slip("A rank that is out of data trains on some of its samples again. The step's gradient "
             "must come from the ranks that still have a batch: bring zeros.",
             {MINE: "batches[min(step, len(batches) - 1)] if batches else"},
             {MINE: "batches[step % len(batches)] if batches else"}),
        Slip("A rank that is out of data brings the gradients of the step before once more. Clear "
             "them first, so that it brings zeros.",
             {"optimizer.zero_grad()": "if step < len(batches):\n    optimizer.zero_grad()"}),
        Slip("When the first rank is out of data, the others go on without averaging. From there "
             "on each trains a model of its own.",
             {"for step in range(steps)": "first = torch.tensor(len(batches))\n"
              "dist.all_reduce(first, op=dist.ReduceOp.MIN)\nfor step in range(len(batches))",
              COUNTED: f"step < first and {COUNTED}", AVERAGED: f"step < first and {AVERAGED}",
              WEIGHT: f"({WEIGHT} if step < first else 1 / samples)"}),
        Slip("You divide by the mean number of samples of a step. The steps differ: ask for the "
             "number in each one.",
             {"torch.tensor(len(mine))": "torch.tensor(sum(map(len, batches)) / steps)"}),
        Slip("A rank that is out of data makes no call: it does not average, or its gradients are "
             "None, and `average_gradients` skips those. The others wait for it. It has to bring "
             "zeros, in as many steps as the longest list has.",
             {LOSS: f"if len(mine) > 0:\n    {LOSS}"},
             {COUNTED: "pass", LOSS: f"if len(mine) > 0:\n    {LOSS}"},
             {COUNTED: "pass", AVERAGED: f"if len(mine) > 0:\n    {AVERAGED}"}, hangs=True),
        Slip("A barrier does not help: one rank waits in it, and the others wait in their next "
             "average. All ranks have to take the same number of steps.",
             {"range(steps)": "range(len(batches))", COUNTED: "pass", "optimizer.step()":
              "optimizer.step()\nif step == len(batches) - 1:\n    dist.barrier()"}, hangs=True),
        Slip("A rank that is out of data still makes fewer calls than the others, and one of them "
             "waits for it. All ranks have to take the same number of steps: let them agree on it "
             "before the first.", {"range(steps)": "range(len(batches))"}, hangs=True),
        Slip(NOT_GIVEN, {"steps = torch": f"{FROM_THE_NOTEBOOK}\nsteps = torch"}),
        Slip("This rank has no batch for this step. It has to take part all the same, with zeros.",
             {f"{MINE} torch.tensor([], dtype=torch.int64)": "batches[step]"}),
    )


def _batches(rank):
    """This rank's batches: their number and their sizes are its own, and rank 2 has none."""
    sizes = SIZES[rank]
    return list(torch.arange(25 * rank, 25 * rank + sum(sizes)).split(sizes)) if sizes else []


def _samples(rank):
    """The same by name, a dict for each batch."""
    return [{f"sample {place} of rank {rank}'s batch {step}": index
             for place, index in enumerate(batch)} for step, batch in enumerate(_batches(rank))]
