"""`run` inside a torchrun job: it joins the job, and starts nothing."""

import pytest
from job import two_ranks_under_torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, os, sys, time

@atexit.register  # what is registered later is called earlier
def end():
    with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
        file.write("\\n".join([repr(found), *refused, str(time.monotonic() - last_line)]))

import psutil, torch
import torch.distributed as dist
import dplab
from dplab import run
from dplab.measure import EmulatedLink

def work(offset):
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.rand(1).item(), str(dplab.device())

values = [run(work, 2, 5, seed=seed, backend="gloo") for seed in (0, 0, 3)]
found = [[(r, t.item(), x, d) for r, t, x, d in value] for value in values]
assert not psutil.Process().children()
refused = []
for ranks, link in ((3, None), (2, EmulatedLink(1e9))):
    try:
        run(work, ranks, 5, link=link)
    except ValueError as error:
        refused.append(str(error))
last_line = time.monotonic()
"""


def test_run_joins_the_job(tmp_path):
    import torch

    done = two_ranks_under_torchrun(tmp_path, SCRIPT, tmp_path / "rank")
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / f"rank-{rank}").read_text().split("\n") for rank in range(2)]
    assert texts[0][0] == texts[1][0], "every rank gets the whole list"
    values, size, link, _ = texts[0]
    first, again, other = eval(values)
    assert [value[:2] for value in first] == [(0, 11.0), (1, 11.0)]
    assert {value[3] for value in first} == {"cpu"}
    assert first == again
    for seed, drawn in ((0, first), (3, other)):
        for rank, value in enumerate(drawn):
            torch.manual_seed(1000 * seed + rank)
            assert value[2] == torch.rand(1).item()
    assert "this torchrun job has 2 ranks, and the code asks for 3" in size
    assert "the job's own link is there" in link
    # before the end, gloo's threads have time to let go of tensors
    assert all(float(text[-1]) >= 0.1 for text in texts)


def test_a_rank_of_the_job_fails(tmp_path):
    done = two_ranks_under_torchrun(
        tmp_path, "from dplab import run\nimport torch.distributed as dist\n"
                  "run(lambda: 1 // dist.get_rank(), 2, backend='gloo')\n")
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr
