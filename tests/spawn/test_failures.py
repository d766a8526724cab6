"""`RankError`: a rank raises, dies, leaves, or cannot be sent something."""

import ctypes
import os
import pathlib
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
from failing import SOON, both_sizes, failure
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


@both_sizes
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_raises_while_the_others_wait(ranks, culprit):
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


@both_sizes
def test_the_first_of_several_errors_is_the_headline(ranks, tmp_path):
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
        error = failure(work, ranks, str(tmp_path / str(attempt)))
        assert str(error).startswith(f"rank 1 of {ranks} raised ValueError: the first")
        assert error.rank == 1
        if all("raised" in report for report in error.reports):
            break
    names = ["KeyError", "ZeroDivisionError", "IndexError"]
    for report, name in zip(error.reports, names, strict=False):
        assert f"raised {name}" in report and "raise kind(f" in report


ABSENT_PEERS = {
    "send": (lambda: dist.send(torch.ones(3), dist.get_world_size()), "{ranks}"),
    "isend": (lambda: dist.isend(torch.ones(3), -1), "-1"),
    "recv": (lambda: dist.recv(torch.ones(3), dist.get_world_size()), "{ranks}"),
    "batch": (lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), -1)]), "-1"),
}


@both_sizes
@pytest.mark.parametrize("how", ABSENT_PEERS)
def test_a_peer_that_does_not_exist_is_refused(ranks, how):
    call, absent = ABSENT_PEERS[how]
    error = failure(call, ranks)
    assert error.kind == "raised"
    assert (f"there is no rank {absent.format(ranks=ranks)} to send to or to receive from: the "
            f"ranks of this group are 0 to {ranks - 1}") in str(error)


DEATHS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed \(SIGKILL\)"),
    "terminated": (lambda: os.kill(os.getpid(), signal.SIGTERM), r"was told to end \(SIGTERM\)"),
    "sys.exit": (lambda: sys.exit(3), r"called sys.exit\(3\) before it returned"),
    "os._exit": (lambda: os._exit(4), "left with exit code 4 before it returned"),
    "os._exit(0)": (lambda: os._exit(0), "left with exit code 0 before it returned"),
    "segfault": (lambda: ctypes.string_at(0), r"crashed \(SIGSEGV\)"),
    "abort": (lambda: os.abort(), r"aborted \(SIGABRT\)"),
}
NO_LINE = {"killed", "terminated", "os._exit", "os._exit(0)"}  # Python has no chance to tell it


@both_sizes
@pytest.mark.parametrize("how", DEATHS)
def test_one_rank_dies_while_the_others_wait(ranks, how):
    die, says = DEATHS[how]

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

    Connection._send = partly


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
    monkeypatch.setattr(supervise, "_START", 4.0)
    error = failure(lambda: 1, 3, link=StopsRankOne())
    assert (error.kind, error.rank) == ("stuck", 1)
    assert str(error).startswith("rank 1 did not start within 4 s")
    assert error.reports[0] == "  rank 0 was still starting"


class RemovesTheStore:
    """A link that removes the file by which ranks find one another, once rank 0 has its place in
    it and before rank 1 has looked.
    """

    def install(self, backend):
        with open("/proc/self/maps") as maps:
            log = next(line.split()[-1] for line in maps if "/calls-" in line)
        if log.endswith("1"):
            store = pathlib.Path(log).with_name("store")
            wait_for(lambda: store.exists() and b"cpu//0/" in store.read_bytes())
            store.unlink()
        return backend


def test_the_store_is_removed_before_all_have_joined():
    error = failure(lambda: 1, 2, link=RemovesTheStore())
    assert (error.kind, error.rank) == ("stuck", None)
    assert ", where the ranks meet, was removed while they started" in str(error)


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
    started = time.monotonic()
    with pytest.raises(RankError, match="ranks 0 and 1 did not start within 3 s"):
        run(lambda tensor: 1, 2, torch.ones(1 << 22))
    assert time.monotonic() - started < SOON
    no_ranks_left()


def test_out_of_memory():
    def torch_gives_up():
        dist.barrier()
        if dist.get_rank() == 1:
            torch.empty(1 << 50)
        dist.barrier()

    def python_gives_up():
        dist.barrier()
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(1 << 40)
        dist.barrier()

    error = failure(torch_gives_up, 2)
    assert (error.rank, error.kind, error.error) == (1, "raised", "RuntimeError")
    assert "memory" in str(error).splitlines()[0]
    error = failure(python_gives_up, 2)
    assert (error.rank, error.kind, error.error) == (1, "raised", "MemoryError")


class Odd(Exception):
    def __init__(self, one, two):
        self.lock = threading.Lock()

    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Odd(1, 2), "test_failures.Odd: <exception str() failed>"),
    (lambda: ValueError("é→\n" + "long " * 10_000), "ValueError: é→"),
    (lambda: KeyboardInterrupt(), "KeyboardInterrupt"),
    (lambda: AssertionError(), "AssertionError"),
])
def test_odd_exceptions(make, says):
    def work():
        if dist.get_rank() == 0:
            raise make()
        dist.barrier()

    error = failure(work, 2)
    assert str(error).startswith(f"rank 0 of 2 raised {says}")
    assert len(str(error)) < 4000


def test_run_inside_a_rank():
    error = failure(lambda: dplab.run(lambda: 1, 2), 2)
    assert "RuntimeError: this process is a rank already" in str(error)


@pytest.mark.slow
def test_the_cells_of_a_terminal_ipython_are_the_learners_too():
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("from dplab import run\\ndef work():\\n    return 1 // 0\\n", store_history=True)
shell.run_cell("run(work, 2)", store_history=True)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "cell In[1], in work" in done.stdout and "return 1 // 0" in done.stdout, done


@pytest.mark.parametrize("call", [
    lambda x: dist.all_reduce(x, op="sum"),
    lambda x: dist.reduce(x, 1, "max"),
    lambda x: dist.reduce_scatter(x[:1], [x[1:], x[:1]], op=max),
], ids=["all_reduce", "reduce", "reduce_scatter"])
def test_what_is_no_reduce_operation_is_answered_with_the_names(call):
    error = failure(lambda: call(torch.arange(2.0) + dist.get_rank()), 2)
    assert (error.kind, error.error) == ("raised", "TypeError")
    head = str(error).splitlines()[0]
    assert "dist.ReduceOp.SUM" in head and ("'sum'" in head or "max" in head)
    assert "_distributed_c10d" not in str(error)
