"""What holds for each sick job: its readings decide between all suspects, and do not name them."""

import pytest
from drill_jobs import first_job_of, fitting, job_of, said_by, seeds_of, words_of, words_of_suspects
from symptoms import symptoms_of

from dplab.drills.failing_reports import FailingReport
from dplab.drills.flawed_plans import FlawedPlan
from dplab.drills.gathered_layers import GatheredLayers
from dplab.drills.late_buckets import LateBuckets
from dplab.drills.rare_meetings import RareMeetings
from dplab.drills.restarted_jobs import RestartedJob
from dplab.drills.sharded_training import ShardedTraining
from dplab.drills.silent_failures import SilentFailure
from dplab.drills.sliced_step import SlicedStep
from dplab.drills.slow_jobs import SlowJob
from dplab.drills.wrapped_transformer import WrappedTransformer
from dplab.drills.wrong_gradients import WrongGradient
from dplab.drills.wrong_steps import WrongSteps

SEEDS = {FailingReport: 1, SlicedStep: 6, WrongGradient: 6, SilentFailure: 6, LateBuckets: 6,
         SlowJob: 5, WrongSteps: 4, ShardedTraining: 5, GatheredLayers: 5, WrappedTransformer: 4,
         FlawedPlan: 5, RestartedJob: 4, RareMeetings: 4}
TORCHRUNS = {"log", "detail"}  # a hung job's take long, so one job that ends at once is read
PLAIN_WORDS = {SilentFailure: {"own", "parts"}}  # of suspects, which a complaint may use
JOBS = [pytest.param(drill, case, fault, id=f"{drill.__name__}-{case.slug}-{number}")
        for drill in SEEDS for case in drill.cases for number, fault in enumerate(case.faults)]
each_job = pytest.mark.parametrize(("drill", "case", "fault"), JOBS)


@pytest.mark.slow
@each_job
def test_exactly_one_suspect_fits_each_job_and_no_reading_names_it(drill, case, fault):
    job = first_job_of(drill, fault)
    assert fitting(drill, job._readings) == [case.suspect]
    left_out = TORCHRUNS if drill is FailingReport and case.slug != "e" else set()
    said = "".join(said_by(getattr(job, name)) for name in job._instruments()
                   if name not in left_out)
    assert fault.symptoms <= symptoms_of(job._readings), said
    assert "rank 1" in said
    assert not words_of_suspects(drill) & words_of(said)


@pytest.mark.nightly
@each_job
def test_exactly_one_suspect_fits_each_job_with_every_seed(drill, case, fault):
    for seed in seeds_of(drill, fault, SEEDS[drill]):
        job = job_of(drill, seed)
        assert fitting(drill, job._readings) == [case.suspect]
        assert fault.symptoms <= symptoms_of(job._readings), fault.complaint


@each_job
def test_a_fault_changes_few_lines_and_its_complaints_name_no_suspect(drill, case, fault):
    job = drill(*seeds_of(drill, fault))
    lines = job._difference().splitlines()
    assert 1 <= sum(line.startswith(("-", "+")) for line in lines) <= 10
    assert job._part_name in lines[0] or fault.part is None
    words = words_of_suspects(drill) - PLAIN_WORDS.get(drill, set())
    for complaint in (fault.complaint, *fault.also):
        assert not words & words_of(complaint)


@pytest.mark.parametrize("drill", SEEDS)
def test_every_suspect_has_a_job_and_an_instrument(drill):
    suspects, instruments = drill.suspects_known, set(drill._instruments())
    assert list(dict.fromkeys(case.suspect for case in drill.cases)) == [
        suspect.name for suspect in suspects]
    assert len({case.slug for case in drill.cases}) == len(drill.cases)
    assert {suspect.instrument for suspect in suspects} <= instruments
    assert not words_of_suspects(drill) & instruments
