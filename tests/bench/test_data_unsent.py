"""chapters/data/infrequent.py plays all ranks in one process; here real ones do the same."""

import functools
import json
import sys

import cloudpickle
import infrequent
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dplab
from dplab.bench.results import FOLDER
from dplab.measure import CallLog
from dplab.parallel import ManualDDP
from dplab.parallel.local_sgd import DiLoCo, LocalSGD
from dplab.parallel.parameter_server import ParameterServer, train_as_worker
from dplab.workloads import standard_library
from dplab.workloads.digits import digits_classifier, load_digits

cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS, SEED = 12, 1
WAYS = [(None, None), (4, (1.0, 0.0)), (4, (0.7, 0.9))]  # synchronous, local SGD, DiLoCo


def train(every, outer):
    """One method on this rank: its weights at the end, and the bytes that it handed over."""
    text = standard_library.load_source()[: -infrequent.HELD_OUT]
    model = infrequent.transformer(SEED + dist.get_rank())
    optimizer, schedule = infrequent.adamw(model.parameters(), STEPS)
    trainer, wrapped = optimizer, model
    if every is None:
        wrapped = ManualDDP(model)
    elif outer == (1.0, 0.0):
        trainer = LocalSGD(model, optimizer, every)
    else:
        trainer = DiLoCo(model, optimizer, every, *outer)
    with CallLog() as log:
        for step in range(1, STEPS + 1):
            x, y = standard_library.sample(text, infrequent.LOCAL_BATCH, infrequent.LENGTH,
                                           infrequent.sample_of(SEED, step, dist.get_rank()))
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten()).backward()
            if every is None:
                wrapped.finish_gradient_sync()
            trainer.step()
            schedule.step()
    sent = sum(call.bytes for call in log.calls if call.dtype == "float32")
    return model.state_dict(), sent / STEPS


@pytest.fixture(scope="module")
def on_ranks():
    """One of WAYS: what `train` gave on each of two ranks."""
    of_ranks = dplab.run(lambda: [train(*way) for way in WAYS], 2, backend="gloo")
    return dict(zip(WAYS, zip(*of_ranks, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("every", "outer"), WAYS)
def test_the_played_ranks_compute_what_real_ones_do(on_ranks, every, outer):
    seeds = [0, SEED]  # the other seed must not matter
    played = infrequent.trained(2, every, outer, STEPS, seeds)[1].state_dict()
    for state, sent in on_ranks[every, outer]:
        for name, value in played.items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
        size = sum(p.numel() for p in infrequent.transformer(0).parameters())
        assert sent == 4 * size / (every or 1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_delayed_gradients_are_those_of_a_server_that_takes_turns(workers):
    images, labels, *_ = load_digits()

    def serve():
        model = digits_classifier(SEED)
        rank = dist.get_rank()
        if rank == 0:
            server = ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.2))
            return server.serve_asynchronously(11, turns=[1 + n % workers for n in range(11)])

        def compute_loss(number):
            chosen = infrequent.digits_batch(number * workers + rank - 1, SEED)
            return F.cross_entropy(model(images[chosen]), labels[chosen])

        train_as_worker(model, compute_loss)
        return [parameter.detach() for parameter in model.parameters()]

    expected = infrequent.delayed(workers - 1, 0.2, 11, SEED)
    found = dplab.run(serve, workers + 1, backend="gloo")[1]
    for mine, want in zip(found, expected.parameters(), strict=True):
        torch.testing.assert_close(mine, want)


@functools.cache
def results():
    return json.loads((FOLDER / "infrequent.json").read_text())


def test_results_are_those_of_this_bench():
    assert {row["method"] for row in results()["meetings"]} == set(infrequent.METHODS)
    assert {row["staleness"] for row in results()["delays"]} == set(infrequent.STALENESS)
    size = sum(parameter.numel() for parameter in infrequent.transformer(0).parameters())
    for row in results()["meetings"]:
        assert row["parameters"] == size
        assert row["every"] == infrequent.METHODS[row["method"]][1]


def test_a_committed_loss_comes_out_again():
    row = next(row for row in results()["delays"] if (row["staleness"], row["seed"]) == (1, 2)
               and row["learning_rate"] < 0.15)
    images, labels, *_ = load_digits()
    model = infrequent.delayed(1, row["learning_rate"], infrequent.DIGITS_UPDATES, 2)
    with torch.no_grad():
        loss = F.cross_entropy(model(images), labels).item()
    assert loss == pytest.approx(row["loss"], rel=0.1)
