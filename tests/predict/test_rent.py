"""Failing ranks, against failures drawn one by one."""

import math
import random
from dataclasses import replace

import pytest

from dplab.predict.rent import GPU_MTBF, Failures, Rent


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


def test_rent_by_hand():
    assert abs(GPU_MTBF / 86_400 / 365.25 - 5.78) < 0.01, "years of a GPU"
    run = Rent(1e12, 1e6, 1000, 1e12, price=2.0, save_rate=1e9, restart_seconds=0.0)
    assert run.save_seconds == 1
    assert run.failures_a_day == pytest.approx(1000 * 86_400 / GPU_MTBF)
    between = GPU_MTBF / 1000
    assert run.save_every == pytest.approx(math.sqrt(2 * between), rel=0.01)  # Young
    # to first order: δ/τ + τ/2M of the time is lost
    assert 1 - run.goodput == pytest.approx(
        1 / run.save_every + run.save_every / 2 / between, rel=0.01)
    assert run.gpu_hours == pytest.approx(1e6 / 3600 * 1000 / run.goodput)
    assert run.money == 2 * run.gpu_hours and replace(run, price=None).money is None


def test_a_cluster_that_always_fails_does_nothing():
    assert Failures(1, 60, 600).goodput(100_000) == 0
    assert Failures(1000, 600, 0).daly_interval(10) == 100
    for wrong in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match=r"above 0 s|0 s or more"):
            Failures(*wrong)
