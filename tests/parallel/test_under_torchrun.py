"""Shards under plain torchrun: the thread that reduces gradients lets the job end."""

import re

import pytest
from job import two_ranks_under_torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import torch, torch.distributed as dist
from dplab.parallel import FullyShardedModel
dist.init_process_group("gloo")
model = FullyShardedModel(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)))
(model(torch.ones(1, 2)) * (dist.get_rank() + 1)).sum().backward()
print(f"<{model.module[1].bias.grad.tolist()}>", flush=True)
dist.destroy_process_group()
"""


def test_shards_in_a_job_of_two_ranks(tmp_path):
    done = two_ranks_under_torchrun(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    # One rank holds the bias's only element. Two ranks may write into one line.
    assert sorted(re.findall("<.*?>", done.stdout)) == ["<[1.5]>", "<[]>"]
