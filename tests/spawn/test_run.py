"""`run`: values, arguments, seeds, environment, devices, links."""

import functools
import math
import os
import random
import sys
import threading

import cloudpickle
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.config
from kernel import no_ranks_left
from torch import nn

import dplab
from dplab import run

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    if psutil.Process().children():
        no_ranks_left()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_values_come_back_in_rank_order(ranks):
    def work(factor, *rest, offset):
        mine = torch.arange(3.0) + 10 * dist.get_rank()
        total = mine.clone()
        dist.all_reduce(total)
        return {"rank": dist.get_rank(), "mine": factor * mine + offset, "total": total,
                "rest": rest, "device": str(dplab.device())}

    values = run(work, ranks, 2, "a", None, offset=0.5, backend="gloo")
    assert [value["rank"] for value in values] == list(range(ranks))
    for rank, value in enumerate(values):
        torch.testing.assert_close(value["mine"], 2 * (torch.arange(3.0) + 10 * rank) + 0.5)
        expected = ranks * torch.arange(3.0) + 10 * sum(range(ranks))
        torch.testing.assert_close(value["total"], expected)
        assert value["rest"] == ("a", None) and value["device"] == "cpu"


class Offset:
    def __init__(self, amount):
        self.amount = amount

    def add(self, x):
        return x + self.amount + dist.get_rank()

    __call__ = add


def test_any_callable():
    for fn in (Offset(30).add, Offset(30), functools.partial(lambda x, y: x + y + dist.get_rank(),
                                                             y=30)):
        assert run(fn, 2, 4) == [34, 35]


def steps(count, seed=7, *, timeout=3.0):
    return count, seed, timeout


def test_an_option_that_the_function_has_too_is_refused_where_it_may_be_meant_for_it():
    with pytest.raises(TypeError, match=r"timeout= .* steps\(\) has a parameter of that name"):
        run(steps, 2, 1, timeout=9)
    assert run(steps, 1, 1) == [(1, 7, 3.0)]  # the function's own defaults
    assert run(steps, 1, 1, 2, seed=5) == [(1, 2, 3.0)]  # given by position already
    assert run(lambda **rest: rest, 1, seed=5, count=4) == [{"count": 4}]


def test_modules_of_other_types_travel_by_name():
    assert "torch.distributed.config" in sys.modules  # whose name `config` is enough to bring it

    def work(config):
        return torch.ops.aten.add.__name__, dist.get_rank() + config

    assert run(work, 2, 5) == [("add", 5), ("add", 6)]


def tensors():
    ramp = torch.arange(6.0).reshape(2, 3)
    return {
        "parameter": nn.Parameter(ramp.clone()), "frozen": nn.Parameter(ramp.clone(), False),
        "leaf": ramp.clone().requires_grad_(), "bfloat16": ramp.bfloat16(),
        "complex": torch.complex(ramp, -ramp), "conj": torch.complex(ramp, -ramp).conj(),
        "bool": ramp > 2, "int": ramp.long(), "scalar": torch.tensor(3.5), "turned": ramp.t(),
        "empty": torch.empty(0, 4), "slice": ramp[:, 1:], "expanded": torch.ones(1, 3).expand(4, 3),
        "sparse": torch.eye(3).to_sparse(),
    }


def test_tensors_there_and_back():
    sent = tensors()
    arrived, made = run(lambda tensors_: (tensors_, tensors()), 2, sent)[1]
    for name, original in sent.items():
        for back in (arrived[name], made[name]):
            assert type(back) is type(original), name
            assert (back.dtype, back.shape, back.device) == (
                original.dtype, original.shape, original.device), name
            assert back.requires_grad == original.requires_grad, name
            assert torch.equal(back.detach().to_dense(), original.detach().to_dense()), name
    back = run(lambda: torch.arange(100_000.0)[:2], 2)[0]
    assert back.untyped_storage().nbytes() == 8  # memory of its own
    back.add_(1)


def test_a_module_comes_back_with_its_ties():
    def work():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model = run(work, 2)[1]
    assert model[0].weight is model[1].weight
    assert model(torch.ones(1, 3)).requires_grad


def draw():
    return torch.rand(3).tolist(), numpy.random.rand(3).tolist(), [random.random()]


def test_each_rank_draws_its_own_numbers_and_the_same_in_each_run():
    ranks = 3
    first, again, other = run(draw, ranks), run(draw, ranks), run(draw, ranks, seed=1)
    assert first == again
    for kind in range(3):
        drawn = [str(numbers[kind]) for numbers in first + other]
        assert len(set(drawn)) == 2 * ranks
    torch.manual_seed(3 * 1000 + 1)
    assert torch.rand(3).tolist() == run(draw, 2, seed=3)[1][0]


def test_environment_folder_and_path_follow(monkeypatch, tmp_path):
    (tmp_path / "helper_beside_the_notebook.py").write_text("NUMBER = 17\n")
    monkeypatch.setenv("DPLAB_TEST_VARIABLE", "é=1\nx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def work():
        import helper_beside_the_notebook

        return (os.environ.get("DPLAB_TEST_VARIABLE"), os.getcwd(), sys.path[0],
                helper_beside_the_notebook.NUMBER)

    assert run(work, 2) == [("é=1\nx", os.getcwd(), str(tmp_path), 17)] * 2
    monkeypatch.delenv("DPLAB_TEST_VARIABLE")

    def threads():
        return (os.environ.get("DPLAB_TEST_VARIABLE"), torch.get_num_threads(),
                os.environ["OMP_NUM_THREADS"])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run(threads, 2) == [(None, 1, "1")] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run(threads, 2) == [(None, 2, "2")] * 2


@pytest.mark.parametrize(("error", "says", "arguments", "options"), [
    (TypeError, r"run\(fn, 4\), not run\(fn\(\), 4\)", (3, 2), {}),
    *[(TypeError, "integer", (draw, size), {}) for size in (True, 2.5)],
    *[(ValueError, "1 to 120", (draw, size), {}) for size in (0, 121)],
    *[(ValueError, "positive number of seconds", (draw, 2), {"timeout": timeout})
      for timeout in (0, math.nan)],
    (ValueError, "no backend 'ring'", (draw, 2), {"backend": "ring"}),
    (ValueError, "gloo", (draw, 100), {"backend": "nccl"}),
])
def test_bad_arguments(error, says, arguments, options):
    with pytest.raises(error, match=says):
        run(*arguments, **options)


def test_numpy_integers_and_an_endless_timeout_are_fine():
    assert run(lambda: 1, numpy.int64(2), timeout=math.inf) == [1, 1]


def test_two_threads_run_at_once():
    values = {}

    def start(name, ranks):
        def work():
            total = torch.tensor([float(len(name))])
            dist.all_reduce(total)
            return name, dist.get_rank(), total.item()

        values[name] = run(work, ranks)

    threads = [threading.Thread(target=start, args=("x" * ranks, ranks)) for ranks in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for ranks in (2, 3, 4):
        name = "x" * ranks
        assert values[name] == [(name, rank, ranks * ranks) for rank in range(ranks)]
