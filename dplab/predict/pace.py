"""How fast: of several measured rates the slow, the typical or the fast one."""

import statistics
from collections.abc import Collection

from dplab.predict.checks import one_of

PACES = ("slow", "typical", "fast")
_DECILES = dict(zip(PACES, (1, 5, 9), strict=True))


def at_pace(rates: Collection[float], pace: str) -> float:
    """The 10th percentile of the rates, their median, or the 90th; ``pace`` is one of `PACES`.

    Between two rates it interpolates linearly; one rate alone is each of the three. Raises
    ValueError for another pace.
    """
    decile = _DECILES[one_of(pace, PACES, "pace")]
    ordered = sorted(rates) if len(rates) > 1 else [*rates] * 2
    return statistics.quantiles(ordered, n=10, method="inclusive")[decile - 1]
