"""A cell that takes long says how long, and where silent ranks are; and nothing of it stays."""

import sys
import time

import cloudpickle
import pytest
import torch.distributed as dist
from failing import failure
from kernel import Kernel

from dplab import run
from dplab.spawn.parent import elapsed

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SETUP = """
%load_ext dplab
import time
import torch.distributed as dist
import dplab
from dplab.spawn.parent import elapsed
elapsed.PATIENCE = 1.0
"""
ONE_IS_BUSY = """%%ranks 3 --timeout 5 --fails
dist.barrier()
if dist.get_rank() == 1:
    while True:
        pass
dist.barrier()"""
MANY_RUNS = "for _ in range(4):\n    dplab.run(time.sleep, 2, 0.6)"


@pytest.fixture(scope="module")
def kernel():
    with Kernel(DPLAB_LIVE="1") as kernel:
        assert kernel.run(SETUP).status == "ok"
        kernel.run("dplab.run(int, 2)")  # so that the ranks' server is there
        yield kernel


def seconds_shown(reply):
    """The seconds that the line counted, in order, and its display; it was taken away."""
    (line,) = [key for key, data in reply.displays.items() if not data]
    assert reply.history[-1] == ""
    return [int(text.split()[0]) for text in reply.history if text[:1].isdigit()], line


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["time.sleep(2.5)", MANY_RUNS], ids=["no run", "many runs"])
def test_one_line_counts_the_seconds_of_a_cell_and_goes(kernel, cell):
    reply = kernel.run(cell)
    seconds, _ = seconds_shown(reply)
    assert seconds[0] >= 1 and len(seconds) >= 2 and seconds == sorted(set(seconds))
    assert len(reply.displays) == 1 and reply.text.strip() == ""


def test_a_quick_cell_has_none(kernel):
    kernel.run("elapsed.PATIENCE = 20.0")
    assert kernel.run("dplab.run(int, 2)").history == []
    kernel.run("elapsed.PATIENCE = 1.0")


@pytest.mark.slow
def test_it_is_not_there_while_ranks_print(kernel):
    reply = kernel.run("%%ranks 2\nfor step in range(8):\n    print(step)\n    time.sleep(0.3)")
    first = next(i for i, text in enumerate(reply.history) if text.startswith("[rank"))
    assert not any(text[:1].isdigit() for text in reply.history[first:]), reply


@pytest.mark.slow
def test_it_says_which_rank_is_busy_where_long_before_the_end(kernel):
    kernel.start(ONE_IS_BUSY)
    line = kernel.until_displayed("rank 1 computes: cell In[")["text/plain"].splitlines()
    assert line[0].endswith(" s …")
    assert any(row.startswith("ranks 0 and 2 wait in barrier number 2: cell In[") for row in line)
    assert any(row.startswith("rank 1 computes") and row.endswith(("while True:", "pass"))
               for row in line)
    reply = kernel.finish()
    seconds_shown(reply)
    assert "RankError: rank 1 did not come to barrier number 2 within 5 s" in reply.text


@pytest.mark.slow
def test_a_cell_that_fails_or_is_stopped_takes_the_line_away(kernel):
    seconds_shown(kernel.run("time.sleep(1.5)\n1 // 0"))
    kernel.start("dplab.run(lambda: time.sleep(1000), 2)")
    kernel.until_displayed("ranks 0 and 1 compute: ")
    kernel.interrupt()
    seconds_shown(kernel.finish())


@pytest.mark.slow
def test_nothing_of_it_where_outputs_are_compared():
    with Kernel() as kernel:  # DPLAB_LIVE=0, as for the notebooks' tests
        kernel.run(SETUP)
        assert kernel.run("time.sleep(2)").history == []


def one_is_busy():
    while dist.get_rank() == 1:
        pass
    dist.barrier()


def all_are_busy():
    time.sleep(1.2)


def test_outside_a_notebook_it_is_said_once_on_stderr(monkeypatch, capsys):
    monkeypatch.setenv("DPLAB_LIVE", "1")
    monkeypatch.setattr(elapsed, "PATIENCE", 0.4)
    run(all_are_busy, 2)
    assert capsys.readouterr().err == ""  # nobody waits for anybody
    error = failure(one_is_busy, 3, timeout=2)
    said = capsys.readouterr().err
    assert said.count("rank 1 computes: test_elapsed.py, line ") == 1
    assert said.count("ranks 0 and 2 wait in barrier number 1") == 1
    assert "loop" in str(error) and "same collectives" not in str(error)
