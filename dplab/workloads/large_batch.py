"""Training at a large batch: learning-rate rules, the schedule, and steps against samples."""

import math
import statistics

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


def least_steps_and_samples(steps: dict[int, float]) -> tuple[float, float]:
    """S_min and E_min of (S / S_min − 1)(E / E_min − 1) = 1, from the steps S for each batch size.

    E = B·S are the samples. With B_crit = E_min / S_min this is S = S_min·(1 + B_crit / B): the
    least squares of log S over a grid of B_crit (McCandlish et al., arXiv:1812.06162, section 2.3).
    """
    def fitted(critical):
        logs = [math.log(s / (1 + critical / batch)) for batch, s in steps.items()]
        return statistics.pvariance(logs), math.exp(statistics.mean(logs))

    critical = min((1.01**power for power in range(1500)), key=lambda each: fitted(each)[0])
    least_steps = fitted(critical)[1]
    return least_steps, critical * least_steps
