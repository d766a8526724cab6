"""Chapter 06's sick jobs, beyond what test_each_job.py holds each to."""

import random
import re

import pytest
from drill_jobs import faults_of, first_job_of, fitting, said_by
from symptoms import symptoms_of

from dplab.drills import slow_jobs
from dplab.drills.slow_jobs import CASES, SlowJob
from dplab.predict.step import COMMUNICATION, COMPUTE, Span
from dplab.workloads import slept_steps


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_of_a_healthy_job_no_suspect_fits_and_no_complaint_is_true(world_size):
    job = SlowJob(1)
    job._world_size = world_size
    job._settings = job._draw_settings(random.Random(world_size))
    job._case = next(case for case in CASES if case.part is slept_steps.count_batches)
    readings = job._run(slept_steps.count_batches)
    assert fitting(SlowJob, readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]
    assert not symptoms_of(readings)
    assert len({tuple(each.calls) for each in readings.ranks}) == 1
    assert all(each.done == len(each.calls) for each in readings.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ef")
def test_of_a_job_that_stands_still_the_last_calls_are_there(slug):
    job = first_job_of(SlowJob, faults_of(SlowJob, slug)[0])
    stuck = [each for each in job._readings.ranks if not each.finished]
    assert stuck and all(each.done < len(each.calls) for each in stuck)
    assert "launched" in said_by(job.dump)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "most"), [(0, 0), (1, 1)])
def test_honest_repairs_are_accepted_and_no_others(number, most, tmp_path, monkeypatch):
    """Of thrown away files, also that all ranks stop with the one that has the fewest."""
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    job = first_job_of(SlowJob, faults_of(SlowJob, "e")[number])
    job.diagnose(job._case.suspect)
    for less, said in ((most, "solved"), (most + 1, "not mended")):
        assert said in said_by(job.repair, lambda rank, ranks, batches, less=less:
                               batches // ranks - less)
    assert "solved" in said_by(job.repair, job._healthy)


@pytest.mark.slow
def test_where_all_ranks_wait_for_data_the_answer_says_all():
    all_wait, one_waits = (slow_jobs.waits_for_data(first_job_of(SlowJob, fault)._readings)[1]
                           for fault in faults_of(SlowJob, "b"))
    assert all_wait.startswith("Each rank waits")
    assert re.match(r"Rank \d waits", one_waits)


@pytest.mark.parametrize(("hidden", "fits"), [(0.75, False), (0.25, True)])
def test_of_hidden_traffic_the_answer_says_how_much_is_hidden(hidden, fits):
    seconds = slow_jobs.LINK.seconds("all_reduce", 2, 22_000)
    step = [Span("backward", COMPUTE, 0, hidden * seconds),
            Span("all_reduce", COMMUNICATION, 0, seconds, 22_000, 0)]
    rank = slow_jobs.Recording([step] * (slow_jobs.SKIPPED + 1), [], 0, 0, True)
    found, sentence = slow_jobs.link_alone(slow_jobs.Readings([rank, rank], rank))
    assert (found, re.search(r"(\d+) %", sentence)[1]) == (fits, "75"), sentence
