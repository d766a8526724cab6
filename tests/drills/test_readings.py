"""What the sick jobs of single chapters measure: true of a healthy job, and counted rightly."""

import random
import re

import pytest
import torch
from drill_jobs import faults_of, first_job_of, fitting, healthy_run_of, said_by
from symptoms import symptoms_of

from dplab.drills import slow_jobs
from dplab.drills.flawed_plans import FlawedPlan, plan
from dplab.drills.gathered_layers import GatheredLayers
from dplab.drills.late_buckets import LateBuckets
from dplab.drills.rare_meetings import RareMeetings
from dplab.drills.restarted_jobs import RestartedJob
from dplab.drills.sharded_training import ShardedTraining
from dplab.drills.silent_failures import SilentFailure
from dplab.drills.sliced_step import SlicedStep
from dplab.drills.slow_jobs import SlowJob
from dplab.drills.wrong_gradients import LIMIT, WrongGradient
from dplab.drills.wrong_steps import WrongSteps
from dplab.predict.step import COMMUNICATION, COMPUTE, Span


def assert_healthy(drill, readings):
    """That no suspect fits, and none of the complaints would be true."""
    assert fitting(drill, readings) == []
    seen = symptoms_of(readings)
    complaints = [fault.symptoms - {"right loss"} for case in drill.cases for fault in case.faults]
    assert not [symptoms for symptoms in complaints if symptoms and symptoms <= seen]


@pytest.mark.slow
@pytest.mark.parametrize(("drill", "slug", "number"), [
    (SlicedStep, "a", 0), (WrongGradient, "e", 0), (SilentFailure, "h", 1), (LateBuckets, "a", 0),
    (LateBuckets, "e", 0), (ShardedTraining, "a", 0), (ShardedTraining, "c", 0),
    (GatheredLayers, "a", 0), (RestartedJob, "a", 0), (RareMeetings, "a", 0), (WrongSteps, "a", 0),
    (SlowJob, "e", 0)])
def test_of_a_mended_job_no_suspect_fits_and_no_complaint_is_true(drill, slug, number, capfd):
    _, readings = healthy_run_of(drill, faults_of(drill, slug)[number])
    assert_healthy(drill, readings)
    assert "Warning" not in "".join(capfd.readouterr()), "a warning of torch may tell the fault"
    IS_RIGHT.get(drill, lambda readings: None)(readings)


def averages_and_overlaps(readings):
    stages = readings.settings.stages
    mean = sum(rank.own for rank in readings.ranks) / len(readings.ranks)
    assert all((rank.after - mean).abs().max() < 1e-5 for rank in readings.ranks)
    assert readings.own() == [0] * len(readings.ranks)
    # The first stage that a rank computes has nothing to be beside.
    assert stages // 2 <= max(readings.beside()) <= stages - 1
    assert {tuple(order) for order in readings.orders()} == {tuple(range(stages))}
    # The ranks' data ask for different orders, and the job does not follow them.
    assert len({each.computed[0].name for each in readings.ranks}) == 2


def holds_its_own(readings):
    for rank in readings.ranks:
        assert rank.adam == 8 * rank.own + 4, "two moments and a counter"
        assert rank.behind == 4 * rank.own
        assert len(set(rank.factors)) > 1 and all(factor < 1 for factor in rank.factors)
        assert len(set(rank.calls)) == 1, "every step calls the same"


def has_the_gradient_of_one_process(readings):
    assert readings.against_one(readings.ranks)[0] < 1e-12
    assert readings.against_one(readings.single)[0] < 1e-5
    length = sum(each.square().sum().item() for each in readings.one.gradients.values()) ** 0.5
    assert length < LIMIT, "in one process nothing is clipped"


def steps_as_one_rank(readings):
    assert readings.times_like([1.0] * 4)
    assert readings.ranks[0].losses == pytest.approx(readings.one_rank.losses, rel=1e-4)


def makes_the_same_calls_to_the_end(readings):
    assert len({tuple(each.calls) for each in readings.ranks}) == 1
    assert all(each.done == len(each.calls) for each in readings.ranks)


IS_RIGHT = {LateBuckets: averages_and_overlaps, ShardedTraining: holds_its_own,
            WrongGradient: has_the_gradient_of_one_process, WrongSteps: steps_as_one_rank,
            SlowJob: makes_the_same_calls_to_the_end}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_healthy_training_is_the_run_of_one_process(world_size):
    job = SilentFailure(1)
    job._world_size = world_size
    job._settings = job._draw_settings(random.Random(world_size))
    readings = job._run(job._healthy)
    assert_healthy(SilentFailure, readings)
    assert job._is_healthy(readings)[0]
    one = readings.one_process.steps
    assert readings.losses == pytest.approx([step.loss for step in one], abs=1e-5)
    for name, tensor in readings.ranks[-1].steps[-1].state.items():
        assert (tensor - one[-1].state[name]).abs().max() < 1e-4
    files = job._settings.files
    assert torch.cat(files).sort().values.tolist() == list(range(358))
    assert min(map(len, files)) >= 20 and len(set(map(len, files))) > (world_size > 1)


