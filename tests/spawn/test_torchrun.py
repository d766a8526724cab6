"""`run` inside a torchrun job: it joins the job, and starts nothing."""

import pytest
import torch
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
    return dist.get_rank(), total.item(), str(dplab.device()), torch.rand(1).item()

found = [run(work, 2, 5, seed=seed, backend="gloo") for seed in (0, 0, 3)]
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
    done = two_ranks_under_torchrun(tmp_path, SCRIPT, tmp_path / "rank")
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / f"rank-{rank}").read_text().split("\n") for rank in range(2)]
    drawn = {number: torch.rand(1, generator=torch.Generator().manual_seed(number)).item()
             for number in (0, 1, 3000, 3001)}
    for values, size, link, waited in texts:  # every rank gets the whole list
        assert eval(values) == [[(rank, 11.0, "cpu", drawn[1000 * seed + rank]) for rank in (0, 1)]
                                for seed in (0, 0, 3)]
        assert "this torchrun job has 2 ranks, and the code asks for 3" in size
        assert "the job's own link is there" in link
        assert float(waited) >= 0.1  # gloo's threads have had time to let go of tensors
