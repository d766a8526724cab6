"""Days, GPU-hours and money for so many tokens, with the failures that so many GPUs will have.

Sources: failures: A. Dubey et al., "The Llama 3 herd of models", 2024, section 3.3.4: 419
unexpected interruptions in 54 days on 16,384 H100s. Saving: KempnerInstitute/KempnerForge b62d2e36,
benchmarks/175b_360gpu/README.md: each asynchronous save of 2.45 TB by 360 H200s held training up
for 60 s. How often to save: J. Young, "A
first order approximation to the optimum checkpoint interval", 1974; J. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006 (the expected time too, exact
for failures that come at a constant rate).
"""

import math
from dataclasses import dataclass

from dplab.predict.checks import whole


@dataclass(frozen=True)
class Failures:
    """``rank_mtbf``: mean seconds between failures of one rank; ``checkpoint_seconds``: for which
    training stands still to write one; ``restart_seconds``: from a failure until training goes on,
    from the last checkpoint. Failures come at a constant rate, also while restarting.
    """

    rank_mtbf: float
    checkpoint_seconds: float
    restart_seconds: float

    def __post_init__(self):
        if not self.rank_mtbf > 0 or not self.checkpoint_seconds > 0:
            raise ValueError("the mean time between failures and a checkpoint's are above 0 s")
        if not self.restart_seconds >= 0:
            raise ValueError(f"a restart takes 0 s or more, not {self.restart_seconds}")

    def mtbf(self, ranks: int) -> float:
        """Seconds from one failure of the job to the next: any rank stops it."""
        return self.rank_mtbf / whole(ranks, "ranks")

    def young_interval(self, ranks: int) -> float:
        """Seconds of training between checkpoints, √(2δM), for δ far below M."""
        return math.sqrt(2 * self.checkpoint_seconds * self.mtbf(ranks))

    def daly_interval(self, ranks: int) -> float:
        """The same to a higher order; M where a checkpoint takes 2M or longer."""
        between, ratio = self.mtbf(ranks), self.checkpoint_seconds / (2 * self.mtbf(ranks))
        if ratio >= 1:
            return between
        series = 1 + math.sqrt(ratio) / 3 + ratio / 9
        return self.young_interval(ranks) * series - self.checkpoint_seconds

    def goodput(self, ranks: int, interval: float | None = None) -> float:
        """The share of time that goes into training that lasts; Daly's interval by default.

        τ / (M · exp(R/M) · (exp((τ+δ)/M) − 1)); 0 where that is too small for a float. Raises
        ValueError for an interval that is not above 0 s.
        """
        between = self.mtbf(ranks)
        interval = self.daly_interval(ranks) if interval is None else interval
        if not interval > 0:
            raise ValueError(f"checkpoints lie more than 0 s apart, not {interval}")
        try:
            lost = math.exp(self.restart_seconds / between) * math.expm1(
                (interval + self.checkpoint_seconds) / between)
        except OverflowError:
            return 0.0
        return interval / (between * lost)


GPU_MTBF = 54 * 86_400 * 16_384 / 419
"""Mean seconds between failures of one GPU."""
SAVE_RATE = 2.45e12 / 360 / 60
"""Bytes that a GPU saves for each second that training waits."""
RESTART_SECONDS = 600
"""From a failure until training goes on: assumed, to notice it, to start again and to load."""


@dataclass(frozen=True)
class Rent:
    """``tokens`` at ``tokens_per_second`` on ``gpus``; ``price`` of a GPU-hour, where it is known.

    A checkpoint has ``checkpoint_bytes``, which all GPUs save together, each
    ``save_rate`` a second.
    """

    tokens: float
    tokens_per_second: float
    gpus: int
    checkpoint_bytes: float
    price: float | None = None
    save_rate: float = SAVE_RATE
    restart_seconds: float = RESTART_SECONDS

    @property
    def save_seconds(self) -> float:
        return self.checkpoint_bytes / self.gpus / self.save_rate

    @property
    def _failures(self) -> Failures:
        return Failures(GPU_MTBF, self.save_seconds, self.restart_seconds)

    @property
    def failures_a_day(self) -> float:
        return 86_400 / self._failures.mtbf(self.gpus)

    @property
    def save_every(self) -> float:
        """Seconds of training between two saves, by Daly."""
        return self._failures.daly_interval(self.gpus)

    @property
    def goodput(self) -> float:
        """The share of the rented time that goes into training that lasts."""
        return self._failures.goodput(self.gpus)

    @property
    def days(self) -> float:
        return self.tokens / self.tokens_per_second / self.goodput / 86_400

    @property
    def gpu_hours(self) -> float:
        return 24 * self.days * self.gpus

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.price * self.gpu_hours
