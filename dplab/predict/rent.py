"""Days, GPU-hours and money for so many tokens, with the failures that so many GPUs will have.

Failures come at a constant rate, also while restarting; after each, training goes on from the last
checkpoint.

Sources: failures: A. Dubey et al., "The Llama 3 herd of models", 2024, section 3.3.4: 419
unexpected interruptions in 54 days on 16,384 H100s. Saving: KempnerInstitute/KempnerForge b62d2e36,
benchmarks/175b_360gpu/README.md: each asynchronous save of 2.45 TB by 360 H200s held training up
for 60 s. How often to save: J. Daly, "A higher order estimate of the optimum checkpoint interval
for restart dumps", 2006 (the expected time too, exact for such failures).
"""

import math
from dataclasses import dataclass

GPU_MTBF = 54 * 86_400 * 16_384 / 419
"""Mean seconds between failures of one GPU."""
SAVE_RATE = 2.45e12 / 360 / 60
"""Bytes that a GPU saves for each second that training waits."""
RESTART_SECONDS = 600
"""From a failure until training goes on: assumed, to notice it, to start again and to load."""


def daly_interval(mtbf: float, save_seconds: float) -> float:
    """Seconds of training between checkpoints that lose least, where failures lie ``mtbf`` apart.

    To first order √(2 · save_seconds · mtbf); ``mtbf`` where a checkpoint takes 2 · mtbf or longer.
    """
    ratio = save_seconds / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * save_seconds * mtbf) * series - save_seconds


def goodput(mtbf: float, save_seconds: float, restart_seconds: float, interval: float) -> float:
    """The share of time that goes into training that lasts, with ``interval`` between checkpoints.

    τ / (M · exp(R/M) · (exp((τ+δ)/M) − 1)); 0 where that is too small for a float. All in seconds.
    """
    try:
        lost = math.exp(restart_seconds / mtbf) * math.expm1((interval + save_seconds) / mtbf)
    except OverflowError:
        return 0.0
    return interval / (mtbf * lost)


@dataclass(frozen=True)
class Rent:
    """``tokens`` at ``tokens_per_second`` on ``gpus``; ``price`` of a GPU-hour, where it is known.

    A checkpoint has ``checkpoint_bytes``, which all GPUs save together.
    """

    tokens: float
    tokens_per_second: float
    gpus: int
    checkpoint_bytes: float
    price: float | None = None

    @property
    def save_seconds(self) -> float:
        return self.checkpoint_bytes / self.gpus / SAVE_RATE

    @property
    def failures_a_day(self) -> float:
        return 86_400 * self.gpus / GPU_MTBF

    @property
    def save_every(self) -> float:
        """Seconds of training between two saves, by Daly."""
        return daly_interval(GPU_MTBF / self.gpus, self.save_seconds)

    @property
    def goodput(self) -> float:
        """The share of the rented time that goes into training that lasts."""
        return goodput(GPU_MTBF / self.gpus, self.save_seconds, RESTART_SECONDS, self.save_every)

    @property
    def days(self) -> float:
        return self.tokens / self.tokens_per_second / self.goodput / 86_400

    @property
    def gpu_hours(self) -> float:
        return 24 * self.days * self.gpus

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.price * self.gpu_hours
