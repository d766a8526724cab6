"""What grows with the number of ranks alone: the slowest of many, and the first of many to fail.

A synchronous step waits for its slowest rank: an order statistic. A job stops when any of its ranks
fails, and goes on from its last checkpoint: goodput is the share of time that is not lost so.

Sources: H. David and H. Nagaraja, "Order statistics", 2003 (the maximum); J. Young, "A first order
approximation to the optimum checkpoint interval", 1974; J. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", 2006 (his interval, and the expected time, exact
for failures that come at a constant rate).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dplab.predict.checks import one_of, whole

# P(X > x), and a lower bound of X, for a mean of 0 and a standard deviation of 1.
DISTRIBUTIONS: dict[str, tuple[Callable[[float], float], float]] = {
    "normal": (lambda x: math.erfc(x / math.sqrt(2)) / 2, -10.0),
    "exponential": (lambda x: min(1.0, math.exp(-1 - x)), -1.0),
    "uniform": (lambda x: min(1.0, max(0.0, 0.5 - x / math.sqrt(12))), -math.sqrt(3)),
}


def expected_maximum(count: int, distribution: str = "normal", spare: int = 0) -> float:
    """The expected largest of ``count`` independent draws, in standard deviations above the mean.

    ``distribution``: one of `DISTRIBUTIONS`. ``spare``: so many of the largest are not waited for,
    as with backup workers. By integrating P(largest > x); right to about 1e-4. Raises ValueError
    for an unknown distribution, for counts below 1, and where none would be waited for.
    """
    one_of(distribution, DISTRIBUTIONS, "distribution")
    if not 0 <= whole(spare, "spare", least=0) < whole(count, "count"):
        raise ValueError(f"of {count} draws at most {count - 1} can be spared, not {spare}")
    survival, low = DISTRIBUTIONS[distribution]
    high = low + 1
    while count * survival(high) > 1e-15:
        high += 1

    def exceeds(x):
        tail = survival(x)
        if spare == 0:
            return 1.0 if tail == 1 else -math.expm1(count * math.log1p(-tail))
        return 1 - sum(_binomial(count, above, tail) for above in range(spare + 1))

    intervals = 2000
    width = (high - low) / intervals
    weights = (1 if place in (0, intervals) else 4 if place % 2 else 2
               for place in range(intervals + 1))
    return low + width / 3 * sum(weight * exceeds(low + place * width)
                                 for place, weight in enumerate(weights))


def straggling_seconds(seconds: float, compute_seconds: float, ranks: int,
                       spread: float) -> float:
    """A step that waits for its slowest rank.

    Of ``seconds``, each rank computes for ``compute_seconds`` on average, with a standard deviation
    of ``spread`` times that, normally distributed, anew each step, and waited for once: at its end.
    """
    return seconds + spread * compute_seconds * expected_maximum(ranks)


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


def rank_mtbf(failures: int, ranks: int, seconds: float) -> float:
    """Mean seconds between failures of one rank, from so many failures of a job on ``ranks``."""
    return seconds * ranks / whole(failures, "failures")


def _binomial(count, above, tail):
    """The probability that exactly ``above`` of ``count`` exceed what one exceeds with ``tail``."""
    if tail in (0, 1):
        return float(above == count * tail)
    return math.exp(math.lgamma(count + 1) - math.lgamma(above + 1) - math.lgamma(count - above + 1)
                    + above * math.log(tail) + (count - above) * math.log1p(-tail))
