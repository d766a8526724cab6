"""Chapter 00's failing jobs: the readings of each decide between all suspects and ranks, the wrong
answers are refuted, and mending mends.
"""

import functools
import inspect
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import dplab
from dplab.desk import record
from dplab.drills.failing_reports import CASES, SUSPECTS, FailingReport

BY_SLUG = {case.slug: case for case in CASES}
ODD_RANKS = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 2, "f": 1}  # how many ranks of a job are to blame


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


def seeds_of(slug, count):
    found = (seed for seed in range(1, 10_000) if FailingReport(seed)._case.slug == slug)
    return [next(found) for _ in range(count)]


@functools.cache
def readings_of(seed):
    job = FailingReport(seed)
    return job._run(job._fault.sick)


def job_of(slug, number=0):
    """A job that has run already."""
    job = FailingReport(seeds_of(slug, number + 1)[number])
    job._readings = readings_of(job.seed)
    return job


def said_by(call, *args, **kwargs):
    said = io.StringIO()
    with redirect_stdout(said):
        call(*args, **kwargs)
    return said.getvalue()


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


def judge(job):
    """The readings decide for one suspect and for the ranks whose data bring the fault out."""
    readings = job._readings
    assert [suspect.name for suspect in SUSPECTS if suspect.finding(readings)[0]] == [
        job._case.suspect]
    assert readings.to_blame() == odd_in_the_data(job)
    assert len(readings.to_blame()) == ODD_RANKS[job._case.slug]
    assert [place.rank for place in readings.places] == list(range(job._world_size))


@pytest.mark.parametrize("slug", BY_SLUG)
def test_exactly_one_suspect_and_the_odd_ranks_fit_each_job(slug):
    judge(job_of(slug))


@pytest.mark.nightly
@pytest.mark.parametrize("slug", BY_SLUG)
def test_exactly_one_suspect_fits_each_job_with_every_seed(slug):
    for number in range(8):
        judge(job_of(slug, number))


def test_another_seed_makes_another_rank_odd():
    for slug in BY_SLUG:
        assert len({tuple(odd_in_the_data(FailingReport(seed)))
                    for seed in seeds_of(slug, 8)}) > 1, slug


@pytest.mark.parametrize("slug", BY_SLUG)
def test_the_mended_function_ends_on_every_rank(slug):
    job = job_of(slug)
    readings = job._run(job._fault.mended)
    assert readings.error is None
    assert job._is_healthy(readings)[0] and not job._is_healthy(job._readings)[0]


@pytest.mark.slow
@pytest.mark.parametrize("slug", BY_SLUG)
def test_torchrun_prints_what_the_complaint_says(slug):
    job = job_of(slug)
    said = said_by(job.torchrun)
    assert job._fault.is_true(job._readings), said
    assert job._readings.torchrun.blamed is not None
    assert_names_no_suspect(said)


def assert_names_no_suspect(said):
    words = {word for suspect in SUSPECTS for word in suspect.name.split()}
    assert not words & set(re.findall(r"[\w-]+", said.lower()))


@pytest.mark.parametrize("slug", BY_SLUG)
def test_no_reading_names_a_suspect_nor_quotes_the_first_line(slug):
    job = job_of(slug)
    said = said_by(job.ranks)
    assert said.count("rank ") >= job._world_size
    assert job._readings.head not in said and "failing_reports" not in said
    assert "distributed_c10d" not in said, "no line of torch's own code"
    assert_names_no_suspect(said)


@pytest.mark.parametrize("slug", BY_SLUG)
def test_each_wrong_suspect_is_ruled_out_by_a_reading_of_this_job(slug):
    for suspect in SUSPECTS:
        if suspect.name == BY_SLUG[slug].suspect:
            continue
        job = job_of(slug)
        said = said_by(job.diagnose, suspect.name, rank=job._readings.to_blame()[0])
        assert f"not “{suspect.name}”" in said
        assert suspect.finding(job._readings)[1][:40] in " ".join(said.split())
        assert "dist.init" not in said and "+    " not in said


