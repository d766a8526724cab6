"""Chapter 11's plans, beyond what test_each_job.py holds each to."""

import random

import pytest
from drill_jobs import fitting
from symptoms import symptoms_of

from dplab.drills.flawed_plans import CASES, FlawedPlan, plan


@pytest.mark.parametrize("seed", range(6))
def test_no_suspect_fits_a_healthy_plan(seed):
    job = FlawedPlan(seed)
    readings = plan(job._draw_settings(random.Random(seed)))
    assert fitting(FlawedPlan, readings) == []
    assert symptoms_of(readings) == {"in time"}
    assert readings.page == readings.right
    assert readings.share == pytest.approx(readings.like.middle * readings.lasting)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_colleague_can_see_differs_by_what_he_complains_of(seed):
    """A recipe on which a fault changes nothing would be no drill."""
    settings = FlawedPlan(seed)._draw_settings(random.Random(seed))
    for case in CASES:
        [fault] = case.faults
        job = FlawedPlan(seed)
        job._case, job._fault, job._healthy = case, fault, case.part
        readings = plan(settings, **{case.part.__name__: job._sick_part()})
        assert fitting(FlawedPlan, readings) == [case.suspect]
        assert fault.symptoms <= symptoms_of(readings)
