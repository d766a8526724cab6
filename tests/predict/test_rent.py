"""Failing ranks, against failures drawn one by one."""

import math
import random

import pytest

from dplab.predict.rent import GPU_MTBF, SAVE_RATE, Rent, daly_interval, goodput


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


@pytest.mark.parametrize("case", [(1000, 10, 30, 600), (300, 60, 100, 150)])
def test_goodput_is_that_of_failures_drawn_one_by_one(case):
    share = trained_share(*case, random.Random(1), until=2e4 * case[0])
    assert goodput(*case) == pytest.approx(share, rel=0.01)
    assert goodput(1e-3, 60, 600, 60) == 0


@pytest.mark.parametrize("save", [1, 10, 100, 600])
def test_dalys_interval_is_near_the_best(save):
    best = max(goodput(1000, save, 50, interval) for interval in range(5, 3000, 5))
    assert goodput(1000, save, 50, daly_interval(1000, save)) == pytest.approx(best, rel=1e-3)
    assert daly_interval(100, 600) == 100


def test_rent_by_hand():
    assert abs(GPU_MTBF / 86_400 / 365.25 - 5.78) < 0.01, "years of a GPU"
    run, between = Rent(1e12, 1e6, 1000, 1000 * SAVE_RATE, price=2.0), GPU_MTBF / 1000
    assert run.save_seconds == 1 and run.failures_a_day == pytest.approx(86_400 / between)
    assert run.save_every == pytest.approx(math.sqrt(2 * between), rel=0.01)
    # to first order: 1/τ + τ/2M of the time is lost, and ten minutes for each failure
    assert 1 - run.goodput == pytest.approx(
        1 / run.save_every + run.save_every / 2 / between + 600 / between, rel=0.02)
    assert run.gpu_hours == pytest.approx(1e6 / 3600 * 1000 / run.goodput)
    assert run.days == pytest.approx(run.gpu_hours / 24 / 1000) and run.money == 2 * run.gpu_hours
    assert Rent(1e12, 1e6, 1000, 1e12).money is None
