"""What holds for each sick job of chapters 04, 05 and 06: its readings decide between all suspects.
"""

import inspect

import pytest
from drill_jobs import first_job_of, fitting, job_of, said_by, seeds_of, words_of, words_of_suspects

from dplab.drills import digit_training, late_buckets
from dplab.drills.late_buckets import LateBuckets
from dplab.drills.silent_failures import SilentFailure
from dplab.drills.slow_jobs import SlowJob
from dplab.workloads import slept_steps

PARTS = {SilentFailure: digit_training.Parts, LateBuckets: late_buckets.Parts,
         SlowJob: slept_steps.Parts}
SEEDS = {SilentFailure: 6, LateBuckets: 6, SlowJob: 5}
PLAIN_WORDS = {SilentFailure: {"own", "parts"}}  # of suspects, which a complaint may use
READ_ALOUD = [(SilentFailure, "c"), (SilentFailure, "h"), (LateBuckets, "b"), (LateBuckets, "e"),
              (SlowJob, "a"), (SlowJob, "c")]
JOBS = [pytest.param(drill, case, fault, id=f"{drill.__name__}-{case.slug}-{number}")
        for drill in PARTS for case in drill.cases for number, fault in enumerate(case.faults)]
each_job = pytest.mark.parametrize(("drill", "case", "fault"), JOBS)


def judge(drill, case, fault, seed):
    """The readings decide for one suspect, and the complaint is true."""
    job = job_of(drill, seed)
    assert fitting(drill, job._readings) == [case.suspect]
    assert fault.is_true(job._readings), fault.complaint


@pytest.mark.slow
@each_job
def test_exactly_one_suspect_fits_each_job(drill, case, fault):
    judge(drill, case, fault, seeds_of(drill, fault, 1)[0])


@pytest.mark.nightly
@each_job
def test_exactly_one_suspect_fits_each_job_with_every_seed(drill, case, fault):
    for seed in seeds_of(drill, fault, SEEDS[drill]):
        judge(drill, case, fault, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("drill", "slug"), READ_ALOUD)
def test_no_reading_names_a_suspect(drill, slug):
    [fault, *_] = next(case.faults for case in drill.cases if case.slug == slug)
    job = first_job_of(drill, fault)
    said = said_by(*(getattr(job, name) for name in job._instruments()))
    assert "rank 1" in said
    words = words_of_suspects(drill)
    assert not words & words_of(said)
    assert not words & set(job._instruments())


@each_job
def test_a_fault_fits_its_place_and_changes_few_lines(drill, case, fault):
    healthy = getattr(PARTS[drill](), case.part)
    signatures = {str(inspect.signature(part)) for part in (healthy, fault.sick, fault.mended)}
    assert len(signatures) == 1
    job = drill(seeds_of(drill, fault, 1)[0])
    marked = [line for line in job._difference().splitlines() if line.startswith(("-", "+"))]
    assert 1 <= len(marked) <= 10
    words = words_of_suspects(drill) - PLAIN_WORDS.get(drill, set())
    for complaint in (fault.complaint, *fault.also):
        assert not words & words_of(complaint)


@pytest.mark.parametrize("drill", PARTS)
def test_every_suspect_has_a_job_and_an_instrument(drill):
    suspects = drill.suspects_known
    assert {case.suspect for case in drill.cases} == {suspect.name for suspect in suspects}
    assert len({case.slug for case in drill.cases}) == len(drill.cases)
    assert {suspect.instrument for suspect in suspects} <= set(drill._instruments())
