"""Chapter 06's sick jobs: the readings of each decide between all suspects, and mending mends."""

import functools
import inspect
import io
import re
from contextlib import redirect_stdout

import pytest

from dplab.drills import slow_jobs
from dplab.drills.slow_jobs import CASES, SUSPECTS, SlowJob
from dplab.predict.step import COMMUNICATION, COMPUTE, Span
from dplab.workloads import slept_steps
from dplab.workloads.slept_steps import Parts

FAULTS = [pytest.param(case, fault, id=f"{case.slug}-{number}")
          for case in CASES for number, fault in enumerate(case.faults)]


@functools.cache
def seeds_of(fault, count):
    """The first seeds whose job has this fault."""
    found = (seed for seed in range(1, 10_000) if SlowJob(seed)._fault is fault)
    return [next(found) for _ in range(count)]


@functools.cache
def job_of(seed):
    job = SlowJob(seed)
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
    for seed in seeds_of(fault, 5):
        judge(case, fault, seed)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_of_a_healthy_job_no_suspect_fits_and_no_complaint_is_true(world_size):
    job = SlowJob(seeds_of(CASES[0].faults[0], 1)[0])
    job._world_size = world_size
    job._settings = job._draw_settings(slow_jobs.random.Random(world_size))
    job._case = next(case for case in CASES if case.part == "count_batches")
    readings = job._run(slept_steps.count_batches)
    assert fitting(readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]
    assert not [fault for case in CASES for fault in case.faults if fault.is_true(readings)]
    assert len({tuple(each.calls) for each in readings.ranks}) == 1
    assert all(each.done == len(each.calls) for each in readings.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ef")
def test_of_a_job_that_stands_still_the_last_calls_are_there(slug, capsys):
    [fault, *_] = next(case.faults for case in CASES if case.slug == slug)
    job = job_of(seeds_of(fault, 1)[0])
    stuck = [each for each in job._readings.ranks if not each.finished]
    assert stuck and all(each.done < len(each.calls) for each in stuck)
    job.dump()
    assert "launched" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loop_that_is_mended_is_accepted_and_another_one_is_not(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    case = next(case for case in CASES if case.to_repair)
    job = job_of(seeds_of(case.faults[0], 1)[0])
    job.diagnose(case.suspect)
    job.repair(lambda rank, ranks, batches: batches // ranks - 1)
    assert "not mended" in capsys.readouterr().out
    job.repair(lambda rank, ranks, batches: batches // ranks)
    assert "solved" in capsys.readouterr().out


@pytest.mark.slow
def test_of_thrown_away_files_both_honest_repairs_are_accepted(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    case = next(case for case in CASES if case.to_repair)
    job = job_of(seeds_of(case.faults[1], 1)[0])
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
    all_wait, one_waits = (slow_jobs.waits_for_data(job_of(seeds_of(fault, 1)[0])._readings)[1]
                           for fault in case.faults)
    assert all_wait.startswith("Each rank waits")
    assert re.match(r"Rank \d waits", one_waits)


def test_threads_that_wake_late_change_nothing_on_the_link():
    def step(late):
        nbytes = 22_000
        return [[Span("backward", COMPUTE, 0, 0.014),
                 Span("all_reduce", COMMUNICATION, 0.014, 0.03 + late * rank, nbytes, 0.002 * rank),
                 Span("optimizer", COMPUTE, 0.05, 0.054)] for rank in range(2)]

    on_time, late = (slow_jobs.on_the_link(step(late)) for late in (0, 0.011))
    assert on_time == late
    seconds = slow_jobs.LINK.seconds("all_reduce", 2, 22_000)
    assert on_time[1][1].start == pytest.approx(0.016)
    assert on_time[1][1].seconds == pytest.approx(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ac")
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
    signatures = {str(inspect.signature(part)) for part in (healthy, fault.sick, fault.mended)}
    assert len(signatures) == 1
    job = SlowJob(seeds_of(fault, 1)[0])
    marked = [line for line in job._difference().splitlines() if line.startswith(("-", "+"))]
    assert 1 <= len(marked) <= 10
    words = {word for suspect in SUSPECTS for word in suspect.name.split()}
    assert not words & set(re.findall(r"[\w-]+", fault.complaint.lower()))


def test_every_suspect_has_a_job_and_an_instrument():
    assert {case.suspect for case in CASES} == {suspect.name for suspect in SUSPECTS}
    assert len({case.slug for case in CASES}) == len(CASES)
    assert {suspect.instrument for suspect in SUSPECTS} <= set(SlowJob._instruments())
    assert any(case.to_repair for case in CASES)
