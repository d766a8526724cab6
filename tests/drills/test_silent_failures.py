"""Chapter 04's sick jobs, beyond what test_each_job.py holds each to."""

import re

import pytest
import torch
from drill_jobs import (
    first_job_of,
    fitting,
    said_by,
    seeds_of,
    words_of,
    words_of_suspects,
)

from dplab.drills import digit_training, silent_failures
from dplab.drills.silent_failures import CASES, SUSPECTS, SilentFailure

FAULTS = [pytest.param(case, fault, id=f"{case.slug}-{number}")
          for case in CASES for number, fault in enumerate(case.faults)]


DIGITS = str.maketrans("", "", "0123456789")
FAULT_BY_NAME = {fault.sick.__name__: fault for case in CASES for fault in case.faults}


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_the_mended_part_trains_what_one_process_trains(case, fault):
    job = SilentFailure(seeds_of(SilentFailure, fault, 1)[0])
    readings = job._run(fault.mended)
    assert fitting(SilentFailure, readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_healthy_job_is_the_run_of_one_process(world_size):
    job = SilentFailure(seeds_of(SilentFailure, CASES[5].faults[0], 1)[0])
    job._world_size = world_size
    job._settings = job._draw_settings(silent_failures.random.Random(world_size))
    readings = job._run(digit_training.evaluate)
    assert fitting(SilentFailure, readings) == []
    assert job._is_healthy(readings)[0]
    assert readings.losses == pytest.approx(readings.one_process.losses, abs=1e-5)
    untrue = [fault for case in CASES for fault in case.faults if fault.is_true(readings)]
    assert not untrue, "of a healthy job, no complaint is true"
    assert (readings.ranks[-1].states[-1] - readings.one_process.states[-1]).abs().max() < 1e-4


@pytest.mark.slow
def test_the_calls_of_a_step_are_those_of_one_step(capsys):
    """Also where the job repeats a part of epoch 1, after its restart."""
    job = first_job_of(SilentFailure, FAULT_BY_NAME["load_epoch"])
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


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_jobs_with_one_fault_come_with_several_complaints(case, fault):
    complaints = {SilentFailure(seed)._text() for seed in seeds_of(SilentFailure, fault, 12)}
    assert len({text.split("”")[0].translate(DIGITS) for text in complaints}) > 1


def test_the_test_set_s_files_are_uneven_and_hold_each_digit_once():
    for seed in range(1, 30):
        settings = SilentFailure(seed)._settings
        sizes = [len(file) for file in settings.files]
        assert torch.cat(settings.files).sort().values.tolist() == list(range(358))
        assert min(sizes) >= 20 and len(set(sizes)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ch")
def test_the_gradients_of_other_steps_name_no_suspect(slug):
    [fault, *_] = next(case.faults for case in CASES if case.slug == slug)
    job = first_job_of(SilentFailure, fault)
    said = said_by(lambda: job.gradients(20), lambda: job.gradients(10_000))
    assert not words_of_suspects(SilentFailure) & words_of(said)


def test_the_suspects_stand_in_the_order_of_the_jobs():
    assert [case.suspect for case in CASES] == [suspect.name for suspect in SUSPECTS]
    assert any(case.to_repair for case in CASES)
