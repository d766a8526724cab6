"""`run`: what reaches each rank, and what comes back."""

import functools
import math
import os
import random
import sys
import threading

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.config
from torch import nn

import dplab
from dplab import run

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_gets_all_it_needs_and_values_come_back_in_rank_order(
        ranks, monkeypatch, tmp_path):
    (tmp_path / "helper_beside_the_notebook.py").write_text("NUMBER = 17\n")
    monkeypatch.setenv("DPLAB_TEST_VARIABLE", f"é={ranks}\nx")
    monkeypatch.setenv("OMP_NUM_THREADS", "2") if ranks % 2 else monkeypatch.delenv(
        "OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def work(factor, *rest, offset):
        import helper_beside_the_notebook

        total = torch.arange(3.0) + 10 * dist.get_rank()
        dist.all_reduce(total)
        return (dist.get_rank(), rest, (factor * total + offset).tolist(), str(dplab.device()),
                torch.rand(1).item(), numpy.random.rand(), random.random(),
                os.environ["DPLAB_TEST_VARIABLE"], os.getcwd(), sys.path[0],
                helper_beside_the_notebook.NUMBER, torch.get_num_threads())

    values = run(work, ranks, 2, "a", None, offset=0.5, seed=ranks, backend="gloo")
    total = [2 * (ranks * x + 10 * sum(range(ranks))) + 0.5 for x in range(3)]
    for rank, value in enumerate(values):
        seed = 1000 * ranks + rank
        drawn = (torch.rand(1, generator=torch.Generator().manual_seed(seed)).item(),
                 numpy.random.RandomState(seed).rand(), random.Random(seed).random())
        assert value == (rank, ("a", None), total, "cpu", *drawn, f"é={ranks}\nx", os.getcwd(),
                         str(tmp_path), 17, 1 + ranks % 2)


def test_any_callable_on_any_integer_of_ranks_for_any_time():
    for fn in ("30 {}".format, functools.partial(lambda x, y: f"{x} {y}", 30),
               nn.Sequential(nn.Identity())):
        assert run(fn, numpy.int64(2), "4", timeout=math.inf) == [
            "4" if isinstance(fn, nn.Module) else "30 4"] * 2
    assert run(dist.barrier, 2) == [None, None]  # the call has no line of a learner's
    # modules of other types travel by name; of dist.config, the name `config` brings it along
    assert run(lambda config: torch.ops.aten.add.__name__ + str(config), 1, 5) == ["add5"]


def tensors():
    ramp = torch.arange(6.0).reshape(2, 3)
    return {
        "parameter": nn.Parameter(ramp.clone()), "frozen": nn.Parameter(ramp.clone(), False),
        "leaf": ramp.clone().requires_grad_(), "bfloat16": ramp.bfloat16(),
        "complex": torch.complex(ramp, -ramp), "conj": torch.complex(ramp, -ramp).conj(),
        "bool": ramp > 2, "int": ramp.long(), "scalar": torch.tensor(3.5), "turned": ramp.t(),
        "empty": torch.empty(0, 4), "slice": torch.arange(100_000.0)[1:3],
        "expanded": torch.ones(1, 3).expand(4, 3), "sparse": torch.eye(3).to_sparse(),
    }


def test_tensors_and_modules_there_and_back():
    def work(sent):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return sent, tensors(), model

    sent = tensors()
    *both, model = run(work, 2, sent)[1]
    assert model[0].weight is model[1].weight and model(torch.ones(1, 3)).requires_grad
    for arrived in both:
        for name, original in sent.items():
            back = arrived[name]
            assert type(back) is type(original), name
            assert (back.dtype, back.shape, back.device, back.requires_grad) == (
                original.dtype, original.shape, original.device, original.requires_grad), name
            assert torch.equal(back.detach().to_dense(), original.detach().to_dense()), name
        assert arrived["slice"].untyped_storage().nbytes() == 8  # memory of its own
        arrived["slice"].add_(1)


def steps(count, seed=7, *, timeout=3.0):
    return count, seed, timeout


def test_an_option_that_the_function_has_too_is_refused_where_it_may_be_meant_for_it():
    with pytest.raises(TypeError, match=r"timeout= .* steps\(\) has a parameter of that name"):
        run(steps, 2, 1, timeout=9)
    assert run(steps, 1, 1) == [(1, 7, 3.0)]  # the function's own defaults
    assert run(steps, 1, 1, 2, seed=5) == [(1, 2, 3.0)]  # given by position already
    assert run(lambda **rest: rest, 1, seed=5, count=4) == [{"count": 4}]


@pytest.mark.parametrize(("error", "says", "arguments", "options"), [
    (TypeError, r"run\(fn, 4\), not run\(fn\(\), 4\)", (3, 2), {}),
    *[(TypeError, "integer", (steps, size), {}) for size in (True, 2.5)],
    *[(ValueError, "1 to 120", (steps, size), {}) for size in (0, 121)],
    *[(ValueError, "positive number of seconds", (tensors, 2), {"timeout": timeout})
      for timeout in (0, math.nan)],
    (ValueError, "no backend 'ring'", (tensors, 2), {"backend": "ring"}),
    (ValueError, "gloo", (tensors, 100), {"backend": "nccl"}),
])
def test_bad_arguments(error, says, arguments, options):
    with pytest.raises(error, match=says):
        run(*arguments, **options)


def test_threads_may_run_at_once():
    values = {}

    def start(ranks):
        def work():
            total = torch.tensor([float(ranks)])
            dist.all_reduce(total)
            return dist.get_rank(), total.item()

        values[ranks] = run(work, ranks)

    threads = [threading.Thread(target=start, args=[ranks]) for ranks in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert values == {ranks: [(rank, ranks * ranks) for rank in range(ranks)]
                      for ranks in (2, 3, 4)}
