"""Chapter 04's drills: training that raises no error, goes on, and is wrong.

The job is that of `digit_training`, on two to four real ranks, with a fault in one of its parts.
The instruments compare the ranks with each other, and with one process that trains on the same
global batches.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab import run, show
from dplab.drills import digit_training as healthy
from dplab.drills.digit_training import Parts, Recording, Settings, Step, Tensors
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, draw, instrument, print_table
from dplab.workloads.digits import TEST_SIZE, TRAIN_SIZE, load_digits

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ROUNDING = 1e-3  # of a gradient's length: far above what the order of a sum changes


# A part of one job, in the place of `digit_training.averager`


def averager_in_buckets(model):
    def average():
        gradients = [each.grad for each in model.parameters() if each.requires_grad]
        for bucket in range((len(gradients) + 3) // 4):
            four = gradients[4 * bucket : 4 * bucket + 4]
            message = parameters_to_vector(four) / dist.get_world_size()
            dist.all_reduce(message)
            vector_to_parameters(message, four)

    return average


# Readings


@dataclass
class Readings:
    """What the ranks of a job did, and what one process did on the same global batches."""

    ranks: list[Recording]
    one_process: Recording

    @property
    def losses(self) -> list[float]:
        """The loss of each step, the mean over the ranks."""
        return [sum(each.loss for each in step) / len(self.ranks) for step in self.steps]

    @property
    def steps(self) -> Iterator[tuple[Step, ...]]:
        """Each step, as all ranks took it."""
        return zip(*(rank.steps for rank in self.ranks), strict=True)

    def in_epoch(self, epoch: int) -> list[tuple[Step, ...]]:
        return [step for step in self.steps if step[0].epoch == epoch]

    def samples(self, epoch: int) -> list[list[int]]:
        """What each rank took in this epoch, in the order in which it took them."""
        return [[sample for step in steps for sample in step.samples]
                for steps in zip(*self.in_epoch(epoch), strict=True)]

    def taken_by_several(self, epoch: int) -> int:
        """How many samples more than one rank took in this epoch."""
        ranks = Counter(sample for own in self.samples(epoch) for sample in set(own))
        return sum(count > 1 for count in ranks.values())

    def right(self, rank: int) -> torch.Tensor:
        """Which digits of the test set one process gets right with this rank's final model."""
        model, digits = healthy.make_model(0).eval(), load_digits()
        model.load_state_dict(self.ranks[rank].steps[-1].state)
        return model(digits.test_images).argmax(dim=1) == digits.test_labels

    def accuracies(self) -> tuple[float, float]:
        """What the log reports in the end, and the right answers among those evaluated."""
        right = torch.cat([self.right(rank)[each.evaluations[-1].samples]
                           for rank, each in enumerate(self.ranks)])
        return self.ranks[0].evaluations[-1].reported, right.float().mean().item()


def spread(ranks: Iterable[Tensors]) -> dict[str, float]:
    """By tensor, how far two ranks are from one another at most."""
    first, *others = ranks
    stacked = {name: torch.stack([first[name], *(each[name] for each in others)]) for name in first}
    return {name: (each.amax(dim=0) - each.amin(dim=0)).max().item()
            for name, each in stacked.items()}


# Suspects


def factor(readings):
    gradient, goal = (torch.cat([each.flatten() for each in process.steps[0].gradients.values()])
                      for process in (readings.ranks[0], readings.one_process))
    factor = (gradient @ goal / (goal @ goal)).item()
    rest = (gradient - factor * goal).norm() / goal.norm()
    ratio = (gradient.norm() / goal.norm()).item()
    exactly = "exactly " if rest < ROUNDING and factor > 1 + ROUNDING else ""
    return bool(exactly), (f"In step 1 the gradient that the optimizer gets on rank 0 is {exactly}"
                           f"{ratio:.2f} times as long as that of one process.")


