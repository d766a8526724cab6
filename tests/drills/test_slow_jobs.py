"""Chapter 06's sick jobs, beyond what test_each_job.py holds each to."""

import re

import pytest
from drill_jobs import first_job_of, fitting, seeds_of

from dplab.drills import slow_jobs
from dplab.drills.slow_jobs import CASES, SlowJob
from dplab.predict.step import COMMUNICATION, COMPUTE, Span
from dplab.workloads import slept_steps

FAULTS = [pytest.param(case, fault, id=f"{case.slug}-{number}")
          for case in CASES for number, fault in enumerate(case.faults)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_of_a_healthy_job_no_suspect_fits_and_no_complaint_is_true(world_size):
    job = SlowJob(seeds_of(SlowJob, CASES[0].faults[0], 1)[0])
    job._world_size = world_size
    job._settings = job._draw_settings(slow_jobs.random.Random(world_size))
    job._case = next(case for case in CASES if case.part == "count_batches")
    readings = job._run(slept_steps.count_batches)
    assert fitting(SlowJob, readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]
    assert not [fault for case in CASES for fault in case.faults if fault.is_true(readings)]
    assert len({tuple(each.calls) for each in readings.ranks}) == 1
    assert all(each.done == len(each.calls) for each in readings.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ef")
def test_of_a_job_that_stands_still_the_last_calls_are_there(slug, capsys):
    [fault, *_] = next(case.faults for case in CASES if case.slug == slug)
    job = first_job_of(SlowJob, fault)
    stuck = [each for each in job._readings.ranks if not each.finished]
    assert stuck and all(each.done < len(each.calls) for each in stuck)
    job.dump()
    assert "launched" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loop_that_is_mended_is_accepted_and_another_one_is_not(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    case = next(case for case in CASES if case.to_repair)
    job = first_job_of(SlowJob, case.faults[0])
    job.diagnose(case.suspect)
    job.repair(lambda rank, ranks, batches: batches // ranks - 1)
    assert "not mended" in capsys.readouterr().out
    job.repair(lambda rank, ranks, batches: batches // ranks)
    assert "solved" in capsys.readouterr().out


@pytest.mark.slow
def test_of_thrown_away_files_both_honest_repairs_are_accepted(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    case = next(case for case in CASES if case.to_repair)
    job = first_job_of(SlowJob, case.faults[1])
    for honest in (case.faults[1].mended,
                   lambda rank, ranks, batches: batches // ranks - 1):  # as the one with fewest
        job.diagnose(case.suspect)
        job.repair(honest)
        assert "solved" in capsys.readouterr().out
    job.repair(lambda rank, ranks, batches: batches // ranks - 2)
    assert "not mended" in capsys.readouterr().out


@pytest.mark.slow
def test_where_all_ranks_wait_for_data_the_answer_says_all():
    case = next(case for case in CASES if case.suspect == "late input")
    all_wait, one_waits = (slow_jobs.waits_for_data(first_job_of(SlowJob, fault)._readings)[1]
                           for fault in case.faults)
    assert all_wait.startswith("Each rank waits")
    assert re.match(r"Rank \d waits", one_waits)


@pytest.mark.parametrize(("hidden", "fits", "share"), [(0.75, False, "75"), (0.25, True, "75")])
def test_of_hidden_traffic_the_answer_says_how_much_is_hidden(hidden, fits, share):
    seconds = slow_jobs.LINK.seconds("all_reduce", 2, 22_000)
    step = [Span("backward", COMPUTE, 0, hidden * seconds),
            Span("all_reduce", COMMUNICATION, 0, seconds, 22_000, 0)]
    rank = slow_jobs.Recording([step] * (slow_jobs.SKIPPED + 1), [], 0, 0, True)
    found, sentence = slow_jobs.link_alone(slow_jobs.Readings([rank, rank], rank))
    assert (found, re.search(r"(\d+) %", sentence)[1]) == (fits, share), sentence


def test_some_jobs_are_to_be_repaired():
    assert any(case.to_repair for case in CASES)
