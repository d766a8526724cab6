"""Chapter 05's sick jobs: the readings of each decide between all suspects, and mending mends."""

import functools
import inspect
import io
import re
from contextlib import redirect_stdout

import pytest

from dplab.drills.late_buckets import CASES, SUSPECTS, LateBuckets, Parts

FAULTS = [pytest.param(case, fault, id=f"{case.slug}-{number}")
          for case in CASES for number, fault in enumerate(case.faults)]


@functools.cache
def seeds_of(fault, count):
    """The first seeds whose job has this fault."""
    found = (seed for seed in range(1, 10_000) if LateBuckets(seed)._fault is fault)
    return [next(found) for _ in range(count)]


@functools.cache
def job_of(seed):
    job = LateBuckets(seed)
    job._readings = job._run(job._fault.sick)
    return job


def fitting(readings):
    return [suspect.name for suspect in SUSPECTS if suspect.finding(readings)[0]]


def judge(case, fault, seed):
    """The readings decide for one suspect, and the complaint is true."""
    job = job_of(seed)
    assert fitting(job._readings) == [case.suspect]
    assert fault.is_true(job._readings), fault.complaint


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_exactly_one_suspect_fits_each_job(case, fault):
    judge(case, fault, seeds_of(fault, 1)[0])


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_exactly_one_suspect_fits_each_job_with_every_seed(case, fault):
    for seed in seeds_of(fault, 6):
        judge(case, fault, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), [FAULTS[0], FAULTS[-1]])
def test_the_mended_part_averages_and_overlaps(case, fault):
    job = LateBuckets(seeds_of(fault, 1)[0])
    readings = job._run(fault.mended)
    assert fitting(readings) == []
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
    readings = job_of(seeds_of(fault, 1)[0])._readings
    stages = readings.settings.stages
    for rank in readings.ranks:
        assert len(rank.messages) == 4 * stages, "a message for each parameter"
        assert sum(message.nbytes for message in rank.messages) == 4 * stages * 2 * (64 * 64 + 64)
        assert all(0 < message.launched < message.done <= rank.step for message in rank.messages)


@pytest.mark.slow
@pytest.mark.parametrize("slug", "be")
def test_no_reading_names_a_suspect(slug):
    [fault, *_] = next(case.faults for case in CASES if case.slug == slug)
    job = job_of(seeds_of(fault, 1)[0])
    said = io.StringIO()
    with redirect_stdout(said):
        for name in job._instruments():
            getattr(job, name)()
    assert "rank 1" in said.getvalue()
    words = {word for suspect in job.suspects for word in suspect.split()}
    assert not words & set(re.findall(r"[\w-]+", said.getvalue().lower()))
    assert not words & set(job._instruments())


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_a_fault_fits_its_place_and_changes_few_lines(case, fault):
    healthy = getattr(Parts(), case.part)
    assert fault.mended is healthy
    signatures = {str(inspect.signature(part)) for part in (healthy, fault.sick)}
    assert len(signatures) == 1
    marked = [line for line in LateBuckets(seeds_of(fault, 1)[0])._difference().splitlines()
              if line.startswith(("-", "+"))]
    assert 1 <= len(marked) <= 10
    words = {word for suspect in SUSPECTS for word in suspect.name.split()}
    assert not words & set(re.findall(r"[\w-]+", fault.complaint.lower()))


def test_every_suspect_has_a_job_and_an_instrument():
    assert [case.suspect for case in CASES] == [suspect.name for suspect in SUSPECTS]
    assert {suspect.instrument for suspect in SUSPECTS} <= set(LateBuckets._instruments())