def overlap(readings):
    ranks, several = readings.samples(0), readings.taken_by_several(0)
    return several > 0, (f"In epoch 0 the ranks took {sum(map(len, ranks)):,} samples, of which "
                         f"{len(set().union(*ranks)):,} are distinct. More than one rank took "
                         f"{several:,} of these.")


def repetition(readings):
    first, last = (readings.samples(epoch)[0] for epoch in (0, healthy.EPOCHS - 1))
    return first == last, (f"On rank 0, epoch 0 begins with the samples {_listed(first[:4])}, and "
                           f"epoch {healthy.EPOCHS - 1} with {_listed(last[:4])}.")


def beginnings(readings):
    widths = spread(rank.before[0] for rank in readings.ranks)
    name = max(widths, key=lambda name: widths[name])
    differ = [name for name, width in widths.items() if width > 0]
    where = f" (of `{name}`)" if differ else ""
    return bool(differ), (f"Before step 1, {len(differ)} of {len(widths)} tensors differ between "
                          f"ranks; the largest difference is {widths[name]:.2g}{where}.")


def statistics(readings):
    widths = spread(rank.steps[-1].state for rank in readings.ranks)
    largest = max(width for name, width in widths.items() if "running" in name)
    return largest > 0, ("After the last step the running means and variances of two ranks differ "
                         f"by {largest:.2g} at most.")


def metric(readings):
    reported, counted = readings.accuracies()
    evaluated = [index for rank in readings.ranks for index in rank.evaluations[-1].samples]
    wrong = abs(reported - counted) > 1e-6 or len(evaluated) != TEST_SIZE
    return wrong, (f"Last in the log stands {reported:.2%}. The ranks evaluated {len(evaluated)} "
                   f"digits, {len(set(evaluated))} of them distinct, and got {counted:.2%} of "
                   f"them right. The test set has {TEST_SIZE}.")


def continuation(readings):
    saved = readings.ranks[0].stopped
    for rank, each in enumerate(readings.ranks):
        for what, before in saved.items():
            if before != (after := each.went_on[what]):
                return True, (f"The {what} was {before:.4g} when rank 0 saved the checkpoint, and "
                              f"rank {rank} goes on with {after:.4g}.")
    return False, ("All ranks go on as rank 0 stopped: in epoch {} at batch {}, with a learning "
                   "rate of {:.4g} and momenta of length {:.4f}.".format(*saved.values()))


def left_out(readings):
    for number, step in enumerate(readings.steps, 1):
        widths = spread(each.gradients for each in step)
        if names := [f"`{name}`" for name, width in widths.items() if width > 0]:
            return True, (f"In step {number} the optimizers get different gradients of "
                          f"{' and '.join(names)} on different ranks.")
    return False, (f"In all {len(readings.losses)} steps, the optimizers of all ranks got the same "
                   "gradients, to the last bit.")


SUSPECTS = (
    Suspect("wrong divisor", "Gradients are summed over the ranks, not divided by their number.",
            "gradients", factor),
    Suspect("overlapping parts", "Ranks take the same samples, all of them or some.", "samples",
            overlap),
    Suspect("repeated order", "Each epoch has the order of the first one.", "samples", repetition),
    Suspect("different start", "The ranks do not all begin with rank 0's weights.", "weights",
            beginnings),
    Suspect("own statistics", "BatchNorm takes each rank's own mean and variance.", "weights",
            statistics),
    Suspect("biased metric", "The accuracy in the log gives ranks or samples a wrong weight.",
            "accuracy", metric),
    Suspect("lossy restart", "A rank goes on from another state than the one that was saved.",
            "checkpoint", continuation),
    Suspect("left-out layer", "The gradients of some layers stay each rank's own.", "gradients",
            left_out),
)

