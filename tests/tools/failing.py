"""A run that is meant to fail, for the tests of what is said then and what is left afterwards."""

import sys
import time

import cloudpickle
import pytest
import torch.distributed as dist
from kernel import no_ranks_left

from dplab import RankError, run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 15  # seconds, on the slowest of days


def failure(fn, ranks, *args, **options) -> RankError:
    """The error of a run that fails before its timeout of 60 s, or within 15 s of another one.

    Afterwards no rank is left, and the next run works.
    """
    run(int, 1, "7")  # so that the fork server is there
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(fn, ranks, *args, **options)
    assert time.monotonic() - started < SOON
    no_ranks_left()
    assert run(lambda: dist.get_rank(), ranks) == list(range(ranks))
    return caught.value
