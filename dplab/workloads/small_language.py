"""A small language model that ranks train together: what each scheme of chapter 13 is tried on.

A byte-level transformer with 70,464 parameters, on the source of Python's standard library, with
AdamW. A *scheme* decides what the ranks send. It is made of a model and its optimizer, and its
``step()`` takes the place of ``optimizer.step()``, as that of `dplab.parallel.LocalSGD` does.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.measure.call_log import CallLog, sent_bytes
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads import standard_library
from dplab.workloads.transformer import Transformer

RANKS, STEPS = 4, 512
LOCAL_BATCH, LENGTH = 4, 32
WARM_UP = 20  # steps
HELD_OUT = 200_000  # the last bytes of the text, on which nobody trains


@dataclass(frozen=True)
class Trained:
    """What came of a training on one rank: its loss on held-out text, and for each step the bytes
    that a rank sends, where collectives go over rings, and the seconds up to the last step.
    """

    loss: float
    sent: float
    seconds: float


def language_model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(TransformerConfig(2, 48, 4, 192, standard_library.VOCABULARY, LENGTH))


def adamw(parameters, rate: float, steps: int):
    """The optimizer, and a schedule that warms up and then falls to a tenth."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (1 - 0.9 * step / steps))


def batch(text: torch.Tensor, seed: int, step: int, rank: int):
    """Inputs and targets of a rank in a step: no two of them draw the same numbers."""
    return standard_library.sample(text, LOCAL_BATCH, LENGTH,
                                   (100_000 * seed + step) * RANKS + rank)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained on, and what is held out."""
    text = standard_library.load_source()
    return text[:-HELD_OUT], text[-HELD_OUT:]


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model) -> float:
    return loss_of(model, *standard_library.sample(texts()[1], 256, LENGTH, seed=0)).item()


def train(make_scheme: Callable, rate: float, seed: int = 0, steps: int = STEPS,
          computing: float = 0.0) -> Trained:
    """Trains on each rank, and judges rank 0's model. Called by every rank.

    ``make_scheme(model, optimizer)`` gives the scheme; if it has a ``finish()``, that is called at
    the end. ``computing``: seconds that a step computes at least: the rest is slept.
    """
    text, _ = texts()
    model = language_model(seed)
    optimizer, schedule = adamw(model.parameters(), rate, steps)
    scheme = make_scheme(model, optimizer)
    dist.barrier()
    begin = time.perf_counter()
    with CallLog() as log:
        for step in range(1, steps + 1):
            until = time.perf_counter() + computing
            optimizer.zero_grad()
            loss_of(model, *batch(text, seed, step, dist.get_rank())).backward()
            time.sleep(max(0.0, until - time.perf_counter()))
            scheme.step()
            schedule.step()
        seconds = (time.perf_counter() - begin) / steps
        if hasattr(scheme, "finish"):
            scheme.finish()
    return Trained(held_out_loss(model), sum(map(sent_bytes, log.calls)) / steps, seconds)
