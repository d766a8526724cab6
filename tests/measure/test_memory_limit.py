"""A rank with a limit runs out of memory alone, and is as before when the block is over."""

import pytest
import torch

from dplab import RankError, run
from dplab.measure import memory_limit
from dplab.measure.memory_limit import _Counted

MB = 10**6


def hold(megabytes, limited):
    """Makes tensors of 1 MB in the block, one after another, and a larger one after it."""
    with limited(32 * MB):
        for _ in range(3):  # what is freed may be held again
            held = None
            held = [torch.ones(MB // 4) for _ in range(megabytes)]
    return len(held) + len([torch.ones(64 * MB // 4)])


LIMITS = pytest.mark.parametrize("limited", [memory_limit, _Counted])


@LIMITS
def test_what_fits_is_held_and_afterwards_there_is_no_limit(limited):
    assert run(hold, 2, 20, limited, backend="gloo") == [21, 21]


@LIMITS
def test_what_is_too_much_ends_this_rank_and_is_named_memory(limited):
    with pytest.raises(RankError) as failure:
        run(hold, 2, 40, limited, backend="gloo")
    assert "memory" in str(failure.value).lower() and failure.value.kind == "raised"


def test_a_block_that_fails_leaves_no_limit():
    def fails_once():
        try:
            with memory_limit(8 * MB):
                torch.ones(64 * MB // 4)
        except (RuntimeError, MemoryError):
            return torch.ones(64 * MB // 4).sum().item()

    assert run(fails_once, 1, backend="gloo") == [16 * MB]
