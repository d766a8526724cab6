"""What schemes that send less are tried on: digits with SGD, and a small language model with AdamW.

A *scheme* decides what the ranks send. It is made of a model and its optimizer, and its ``step()``
takes the place of ``optimizer.step()``, as that of `dplab.parallel.LocalSGD` does.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.measure.call_log import CallLog, sent_bytes
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads import standard_library
from dplab.workloads.digits import digits_classifier, load_digits
from dplab.workloads.transformer import Transformer

RANKS = 4
LENGTH, HELD_OUT = 32, 200_000  # of a sample, and of the text on which nobody trains: in bytes


@dataclass(frozen=True)
class Task:
    """What the ranks train.

    ``model(seed)``; ``optimizer(parameters, rate, steps)``, with its schedule; ``batch(seed, step,
    rank)``: inputs and targets, others for each; ``held_out()``: those on which nobody trains.
    """

    steps: int
    model: Callable[[int], nn.Module]
    optimizer: Callable
    batch: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
    held_out: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        return loss_of(model, *self.held_out()).item()


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _language_model(seed):
    torch.manual_seed(seed)
    return Transformer(TransformerConfig(2, 48, 4, 192, standard_library.VOCABULARY, LENGTH))


def _adamw(parameters, rate, steps):
    """It warms up over 20 steps, and then falls to a tenth."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 - 0.9 * step / steps))


def _sgd(parameters, rate, steps):
    """It falls to zero."""
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


@functools.cache
def _text():
    text = standard_library.load_source()
    return text[:-HELD_OUT], text[-HELD_OUT:]


def _windows(seed, step, rank):
    return standard_library.sample(_text()[0], 4, LENGTH, number_of(seed, step, rank))


def _digits(seed, step, rank):
    digits = load_digits()
    generator = torch.Generator().manual_seed(number_of(seed, step, rank))
    chosen = torch.randint(len(digits.train_labels), (16,), generator=generator)
    return digits.train_images[chosen], digits.train_labels[chosen]


def number_of(seed, step, rank):
    """Another one for each rank in each step."""
    return (100_000 * seed + step) * RANKS + rank


LANGUAGE = Task(512, _language_model, _adamw, _windows,
                lambda: standard_library.sample(_text()[1], 256, LENGTH, seed=0))
DIGITS = Task(200, digits_classifier, _sgd, _digits, lambda: load_digits()[2:])


@dataclass(frozen=True)
class Trained:
    """What came of a training on one rank: its loss on held-out data, and for each step the bytes
    that a rank sends, where collectives go over rings, and the seconds; both with what the scheme
    does at the end.
    """

    loss: float
    sent: float
    seconds: float


def train(task: Task, make_scheme: Callable, rate: float, seed: int = 0, steps: int | None = None,
          computing: float = 0.0) -> Trained:
    """Trains on each rank. Called by every rank.

    ``make_scheme(model, optimizer)`` gives the scheme; if it has a ``finish()``, that is called at
    the end. ``computing``: seconds that a step computes at least: the rest is slept.
    """
    steps = task.steps if steps is None else steps
    model = task.model(seed)
    optimizer, schedule = task.optimizer(model.parameters(), rate, steps)
    scheme = make_scheme(model, optimizer)
    dist.barrier()
    begin = time.perf_counter()
    with CallLog() as log:
        for step in range(1, steps + 1):
            until = time.perf_counter() + computing
            optimizer.zero_grad()
            loss_of(model, *task.batch(seed, step, dist.get_rank())).backward()
            time.sleep(max(0.0, until - time.perf_counter()))
            scheme.step()
            schedule.step()
        if hasattr(scheme, "finish"):
            scheme.finish()
    seconds = (time.perf_counter() - begin) / steps
    sent = sum(map(sent_bytes, log.calls)) / steps
    return Trained(task.held_out_loss(model), sent, seconds)
