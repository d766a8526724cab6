"""Chapter 07's sick jobs, beyond what test_each_job.py holds each to."""

import random

import pytest
from drill_jobs import faults_of, first_job_of, fitting
from symptoms import symptoms_of

from dplab.drills import wrong_steps
from dplab.drills.wrong_steps import WrongSteps


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_healthy_job_takes_the_steps_of_one_rank_and_no_suspect_fits(world_size):
    job = WrongSteps(1)
    job._world_size = world_size
    job._settings = job._draw_settings(random.Random(world_size))
    job._case = wrong_steps.CASES[0]
    readings = job._run(wrong_steps.rate_at)
    assert fitting(WrongSteps, readings) == []
    assert not symptoms_of(readings)
    assert readings.times_like([1.0] * 4) and readings.in_a_step == job._settings.batch
    assert readings.ranks[0].losses == pytest.approx(readings.one_rank.losses, rel=1e-4)


@pytest.mark.slow
def test_the_micro_batches_that_a_rank_drops_are_told_one_by_one():
    readings = first_job_of(WrongSteps, faults_of(WrongSteps, "e")[0])._readings
    for rank in readings.ranks:
        for times in rank.times.values():
            assert times == pytest.approx([0, 0, 0, 1], abs=1e-3)