@pytest.mark.slow
def test_the_calls_of_a_step_are_those_of_one_step():
    """Also where the job repeats a part of epoch 1, after its restart."""
    job = first_job_of(SilentFailure, faults_of(SilentFailure, "g")[1])
    steps = job._readings.ranks[0].steps
    places = [(step.epoch, step.batch) for step in steps]
    assert all(places.count((epoch, batch)) == (
        2 if epoch == 1 and batch < job._settings.stop else 1) for epoch, batch in places)
    sizes = {moment: list(map(int, listed.split())) for moment, listed in re.findall(
        r"(.*), every rank:\n  \d+ all_reduce: (.*)", said_by(job.calls))}
    # BatchNorm's sums come first; then each gradient is summed once.
    gradients = [each.numel() for each in steps[0].gradients.values()]
    assert sizes["a step of epoch 1"] == sizes["a step of epoch 2"]
    assert sizes["a step of epoch 2"][-len(gradients):] == gradients
    assert not set(sizes["a step of epoch 2"][:-len(gradients)]) & {max(gradients)}
    assert len(sizes["a step of epoch 0"]) < len(sizes["a step of epoch 1"])
    assert sizes["accuracy"] == [2]


@pytest.mark.slow
def test_messages_bytes_and_dropped_micro_batches_are_told_one_by_one():
    readings = first_job_of(LateBuckets, faults_of(LateBuckets, "c")[0])._readings
    stages = readings.settings.stages
    for rank in readings.ranks:
        spans = [message.span for message in rank.messages]
        assert len(spans) == 4 * stages, "a message for each parameter"
        assert sum(span.nbytes for span in spans) == 4 * stages * 2 * (64 * 64 + 64)
        assert all(0 < span.start < span.end <= rank.step for span in spans)
        assert [int(span.name.split()[1]) for span in rank.computed[2:]] == list(
            reversed(range(stages - 2)))
    for rank in first_job_of(WrongSteps, faults_of(WrongSteps, "e")[0])._readings.ranks:
        for times in rank.times.values():
            assert times == pytest.approx([0, 0, 0, 1], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "most"), [(0, 0), (1, 1)])
def test_honest_repairs_of_a_job_that_stands_still_are_accepted_and_no_others(
        number, most, tmp_path, monkeypatch):
    """Of thrown away files, also that all ranks stop with the one that has the fewest."""
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    job = first_job_of(SlowJob, faults_of(SlowJob, "e")[number])
    stuck = [each for each in job._readings.ranks if not each.finished]
    assert stuck and all(each.done < len(each.calls) for each in stuck)
    assert "launched" in said_by(job.dump)
    job.diagnose(job._case.suspect)
    for less, said in ((most, "solved"), (most + 1, "not mended")):
        assert said in said_by(job.repair, lambda rank, ranks, batches, less=less:
                               batches // ranks - less)
    assert "solved" in said_by(job.repair, job._healthy)


@pytest.mark.parametrize(("hidden", "fits"), [(0.75, False), (0.25, True)])
def test_of_hidden_traffic_the_answer_says_how_much_is_hidden(hidden, fits):
    seconds = slow_jobs.LINK.seconds("all_reduce", 2, 22_000)
    usual, held_up = ([Span("backward", COMPUTE, 0, computed * seconds),
                       Span("all_reduce", COMMUNICATION, 0, seconds, 22_000, 0)]
                      for computed in (hidden, 1))
    steps = [usual] * (slow_jobs.SKIPPED + 1) + [held_up, usual]
    rank = slow_jobs.Recording(steps, [], 0, 0, True)
    found, sentence = slow_jobs.link_alone(slow_jobs.Readings([rank, rank], rank))
    assert (found, re.search(r"(\d+) %", sentence)[1]) == (fits, "75"), sentence


@pytest.mark.slow
def test_a_rank_that_is_nearly_right_is_not_printed_as_right(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    job = WrongGradient(1862)  # with private statistics, and 0.125002 in place of 3/24
    assert "0.12500\n" not in said_by(job.losses)


@pytest.mark.parametrize("seed", range(12))
def test_each_fault_of_a_plan_changes_what_a_colleague_sees_and_a_healthy_plan_is_right(seed):
    settings = FlawedPlan(seed)._draw_settings(random.Random(seed))
    readings = plan(settings)
    assert fitting(FlawedPlan, readings) == [] and symptoms_of(readings) == {"in time"}
    assert readings.page == readings.right
    assert readings.share == pytest.approx(readings.like.middle * readings.lasting)
    for case in FlawedPlan.cases:
        [fault] = case.faults
        job = FlawedPlan(seed)
        job._case, job._fault, job._healthy = case, fault, case.part
        readings = plan(settings, **{case.part.__name__: job._sick_part()})
        assert fitting(FlawedPlan, readings) == [case.suspect]
        assert fault.symptoms <= symptoms_of(readings)
