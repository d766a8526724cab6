"""Training at a large batch: learning-rate rules and the schedule."""

import math

import torch

BASE_BATCH, WARM_UP = 32, 1 / 8  # warm-up: the share of the training that it takes
BATCHES = [BASE_BATCH * 2**power for power in range(7)]
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.0),
}
# The learning rate at k times the base batch is so many times the base rate.
RULES = {"unscaled": lambda k: 1.0, "square root": math.sqrt, "linear": float}


def learning_rate(progress: float, base: float, peak: float, warm_up: float = WARM_UP) -> float:
    """The rate after a share ``progress`` of the training, from 0 to 1.

    It rises in a line from ``base`` to ``peak`` during the first share ``warm_up``, as in Goyal et
    al. (arXiv:1706.02677, section 2.2), and then falls to zero as a cosine. Progress counts
    samples, not steps, so the schedule is the same at each batch size.
    """
    if progress < warm_up:
        return base + (peak - base) * progress / warm_up
    return peak * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))) / 2
