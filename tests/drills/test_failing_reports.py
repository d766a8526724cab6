"""Chapter 00's failing jobs, beyond test_each_job.py: the line and the rank are the answer."""

import pytest
from drill_jobs import faults_of, first_job_of, healthy_run_of, said_by, seeds_of

import dplab
from dplab.desk import record
from dplab.drills.failing_reports import CASES, CODE, LINES, FailingReport

each_case = pytest.mark.parametrize("case", CASES, ids=[case.slug for case in CASES])
ODD = {"a": lambda each: each.max() < 7.5, "b": lambda each: len(each) < 12,
       "c": lambda each: not each.isfinite().all(),
       "d": lambda each: any(batch.max() < 7 for batch in each.split(4)),
       "e": lambda each: each.max() > 7.9, "f": lambda each: each[-1] == 4}


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


def job_of_case(slug):
    return first_job_of(FailingReport, *faults_of(FailingReport, slug))


def odd_in_the_data(job):
    """The rank whose losses bring the fault to light, found in the losses alone."""
    [odd] = [rank for rank, each in enumerate(job._settings) if ODD[job._case.slug](each)]
    return odd


@each_case
def test_the_readings_decide_for_the_rank_with_the_odd_data_and_mended_all_ranks_end(case):
    job = job_of_case(case.slug)
    assert job._readings.to_blame() == odd_in_the_data(job)
    said = said_by(job.ranks).splitlines()
    assert [int(line.split()[1]) for line in said] == list(range(job._world_size))
    for line in said:
        number, text = line.partition(": line ")[2].split(", ", 1)
        assert CODE[int(number) - 1].strip() == text
        if case.slug in "bd":  # one waits, one called what does not agree
            assert "all_reduce number " in line or " recv of " in line
    assert ("leave out" in job._legend) == (case.slug == "b")
    assert healthy_run_of(FailingReport, *case.faults)[1].error is None
    assert len({odd_in_the_data(FailingReport(seed))
                for seed in seeds_of(FailingReport, *case.faults, 8)}) > 1


@each_case
def test_every_wrong_answer_costs_a_rerun_and_is_ruled_out_by_one_ranks_reading(case):
    job = job_of_case(case.slug)
    readings, ranks = job._readings, range(job._world_size)
    right = int(case.suspect.partition("-")[2]), readings.to_blame()
    wrong = [(line, rank) for line in LINES.values() for rank in ranks if (line, rank) != right]
    for line, rank in wrong:
        said = " ".join(said_by(job.diagnose, line, rank=rank).split())
        assert "solved" not in said and "+    " not in said
        assert (f"line {line} is right, but not rank {rank}" if line == right[0]
                else f"not line {line} on rank {rank}") in said
        shown = [each for each in ranks if readings.words(each) in said]
        assert len(shown) == 1 and (line != right[0] or shown == [rank])
    said = said_by(job.diagnose, right[0], rank=right[1])
    assert f"solved at the {len(wrong) + 1}" in said and f"It took {len(wrong)} reruns" in said
    assert f": line {right[0]}, rank {right[1]}" in said
    assert "\n-    " in said and "\n+    " in said
    assert record.entries("drills")[f"00/{case.slug}"]["solved"]


@pytest.mark.parametrize(("asked", "cost"), [
    ({"log"}, "0 reruns"), ({"log", "detail"}, "1 rerun "), ({"ranks"}, "2 reruns"),
    ({"detail", "ranks"}, "3 reruns")])
def test_torchs_detail_costs_less_than_what_only_run_tells(asked, cost):
    job = job_of_case("b")
    job._asked = asked
    said = said_by(job.diagnose, job._readings.line(), rank=job._readings.to_blame())
    assert f"It took {cost}" in " ".join(said.split())


@pytest.mark.parametrize(("line", "rank", "answer"), [
    (..., ..., "Which line?"), (7, ..., "Line 7 is one of the six"), (7, 4, "Which rank?"),
    (7, True, "Which rank?"), (7, "1", "Which rank?"), (0, 1, "Which line?"),
    ("7", 1, "Which line?"), (8, 1, "none of the six"), (8, ..., "none of the six")])
def test_an_answer_that_can_be_none_is_no_try(line, rank, answer):
    assert answer in said_by(job_of_case("b").diagnose, line, rank=rank)
    assert record.entries("drills") == {}


def test_the_card_has_the_code_as_a_traceback_numbers_it_and_not_the_losses(monkeypatch):
    job = FailingReport(3)
    said = repr(job)
    assert all(line in said for line in CODE) and "tensor([" not in said and "Suspects" not in said
    assert job._script().splitlines()[:len(CODE)] == CODE

    def fail(*_, **__):
        raise dplab.RankError("rank 1 was killed", rank=1, kind="died")

    monkeypatch.setattr("dplab.drills.failing_reports.run", fail)
    assert "did not run here" in said_by(job.ranks)  # the machine's failure is not the fault