CASES = (
    Case("a", "wrong divisor", healthy.averager, (
        Fault({"parameter.grad /= dist.get_world_size()\n                ": ""},
              "I put the old log beside the new one, one GPU against {n}. Line one agrees in every "
              "digit. Line two does not, and nobody has touched the learning rate.",
              {"from step 2"},
              also=("Both curves leave from the same point, the one-GPU run's and ours on {n}, and "
                    "one step later they are apart. My manager calls that parallel noise.",)),
        Fault({"dist.get_world_size()": "2"},
              "For months this ran on two GPUs, and it was the one-GPU run. Since we got {n}, it "
              "is that in the first step only. The code has not changed by a character.",
              {"from step 2"}, world_sizes=(3, 4),
              also=("A colleague tested the script on two GPUs and signed it off. On {n} the first "
                    "loss agrees with one GPU and the second does not. Is my cluster broken?",)))),
    Case("b", "overlapping parts", healthy.own_samples, (
        Fault({"(range(TRAIN_SIZE), seed=seed, drop_last=True)":
               "(range(TRAIN_SIZE), dist.get_world_size(), 0, seed=seed,\n"
               "                             drop_last=True)"},
              "Nothing crashed overnight, and the loss has come down nicely. Then I held the curve "
              "against last month's run on one GPU: even its first point lies beside it.",
              {"from step 1", "falls"},
              also=("Training on {n} GPUs is as fast as we had hoped, and the loss falls. I only "
                    "wonder why the very first number in the log is not the one-GPU run's.",)),
        Fault({"seed=seed": "seed=seed + dist.get_rank()"},
              "Same seed, same global batch as on one GPU, and yet the first loss is another one. "
              "It trains all the same. Should I worry?", {"from step 1", "falls"},
              also=("For the paper I have to write that {n} GPUs train what one trains. The loss "
                    "does come down. But step 1 already has another number than on one GPU.",)))),
    Case("c", "repeated order", healthy.own_samples, (
        Fault({"    sampler.set_epoch(epoch)\n": ""},
              "All through epoch 0 the log is that of the one-GPU run. In epoch 1 the curves part, "
              "and ours goes on falling as if nothing had happened.", {"in epoch 1", "falls"},
              also=("My script prints each step whose loss is not that of the one-GPU run. In "
                    "epoch 0 it printed nothing. Then it did, though the loss still falls.",)),)),
    Case("d", "different start", healthy.begin, (
        Fault({"dist.broadcast(tensor,": "message = tensor.clone()\ndist.broadcast(message,"},
              "Since the move to {n} GPUs the loss is off from the first step on. My colleague "
              "says that this is noise. Is it?", {"from step 1"},
              also=("I have checked the data twice, because the first loss on {n} GPUs is not that "
                    "of one GPU. What else can it be, before anything was learned?",)),
        Fault({"tensor in model.state_dict().values()": "parameter in model.parameters()",
               "dist.broadcast(tensor,":
               "if parameter.requires_grad:\n    dist.broadcast(parameter.data,"},
              "The first loss on {n} GPUs disagrees with a single GPU's. It learns, though, and so "
              "nobody wants to look into it.", {"from step 1", "falls"},
              also=("The intern says that the run on {n} GPUs cannot be compared with the one-GPU "
                    "run, as even step 1 is off. It trains well, so I had not looked.",)))),
    Case("e", "own statistics", healthy.make_model, (
        Fault({"SynchronizedBatchNorm": "nn.BatchNorm1d"},
              "The loss on {n} GPUs is near that of one GPU, but it is not the same, not even in "
              "the first step. Rounding, says the team.", {"from step 1", "near"},
              also=("One has to zoom in to see it: two curves, of one GPU and of {n}, close "
                    "together and not equal from the first point on.",)),)),
    Case("f", "biased metric", healthy.evaluate, (
        Fault({"labels).sum()": "labels).float().mean()",
               "    counts = torch.tensor([right, len(labels)])\n": "",
               "all_reduce(counts)": "all_reduce(right)",
               "(counts[0] / counts[1]).item()": "right.item() / dist.get_world_size()"},
              "A customer tests our final model on one GPU, and comes to another result than we "
              "did on {n}. Which of us is mistaken?",
              {"only in the accuracy"},
              also=("A reviewer took our final model, and on one GPU does not get what we "
                    "reported. Did we send another file?",)),
        Fault({"images, labels =": "longest = torch.tensor(len(mine))\n"
               "dist.all_reduce(longest, op=dist.ReduceOp.MAX)\n"
               "mine = mine.repeat(longest)[:longest]  # equally many on each rank\n"
               "images, labels ="},
              "I had thought that a model is a model. On one GPU, ours does not score what it "
              "scored on {n}, and it is the same file.", {"only in the accuracy"},
              also=("Training on {n} GPUs raised no error. But when I evaluate the final model "
                    "by myself, I do not find what I was told to expect of it.",))),
        to_repair=True),
    Case("g", "lossy restart", healthy.load, (
        Fault({'    optimizer.load_state_dict(saved["optimizer"])\n': ""},
              "The job on {n} GPUs matches the one-GPU run all through epoch 0. Later it does not, "
              "and I cannot say which of the two is right.", {"in epoch 1"},
              also=("I plotted the gap to the one-GPU run. It is flat at zero for an epoch. Some "
                    "time in epoch 1 it is not any more.",)),
        Fault({'saved["batch"]': "0"},
              "Until the middle of epoch 1 there is nothing to complain of. After that, the losses "
              "on {n} GPUs are not those of one.", {"in epoch 1", "in its middle"},
              also=("Two logs, equal for more than an epoch, and then not. Should I trust the one "
                    "on {n} GPUs? The curve looks smooth enough to me.",)),
        Fault({"optimizer.load": "if dist.get_rank() == 0:\n    optimizer.load"},
              "It begins just like the one-GPU run. In epoch 1 it goes its own way. No error, no "
              "warning.", {"in epoch 1"},
              also=("We trust the first epoch, since it equals that of the one-GPU run. The second "
                    "does not equal it, and on {n} GPUs nobody has time to find out why.",)))),
    Case("h", "left-out layer", healthy.averager, (
        Fault({"def average():": "trained = [parameter for parameter in model.parameters() "
               "if parameter.requires_grad]\ndef average():",
               "in model.parameters():": "in trained:",
               "            if parameter.requires_grad:\n    ": "",
               "        dist.all_reduce": "    dist.all_reduce"},
              "Epoch 0 is the one-GPU run, step for step. Somewhere in epoch 1 that ends, and I "
              "have not changed a thing.", {"in epoch 1"},
              also=("On Monday I wrote into the report that {n} GPUs reproduce one. On Tuesday I "
                    "read the log of epoch 1, and took the sentence out.",)),
        Fault({"(len(gradients) + 3) // 4": "len(gradients) // 4"},
              "The first loss is right, and the later ones are a little off. Seed, global batches "
              "and optimizer are those of the one-GPU run. Is this what people call rounding?",
              {"from step 2", "near"},
              also=("If you squint, the run on {n} GPUs is the one-GPU run. If you compare the "
                    "logs line by line, only step 1 is.",), part=averager_in_buckets)),
        to_repair=True),
)


