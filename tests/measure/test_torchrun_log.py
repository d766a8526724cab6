"""What plain torchrun prints about a script that fails, and nothing is left of its processes."""

import time

import psutil
import pytest

from dplab.measure import torchrun_log
from dplab.measure.torchrun_log import read

RAISES = """
import os
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise KeyError(os.environ["DPLAB_SAMPLE"])
dist.barrier()
"""


@pytest.mark.slow
def test_the_errors_of_the_ranks_and_the_rank_that_is_named():
    log = torchrun_log(RAISES, 2, DPLAB_SAMPLE="no such sample")
    assert any(line.startswith("[rank1]: KeyError: 'no such sample'") for line in log.errors)
    assert all(line.startswith("[rank") for line in log.errors)
    assert log.blamed in (0, 1)  # the first that torchrun saw
    assert str(log).endswith(f"(first observed failure): rank {log.blamed}")


@pytest.mark.slow
def test_a_script_that_does_not_end_is_ended_with_its_processes():
    before = time.monotonic()
    torchrun_log("import time\ntime.sleep(300)", 2, timeout=8)
    assert time.monotonic() - before < 100
    assert not [child for child in psutil.Process().children(recursive=True)
                if "job.py" in " ".join(child.cmdline())]


def test_only_lines_that_begin_with_a_rank_and_an_error_are_kept():
    said = ("[rank1]: Traceback (most recent call last):\n[rank1]:   raise ValueError\n"
            "[rank1]: ValueError: nan\n[rank0]: torch.distributed.DistBackendError: NCCL\n"
            "Root Cause (first observed failure):\n[0]:\n  time : today\n  rank      : 12 (local)")
    log = read(said)
    assert log.errors == ("[rank1]: ValueError: nan",
                          "[rank0]: torch.distributed.DistBackendError: NCCL")
    assert log.blamed == 12
    assert str(read("done")) == "Root Cause (first observed failure): no rank"
