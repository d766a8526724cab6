"""chapters/data/training.py: its runs beside ordinary ones on two ranks, the committed sweep."""

import functools
import itertools
import json
import math
import statistics

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab.bench.results import FOLDER
from dplab.exercises.fit_critical import fit_critical
from dplab.workloads import moved_digits
from dplab.workloads.large_batch import BATCHES, OPTIMIZERS


def one_epoch(optimizer, batch, base, peak, seed):
    """An ordinary loop with DDP; the test error and the test loss."""
    data = moved_digits.load_moved_digits()
    model = DistributedDataParallel(moved_digits.moved_digits_classifier(seed))
    stepper = {"SGD": lambda p: torch.optim.SGD(p, lr=base, momentum=0.9),
               "Adam": lambda p: torch.optim.Adam(p, lr=base)}[optimizer](model.parameters())
    order = torch.randperm(8192, generator=torch.Generator().manual_seed(seed))
    steps = 8192 // batch
    for step, indices in enumerate(order.split(batch)):
        done = step / steps
        stepper.param_groups[0]["lr"] = (
            base + (peak - base) * 4 * done if done < 0.25
            else peak * (0.5 + 0.5 * math.cos(math.pi * (done - 0.25) / 0.75)))
        mine = indices.chunk(dist.get_world_size())[dist.get_rank()]
        stepper.zero_grad()
        F.cross_entropy(model(data.train_images[mine]), data.train_labels[mine]).backward()
        stepper.step()
    with torch.no_grad():
        logits = model.module(data.test_images)
    return ((logits.argmax(1) != data.test_labels).float().mean().item(),
            F.cross_entropy(logits, data.test_labels).item())


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "base", "peak"), [("SGD", 0.05, 0.6), ("Adam", 2e-3, 8e-3)])
def test_seeds_side_by_side_are_ordinary_runs_on_two_ranks(monkeypatch, optimizer, base, peak):
    monkeypatch.setattr(training, "EPOCHS", 1)
    errors, losses = training.train(optimizer, 512, base, peak, seeds=[0, 3], warm_up=0.25)
    for index, seed in enumerate([0, 3]):
        error, loss = dplab.run(one_epoch, 2, optimizer, 512, base, peak, seed, backend="gloo")[0]
        assert losses[index] == pytest.approx(loss, rel=5e-4)
        assert errors[index] == pytest.approx(error, abs=2e-3)
    assert abs(losses[0] - losses[1]) > 2e-3 * losses[0]  # so one seed is not taken for the other


def test_each_epoch_visits_each_image_once():
    runs = training._Runs("SGD", [0, 1])
    seen = []
    plain_call = runs.each_its_own
    images = runs.data.train_images
    images[:, 0, 0] = torch.arange(8192.0)  # a mark in each image
    runs.each_its_own = lambda weights, x: (seen.append(x[:, :, 0, 0]), plain_call(weights, x))[1]
    for _ in range(2 * 4):
        runs.step(2048, 0.0)
    epochs = torch.cat(seen, dim=1).split(8192, dim=1)
    assert all(torch.equal(epoch.sort(dim=1).values, torch.arange(8192.0).expand(2, -1))
               for epoch in epochs)
    assert not torch.equal(epochs[0][0], epochs[1][0])
    assert not torch.equal(epochs[0][0], epochs[0][1])


def test_steps_to_the_targets_end_there_or_are_given_up(monkeypatch):
    monkeypatch.setattr(training, "TARGETS", (2.2, 2.0))
    found = training._steps(256, 0.01, [0], 10**6)
    runs, losses = training._Runs("Adam", [0]), []
    for _ in range(found[2.0][0]):
        runs.step(256, 0.01)
        losses.append(runs.test(samples=1024)[1][0])
    for target, [steps] in found.items():
        assert losses[steps - 1] < target and min(losses[: int(0.9 * steps)]) >= target
    assert training._steps(256, 0.01, [0], found[2.2][0])[2.0] == [None]


@functools.cache
def results():
    return json.loads((FOLDER / "training.json").read_text())


def rows(**wanted):
    return [row for row in results()["rules"]
            if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", BATCHES[1:])
def test_the_committed_sweep_has_each_rule_with_and_without_warm_up(optimizer, batch):
    k = batch / 32
    found = {(round(row["times"], 9), row["warm_up"])
             for row in rows(optimizer=optimizer, batch=batch)}
    assert {(round(times, 9), warm_up) for times in (1.0, k**0.5, k)
            for warm_up in (0, 1 / 8)} <= found


def test_the_committed_sweep_was_made_by_this_code():
    assert results()["seeds"] == list(training.SEEDS) and results()["epochs"] == training.EPOCHS
    assert all(len(row["errors"]) == len(row["losses"]) == 5 for row in results()["rules"])
    [first] = rows(optimizer="SGD", batch=2048, times=4.0)
    errors, losses = training.train("SGD", 2048, first["learning_rate"] / 4,
                                    first["learning_rate"], seeds=[0])
    assert 100 * errors[0] == pytest.approx(first["errors"][0], abs=3)
    assert losses[0] == pytest.approx(first["losses"][0], rel=0.05)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_base_rate_is_the_best_at_the_smallest_batch(optimizer):
    at_32 = rows(optimizer=optimizer, batch=32)
    best = min(at_32, key=lambda row: statistics.mean(row["errors"]))
    assert best["times"] == 1.0 and len(at_32) == len(training.BASE_GRID[optimizer])


def least_steps(target):
    """Batch: the steps of the seeds at the best rate, of the rates at which all seeds arrive."""
    found = {}
    for row in results()["steps_to_targets"]:
        if row["target"] == target and None not in row["steps"]:
            found[row["batch"]] = min(found.get(row["batch"], row["steps"]), row["steps"], key=sum)
    return found


def test_the_lower_the_target_the_larger_the_critical_batch_with_each_seed():
    ranges = []
    for target in training.TARGETS:
        steps = least_steps(target)
        assert set(training.TARGET_BATCHES) - set(steps) <= {4096}
        of_seeds = []
        for seed in range(5):
            of_seeds.append(fit_critical({batch: each[seed] for batch, each in steps.items()})[1])
        ranges.append((min(of_seeds), max(of_seeds)))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))


def mean_error(optimizer, batch, rule, warm_up=1 / 8):
    times = {"unscaled": 1.0, "square root": (batch / 32) ** 0.5, "linear": batch / 32}[rule]
    [row] = [row for row in rows(optimizer=optimizer, batch=batch, warm_up=warm_up)
             if row["times"] == pytest.approx(times)]
    return statistics.mean(row["errors"])


def test_the_committed_sweep_says_what_chapter_07_says():
    for batch in (64, 128, 256):
        assert mean_error("SGD", batch, "linear") < mean_error("SGD", batch, "square root")
        assert abs(mean_error("Adam", batch, "linear")
                   - mean_error("Adam", batch, "square root")) < 0.3
    for batch in (512, 1024, 2048):
        for optimizer in OPTIMIZERS:
            others = [mean_error(optimizer, batch, rule) for rule in ("unscaled", "linear")]
            assert mean_error(optimizer, batch, "square root") < min(others)
    for batch in (256, 512, 1024, 2048):
        assert mean_error("Adam", batch, "unscaled") > mean_error("Adam", batch, "square root")
        assert mean_error("SGD", batch, "unscaled") > mean_error("SGD", batch, "square root")
    assert mean_error("Adam", 512, "linear", 0) > 4 * mean_error("Adam", 512, "linear")
    assert mean_error("SGD", 512, "linear") > 25 and mean_error("SGD", 512, "linear", 0) > 25
    for optimizer, least in (("SGD", 40), ("Adam", 15)):
        assert min(statistics.mean(row["errors"])
                   for row in rows(optimizer=optimizer, batch=2048)) > least
