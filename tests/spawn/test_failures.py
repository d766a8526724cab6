"""`RankError`: a rank raises, dies, stops or leaves, or what it has cannot be sent."""

import ctypes
import linecache
import os
import pickle
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from kernel import no_ranks_left, server_of, wait_for

import dplab
from dplab import RankError, run
from dplab.spawn.parent import ranks as parents_ranks
from dplab.spawn.parent import supervise

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Odd(Exception):
    def __init__(self, one, two):
        self.lock = threading.Lock()

    def __str__(self):
        raise RuntimeError("no text")


def python_gives_up():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 40)


def raises(error):
    raise error


def typed_in():
    """A function as IPython in a terminal has it: its source is in no file."""
    name, source = "<ipython-input-3-x>", "def typed():\n    return 1 // 0\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {}
    exec(compile(source, name, "exec"), names)
    return names["typed"]


KILLED, LEFT = "was killed (SIGKILL)", "left with exit code 0 before it returned"
# what rank 1 of how many does, what is said of it
FAILS = {
    "raise": (4, lambda: raises(ValueError("wrong")), "raised ValueError: wrong"),
    "memory": (2, python_gives_up, "raised MemoryError"),
    "odd": (2, lambda: raises(Odd(1, 2)), "raised test_failures.Odd: <exception str() failed>"),
    "long": (2, lambda: raises(ValueError("é→\n" + "long " * 10_000)), "raised ValueError: é→"),
    "interrupt": (2, lambda: raises(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    "typed": (2, typed_in(), "raised ZeroDivisionError"),
    "peer": (3, lambda: dist.send(torch.ones(3), dist.get_world_size()),
             "raised ValueError: there is no rank 3 to send to or to receive from: the ranks of "
             "this group are 0 to 2"),
    "sum": (2, lambda: dist.all_reduce(torch.ones(2), op="sum"),
            "raised TypeError: 'sum' is no reduce operation"),
    "run": (2, lambda: run(print, 2), "raised RuntimeError: this process is a rank already"),
    "input": (2, lambda: input("your name? "), "raised EOFError: ranks have no keyboard"),
    "killed": (2, lambda: os.kill(os.getpid(), signal.SIGKILL), KILLED),
    "sys.exit": (4, lambda: sys.exit(3), "called sys.exit(3) before it returned"),
    "os._exit": (2, lambda: os._exit(0), LEFT),
    "segfault": (3, lambda: ctypes.string_at(0), "crashed (SIGSEGV)"),
    "abort": (2, lambda: os.abort(), "aborted (SIGABRT)"),
}
CODES = {"killed": -9, "os._exit": 0, "segfault": -11, "abort": -6}


@pytest.mark.parametrize("how", FAILS)
def test_one_rank_fails_while_the_others_wait(how):
    ranks, fails, says = FAILS[how]

    def work():
        total = torch.full((3, 5), float(dist.get_rank()))
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            fails()
        dist.all_reduce(total)

    error = failure(work, ranks)
    text = str(error)
    assert text.startswith(f"rank 1 of {ranks} {says}") and len(text) < 4000
    assert (error.rank, error.kind) == (1, "raised" if says.startswith("raised") else "died")
    assert error.error == (says.split()[1].rstrip(":").rpartition(".")[2]
                           if error.kind == "raised" else "")
    head = text.split("The other ranks")[0]
    if says in (KILLED, LEFT):  # Python has no chance to tell where
        assert "Its last call was all_reduce of float32[3, 5], SUM" in head
        assert error.ranks[1].source == "dist.all_reduce(total)"
    else:
        assert "test_failures.py, in work" in head and "fails()" in head
        assert "→   2     return 1 // 0" in head if how == "typed" else "→" in head
        assert error.ranks[1].source in head
    assert (error.ranks[1].state, error.ranks[1].exit_code) == (error.kind, CODES.get(how))
    assert not any(name in text for name in ("life.py", "recording.py", "distributed_c10d"))
    for rank, report in zip({*range(ranks)} - {1}, error.reports, strict=True):
        assert report.endswith(": dist.all_reduce(total)"), report
        each = error.ranks[rank]
        assert str(each) == report.strip()
        if each.state == "disconnected" and how in CODES:
            assert report.startswith(f"  rank {rank} lost its connection: test_failures.py, line ")
        else:
            assert report.startswith(f"  rank {rank} waits in all_reduce number 2 of float32[3, 5]")
            assert (each.state, each.operation, each.number, each.tensor) == (
                "waiting", "all_reduce", 2, "float32[3, 5]")


@pytest.mark.parametrize("leave", [lambda: raises(ValueError("the first")), lambda: os._exit(9)])
def test_the_first_of_several_failures_is_the_headline(leave, tmp_path):
    def work(sign):
        dist.barrier()
        if dist.get_rank() == 1:
            open(sign, "w").close()
            leave()
        while not os.path.exists(sign):
            time.sleep(0.001)
        time.sleep(0.02)
        raise [KeyError, ValueError, ZeroDivisionError][dist.get_rank()]("later")

    for attempt in range(5):  # on a slow day the others may not come to raise
        error = failure(work, 3, str(tmp_path / str(attempt)))
        assert error.rank == 1
        if all("raised" in report for report in error.reports):
            break
    for report, name in zip(error.reports, ("KeyError", "ZeroDivisionError"), strict=True):
        assert f"raised {name}" in report and '("later")' in report


# Ranks that give no answer

def loops():
    while True:
        pass


STUCK = {
    "returns": (4, lambda: os.getpid(), "rank 1 returned, and ranks 0, 2 and 3 still wait in "
                "all_reduce number 2 of float32[3, 2]", "had returned", ""),
    "loops": (3, loops, "rank 1 did not come to all_reduce number 2 of float32[3, 2] within 1.5 s, "
              "and ranks 0 and 2 wait", "was running: test_failures.py, line ",
              "Rank 1 is busy in code of its own: a loop"),
    "in C code": (2, lambda: ctypes.PyDLL(None).sleep(100), "rank 1 did not come to all_reduce "
                  "number 2 of float32[3, 2] within 1.5 s, and rank 0 waits",
                  "does not answer: it is stopped, or inside C code; its last call was all_reduce "
                  "of float32[3, 2], SUM: test_failures.py, line ", ""),
}


@pytest.mark.parametrize("how", STUCK)
def test_a_rank_that_the_others_wait_for(how):
    ranks, does, head, reported, advice = STUCK[how]

    def work():
        total = torch.ones(3, 2)
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            return does()
        dist.all_reduce(total)

    error = failure(work, ranks, **{} if how == "returns" else {"timeout": 1.5})
    assert (error.kind, error.rank) == ("stuck", 1)
    assert str(error).startswith(f"{head}\n") and advice in str(error).splitlines()[-1]
    assert error.reports[1].startswith(f"  rank 1 {reported}")
    for rank in {*range(ranks)} - {1}:
        assert error.reports[rank].startswith(f"  rank {rank} waits in all_reduce number 2 of ")
        assert error.reports[rank].endswith("dist.all_reduce(total)")


def test_all_ranks_loop_and_ranks_that_end_just_as_their_time_is_up_give_their_values(monkeypatch):
    error = failure(loops, 2, timeout=0.5)
    assert str(error).startswith("ranks 0 and 1 gave no answer within 0.5 s")
    assert (error.kind, error.rank) == ("stuck", None)

    ask = parents_ranks.Ranks.ask_where

    def late(ranks):
        ask(ranks)
        while not all(state.finished for state in ranks.states):
            ranks.listen(0.05)

    monkeypatch.setattr(parents_ranks.Ranks, "ask_where", late)
    assert run(lambda: time.sleep(0.9) or 10 * dist.get_rank(), 3, timeout=0.5) == [0, 10, 20]


def stop_in_the_middle_of(message_bytes):
    """From now on, this rank stops when it has sent a part of a message of that size."""
    send = Connection._send

    def partly(connection, data, *args):
        if len(data) >= message_bytes:
            os.write(connection.fileno(), bytes(data[:1000]))
            os.kill(os.getpid(), signal.SIGSTOP)
        return send(connection, data, *args)

    Connection._send = partly  # in this rank's process, which ends with the run


def test_a_rank_that_is_stopped_while_its_value_is_on_its_way():
    def work():
        if dist.get_rank() == 1:
            stop_in_the_middle_of(1 << 20)
        return torch.ones(1 << 20)

    error = failure(work, 2, timeout=2)
    assert (error.kind, error.rank) == ("stuck", 1)
    assert str(error).startswith("rank 1 gave no answer within 2 s")
    assert error.reports[1] == "  rank 1 had returned, and its value was on its way"


@pytest.mark.parametrize(("ranks", "which", "names"), [
    (3, [1], "rank 1"), (2, [0, 1], "ranks 0 and 1")])
def test_ranks_that_are_stopped_before_they_have_joined(ranks, which, names, monkeypatch):
    def stopped(*where):
        handle = start(*where)
        wait_for(lambda: len(server_of().children()) == ranks)
        for rank in which:
            server_of().children()[rank].suspend()
        return handle

    run(int, 2, "7")
    start = parents_ranks.start_ranks
    monkeypatch.setattr(supervise, "_START", 2.0)
    monkeypatch.setattr(parents_ranks, "start_ranks", stopped)
    with pytest.raises(RankError, match=f"^{names} did not start within 2 s") as caught:
        run(lambda tensor: 1, ranks, torch.ones(1 << 22))  # more than the connection holds
    assert (caught.value.kind, caught.value.rank) == ("stuck", 1 if which == [1] else None)
    assert caught.value.reports[0] == "  rank 0 was still starting"
    no_ranks_left()


# What cannot travel, and the error as a value

def used(lock):
    return lambda: lock


@pytest.mark.parametrize(("fn", "arguments", "options", "culprit"), [
    (used({"x": [1, threading.Lock()]}), (), {}, "`lock`, used by <lambda>()['x'][1], a _thread"),
    (print, (1, {"a": threading.Lock()}), {}, "args[1]['a'], a _thread.lock, cannot"),
    (print, (), {"x": (number for number in "12")}, "kwargs['x'], a generator, cannot"),
    (print, (), {"link": threading.Lock()}, "link, a _thread.lock, cannot"),
], ids=["inside", "args", "kwargs", "link"])
def test_what_cannot_be_sent_is_named(fn, arguments, options, culprit):
    with pytest.raises(RankError) as kept:
        run(fn, 2, *arguments, **options)
    assert (kept.value.kind, kept.value.rank) == ("unpicklable", None)
    assert culprit in str(kept.value)


class Sulks:
    """Pickles, but does not come to life elsewhere."""

    def __reduce__(self):
        return exec, ("raise ImportError('not here')",)


@pytest.mark.parametrize(("returned", "says"), [
    ({"model": [1, threading.Lock]}, "the returned value['model'][1], a _thread.lock, cannot be "
                                     "pickled"),
    ({"model": [1, Sulks]}, "the returned value could not be loaded here (ImportError: not here)"),
])
def test_a_value_that_cannot_come_back_is_named(returned, says):
    def work():
        dist.barrier()
        one, make = returned["model"]
        return {"model": [one, make() if dist.get_rank() == 1 else 2]}

    error = failure(work, 3)
    assert (error.kind, error.rank, error.ranks[0].state) == ("unpicklable", 1, "returned")
    assert str(error).startswith(f"rank 1 of 3: {says}")
    assert error.reports == ["  rank 0 had returned", "  rank 2 had returned"]


def test_an_argument_that_cannot_be_loaded_there():
    error = failure(print, 2, Sulks())
    assert error.kind == "unpicklable" and "ImportError: not here" in str(error)


def test_a_meant_failure_is_shown_and_kept_and_can_be_pickled(capsys):
    with dplab.expect_failure() as meant:
        run(lambda: 1 // dist.get_rank(), 2)
    assert (meant.rank, meant.kind, str(meant)) == (0, "raised", str(meant.error))
    assert capsys.readouterr().out.startswith("RankError: rank 0 of 2 raised ZeroDivisionError")
    again = pickle.loads(pickle.dumps(meant.error))
    assert (str(again), vars(again)) == (str(meant.error), vars(meant.error))
    assert (again.rank, again.error) == (0, "ZeroDivisionError")
    with pytest.raises(AssertionError, match="meant to fail"), dplab.expect_failure():
        run(print, 1)
