"""Days, GPU-hours and money for so many tokens, with the failures that so many GPUs will have.

Sources: failures: A. Dubey et al., "The Llama 3 herd of models", 2024, section 3.3.4: 419
unexpected interruptions in 54 days on 16,384 H100s. Saving: KempnerInstitute/KempnerForge b62d2e36,
benchmarks/175b_360gpu/README.md: each asynchronous save of 2.45 TB by 360 H200s held training up
for 60 s. How often to save: `reliability`.
"""

from dataclasses import dataclass

from dplab.predict.reliability import Failures, rank_mtbf

GPU_MTBF = rank_mtbf(419, 16_384, 54 * 86_400)
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
