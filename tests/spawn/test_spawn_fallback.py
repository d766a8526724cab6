"""Where processes cannot be forked safely (macOS): each rank is a fresh Python."""

import os
import signal
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from kernel import Kernel, descendants, wait_for, wait_until_gone

from dplab import RankError, run

pytestmark = pytest.mark.slow

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SETUP = """
import os, time, torch
import torch.distributed as dist
from dplab import run
"""


@pytest.fixture(autouse=True)
def spawned(monkeypatch):
    monkeypatch.setenv("DPLAB_START", "spawn")


def test_values_output_and_seeds(capsys):
    def work(offset):
        total = torch.tensor([dist.get_rank() + offset])
        dist.all_reduce(total)
        print("total", total.item())
        return total, torch.rand(1).item(), torch.get_num_threads()

    values = run(work, 2, 0.5)
    assert [total.item() for total, *_ in values] == [2.0, 2.0]
    for rank, (_, drawn, threads) in enumerate(values):
        torch.manual_seed(rank)
        assert drawn == torch.rand(1).item() and threads == 1
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] total 2.0", "[rank 1] total 2.0"]


def test_a_rank_that_is_killed():
    def work():
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2))

    with pytest.raises(RankError, match=r"^rank 1 of 2 was killed \(SIGKILL\)") as caught:
        run(work, 2)
    assert (caught.value.rank, caught.value.kind) == (1, "died")
    assert "dist.all_reduce(torch.ones(2))" in caught.value.reports[0]


@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_the_end_of_a_kernel_s_run(end, tmp_path):
    path = str(tmp_path / "rank")
    with Kernel(DPLAB_START="spawn") as kernel:
        kernel.run(SETUP)
        kernel.start(f"""
def hang():
    open({path!r} + str(dist.get_rank()), "w").close()
    if dist.get_rank(): dist.barrier()
    while True: pass
run(hang, 2)""")
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        time.sleep(0.3)
        ranks = descendants(kernel.process)
        folders = {os.path.dirname(area.path) for area in kernel.process.memory_maps()
                   if "calls-" in area.path}
        assert len(ranks) == 2 and len(folders) == 1
        if end == "kill":
            kernel.kill()
        else:
            kernel.interrupt()
            error = kernel.finish().error
            assert "stopped by you" in error and "rank 1 waits in barrier number 1" in error
        assert wait_until_gone(ranks, 15) < 15
        wait_for(lambda: not any(map(os.path.exists, folders)), 5)
        if end == "interrupt":
            assert kernel.run("run(lambda: dist.get_rank(), 2)").value == "[0, 1]"
