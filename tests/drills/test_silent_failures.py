"""Chapter 04's sick jobs, beyond what test_each_job.py holds each to."""

import random
import re

import pytest
import torch
from drill_jobs import (
    faults_of,
    first_job_of,
    fitting,
    healthy_run_of,
    said_by,
    seeds_of,
    words_of,
    words_of_suspects,
)
from symptoms import symptoms_of

from dplab.drills import digit_training
from dplab.drills.silent_failures import CASES, SilentFailure


@pytest.mark.slow
def test_a_part_of_one_job_alone_trains_what_one_process_trains():
    job, readings = healthy_run_of(SilentFailure, faults_of(SilentFailure, "h")[1])
    assert fitting(SilentFailure, readings) == []
    assert job._is_healthy(readings)[0], job._is_healthy(readings)[1]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_healthy_job_is_the_run_of_one_process(world_size):
    job = SilentFailure(*seeds_of(SilentFailure, faults_of(SilentFailure, "f")[0]))
    job._world_size = world_size
    job._settings = job._draw_settings(random.Random(world_size))
    readings = job._run(digit_training.evaluate)
    assert fitting(SilentFailure, readings) == []
    assert job._is_healthy(readings)[0]
    one = readings.one_process.steps
    assert readings.losses == pytest.approx([step.loss for step in one], abs=1e-5)
    seen = symptoms_of(readings)
    assert not any(fault.symptoms <= seen for case in CASES for fault in case.faults)
    for name, tensor in readings.ranks[-1].steps[-1].state.items():
        assert (tensor - one[-1].state[name]).abs().max() < 1e-4


@pytest.mark.slow
def test_the_calls_of_a_step_are_those_of_one_step():
    """Also where the job repeats a part of epoch 1, after its restart."""
    job = first_job_of(SilentFailure, faults_of(SilentFailure, "g")[1])
    steps = {(1, batch): 2 for batch in range(job._settings.stop)}
    places = [(step.epoch, step.batch) for step in job._readings.ranks[0].steps]
    assert all(places.count(place) == steps.get(place, 1) for place in places)
    sizes = {moment: list(map(int, listed.split())) for moment, listed in re.findall(
        r"(.*), every rank:\n  \d+ all_reduce: (.*)", said_by(job.calls))}
    # BatchNorm's sums come first; then each gradient is summed once.
    gradients = [each.numel() for each in job._readings.ranks[0].steps[0].gradients.values()]
    assert sizes["a step of epoch 2"][-len(gradients):] == gradients
    assert not set(sizes["a step of epoch 2"][:-len(gradients)]) & {max(gradients)}
    assert sizes["a step of epoch 1"] == sizes["a step of epoch 2"]
    assert len(sizes["a step of epoch 0"]) < len(sizes["a step of epoch 1"])
    assert sizes["accuracy"] == [2]
    said = said_by(job.gradients, 20) + said_by(job.gradients, 10_000)
    assert "other weights" in said and "The steps are 1 to" in said
    assert not words_of_suspects(SilentFailure) & words_of(said)


def test_jobs_with_one_fault_come_with_several_complaints():
    for fault in (fault for case in CASES for fault in case.faults):
        complaints = {SilentFailure(seed)._complaint for seed in seeds_of(SilentFailure, fault, 12)}
        assert complaints == {fault.complaint, *fault.also} and fault.also


def test_the_test_set_s_files_are_uneven_and_hold_each_digit_once():
    for seed in range(1, 30):
        files = SilentFailure(seed)._settings.files
        assert torch.cat(files).sort().values.tolist() == list(range(358))
        assert min(map(len, files)) >= 20 and len(set(map(len, files))) > 1
