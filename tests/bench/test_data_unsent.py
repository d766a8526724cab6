"""chapters/data/unsent.py plays all ranks in one process; here real ones do the same."""

import functools
import json
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import unsent
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dplab
from dplab.bench.results import FOLDER
from dplab.exercises.sparse_average import sparse_average
from dplab.parallel import DiLoCo, LocalSGD, ParameterServer, StreamingDiLoCo
from dplab.parallel.local_sgd import average_tensors
from dplab.parallel.parameter_server import train_as_worker
from dplab.workloads.scheme_tasks import DIGITS, LANGUAGE, RANKS, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RATE, STEPS, SEED = 0.05, 20, 1


class Averaged:
    """Changes the gradients, and steps with them."""

    def __init__(self, model, optimizer):
        self.parameters, self.optimizer = list(model.parameters()), optimizer

    def step(self):
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        mean = self.average(gradient)
        for parameter, part in zip(self.parameters, mean.split(
                [parameter.numel() for parameter in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()

    def average(self, gradient):
        average_tensors([gradient])
        return gradient


class Int8(Averaged):
    def average(self, gradient):
        unit = gradient.abs().max() / (127 // dist.get_world_size())
        dist.all_reduce(unit, op=dist.ReduceOp.MAX)
        numbers = (gradient / unit).round().to(torch.int8)
        dist.all_reduce(numbers)
        return numbers * unit / dist.get_world_size()


class TopK(Averaged):
    residual = None

    def average(self, gradient):
        if self.residual is None:
            self.residual = torch.zeros_like(gradient)
        return sparse_average(gradient, self.residual, len(gradient) // 100)


class TopKDropped(TopK):
    def step(self):
        super().step()
        self.residual.zero_()


def streaming(model, optimizer):
    return StreamingDiLoCo(model, optimizer, every=8, fragments=4, late=4, outer_momentum=0.9)


PAIRS = {  # as it is played, and on real ranks
    "synchronous": (unsent.Synchronous(), Averaged),
    "int8": (unsent.Int8(), Int8),
    "top k, kept": (unsent.TopK(), TopK),
    "top k, dropped": (unsent.TopK(keeps=False), TopKDropped),
    "local": (unsent.DiLoCo(every=5, outer=(1.0, 0.0)),
              lambda model, optimizer: LocalSGD(model, optimizer, 5)),
    "DiLoCo": (unsent.DiLoCo(every=5), lambda model, optimizer: DiLoCo(model, optimizer, 5)),
    "streaming": (unsent.Streaming(every=8), streaming),
}


@pytest.fixture(scope="module")
def on_ranks():
    return dplab.run(lambda: {name: train(DIGITS, real, RATE, SEED, STEPS)
                              for name, (_, real) in PAIRS.items()}, RANKS, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_played_ranks_compute_what_real_ones_do(on_ranks, name):
    scheme, _ = PAIRS[name]
    weights = unsent.trained(DIGITS, scheme, RATE, STEPS, [0, SEED])  # the other must not matter
    model = DIGITS.model(0)
    torch.nn.utils.vector_to_parameters(weights[1, 0], model.parameters())
    for found in (rank[name] for rank in on_ranks):
        assert found.loss == pytest.approx(DIGITS.held_out_loss(model), rel=1e-3)
        assert found.sent == pytest.approx(scheme.sent(weights.shape[-1], STEPS))


@pytest.mark.slow
def test_the_language_model_is_played_as_it_trains():
    found = dplab.run(train, RANKS, LANGUAGE, Averaged, 0.003, SEED, 8, backend="gloo")[0]
    [row] = unsent.runs("language", "synchronous", 0.003, 8, [SEED])
    assert found.loss == pytest.approx(row["loss"], rel=1e-3)
    assert found.sent == row["sent"]


@pytest.mark.slow
def test_stale_gradients_are_those_of_a_server_that_takes_turns():
    steps = 3

    def serve():
        model = DIGITS.model(SEED)
        rank = dist.get_rank()
        if rank == 0:
            optimizer, schedule = DIGITS.optimizer(model.parameters(), RATE, steps * RANKS)
            server = ParameterServer(model, optimizer, schedule.step)
            turns = [1 + number % RANKS for number in range(steps * RANKS)]
            return server.serve(steps * RANKS, turns=turns)

        def compute_loss(number):
            inputs, targets = DIGITS.batch(SEED, number + 1, rank - 1)
            return F.cross_entropy(model(inputs), targets)

        train_as_worker(model, compute_loss)
        return parameters_to_vector(model.parameters()).detach()

    expected = unsent.trained(DIGITS, unsent.SCHEMES["asynchronous"], RATE, steps, [SEED])[0, 0]
    found = dplab.run(serve, 1 + RANKS, backend="gloo")[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_accumulated_batches_are_one_larger_batch():
    weights = unsent.trained(DIGITS, unsent.Scheme(ranks=1, batches=2), RATE, 3, [SEED])[0, 0]
    model = DIGITS.model(SEED)
    optimizer, schedule = DIGITS.optimizer(model.parameters(), RATE, 3)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = map(torch.cat, zip(*(DIGITS.batch(SEED, 2 * step + number, 0)
                                               for number in (1, 2)), strict=True))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(weights, parameters_to_vector(model.parameters()).detach())


@functools.cache
def results():
    return json.loads((FOLDER / "unsent.json").read_text())


def test_results_are_those_of_this_bench():
    found = {}
    for row in results()["runs"]:
        found.setdefault(row["task"], {}).setdefault(row["scheme"], {}).setdefault(
            row["rate"], []).append(row)
    assert {task: list(schemes) for task, schemes in found.items()} == unsent.SEARCHED
    for task, schemes in found.items():
        for scheme, rates in schemes.items():
            for rows in rates.values():
                assert [row["seed"] for row in rows] == results()["seeds"]
            size = parameters_to_vector(unsent.TASKS[task].model(0).parameters()).numel()
            sent = unsent.SCHEMES[scheme].sent(size, unsent.TASKS[task].steps)
            assert {row["sent"] for rows in rates.values() for row in rows} == {round(sent)}


def test_each_best_rate_has_a_worse_neighbour_on_each_side():
    for task, schemes in unsent.SEARCHED.items():
        for scheme in schemes:
            losses = {}
            for row in results()["runs"]:
                if (row["task"], row["scheme"]) == (task, scheme):
                    losses.setdefault(row["rate"], []).append(row["loss"])
            best = min(losses, key=lambda rate: sorted(losses[rate])[1])
            assert min(losses) < best < max(losses)


@pytest.mark.slow
def test_a_recorded_loss_comes_out_again():
    row = next(row for row in results()["runs"] if (row["task"], row["scheme"], row["seed"]) == (
        "digits", "synchronous", 2))
    [again] = unsent.runs("digits", "synchronous", row["rate"], None, [2])
    assert again["loss"] == pytest.approx(row["loss"], rel=0.1)
