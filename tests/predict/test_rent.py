"""Failing ranks, against failures drawn one by one."""

import math
import random

import pytest

from dplab.predict.rent import Failures, rank_mtbf


def trained_share(mtbf, checkpoint, restart, interval, chance, until):
    """The share of time in segments that a checkpoint kept, with failures drawn one by one."""
    now, kept, failure = 0.0, 0.0, chance.expovariate(1 / mtbf)
    while now < until:
        if now + interval + checkpoint <= failure:
            now, kept = now + interval + checkpoint, kept + interval
            continue
        while True:  # restart, which may fail too
            now, failure = failure, failure + chance.expovariate(1 / mtbf)
            if now + restart <= failure:
                now += restart
                break
    return kept / now


@pytest.mark.parametrize(("mtbf", "checkpoint", "restart", "interval"), [
    (1000, 10, 30, 600), (300, 60, 100, 150)])
def test_goodput_is_that_of_failures_drawn_one_by_one(mtbf, checkpoint, restart, interval):
    failures = Failures(50 * mtbf, checkpoint, restart)
    share = trained_share(mtbf, checkpoint, restart, interval, random.Random(1), 2e4 * mtbf)
    assert failures.goodput(50, interval) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("checkpoint", [1, 10, 100, 600])
def test_dalys_interval_is_near_the_best(checkpoint):
    failures = Failures(1000, checkpoint, 50)
    best = max(failures.goodput(1, tau) for tau in range(5, 3000, 5))
    assert failures.goodput(1) == pytest.approx(best, rel=1e-3)
    assert failures.goodput(1) >= failures.goodput(1, failures.young_interval(1)) - 1e-4
    assert failures.young_interval(1) == pytest.approx(math.sqrt(2000 * checkpoint))


def test_llama_3s_interruptions():
    mtbf = rank_mtbf(419, 16_384, 54 * 86_400)
    assert mtbf / (365.25 * 86_400) == pytest.approx(5.78, abs=0.01)  # years of a GPU
    quick = Failures(mtbf, checkpoint_seconds=10, restart_seconds=300)
    assert quick.mtbf(16_384) / 3600 == pytest.approx(54 * 24 / 419)  # 3.1 hours
    # "> 90 % effective training time" (section 3.3.4) needs both to be short
    assert quick.goodput(16_384) > 0.9
    assert Failures(mtbf, 60, 600).goodput(16_384) < 0.9
    # to first order: δ/τ + τ/2M + R/M of the time is lost
    lost = 2 * math.sqrt(10 / (2 * 11_135)) + 300 / 11_135
    assert 1 - quick.goodput(16_384) == pytest.approx(lost, rel=0.05)


def test_a_cluster_that_always_fails_does_nothing():
    assert Failures(1, 60, 600).goodput(100_000) == 0
    assert Failures(1000, 600, 0).daly_interval(10) == 100
    for wrong in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match=r"above 0 s|0 s or more"):
            Failures(*wrong)
