"""The training job that the drills of chapter 04 make sick: its parts, its loop, its recording.

Six parts are functions as a learner writes them. `train` puts them together on each rank and
records what happens. A sick job is this one with another function in the place of one part. With
these parts, the job trains the model of one process, whatever the number of ranks.
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from dplab.measure import CallLog
from dplab.workloads.digits import TRAIN_SIZE, load_digits

EPOCHS = 3
THAW = 1  # the epoch from whose first step on the frozen layer is trained, too
LEARNING_RATE = 0.15


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        return SumOverRanks.forward(context, gradient)


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """With the statistics of all ranks' batches, which are equally large.

    `nn.SyncBatchNorm` does the same, on GPUs only.
    """

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        count = len(x) * dist.get_world_size()
        mean = SumOverRanks.apply(x.sum(dim=0)) / count
        centred = x - mean
        squares = SumOverRanks.apply(centred.square().sum(dim=0))
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(squares / (count - 1), self.momentum)
        return centred * (squares / count + self.eps).rsqrt() * self.weight + self.bias


# The parts


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(
        flat=nn.Flatten(),
        first=nn.Linear(64, 23, bias=False), norm=SynchronizedBatchNorm(23),
        gelu=nn.GELU(),
        second=nn.Linear(23, 17, bias=False), tanh=nn.Tanh(),
        last=nn.Linear(17, 10)))


def begin(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def own_samples(epoch, seed):
    sampler = DistributedSampler(range(TRAIN_SIZE), seed=seed, drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def averager(model):
    def average():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)

    return average


def evaluate(model, test_set, mine):
    images, labels = test_set[mine]
    right = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.tensor([right, len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def load(path, model, optimizer):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"], saved["batch"]


@dataclass(frozen=True)
class Parts:
    """What `train` is made of."""

    make_model: Callable = make_model
    begin: Callable = begin
    own_samples: Callable = own_samples
    averager: Callable = averager
    evaluate: Callable = evaluate
    load: Callable = load


# The loop


@dataclass(frozen=True)
class Settings:
    """One job's size and chances, the same on every rank.

    ``frozen``: the name of the layer that is not trained before epoch `THAW`; ``stop``: before
    which batch of epoch 1 the job stops, to go on from its checkpoint; ``files``: the test set's
    indices, a tensor for each rank.
    """

    seed: int
    batch: int
    frozen: str
    stop: int
    files: list[torch.Tensor]


Tensors = dict[str, torch.Tensor]  # by the model's names, copies in float64


@dataclass
class Step:
    """One step of one rank: its own batch, and what came of it."""

    epoch: int
    batch: int
    loss: float
    samples: list[int]
    gradients: Tensors  # as the optimizer gets them
    state: Tensors  # weights and buffers after the step


@dataclass
class Evaluation:
    """What a rank evaluated after an epoch, as indices, and the accuracy that the log then has."""

    samples: list[int]
    reported: float


@dataclass
class Recording:
    """What one rank did. ``stopped`` and ``went_on``: where it was then, as `position` has it."""

    steps: list[Step] = field(default_factory=list)
    before: list[Tensors] = field(default_factory=list)  # the state before a run's first step
    evaluations: list[Evaluation] = field(default_factory=list)  # by epoch
    calls: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # moment, operation, sizes
    stopped: dict[str, float] = field(default_factory=dict)
    went_on: dict[str, float] = field(default_factory=dict)

    def then(self, later: "Recording") -> "Recording":
        """Both runs of a job that was stopped."""
        return Recording(self.steps + later.steps, self.before + later.before,
                         self.evaluations + later.evaluations, self.calls | later.calls,
                         self.stopped, later.went_on)


class Samples:
    """Images and labels by index. ``read``: the indices asked for so far."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        self.read: list[int] = []

    def __getitem__(self, indices):
        self.read += torch.as_tensor(indices).tolist()
        return self.images[indices], self.labels[indices]


def train(parts: Parts, settings: Settings, path, *, resume=False, interrupted=True) -> Recording:
    """Trains from the beginning to the stop, or, to ``resume``, from there to the end.

    With ``interrupted=False`` it trains to the end in one run. Called by every rank.
    """
    digits = load_digits()
    test_set = Samples(digits.test_images, digits.test_labels)
    record = Recording()
    with CallLog() as log:
        model = parts.make_model(settings.seed + dist.get_rank())
        model.get_submodule(settings.frozen).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        average = parts.averager(model)
        first_epoch, done = 0, 0
        if resume:
            first_epoch, done = parts.load(path, model, optimizer)
            record.went_on = position(optimizer, first_epoch, done)
            note_calls(record, log, "going on")
        else:
            parts.begin(model)
            note_calls(record, log, "before step 1")
        record.before.append(copies(model.state_dict()))

        for epoch in range(first_epoch, EPOCHS):
            if epoch >= THAW:
                model.get_submodule(settings.frozen).requires_grad_(True)
            mine = torch.tensor(parts.own_samples(epoch, settings.seed))
            batches = mine.split(settings.batch)[: len(mine) // settings.batch]
            for number, batch in enumerate(batches):
                if epoch == first_epoch and number < done:
                    continue
                if interrupted and not resume and (epoch, number) == (1, settings.stop):
                    save(path, model, optimizer, epoch, number)
                    record.stopped = position(optimizer, epoch, number)
                    note_calls(record, log, "at the stop")
                    return record

                optimizer.zero_grad()
                loss = F.cross_entropy(model(digits.train_images[batch]),
                                       digits.train_labels[batch])
                loss.backward()
                average()
                gradients = copies({name: torch.zeros_like(parameter) if parameter.grad is None
                                    else parameter.grad
                                    for name, parameter in model.named_parameters()})
                optimizer.step()
                record.steps.append(Step(epoch, number, loss.item(), batch.tolist(), gradients,
                                         copies(model.state_dict())))
                note_calls(record, log, f"a step of epoch {epoch}")

            test_set.read.clear()
            model.eval()
            with torch.no_grad():
                reported = float(parts.evaluate(model, test_set, settings.files[dist.get_rank()]))
            model.train()
            if not test_set.read:
                raise ValueError("evaluate takes its samples as test_set[mine]")
            record.evaluations.append(Evaluation(list(test_set.read), reported))
            note_calls(record, log, "accuracy")
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
    return record


def save(path, model, optimizer, epoch, batch):
    """Rank 0 writes the checkpoint; no rank goes on before it is whole."""
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "epoch": epoch, "batch": batch}, f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()


def position(optimizer, epoch, batch) -> dict[str, float]:
    """Where a rank is, at the stop or when it goes on."""
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()
               if state.get("momentum_buffer") is not None]
    squares = sum(momentum.double().square().sum().item() for momentum in momenta)
    return {"epoch": epoch, "batch": batch, "learning rate": optimizer.param_groups[0]["lr"],
            "norm of the momenta": squares ** 0.5}


def copies(tensors) -> Tensors:
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}


def note_calls(record, log, moment):
    """Moves what was called since the last time to the record; the last of its kind is kept."""
    sizes: dict[str, list[int]] = {}
    for call in log.calls:
        sizes.setdefault(call.operation, []).append(torch.Size(call.shape).numel())
    if sizes:
        record.calls[moment] = sizes
    log.calls.clear()
