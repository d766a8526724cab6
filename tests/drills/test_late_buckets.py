"""Chapter 05's sick jobs, beyond what test_each_job.py holds each to."""

import pytest
from drill_jobs import first_job_of, fitting, seeds_of

from dplab.drills.late_buckets import CASES, SUSPECTS, LateBuckets, Parts

FAULTS = [pytest.param(case, fault, id=f"{case.slug}-{number}")
          for case in CASES for number, fault in enumerate(case.faults)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), [FAULTS[0], FAULTS[-1]])
def test_the_mended_part_averages_and_overlaps(case, fault):
    job = LateBuckets(seeds_of(LateBuckets, fault, 1)[0])
    readings = job._run(fault.mended)
    assert fitting(LateBuckets, readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]
    assert readings.own() == [0] * len(readings.ranks)
    assert max(readings.beside()) >= job._settings.stages // 2
    # The first stage that a rank computes has nothing to be beside.
    assert max(readings.beside()) <= job._settings.stages - 1
    assert {tuple(order) for order in readings.orders()} == {tuple(range(job._settings.stages))}
    # The ranks' data ask for different orders, and the job does not follow them.
    assert len({each.computed[0][0] for each in readings.ranks}) == 2


@pytest.mark.slow
def test_the_readings_count_messages_and_bytes():
    fault = CASES[2].faults[0]
    readings = first_job_of(LateBuckets, fault)._readings
    stages = readings.settings.stages
    for rank in readings.ranks:
        assert len(rank.messages) == 4 * stages, "a message for each parameter"
        assert sum(message.nbytes for message in rank.messages) == 4 * stages * 2 * (64 * 64 + 64)
        assert all(0 < message.launched < message.done <= rank.step for message in rank.messages)


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_a_fault_is_mended_by_the_healthy_part(case, fault):
    assert fault.mended is getattr(Parts(), case.part)


def test_the_suspects_stand_in_the_order_of_the_jobs():
    assert [case.suspect for case in CASES] == [suspect.name for suspect in SUSPECTS]
