"""The algorithms run under plain torchrun, need torch alone, and their threads let the job end."""

import re

import pytest
from job import two_ranks_under_torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch, torch.distributed as dist
from dplab.parallel import FullyShardedModel, ManualDDP, collectives
dist.init_process_group("gloo")
tensor = torch.arange(5.0) * (dist.get_rank() + 1)
collectives.ring_all_reduce(tensor)
x, share = torch.ones(1, 2), dist.get_rank() + 1
whole = ManualDDP(torch.nn.Linear(2, 1))
(whole(x) * share).sum().backward()
whole.finish_gradient_sync()
sharded = FullyShardedModel(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)))
(sharded(x) * share).sum().backward()
others = [m for m in sys.modules if m.startswith("dplab.")
          and not m.startswith(("dplab.parallel", "dplab.needs"))]
mean, piece = whole.module.bias.grad.item(), sharded.module[1].bias.grad.tolist()
print(f"<{(tensor.tolist(), mean, piece, others)}>", flush=True)
dist.destroy_process_group()
"""


def test_a_ring_a_replica_and_shards_in_one_job(tmp_path):
    done = two_ranks_under_torchrun(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    ring, mean = [0.0, 3.0, 6.0, 9.0, 12.0], 1.5
    # One rank holds the bias's only element. Two ranks may write into one line.
    assert sorted(re.findall("<.*?>", done.stdout)) == [
        f"<{(ring, mean, [mean], [])}>", f"<{(ring, mean, [], [])}>"]
