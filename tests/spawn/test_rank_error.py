"""`RankError` for what cannot be pickled, and as a value: kept, pickled, meant."""

import os
import pickle
import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import both_sizes, failure

import dplab
from dplab import run

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def used(lock):
    return lambda: lock


@pytest.mark.parametrize(("fn", "arguments", "options", "culprit"), [
    (used(threading.Lock()), (), {}, "`lock`, used by <lambda>(), a _thread.lock, cannot"),
    (used({"x": [1, threading.Lock()]}), (), {}, "`lock`, used by <lambda>()['x'][1]"),
    (print, (1, {"a": threading.Lock()}), {}, "args[1]['a'], a _thread.lock, cannot"),
    (print, (), {"x": (number for number in "12")}, "kwargs['x'], a generator, cannot"),
    (print, (), {"link": threading.Lock()}, "link, a _thread.lock, cannot"),
], ids=["closure", "inside", "args", "kwargs", "link"])
def test_what_cannot_be_sent_is_named(fn, arguments, options, culprit):
    error = failure(fn, 2, *arguments, **options)
    assert (error.kind, error.rank) == ("unpicklable", None)
    assert culprit in str(error)


@both_sizes
def test_a_value_that_cannot_come_back_is_named(ranks):
    def work():
        dist.barrier()
        return {"model": [1, threading.Lock() if dist.get_rank() == 1 else 2]}

    error = failure(work, ranks)
    assert (error.kind, error.rank) == ("unpicklable", 1)
    assert str(error).startswith(f"rank 1 of {ranks}: the returned value['model'][1], a "
                                 "_thread.lock, cannot be pickled")
    assert error.reports[0] == "  rank 0 had returned"


class Sulks:
    """Pickles on a rank, but does not come to life elsewhere."""

    def __reduce__(self):
        return exec, ("raise ImportError('not here')",)


def test_what_arrives_and_cannot_be_loaded():
    error = failure(print, 2, Sulks())
    assert error.kind == "unpicklable" and "ImportError: not here" in str(error)
    error = failure(lambda: Sulks() if dist.get_rank() == 1 else None, 2)
    assert (error.kind, error.rank) == ("unpicklable", 1)
    assert "ImportError: not here" in str(error)


def test_a_rank_error_can_be_pickled():
    error = failure(lambda: 1 // dist.get_rank(), 2)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.kind, again.error, again.ranks, again.reports) == (
        str(error), 0, "raised", "ZeroDivisionError", error.ranks, error.reports)


def test_what_each_rank_was_doing_is_data_too():
    def work(how):
        if dist.get_rank() == 1:
            how()
        dist.all_reduce(torch.ones(2, 3))

    nothing = ("", None, "", None)
    reduces = ("all_reduce", 1, "float32[2, 3]", None)
    for how, others, of_rank_1 in (
            (lambda: 1 // 0, ("waiting", *reduces), ("raised", *nothing)),
            (lambda: dist.recv(torch.ones(3), 2), ("waiting", *reduces),
             ("waiting", "recv", None, "float32[3]", 2)),
            (lambda: dist.all_reduce(torch.ones(7)), ("called", *reduces),
             ("called", "all_reduce", 1, "float32[7]", None))):
        error = failure(work, 3, how)
        assert [(each.state, each.operation, each.number, each.tensor, each.peer)
                for each in error.ranks] == [others, of_rank_1, others]
        assert error.ranks[2].source == "dist.all_reduce(torch.ones(2, 3))"
        assert error.ranks[2].at in str(error)
    error = failure(lambda: dist.get_rank() == 1 and os._exit(3), 2)
    assert [(each.rank, each.state, each.exit_code) for each in error.ranks] == [
        (0, "returned", None), (1, "died", 3)]


def test_a_meant_failure_is_shown_and_kept(capsys):
    with dplab.expect_failure() as meant:
        run(lambda: 1 // dist.get_rank(), 2)
    assert (meant.rank, meant.kind) == (0, "raised")
    assert str(meant) == str(meant.error)
    assert capsys.readouterr().out.startswith("RankError: rank 0 of 2 raised ZeroDivisionError")


def test_a_meant_failure_that_does_not_come():
    with pytest.raises(AssertionError, match="meant to fail"), dplab.expect_failure():
        run(lambda: 1, 2)
    with pytest.raises(ValueError, match="other"), dplab.expect_failure():
        raise ValueError("other")
