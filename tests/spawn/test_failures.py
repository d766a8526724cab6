"""`RankError`: a rank raises, dies, leaves, or has what cannot be sent; the error as a value."""

import ctypes
import os
import pickle
import resource
import signal
import subprocess
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


def only_learners_frames(error):
    text = str(error)
    assert os.path.basename(__file__) in text
    for line in text.splitlines():
        assert not line.strip().startswith(("run.py", "life.py", "supervise.py", "recording.py",
                                            "distributed_c10d.py", "c10d_logger.py")), text


def test_one_rank_raises_while_the_others_wait():
    ranks, culprit = 4, 1

    def work():
        total = torch.full((3, 5), float(dist.get_rank()))
        dist.all_reduce(total)
        step(total)
        dist.all_reduce(total)

    def step(total):
        if dist.get_rank() == culprit:
            raise ValueError(f"the mean is {total.mean().item():.1f}")

    error = failure(work, ranks)
    assert (error.rank, error.kind, error.error) == (culprit, "raised", "ValueError")
    head, *rest = str(error).splitlines()
    mean = sum(range(ranks))
    assert head == f"rank {culprit} of {ranks} raised ValueError: the mean is {mean:.1f}"
    assert any("→" in line and "raise ValueError" in line for line in rest)
    assert any(line.strip() == "test_failures.py, in work" for line in rest)
    only_learners_frames(error)
    assert len(error.reports) == ranks - 1
    for rank, report in zip(set(range(ranks)) - {culprit}, error.reports, strict=True):
        assert f"rank {rank} waits in all_reduce number 2 of float32[3, 5]" in report
        assert report.endswith("dist.all_reduce(total)")


def test_the_first_of_several_errors_is_the_headline(tmp_path):
    def work(first):
        dist.barrier()
        kind = [KeyError, ValueError, ZeroDivisionError, IndexError][dist.get_rank()]
        if dist.get_rank() == 1:
            open(first, "w").close()
            raise kind("the first")
        while not os.path.exists(first):
            time.sleep(0.001)
        time.sleep(0.02)
        raise kind(f"from rank {dist.get_rank()}")

    for attempt in range(5):  # on a slow day the others may not come to raise
        error = failure(work, 4, str(tmp_path / str(attempt)))
        assert str(error).startswith("rank 1 of 4 raised ValueError: the first")
        assert error.rank == 1
        if all("raised" in report for report in error.reports):
            break
    names = ["KeyError", "ZeroDivisionError", "IndexError"]
    for report, name in zip(error.reports, names, strict=True):
        assert f"raised {name}" in report and "raise kind(f" in report


DEATHS = {
    "killed": (2, lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed \(SIGKILL\)"),
    "sys.exit": (4, lambda: sys.exit(3), r"called sys.exit\(3\) before it returned"),
    "os._exit(0)": (2, lambda: os._exit(0), "left with exit code 0 before it returned"),
    "segfault": (4, lambda: ctypes.string_at(0), r"crashed \(SIGSEGV\)"),
    "abort": (2, lambda: os.abort(), r"aborted \(SIGABRT\)"),
}
NO_LINE = {"killed", "os._exit(0)"}  # Python has no chance to tell it


@pytest.mark.parametrize("how", DEATHS)
def test_one_rank_dies_while_the_others_wait(how):
    ranks, die, says = DEATHS[how]

    def work():
        total = torch.ones(4)
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            die()
        dist.all_reduce(total)

    error = failure(work, ranks)
    assert (error.rank, error.kind) == (1, "died")
    with pytest.raises(RankError, match=rf"^rank 1 of {ranks} {says}"):
        raise error
    spot = "dist.all_reduce(total)" if how in NO_LINE else "die()"
    assert spot in str(error).split("The other ranks")[0]
    assert error.ranks[1].source in str(error).split("The other ranks")[0]
    only_learners_frames(error)
    for rank, report in zip(set(range(ranks)) - {1}, error.reports, strict=True):
        assert f"rank {rank} " in report
        assert "dist.all_reduce(total)" in report


def test_a_death_is_not_blamed_on_the_error_that_it_causes(tmp_path):
    def work(sign):
        dist.barrier()
        if dist.get_rank() == 1:
            open(sign, "w").close()
            os._exit(9)
        while not os.path.exists(sign):
            time.sleep(0.001)
        time.sleep(0.05)
        raise ValueError("later, on another rank")

    assert failure(work, 2, str(tmp_path / "sign")).rank == 1


def stop_in_the_middle_of(message_bytes):
    """From now on, this rank stops when it has sent a part of a message of that size."""
    send = Connection._send

    def partly(connection, data, *args):
        if len(data) >= message_bytes:
            os.write(connection.fileno(), bytes(data[:1000]))
            os.kill(os.getpid(), signal.SIGSTOP)
        return send(connection, data, *args)

    Connection._send = partly  # in this rank's process, which ends with the run


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_its_value_is_on_its_way():
    def work():
        if dist.get_rank() == 1:
            stop_in_the_middle_of(1 << 20)
        return torch.ones(1 << 20)

    error = failure(work, 2, timeout=2)
    assert (error.kind, error.rank) == ("stuck", 1)
    assert str(error).startswith("rank 1 gave no answer within 2 s")
    assert error.reports[1] == "  rank 1 had returned, and its value was on its way"


def test_ranks_that_end_just_as_their_time_is_up_give_their_values(monkeypatch):
    ask = parents_ranks.Ranks.ask_where

    def late(ranks):
        ask(ranks)
        while not all(state.finished for state in ranks.states):
            ranks.listen(0.05)

    monkeypatch.setattr(parents_ranks.Ranks, "ask_where", late)

    def work():
        time.sleep(0.9)
        return 10 * dist.get_rank()

    assert run(work, 3, timeout=0.5) == [0, 10, 20]


class StopsRankOne:
    """A link that stops rank 1 before it has joined the others."""

    def install(self, backend):
        with open("/proc/self/maps") as maps:
            if "/calls-1" in maps.read():
                os.kill(os.getpid(), signal.SIGSTOP)
        return backend


@pytest.mark.slow
def test_a_rank_that_is_stopped_before_it_has_joined(monkeypatch):
    run(int, 2, "7")
    monkeypatch.setattr(supervise, "_START", 3.0)
    error = failure(lambda: 1, 3, link=StopsRankOne())
    assert (error.kind, error.rank) == ("stuck", 1)
    assert str(error).startswith("rank 1 did not start within 3 s")
    assert error.reports[0] == "  rank 0 was still starting"


@pytest.mark.slow
def test_much_is_sent_to_a_rank_that_is_stopped(monkeypatch):
    run(int, 2, "7")
    monkeypatch.setattr(supervise, "_START", 3.0)
    start = parents_ranks.start_ranks

    def stopped(*where):
        handle = start(*where)
        wait_for(lambda: len(server_of().children()) == 2)
        for rank in server_of().children():
            rank.suspend()
        return handle

    monkeypatch.setattr(parents_ranks, "start_ranks", stopped)
    with pytest.raises(RankError, match="ranks 0 and 1 did not start within 3 s"):
        run(lambda tensor: 1, 2, torch.ones(1 << 22))
    no_ranks_left()


def python_gives_up():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 40)