# The jobs


class SilentFailure(SickJob):
    """A training job on digits that trains something else than one process would."""

    chapter = 4
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Settings:
        steps = chances.randrange(12, 16)  # in an epoch
        # The test set's files, one a rank, in the order of the classes' names and of unequal length
        sizes = [chances.uniform(1, 4) for _ in range(self._world_size)]
        cuts = [0, *(round(TEST_SIZE * sum(sizes[:file]) / sum(sizes))
                     for file in range(1, self._world_size)), TEST_SIZE]
        return Settings(
            seed=chances.randrange(1000, 1_000_000), batch=TRAIN_SIZE // self._world_size // steps,
            frozen=chances.choice(["first", "second"]), stop=chances.randrange(3, steps - 3),
            files=[torch.tensor(digits_by_name()[begin:end]) for begin, end in pairwise(cuts)])

    def _description(self):
        settings = self._settings
        return (f"The job trains a classifier of digits on {self._world_size} ranks: "
                f"{settings.batch} digits on each in a step, {healthy.EPOCHS} epochs. Its "
                "BatchNorm is meant to take mean and variance over the batches of all ranks "
                "(written by hand). Then buffers are equal on all ranks too, and one checkpoint is "
                f"enough: rank 0 writes it. The layer `{settings.frozen}` is frozen in epoch 0, "
                "and trained from epoch 1 on. The queue stopped the job once, in epoch 1, and it "
                "went on from its checkpoint.")

    def _run(self, part):
        parts = replace(Parts(), **{self._part_name: part})
        whole = replace(self._settings, batch=self._world_size * self._settings.batch,
                        files=[torch.cat(self._settings.files)])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint.pt")
            [one] = run(healthy.train, 1, Parts(), whole, path, interrupted=False, backend="gloo")
            until = run(healthy.train, self._world_size, parts, self._settings, path,
                        backend="gloo")
            after = run(healthy.train, self._world_size, parts, self._settings, path, resume=True,
                        seed=1, backend="gloo")
        return Readings([begun.then(ended) for begun, ended in zip(until, after, strict=True)], one)

    def _is_healthy(self, readings):
        goal, losses = readings.one_process.steps, readings.losses
        gap = max(abs(step.loss - loss) for step, loss in zip(goal, losses, strict=False))
        reported, counted = readings.accuracies()
        evaluated = sum(len(rank.evaluations[-1].samples) for rank in readings.ranks)
        for suspect in SUSPECTS:
            fits, sentence = suspect.finding(readings)
            if fits:
                is_old = suspect.name == self._case.suspect
                return False, (f"It is {'still' if is_old else 'another fault now:'} "
                               f"“{suspect.name}”. {sentence}")
        healthy = (gap < ROUNDING and len(goal) == len(losses) and evaluated == TEST_SIZE
                   and abs(reported - counted) < 1e-6)
        return healthy, (
            f"The loss is within {gap:.1g} of that of one process in all {len(goal)} steps, and "
            f"the log says {reported:.2%} where {counted:.2%} of {evaluated} digits are right.")

    @instrument
    def losses(self) -> None:
        """The loss in each step, of each rank and of one process."""
        readings = self._readings
        curves = {"one process": [step.loss for step in readings.one_process.steps],
                  "mean over the ranks": readings.losses}
        draw(show.loss_curves, curves, title="Loss of the global batch in each step",
             first=1, note="")
        curves |= {f"rank {rank}": [step.loss for step in each.steps]
                   for rank, each in enumerate(readings.ranks)}
        steps = [0, 1, 2, *range(9, len(readings.losses), 10)]
        print_table(["step", *(step + 1 for step in steps)], *(
            [name, *(f"{losses[step]:.4f}" if step < len(losses) else "" for step in steps)]
            for name, losses in curves.items()))

    @instrument
    def weights(self) -> None:
        """How far apart two ranks are, by tensor, at six moments."""
        before, going_on = zip(*(rank.before for rank in self._readings.ranks), strict=True)
        first = next(self._readings.steps)
        last = [self._readings.in_epoch(epoch)[-1] for epoch in range(healthy.EPOCHS)]
        step_1, epoch_0, epoch_1, epoch_2 = ([each.state for each in step]
                                             for step in (first, *last))
        moments = {"before": before, "step 1": step_1, "epoch 0": epoch_0, "going on": going_on,
                   "epoch 1": epoch_1, "epoch 2": epoch_2}
        widths = [spread(states) for states in moments.values()]
        print("Largest difference between two ranks: before step 1, after it, after epoch 0, when "
              "the job\ngoes on, and after epochs 1 and 2. 0 means equal to the last bit.")
        print_table(["", *moments], *([name, *(f"{each[name]:.2g}" for each in widths)]
                                      for name in before[0]))

    @instrument
    def gradients(self, step: int = 1) -> None:
        """The norm of each gradient that step 1 applies; gradients(20): step 20."""
        *ranks, alone = (each.steps for each in (*self._readings.ranks, self._readings.one_process))
        steps = min(len(alone), len(ranks[0]))
        if not 1 <= step <= steps:
            print(f"The steps are 1 to {steps}.")
            return
        print(f"Step {step}" + ("" if step == 1 else ", in which one process may have come to "
                                "other weights"))
        gradients = [each[step - 1].gradients for each in (*ranks, alone)]
        print_table(["", *(f"rank {rank}" for rank in range(len(ranks))), "one process"], *(
            [name, *(f"{each[name].norm():.5f}" for each in gradients)] for name in gradients[0]))

    @instrument
    def samples(self) -> None:
        """What the ranks took of the training set, epoch by epoch."""
        readings, rows = self._readings, []
        epochs = [readings.samples(epoch) for epoch in range(healthy.EPOCHS)]
        for epoch, ranks in enumerate(epochs):
            counts = Counter(sample for each in ranks for sample in each)
            numbers = (counts.total(), len(counts), readings.taken_by_several(epoch),
                       max(counts.values()))
            rows.append([f"epoch {epoch}", *(f"{number:,}" for number in numbers)])
        print_table(["", "taken", "distinct", "by more than one rank", "most often"], *rows)
        print("\nThe first of each epoch, as indices")
        for epoch, ranks in enumerate(epochs):
            for rank, each in enumerate(ranks):
                print(f"epoch {epoch}, rank {rank}: {_listed(each[:10])}")

    @instrument
    def calls(self) -> None:
        """The collectives that the ranks call, with the count of values in each."""
        first, *others = (rank.calls for rank in self._readings.ranks)
        for moment, calls in first.items():
            same = all(rank.get(moment) == calls for rank in others)
            print(f"{moment}, {'every rank' if same else 'rank 0; others differ'}:")
            for operation, sizes in calls.items():
                print(f"  {len(sizes)} {operation}: {_listed(sizes)}")

    @instrument
    def accuracy(self) -> None:
        """The accuracy in the log, and what each rank contributed."""
        readings = self._readings
        for epoch, each in enumerate(readings.ranks[0].evaluations):
            print(f"After epoch {epoch} the log says {each.reported:.2%}")
        print(f"\nAfter epoch {healthy.EPOCHS - 1}; the test set has {TEST_SIZE} digits")
        rows = []
        for rank, each in enumerate(readings.ranks):
            right, samples = readings.right(rank), each.evaluations[-1].samples
            rows.append((f"rank {rank}", len(samples), int(right[samples].sum()),
                         f"{right.float().mean():.2%}"))
        _, evaluated, right, _ = zip(*rows, strict=True)
        rows.append(("together", sum(evaluated), sum(right), ""))
        print_table(["", "evaluated", "right", "share", "its model on all"], *(
            [who, number, right, f"{right / number:.2%}", alone]
            for who, number, right, alone in rows))

    @instrument
    def checkpoint(self) -> None:
        """Where rank 0 was when it saved, and where each rank went on."""
        ranks = self._readings.ranks
        states = {"rank 0 at the stop": ranks[0].stopped} | {
            f"rank {rank} going on": each.went_on for rank, each in enumerate(ranks)}
        print_table(["", *ranks[0].stopped], *(
            [when, *(f"{number:.5g}" for number in state.values())]
            for when, state in states.items()))


@cache
def digits_by_name() -> list[int]:
    """The test set's indices in the order of the classes' names, as folders of images are read."""
    labels = load_digits().test_labels.tolist()
    return sorted(range(TEST_SIZE), key=lambda index: NAMES[labels[index]])


def _listed(numbers):
    return " ".join(map(str, numbers))
