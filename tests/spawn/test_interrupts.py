"""An interrupt at the worst of moments: amid a run's start, its end, a transfer."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from kernel import kill_server, no_ranks_left, server_of, wait_for

from dplab import run
from dplab.spawn.between.errors import Interrupted
from dplab.spawn.parent import ranks
from dplab.spawn.server import start

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MOMENTS = [(tempfile, "mkdtemp", 1), (ranks, "start_ranks", 2), (ranks, "CallReader", 2),
           (ranks.Ranks, "start", 1), (ranks.Ranks, "stop", 2), (start._Forked, "end", 1)]


@pytest.fixture
def nothing_left():
    """Afterwards nothing is left of an interrupted run, though its error is kept."""
    run(int, 2, "7")
    made, before = [], (psutil.Process().num_fds(), signal.getsignal(signal.SIGINT))
    listening = True
    sys.addaudithook(lambda event, details: listening and event == "tempfile.mkdtemp"
                     and made.append(details[0]))
    yield made
    listening = False
    assert made and not [folder for folder in made if os.path.exists(folder)]
    wait_for(lambda: not server_of().children(recursive=True), 5)  # what a new server still starts
    assert (psutil.Process().num_fds(), signal.getsignal(signal.SIGINT)) == before
    assert run(lambda: dist.get_rank(), 2) == [0, 1]
    no_ranks_left()


@contextlib.contextmanager
def press_after(seconds):
    """Presses ■ then, unless the block is left before: another test's run is not to be struck."""
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("where", "name", "presses"), MOMENTS)
def test_at_a_bad_moment(nothing_left, monkeypatch, where, name, presses, when):
    original = getattr(where, name)

    def interrupted(*args, **kwargs):
        if when == "before":
            press()
        value = original(*args, **kwargs)
        if when == "after":
            press()
        return value

    def press():
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(Interrupted, match="stopped by you") as kept:
        run(lambda: dist.barrier(), 2)
    monkeypatch.undo()
    assert "rank 1 " in str(kept.value)


@pytest.mark.slow
def test_while_much_is_sent_to_a_server_that_still_loads(nothing_left):
    kill_server()
    started = time.monotonic()
    with press_after(0.5), pytest.raises(Interrupted, match="rank 1 was still starting"):
        run(lambda tensor: tensor.sum(), 2, torch.ones(3_000_000))
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_while_much_comes_back(nothing_left):
    def work():
        return torch.full((1 << 26,), 1.0 + dist.get_rank())

    for moment in (0.1, 0.3):
        with press_after(moment), pytest.raises(KeyboardInterrupt):
            run(work, 2)
            time.sleep(60)


def test_a_handler_of_ones_own_stays(nothing_left):
    def stop(*_):
        raise TimeoutError("enough")

    old = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError, match="enough"):
            run(lambda: time.sleep(1000), 2)
    finally:
        signal.signal(signal.SIGALRM, old)
