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
    at = log.lines.index("[rank1]: KeyError: 'no such sample'")
    assert log.lines[at - 2:at] == ('[rank1]:   File "job.py", line 7, in <module>',
                                    '[rank1]:     raise KeyError(os.environ["DPLAB_SAMPLE"])')
    assert {*log.lines} <= {*log.all.splitlines()} and "job.py FAILED" in log.all
    assert log.blamed in (0, 1)  # the first that torchrun saw
    assert f"(first observed failure):\n  rank      : {log.blamed} (local" in str(log)


@pytest.mark.slow
def test_a_script_that_does_not_end_is_ended_with_its_processes():
    before = time.monotonic()
    torchrun_log("import time\ntime.sleep(300)", 2, timeout=8)
    assert time.monotonic() - before < 100
    assert not [child for child in psutil.Process().children(recursive=True)
                if "job.py" in " ".join(child.cmdline())]


def test_of_each_traceback_the_lines_are_where_the_script_was_and_the_error():
    said = ('[rank1]:   File "/tmp/a/job.py", line 9, in <module>\n[rank1]:     train()\n'
            '[rank0]:   File "/tmp/a/job.py", line 9, in <module>\n'
            '[rank1]:   File "/tmp/a/job.py", line 3, in train\n[rank0]:     train()\n'
            "[rank1]:     dist.barrier()\n"
            '[rank1]:   File "/b/site-packages/torch/distributed/c10d.py", line 1, in barrier\n'
            "[rank1]: ValueError: nan\n[rank0]: torch.distributed.DistBackendError: NCCL\n"
            "terminate called\n  what():  [enforce fail]\nE1 failed of binary: /b/bin/python\n"
            "Root Cause (first observed failure):\n[0]:\n  time : today\n"
            "  rank      : 12 (local_rank: 2)\n  exitcode  : -6 (pid: 3)\n  error_file: <N/A>")
    log = read(said)
    assert log.lines == (
        '[rank1]:   File "job.py", line 3, in train', "[rank1]:     dist.barrier()",
        "[rank1]: ValueError: nan",
        '[rank0]:   File "job.py", line 9, in <module>', "[rank0]:     train()",
        "[rank0]: torch.distributed.DistBackendError: NCCL",
        "terminate called", "  what():  [enforce fail]",
        "Root Cause (first observed failure):", "  rank      : 12 (local_rank: 2)",
        "  exitcode  : -6 (pid: 3)")
    assert log.blamed == 12
    assert "[enforce fail]" in log._repr_html_() and "&lt;N/A&gt;" in log._repr_html_()
    assert "/tmp" not in log.all and "/b/" not in log.all
    assert str(read("done")) == "no rank failed"
