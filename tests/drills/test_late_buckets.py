"""Chapter 05's sick jobs, beyond what test_each_job.py holds each to."""

import pytest
from drill_jobs import faults_of, first_job_of, fitting, healthy_run_of
from symptoms import symptoms_of

from dplab.drills.late_buckets import LateBuckets


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ae")
def test_the_mended_part_averages_and_overlaps(slug):
    job, readings = healthy_run_of(LateBuckets, faults_of(LateBuckets, slug)[0])
    assert fitting(LateBuckets, readings) == []
    assert "the ranks end apart" not in symptoms_of(readings)
    mean = sum(rank.own for rank in readings.ranks) / len(readings.ranks)
    assert all((rank.after - mean).abs().max() < 1e-5 for rank in readings.ranks)
    assert readings.own() == [0] * len(readings.ranks)
    # The first stage that a rank computes has nothing to be beside.
    assert job._settings.stages // 2 <= max(readings.beside()) <= job._settings.stages - 1
    assert {tuple(order) for order in readings.orders()} == {tuple(range(job._settings.stages))}
    # The ranks' data ask for different orders, and the job does not follow them.
    assert len({each.computed[0].name for each in readings.ranks}) == 2


@pytest.mark.slow
def test_the_readings_count_messages_and_bytes():
    readings = first_job_of(LateBuckets, faults_of(LateBuckets, "c")[0])._readings
    stages = readings.settings.stages
    for rank in readings.ranks:
        assert len(rank.messages) == 4 * stages, "a message for each parameter"
        spans = [message.span for message in rank.messages]
        assert sum(span.nbytes for span in spans) == 4 * stages * 2 * (64 * 64 + 64)
        assert all(0 < span.start < span.end <= rank.step for span in spans)
        assert [int(span.name.split()[1]) for span in rank.computed[2:]] == list(
            reversed(range(stages - 2)))
