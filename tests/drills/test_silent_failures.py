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


DIGITS = str.maketrans("", "", "0123456789")
FAULT_BY_NAME = {fault.sick.__name__: fault for case in CASES for fault in case.faults}


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
    untrue = [fault for case in CASES for fault in case.faults if fault.is_true(readings)]
    assert not untrue, "of a healthy job, no complaint is true"
    assert (readings.ranks[-1].states[-1] - readings.one_process.states[-1]).abs().max() < 1e-4


@pytest.mark.slow
def test_the_calls_of_a_step_are_those_of_one_step(capsys):
    """Also where the job repeats a part of epoch 1, after its restart."""
    job = job_of(seeds_of(FAULT_BY_NAME["load_epoch"], 1)[0])
    steps = {(1, batch): 2 for batch in range(job._settings.stop)}
    places = job._readings.ranks[0].places
    assert all(places.count(place) == steps.get(place, 1) for place in places)
    job.calls()
    sizes = {moment: list(map(int, listed.split())) for moment, listed in re.findall(
        r"(.*), every rank:\n  \d+ all_reduce: (.*)", capsys.readouterr().out)}
    # BatchNorm's sums come first; then each gradient is summed once.
    gradients = [shape.numel() for shape in job._readings.parameters.values()]
    assert sizes["a step of epoch 2"][-len(gradients):] == gradients
    assert not set(sizes["a step of epoch 2"][:-len(gradients)]) & {max(gradients)}
    assert sizes["a step of epoch 1"] == sizes["a step of epoch 2"]
    assert len(sizes["a step of epoch 0"]) < len(sizes["a step of epoch 1"])
    assert sizes["accuracy"] == [2]


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
    for complaint in (fault.complaint, *fault.also):
        assert not words & set(re.findall(r"[\w-]+", complaint.lower()))


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_jobs_with_one_fault_come_with_several_complaints(case, fault):
    complaints = {SilentFailure(seed)._text() for seed in seeds_of(fault, 12)}
    assert len({text.split("”")[0].translate(DIGITS) for text in complaints}) > 1


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
