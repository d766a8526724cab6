"""Chapter 04's sick jobs: the readings of each decide between all suspects, and mending mends."""

import functools
import inspect
import io
import re
from contextlib import redirect_stdout

import pytest
import torch

from dplab.drills import digit_training, silent_failures
from dplab.drills.digit_training import Parts
from dplab.drills.silent_failures import CASES, SUSPECTS, SilentFailure

FAULTS = [pytest.param(case, fault, id=f"{case.slug}-{number}")
          for case in CASES for number, fault in enumerate(case.faults)]
# From which loss on a job is not what one process does; None: its losses are right.
PARTS_FROM = {"a": "step 2", "b": "step 1", "c": "epoch 1", "d": "step 1", "e": "step 1",
              "f": None, "g": "epoch 1"}
PARTS_FROM_BY_FAULT = {"averager_of_a_list": "epoch 1", "averager_in_buckets": "step 2"}
MATCHED = 1e-5


@functools.cache
def seeds_of(fault, count):
    """The first seeds whose job has this fault."""
    found = (seed for seed in range(1, 10_000) if SilentFailure(seed)._fault is fault)
    return [next(found) for _ in range(count)]


@functools.cache
def job_of(seed):
    job = SilentFailure(seed)
    job._readings = job._run(job._fault.sick)
    return job


def fitting(readings):
    return [suspect.name for suspect in SUSPECTS if suspect.finding(readings)[0]]


def differs_from(job):
    """From where on the loss is not that of one process, in the words of `PARTS_FROM`."""
    readings = job._readings
    for step, losses in enumerate(zip(readings.losses, readings.one_process.losses, strict=False)):
        if abs(losses[0] - losses[1]) > MATCHED:
            epoch, _ = readings.ranks[0].places[step]
            return f"step {step + 1}" if step < 2 else f"epoch {epoch}"
    return None


def judge(case, fault, seed):
    """The readings decide for one suspect, and the complaint is true."""
    job = job_of(seed)
    assert fitting(job._readings) == [case.suspect]
    parts_from = PARTS_FROM_BY_FAULT.get(fault.sick.__name__, PARTS_FROM.get(case.slug))
    assert differs_from(job) == parts_from
    rank_0 = job._model_of(job._readings.ranks[0].states[-1])
    digits = digit_training.load_digits()
    alone = silent_failures.accuracy(rank_0, digits.test_images, digits.test_labels)
    if case.slug == "f":  # what its complaint says
        assert abs(job._readings.accuracies()[0] - alone) > MATCHED


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), [each for each in FAULTS if each.id.endswith("-0")])
def test_exactly_one_suspect_fits_each_job(case, fault):
    judge(case, fault, seeds_of(fault, 1)[0])


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_exactly_one_suspect_fits_each_job_with_every_seed(case, fault):
    for seed in seeds_of(fault, 6):
        judge(case, fault, seed)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_the_mended_part_trains_what_one_process_trains(case, fault):
    job = SilentFailure(seeds_of(fault, 1)[0])
    readings = job._run(fault.mended)
    assert fitting(readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_healthy_job_is_the_run_of_one_process(world_size):
    job = SilentFailure(seeds_of(CASES[5].faults[0], 1)[0])
    job._world_size = world_size
    job._settings = job._draw_settings(silent_failures.random.Random(world_size))
    readings = job._run(digit_training.evaluate)
    assert fitting(readings) == []
    assert job._is_healthy(readings)[0]
    assert readings.losses == pytest.approx(readings.one_process.losses, abs=1e-5)
    assert (readings.ranks[-1].states[-1] - readings.one_process.states[-1]).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ch")
def test_no_reading_names_a_suspect(slug):
    [fault, *_] = next(case.faults for case in CASES if case.slug == slug)
    job = job_of(seeds_of(fault, 1)[0])
    said = io.StringIO()
    with redirect_stdout(said):
        for name in job._instruments():
            getattr(job, name)()
        job.gradients(20)
        job.gradients(10_000)
    assert "rank 1" in said.getvalue()
    words = {word for suspect in job.suspects for word in suspect.split()}
    assert not words & set(re.findall(r"[\w-]+", said.getvalue().lower()))
    assert not words & set(job._instruments())


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_a_fault_fits_its_place_and_changes_few_lines(case, fault):
    healthy = getattr(Parts(), case.part)
    signatures = {str(inspect.signature(part)) for part in (healthy, fault.sick, fault.mended)}
    assert len(signatures) == 1
    job = SilentFailure(seeds_of(fault, 1)[0])
    marked = [line for line in job._difference().splitlines() if line.startswith(("-", "+"))]
    assert 1 <= len(marked) <= 10
    words = {word for suspect in SUSPECTS for word in suspect.name.split()} - {"own", "parts"}
    assert not words & set(re.findall(r"[\w-]+", fault.complaint.lower()))


def test_every_suspect_has_a_job_and_an_instrument():
    assert [case.suspect for case in CASES] == [suspect.name for suspect in SUSPECTS]
    assert {suspect.instrument for suspect in SUSPECTS} <= set(SilentFailure._instruments())
    assert any(case.to_repair for case in CASES)


def test_the_test_set_s_files_are_uneven_and_hold_each_digit_once():
    for seed in range(1, 30):
        settings = SilentFailure(seed)._settings
        sizes = [len(file) for file in settings.files]
        assert torch.cat(settings.files).sort().values.tolist() == list(range(358))
        assert min(sizes) >= 20 and len(set(sizes)) > 1
