"""Chapter 00's failing jobs, beyond test_each_job.py: the rank belongs to the answer."""

import pytest
from drill_jobs import faults_of, first_job_of, fitting, healthy_run_of, job_of, said_by, seeds_of

import dplab
from dplab.desk import record
from dplab.drills.failing_reports import CASES, FailingReport

ODD_RANKS = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 2, "f": 1}  # how many ranks of a job are to blame
each_case = pytest.mark.parametrize("case", CASES, ids=[case.slug for case in CASES])


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


def job_of_case(slug):
    return first_job_of(FailingReport, *faults_of(FailingReport, slug))


def odd_in_the_data(job):
    """The ranks whose losses bring the fault to light, found in the losses alone."""
    losses = job._settings
    if job._case.slug == "e":
        lengths = [len(each) for each in losses]
        return [rank for rank, length in enumerate(lengths) if length == lengths[rank ^ 1]]
    odd = {"a": lambda each: len(each) == 0,
           "b": lambda each: not each.isfinite().all(),
           "c": lambda each: any(batch.max() < 7 for batch in each.split(4)),
           "d": lambda each: each.max() > 9,
           "f": lambda each: each.max() < 7}[job._case.slug]
    return [rank for rank, each in enumerate(losses) if odd(each)]


@each_case
def test_the_readings_decide_for_one_suspect_and_for_the_ranks_with_the_odd_data(case):
    job = job_of_case(case.slug)
    assert fitting(FailingReport, job._readings) == [case.suspect]
    assert job._readings.to_blame() == odd_in_the_data(job)
    assert len(odd_in_the_data(job)) == ODD_RANKS[case.slug]
    said = said_by(job.ranks).splitlines()
    assert [int(line.split()[1]) for line in said] == list(range(job._world_size))
    assert all(": dist." in line for line in said if "waits in" in line), "the part's own line"
    assert str(job._readings.error).splitlines()[0] not in said


@pytest.mark.nightly
@each_case
def test_the_readings_decide_with_every_seed(case):
    for seed in seeds_of(FailingReport, *case.faults, 8):
        job = job_of(FailingReport, seed)
        assert fitting(FailingReport, job._readings) == [case.suspect]
        assert job._readings.to_blame() == odd_in_the_data(job)


@each_case
def test_another_seed_makes_another_rank_odd(case):
    assert len({tuple(odd_in_the_data(FailingReport(seed)))
                for seed in seeds_of(FailingReport, *case.faults, 8)}) > 1


@each_case
def test_the_mended_function_ends_on_every_rank(case):
    _, readings = healthy_run_of(FailingReport, *case.faults)
    assert readings.error is None


@each_case
def test_an_answer_is_right_on_the_ranks_to_blame_and_wrong_on_the_others(case):
    guilty = job_of_case(case.slug)._readings.to_blame()
    for rank in range(job_of_case(case.slug)._world_size):
        job = job_of_case(case.slug)
        said = said_by(job.diagnose, case.suspect, rank=rank)
        if rank in guilty:
            assert "solved" in said and "-    " in said and "+    " in said
            continue
        assert f"not rank {rank}" in said and "+    " not in said
        ranks = job._readings.ranks
        if "something else" in said:
            assert all((ranks[rank].operation, ranks[rank].tensor)
                       != (ranks[odd].operation, ranks[odd].tensor) for odd in guilty)
    assert record.entries("drills")[f"00/{case.slug}"]["solved"]


@each_case
def test_each_wrong_suspect_is_ruled_out_by_a_reading_of_this_job(case):
    job = job_of_case(case.slug)
    for suspect in FailingReport.suspects_known:
        if suspect.name != case.suspect:
            said = said_by(job.diagnose, suspect.name, rank=job._readings.to_blame()[0])
            assert f"not “{suspect.name}”" in said
            assert suspect.finding(job._readings)[1][:40] in " ".join(said.split())
            assert "+    " not in said


@pytest.mark.parametrize(("rank", "answer"), [
    (None, "On which rank?"), (..., "On which rank?"), (7, "no rank 7"), (True, "no rank True"),
    ("1", "no rank '1'")])
def test_an_answer_without_a_rank_of_the_job_is_no_try(rank, answer):
    job = job_of_case("b")
    assert answer in said_by(job.diagnose, "early end", rank=rank)
    assert 'job.diagnose("exception", rank=...)' in said_by(job.diagnose, "…", rank=...)
    assert record.entries("drills") == {}


def test_a_missing_transfer_is_no_odd_line():
    """Two ranks are in the one call and two in the other: who went past is found by comparing."""
    readings = job_of(FailingReport, 3)._readings  # the chapter's
    assert readings.values("operation") == {"all_reduce": 2, "recv": 2}
    [guilty] = readings.to_blame()
    assert readings.ranks[guilty].operation == "all_reduce"


def test_a_failure_of_the_machine_is_not_the_fault_to_find(monkeypatch):
    def fail(*_, **__):
        raise dplab.RankError("rank 1 was killed", rank=1, kind="died")

    job = FailingReport(3)
    monkeypatch.setattr("dplab.drills.failing_reports.run", fail)
    assert "did not run here" in said_by(job.ranks)