class Odd(Exception):
    def __init__(self, one, two):
        self.lock = threading.Lock()

    def __str__(self):
        raise RuntimeError("no text")


def raises(error):
    raise error


@pytest.mark.parametrize(("fails", "says"), [
    (lambda: torch.empty(1 << 50), "RuntimeError: "),
    (python_gives_up, "MemoryError"),
    (lambda: raises(Odd(1, 2)), "test_failures.Odd: <exception str() failed>"),
    (lambda: raises(ValueError("é→\n" + "long " * 10_000)), "ValueError: é→"),
    (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    (lambda: dist.send(torch.ones(3), dist.get_world_size()),
     "ValueError: there is no rank 2 to send to or to receive from: the ranks of this group are "
     "0 to 1"),
    (lambda: dist.all_reduce(torch.ones(2), op="sum"), "TypeError: 'sum' is no reduce operation"),
    (lambda: dplab.run(lambda: 1, 2), "RuntimeError: this process is a rank already"),
], ids=["torch's memory", "memory", "odd", "long", "interrupt", "send", "sum", "run"])
def test_what_a_rank_raises(fails, says):
    def work():
        dist.barrier()
        if dist.get_rank() == 1:
            fails()
        dist.barrier()

    error = failure(work, 2)
    assert (error.rank, error.kind) == (1, "raised")
    assert str(error).startswith(f"rank 1 of 2 raised {says}")
    assert len(str(error)) < 4000 and "_distributed_c10d" not in str(error)


@pytest.mark.slow
def test_the_cells_of_a_terminal_ipython_are_the_learners_too():
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("from dplab import run\\ndef work():\\n    return 1 // 0\\n", store_history=True)
shell.run_cell("run(work, 2)", store_history=True)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "cell In[1], in work" in done.stdout and "return 1 // 0" in done.stdout, done


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


def test_a_value_that_cannot_come_back_is_named():
    def work():
        dist.barrier()
        return {"model": [1, threading.Lock() if dist.get_rank() == 1 else 2]}

    error = failure(work, 4)
    assert (error.kind, error.rank) == ("unpicklable", 1)
    assert str(error).startswith("rank 1 of 4: the returned value['model'][1], a _thread.lock, "
                                 "cannot be pickled")
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


def test_a_meant_failure_is_shown_and_kept_and_can_be_pickled(capsys):
    with dplab.expect_failure() as meant:
        run(lambda: 1 // dist.get_rank(), 2)
    assert (meant.rank, meant.kind, str(meant)) == (0, "raised", str(meant.error))
    assert capsys.readouterr().out.startswith("RankError: rank 0 of 2 raised ZeroDivisionError")
    again = pickle.loads(pickle.dumps(meant.error))
    assert (str(again), vars(again)) == (str(meant.error), vars(meant.error))
    assert (again.rank, again.error) == (0, "ZeroDivisionError")