@pytest.mark.parametrize("slug", BY_SLUG)
def test_the_right_suspect_on_another_rank_is_a_wrong_answer(slug):
    job = job_of(slug)
    innocent = next(rank for rank in range(job._world_size)
                    if rank not in job._readings.to_blame())
    said = said_by(job.diagnose, job._case.suspect, rank=innocent)
    assert f"not rank {innocent}" in said
    assert record.entries("drills")[f"00/{slug}"] == {"tries": 1, "diagnosed": False}


@pytest.mark.parametrize("slug", BY_SLUG)
def test_a_rank_that_did_something_else_has_another_line_than_the_innocent(slug):
    job = job_of(slug)
    places, guilty = job._readings.places, job._readings.to_blame()
    for rank in {*range(job._world_size)} - {*guilty}:
        said = said_by(job.diagnose, job._case.suspect, rank=rank)
        if "something else" in said:
            assert all((places[rank].operation, places[rank].tensor)
                       != (places[odd].operation, places[odd].tensor) for odd in guilty)


@pytest.mark.parametrize("slug", BY_SLUG)
def test_the_right_answer_shows_the_line_to_change(slug):
    for rank in job_of(slug)._readings.to_blame():
        job = job_of(slug)
        said = said_by(job.diagnose, job._case.suspect, rank=rank)
        assert "solved" in said and "-    " in said and "+    " in said
        assert job._fault.sick.__name__ not in said
    assert record.entries("drills")[f"00/{slug}"]["solved"]


@pytest.mark.parametrize(("rank", "answer"), [(None, "On which rank?"), (7, "no rank 7"),
                                              (True, "no rank True"), ("1", "no rank '1'")])
def test_an_answer_without_a_rank_of_the_job_is_no_try(rank, answer):
    job = job_of("b")
    assert answer in said_by(job.diagnose, "early end", rank=rank)
    assert record.entries("drills") == {}


def test_the_prepared_cell_is_no_try_until_it_is_filled_in():
    job = job_of("f")
    assert 'job.diagnose("exception", rank=...)' in said_by(job.diagnose, "…", rank=...)
    assert "On which rank?" in said_by(job.diagnose, "missing transfer", rank=...)
    assert record.entries("drills") == {}


def test_a_missing_transfer_is_no_odd_line():
    """Two ranks are in the one call and two in the other: who went past is found by comparing."""
    readings = readings_of(seed_of_the_chapter())
    assert readings.values("operation") == {"all_reduce": 2, "recv": 2}
    [guilty] = readings.to_blame()
    assert readings.places[guilty].operation == "all_reduce"


def seed_of_the_chapter():
    source = (Path(__file__).parents[2] / "chapters/00_start_here.ipynb").read_text()
    [seed] = re.findall(r'dplab\.drill\(\\"00\\", seed=(\d+)\)', source)[:1]
    return int(seed)


def test_a_failure_of_the_machine_is_not_the_fault_to_find(monkeypatch):
    def fail(*_, **__):
        raise dplab.RankError("rank 1 was killed", rank=1, kind="died")

    job = FailingReport(seeds_of("b", 1)[0])
    monkeypatch.setattr("dplab.drills.failing_reports.run", fail)
    assert "did not run here" in said_by(job.ranks)


def test_the_card_says_what_can_be_typed_and_gives_nothing_away():
    said = said_by(dplab.drill, "00", seed=seeds_of("b", 1)[0])
    for name in ("job.ranks()", "job.torchrun()", 'job.diagnose("…", rank=...)', "early end"):
        assert name in said
    words = {word for suspect in SUSPECTS for word in suspect.name.split()}
    assert not words & set(re.findall(r"[\w-]+", said.partition("job.ranks()")[0].lower()))


def test_every_suspect_has_a_job_and_an_instrument():
    assert [case.suspect for case in CASES] == [suspect.name for suspect in SUSPECTS]
    assert {suspect.instrument for suspect in SUSPECTS} <= set(FailingReport._instruments())


@pytest.mark.parametrize("case", CASES, ids=[*BY_SLUG])
def test_a_mended_function_has_the_signature_of_the_sick_one_and_few_other_lines(case):
    [fault] = case.faults
    assert inspect.signature(fault.sick) == inspect.signature(fault.mended)
    job = FailingReport(seeds_of(case.slug, 1)[0])
    marked = [line for line in job._difference().splitlines() if line.startswith(("-", "+"))]
    assert 2 <= len(marked) <= 10
