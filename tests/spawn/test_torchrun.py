"""`run` inside a torchrun job: it joins the job, and starts nothing."""

import pytest
from job import two_ranks_under_torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
import psutil, torch
import torch.distributed as dist
import dplab
from dplab import run

def work(offset):
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.rand(1).item(), str(dplab.device())

values = [run(work, 2, 5, seed=seed, backend="gloo") for seed in (0, 0, 3)]
assert not psutil.Process().children()
try:
    run(work, 3, 5)
except ValueError as error:
    refused = str(error)
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    file.write(repr([[(r, t.item(), x, d) for r, t, x, d in value] for value in values]))
    file.write("\\n" + refused)
dist.destroy_process_group()
"""


def test_run_joins_the_job(tmp_path):
    import torch

    done = two_ranks_under_torchrun(tmp_path, SCRIPT, tmp_path / "rank")
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert texts[0] == texts[1], "every rank gets the whole list"
    values, refused = texts[0].split("\n")
    first, again, other = eval(values)
    assert [value[:2] for value in first] == [(0, 11.0), (1, 11.0)]
    assert {value[3] for value in first} == {"cpu"}
    assert first == again
    for seed, drawn in ((0, first), (3, other)):
        for rank, value in enumerate(drawn):
            torch.manual_seed(1000 * seed + rank)
            assert value[2] == torch.rand(1).item()
    assert "this torchrun job has 2 ranks, and the code asks for 3" in refused


ENDS_AT_ONCE = """
import atexit, sys, time

@atexit.register  # what is registered later is called earlier
def end():
    with open(f"{sys.argv[1]}-{rank}", "w") as file:
        file.write(str(time.monotonic() - last_line))

import torch.distributed as dist
from dplab import run
from dplab.measure import EmulatedLink

rank = run(dist.get_rank, 2, backend="gloo")[dist.get_rank()]
try:
    run(print, 2, link=EmulatedLink(1e9))
except ValueError as error:
    assert "the job's own link is there" in str(error)
    last_line = time.monotonic()
"""


def test_before_the_end_of_a_job_gloos_threads_have_time_to_let_go_of_tensors(tmp_path):
    done = two_ranks_under_torchrun(tmp_path, ENDS_AT_ONCE, tmp_path / "rank")
    assert done.returncode == 0, done.stderr
    assert [float((tmp_path / f"rank-{rank}").read_text()) >= 0.1 for rank in (0, 1)] == [True] * 2


def test_a_rank_of_the_job_fails(tmp_path):
    done = two_ranks_under_torchrun(
        tmp_path, "from dplab import run\nimport torch.distributed as dist\n"
                  "run(lambda: 1 // dist.get_rank(), 2, backend='gloo')\n")
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr
