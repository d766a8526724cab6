"""Chapter 04's drills: training that raises no error, goes on, and is wrong.

The job is that of `digit_training`, on two to four real ranks, with a fault in one of its parts.
The instruments compare the ranks with each other, and with one process that trains on the same
global batches.
"""

import random
import tempfile
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DistributedSampler

from dplab import run, show
from dplab.drills import digit_training as healthy
from dplab.drills.digit_training import Parts, Recording, Settings
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument
from dplab.spawn.parent.output import in_notebook
from dplab.workloads.digits import TEST_SIZE, TRAIN_SIZE, accuracy, load_digits

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ROUNDING = 1e-3  # of a gradient's length: far above what the order of a sum changes
MATCHED = 1e-5  # losses that differ by less are the same: far above what the order changes


# Faults. Each has the signature of the part that it replaces.


def averager_that_sums(model):
    def average():
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)

    return average


def averager_for_two(model):
    def average():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad /= 2
                dist.all_reduce(parameter.grad)

    return average


def samples_of_rank_0(epoch, seed):
    sampler = DistributedSampler(range(TRAIN_SIZE), dist.get_world_size(), 0, seed=seed,
                                 drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def samples_by_own_seed(epoch, seed):
    sampler = DistributedSampler(range(TRAIN_SIZE), seed=seed + dist.get_rank(), drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def samples_of_epoch_0(epoch, seed):
    sampler = DistributedSampler(range(TRAIN_SIZE), seed=seed, drop_last=True)
    return list(sampler)


def begin_with_copies(model):
    for tensor in model.state_dict().values():
        message = tensor.clone()
        dist.broadcast(message, src=0)


def begin_with_the_trained(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)


def model_with_own_statistics(seed):
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(
        flat=nn.Flatten(),
        first=nn.Linear(64, 23, bias=False), norm=nn.BatchNorm1d(23),
        gelu=nn.GELU(),
        second=nn.Linear(23, 17, bias=False), tanh=nn.Tanh(),
        last=nn.Linear(17, 10)))


def evaluate_by_means(model, test_set, mine):
    images, labels = test_set[mine]
    right = (model(images).argmax(dim=1) == labels).float().mean()
    dist.all_reduce(right)
    return right.item() / dist.get_world_size()


def evaluate_padded(model, test_set, mine):
    longest = torch.tensor(len(mine))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mine = mine.repeat(longest)[:longest]  # equally many on each rank
    images, labels = test_set[mine]
    right = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.tensor([right, len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def load_weights(path, model, optimizer):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    return saved["epoch"], saved["batch"]


def load_epoch(path, model, optimizer):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"], 0


def load_on_rank_0(path, model, optimizer):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    if dist.get_rank() == 0:
        optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"], saved["batch"]


def averager_of_a_list(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def average():
        for parameter in trained:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)

    return average


def averager_in_buckets(model):
    def average():
        gradients = [each.grad for each in model.parameters() if each.requires_grad]
        for bucket in range(len(gradients) // 4):
            four = gradients[4 * bucket : 4 * bucket + 4]
            message = parameters_to_vector(four) / dist.get_world_size()
            dist.all_reduce(message)
            vector_to_parameters(message, four)

    return average


def averager_in_buckets_mended(model):
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

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Of every tensor in the model's state, in the order of the recorded vectors."""
        return {name: tensor.shape for name, tensor in healthy.make_model(0).state_dict().items()}

    @cached_property
    def parameters(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in healthy.make_model(0).named_parameters()}

    @property
    def losses(self) -> list[float]:
        """The loss of each step, the mean over the ranks."""
        return [sum(step) / len(self.ranks)
                for step in zip(*(rank.losses for rank in self.ranks), strict=True)]

    def spread(self, vectors: list[torch.Tensor]) -> dict[str, float]:
        """By tensor of the state, how far two ranks are from one another at most."""
        stacked = torch.stack(vectors)
        widths = stacked.amax(dim=0) - stacked.amin(dim=0)
        parts = widths.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.max().item() for name, part in zip(self.shapes, parts, strict=True)}

    def states(self, step: int) -> list[torch.Tensor]:
        return [rank.states[step] for rank in self.ranks]

    def norms(self, step: int) -> dict[str, list[float]]:
        """By parameter, the norm of each rank's gradient in this step, and of one process's."""
        vectors = [each.gradients[step] for each in (*self.ranks, self.one_process)]
        parts = zip(*(vector.split([shape.numel() for shape in self.parameters.values()])
                      for vector in vectors), strict=True)
        return {name: [part.norm().item() for part in each]
                for name, each in zip(self.parameters, parts, strict=True)}

    def parted(self) -> tuple[int, list[str]] | None:
        """The first step in which gradients differ between ranks, and those of which parameters."""
        for step, gradients in enumerate(zip(*(rank.gradients for rank in self.ranks),
                                             strict=True)):
            stacked = torch.stack(gradients)
            same = (stacked == stacked[0]).all(dim=0)
            parts = same.split([shape.numel() for shape in self.parameters.values()])
            differing = [name for name, part in zip(self.parameters, parts, strict=True)
                         if not part.all()]
            if differing:
                return step, differing
        return None

    def last_of_epoch(self, epoch: int) -> int:
        """The number of the last step of this epoch."""
        places = self.ranks[0].places
        return max(step for step, place in enumerate(places) if place[0] == epoch)

    def samples(self, epoch: int) -> list[list[int]]:
        """What each rank took in this epoch, in the order in which it took them."""
        return [torch.cat([batch for batch, (its_epoch, _) in zip(
            rank.samples, rank.places, strict=True) if its_epoch == epoch]).tolist()
            for rank in self.ranks]

    def taken_by_several(self, epoch: int) -> int:
        """How many samples more than one rank took in this epoch."""
        ranks = Counter(sample for own in self.samples(epoch) for sample in set(own))
        return sum(count > 1 for count in ranks.values())

    def model_of(self, state: torch.Tensor) -> nn.Module:
        """The model whose tensors stand in this vector."""
        model = healthy.make_model(0)
        parts = state.split([shape.numel() for shape in self.shapes.values()])
        model.load_state_dict({name: part.reshape(shape) for (name, shape), part in zip(
            self.shapes.items(), parts, strict=True)})
        return model

    def accuracies(self, epoch: int = -1) -> tuple[float, float]:
        """What the log reports after an epoch, and the right answers among those evaluated."""
        evaluated = sum(len(rank.evaluated[epoch]) for rank in self.ranks)
        right = sum(rank.right[epoch] for rank in self.ranks)
        return self.ranks[0].reported[epoch], right / evaluated


# Suspects


def factor(readings):
    gradient, goal = readings.ranks[0].gradients[0], readings.one_process.gradients[0]
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
    spread = readings.spread([rank.before[0] for rank in readings.ranks])
    name = max(spread, key=lambda name: spread[name])
    differ = [name for name, width in spread.items() if width > 0]
    where = f" (of `{name}`)" if differ else ""
    return bool(differ), (f"Before step 1, {len(differ)} of {len(spread)} tensors differ between "
                          f"ranks; the largest difference is {spread[name]:.2g}{where}.")


def statistics(readings):
    spread = readings.spread(readings.states(-1))
    largest = max(spread[name] for name in spread if "running" in name)
    return largest > 0, ("After the last step the running means and variances of two ranks differ "
                         f"by {largest:.2g} at most.")


def metric(readings):
    reported, counted = readings.accuracies()
    evaluated = torch.cat([rank.evaluated[-1] for rank in readings.ranks])
    wrong = abs(reported - counted) > 1e-6 or len(evaluated) != TEST_SIZE
    return wrong, (f"Last in the log stands {reported:.2%}. The ranks evaluated {len(evaluated)} "
                   f"digits, {len(evaluated.unique())} of them distinct, and got {counted:.2%} of "
                   f"them right. The test set has {TEST_SIZE}.")


def continuation(readings):
    saved = readings.ranks[0].stopped
    for rank, each in enumerate(readings.ranks):
        for what, before, after in zip(
                ("epoch", "batch", "learning rate", "norm of the momenta"),
                _numbers(saved), _numbers(each.went_on), strict=True):
            if before != after:
                return True, (f"The {what} was {before:.4g} when rank 0 saved the checkpoint, and "
                              f"rank {rank} goes on with {after:.4g}.")
    return False, (f"All ranks go on as rank 0 stopped: in epoch {saved.epoch} at batch "
                   f"{saved.batch}, with a learning rate of {saved.learning_rate:.4g} and momenta "
                   f"of length {saved.momentum.norm():.4f}.")


def left_out(readings):
    parted = readings.parted()
    if parted is None:
        return False, (f"In all {len(readings.losses)} steps, the optimizers of all ranks got the "
                       "same gradients, to the last bit.")
    step, names = parted
    return True, (f"In step {step + 1} the optimizers get different gradients of "
                  f"{' and '.join(f'`{name}`' for name in names)} on different ranks.")


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
    Suspect("lossy restart", "A rank goes on with another batch, learning rate or momentum than "
            "was saved.", "checkpoint", continuation),
    Suspect("left-out layer", "The gradients of some layers stay each rank's own.", "gradients",
            left_out),
)

# What the complaints say of their jobs. The tests hold each to it.


def parts_at(readings) -> tuple[int, int] | None:
    """Epoch and batch of one process from which on the losses differ; None if they never do."""
    one_process = readings.one_process
    losses = zip(readings.losses, one_process.losses, one_process.places, strict=False)
    return next((place for one, other, place in losses if abs(one - other) > MATCHED), None)


def from_the_first_step(readings):
    return parts_at(readings) == (0, 0)


def from_the_second_step(readings):
    return parts_at(readings) == (0, 1)


def from_the_first_step_and_falls(readings):
    losses = readings.losses
    return from_the_first_step(readings) and sum(losses[-5:]) / 5 < losses[0] / 2


def in_epoch_1(readings):
    return (parts_at(readings) or (0, 0))[0] == 1


def in_the_middle_of_epoch_1(readings):
    return in_epoch_1(readings) and parts_at(readings)[1] > 0


def in_epoch_1_and_falls(readings):
    return in_epoch_1(readings) and readings.losses[-1] < readings.losses[0] / 2


def from_the_first_step_but_near(readings):
    return from_the_first_step(readings) and nearness(readings) < 0.1


def from_the_second_step_but_near(readings):
    return from_the_second_step(readings) and nearness(readings) < 0.1


def nearness(readings):
    """How far the loss is from that of one process on average, relative to that of one process."""
    goal = readings.one_process.losses
    gaps = [abs(one - other) for one, other in zip(readings.losses, goal, strict=True)]
    return sum(gaps) / sum(goal)


def only_in_the_accuracy(readings):
    """The losses are right, and one process gets another accuracy of the final model."""
    digits = load_digits()
    alone = accuracy(readings.model_of(readings.ranks[0].states[-1]), digits.test_images,
                     digits.test_labels)
    return parts_at(readings) is None and abs(readings.accuracies()[0] - alone) > 1e-6


_FROM_STEP_1 = ("Same seed, same global batch as on one GPU, and yet the very first loss in the "
                "log is another one. It trains all the same. Should I worry?")
_IN_OTHER_WORDS = ("The first loss on {n} GPUs is not that of a single GPU. It learns, though, and "
                   "nobody wants to look into it.")
CASES = (
    Case("a", "wrong divisor", "averager", (
        Fault(averager_that_sums, healthy.averager, "We moved the job from one GPU to {n}, with "
              "the same seed and global batch. The first loss is the old one. From the second "
              "step on it is another run.", from_the_second_step,
              also=("Step 1 is the same on one GPU and on {n}. Step 2 is not. Nobody has touched "
                    "the learning rate.",)),
        Fault(averager_for_two, healthy.averager, "It was fine on two GPUs. On {n} the first loss "
              "is still right, and then the curve leaves that of the one-GPU run. Nobody has "
              "touched the code.", from_the_second_step, world_sizes=(3, 4),
              also=("The same script has been right on two GPUs for months. Now it runs on {n}: "
                    "the first loss agrees with the one-GPU log, the second one does not.",)))),
    Case("b", "overlapping parts", "own_samples", (
        Fault(samples_of_rank_0, healthy.own_samples, "Training on {n} GPUs is as fast as we had "
              "hoped, and the loss falls. But from the first step on, the log is not that of the "
              "one-GPU run.", from_the_first_step_and_falls,
              also=("It learns, and it is fast. Only, its log parts from the one-GPU log in the "
                    "very first line.",)),
        Fault(samples_by_own_seed, healthy.own_samples, _FROM_STEP_1,
              from_the_first_step_and_falls,
              also=(_IN_OTHER_WORDS,)))),
    Case("c", "repeated order", "own_samples", (
        Fault(samples_of_epoch_0, healthy.own_samples, "All through epoch 0 the log is that of "
              "the one-GPU run. In epoch 1 the curves part. The loss goes down all the same. "
              "What happened?", in_epoch_1_and_falls,
              also=("For one epoch the two logs agree line by line: one GPU, and {n}. Then they "
                    "do not, though the loss still falls.",)),)),
    Case("d", "different start", "begin", (
        Fault(begin_with_copies, healthy.begin, "Since the move to {n} GPUs the loss is off "
              "from the first step on. My colleague says that this is noise. Is it?",
              from_the_first_step,
              also=("Two logs of one config, on one GPU and on {n}: their first losses do not "
                    "agree. I have checked the data twice.",)),
        Fault(begin_with_the_trained, healthy.begin, _FROM_STEP_1,
              from_the_first_step_and_falls,
              also=(_IN_OTHER_WORDS,)))),
    Case("e", "own statistics", "make_model", (
        Fault(model_with_own_statistics, healthy.make_model, "The loss on {n} GPUs is near that of "
              "one GPU, but it is not the same, not even in the first step. We have compared "
              "the seeds twice.", from_the_first_step_but_near,
              also=("The losses on {n} GPUs are close to those of one GPU. But the very first "
                    "one is a little off already. Rounding, says the team.",)),)),
    Case("f", "biased metric", "evaluate", (
        Fault(evaluate_by_means, healthy.evaluate, "The curve is that of the one-GPU run, and I "
              "was about to report the accuracy in the log. Then I evaluated the final model in "
              "one process and got another number. Which one goes into the report?",
              only_in_the_accuracy,
              also=("No loss in the log is another than on one GPU. The accuracy is, when I "
                    "compute it by myself from the final model.",)),
        Fault(evaluate_padded, healthy.evaluate, "In one process the final model gets another "
              "accuracy than in our log from {n} GPUs. I had thought that an accuracy belongs to "
              "a model.", only_in_the_accuracy,
              also=("I took the final model and evaluated it on one GPU: not the accuracy that "
                    "the log of {n} GPUs has. The losses are those of one GPU.",))),
        to_repair=True),
    Case("g", "lossy restart", "load", (
        Fault(load_weights, healthy.load, "The job on {n} GPUs matches the one-GPU run all through "
              "epoch 0. Later it does not, and I cannot say which of the two is right.",
              in_epoch_1,
              also=("Epoch 0 is as on one GPU. Some time in epoch 1 the log of {n} GPUs leaves "
                    "the one-GPU log.",)),
        Fault(load_epoch, healthy.load, "The first epoch agrees with the one-GPU run. In the "
              "middle of epoch 1 the two logs part. Should I trust the one on {n} GPUs?",
              in_the_middle_of_epoch_1,
              also=("Until the middle of epoch 1 there is nothing to complain of. After that, "
                    "the losses on {n} GPUs are not those of one.",)),
        Fault(load_on_rank_0, healthy.load, "It begins just like the one-GPU run. In epoch 1 it "
              "goes its own way. No error, no warning.", in_epoch_1,
              also=("We trust the first epoch: it equals that of the one-GPU run. The second one "
                    "is not the same, and nobody knows why.",)))),
    Case("h", "left-out layer", "averager", (
        Fault(averager_of_a_list, healthy.averager, "Epoch 0 is the one-GPU run, step for step. "
              "Somewhere in epoch 1 that ends, and nobody can say why.", in_epoch_1,
              also=("For one epoch the logs are equal, on one GPU and on {n}. In epoch 1 they "
                    "part, and I have not changed a thing.",)),
        Fault(averager_in_buckets, averager_in_buckets_mended, "The first loss is right, the later "
              "ones are a little off. I have the same seed, the same data and the same optimizer "
              "on all {n} GPUs.", from_the_second_step_but_near,
              also=("Step 1 agrees with one GPU. From step 2 on, the losses on {n} GPUs are a "
                    "little off.",))),
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
                "(written by hand, for CPUs), so rank 0 writes one checkpoint for all. The layer "
                f"`{settings.frozen}` is frozen in epoch 0, and trained from epoch 1 on. The queue "
                "stopped the job once, in epoch 1, and it went on from its checkpoint.")

    def _run(self, part):
        parts = replace(Parts(), **{self._case.part: part})
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
        goal, losses = readings.one_process.losses, readings.losses
        gap = max(abs(one - all) for one, all in zip(goal, losses, strict=False))
        reported, counted = readings.accuracies()
        evaluated = sum(len(rank.evaluated[-1]) for rank in readings.ranks)
        healthy = (gap < ROUNDING and len(goal) == len(losses) and evaluated == TEST_SIZE
                   and abs(reported - counted) < 1e-6
                   and not any(suspect.finding(readings)[0] for suspect in SUSPECTS))
        return healthy, (
            f"The loss is within {gap:.1g} of that of one process in all {len(goal)} steps, and "
            f"the log says {reported:.2%} where {counted:.2%} of {evaluated} digits are right.")

    @instrument
    def losses(self) -> None:
        """The loss in each step, of each rank and of one process."""
        curves = {"one process": self._readings.one_process.losses,
                  "mean over the ranks": self._readings.losses}
        curves |= {f"rank {rank}": each.losses for rank, each in enumerate(self._readings.ranks)}
        if in_notebook():
            from IPython.display import display

            names = ("one process", "mean over the ranks")
            display(show.loss_curves({name: curves[name] for name in names},
                                     title="Loss of the global batch in each step",
                                     note="Step 1 stands at 0"))
        steps = [0, 1, 2, *(step for step in range(9, len(self._readings.losses), 10))]
        _print_table(["step", *(str(step + 1) for step in steps)], *(
            [name, *(f"{losses[step]:.4f}" if step < len(losses) else "" for step in steps)]
            for name, losses in curves.items()))

    @instrument
    def weights(self) -> None:
        """How far apart two ranks are, by tensor, at six moments."""
        readings, ranks = self._readings, self._readings.ranks
        last = [readings.last_of_epoch(epoch) for epoch in range(healthy.EPOCHS)]
        moments = {"before": [rank.before[0] for rank in ranks], "step 1": readings.states(0),
                   "epoch 0": readings.states(last[0]),
                   "going on": [rank.before[1] for rank in ranks],
                   "epoch 1": readings.states(last[1]), "epoch 2": readings.states(last[2])}
        spreads = [readings.spread(vectors) for vectors in moments.values()]
        print("Largest difference between two ranks: before step 1, after it, after epoch 0, when "
              "the job\ngoes on, and after epochs 1 and 2. 0 means equal to the last bit.")
        _print_table(["", *moments], *([name, *(f"{spread[name]:.2g}" for spread in spreads)]
                                       for name in readings.shapes))

    @instrument
    def gradients(self, step: int = 1) -> None:
        """The norm of each gradient in step 1; gradients(20): in step 20."""
        steps = min(len(self._readings.losses), len(self._readings.one_process.losses))
        if not 1 <= step <= steps:
            print(f"The steps are 1 to {steps}.")
            return
        print(f"Step {step}" + ("" if step == 1 else ", in which one process may have come to "
                                "other weights"))
        ranks = [f"rank {rank}" for rank in range(self._world_size)]
        _print_table(["", *ranks, "one process"], *(
            [name, *(f"{norm:.5f}" for norm in norms)]
            for name, norms in self._readings.norms(step - 1).items()))

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
        _print_table(["", "taken", "distinct", "by more than one rank", "most often"], *rows)
        print("\nThe first of each epoch, as indices")
        for epoch, ranks in enumerate(epochs):
            for rank, each in enumerate(ranks):
                print(f"epoch {epoch}, rank {rank}: {_listed(each[:10])}")

    @instrument
    def calls(self) -> None:
        """The collectives that the ranks call, with the count of values in each."""
        ranks = [self._by_moment(rank.calls) for rank in self._readings.ranks]
        for moment in ranks[0]:
            same = all(rank.get(moment) == ranks[0][moment] for rank in ranks)
            print(f"{moment}, {'every rank' if same else 'rank 0; others differ'}:")
            for operation, sizes in ranks[0][moment].items():
                print(f"  {len(sizes)} {operation}: {_listed(sizes)}")

    @instrument
    def accuracy(self) -> None:
        """The accuracy in the log, and what each rank contributed."""
        readings = self._readings
        for epoch in range(healthy.EPOCHS):
            print(f"After epoch {epoch} the log says {readings.accuracies(epoch)[0]:.2%}")
        digits = load_digits()
        print(f"\nAfter epoch {healthy.EPOCHS - 1}; the test set has {TEST_SIZE} digits")
        rows = []
        for rank, each in enumerate(readings.ranks):
            model = readings.model_of(each.states[-1])
            alone = accuracy(model, digits.test_images, digits.test_labels)
            rows.append([f"rank {rank}", str(len(each.evaluated[-1])), str(each.right[-1]),
                         f"{each.right[-1] / len(each.evaluated[-1]):.2%}", f"{alone:.2%}"])
        evaluated = sum(len(rank.evaluated[-1]) for rank in readings.ranks)
        right = sum(rank.right[-1] for rank in readings.ranks)
        rows.append(["together", str(evaluated), str(right), f"{right / evaluated:.2%}", ""])
        _print_table(["", "evaluated", "right", "share", "its model on all"], *rows)

    @instrument
    def checkpoint(self) -> None:
        """Where rank 0 was when it saved, and where each rank went on."""
        ranks = self._readings.ranks
        states = {"rank 0 at the stop": ranks[0].stopped} | {
            f"rank {rank} going on": each.went_on for rank, each in enumerate(ranks)}
        rows = []
        for when, state in states.items():
            epoch, batch, rate, momenta = _numbers(state)
            rows.append([when, str(epoch), str(batch), f"{rate:.4g}", f"{momenta:.4f}"])
        _print_table(["", "epoch", "batch", "learning rate", "norm of momenta"], *rows)

    def _by_moment(self, calls):
        """The sizes by moment and operation; of an epoch's steps, those of the second one.

        Of a moment that comes again, such as a step that is repeated, they are those of one time.
        """
        moments = {}
        for moment, group in groupby(calls, key=lambda call: call[0]):
            what, _, number = moment.partition(", ")
            if what in moments or (what.startswith("a step") and number != "1"):
                continue
            moments[what] = {}
            for _, operation, size in group:
                moments[what].setdefault(operation, []).append(size)
        return moments


@cache
def digits_by_name() -> list[int]:
    """The test set's indices in the order of the classes' names, as folders of images are read."""
    labels = load_digits().test_labels.tolist()
    return sorted(range(TEST_SIZE), key=lambda index: NAMES[labels[index]])


def _numbers(state):
    return state.epoch, state.batch, state.learning_rate, state.momentum.norm().item()


def _listed(numbers):
    return " ".join(map(str, numbers))


def _print_table(head, *rows):
    """Columns as wide as they must be, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for first, *others in (head, *rows):
        print(f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(
            others, widths[1:], strict=True)), sep="  ")
