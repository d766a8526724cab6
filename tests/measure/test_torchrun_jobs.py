"""Jobs under torchrun: followed, broken, what is printed of them, and that nothing is left."""

import time

import psutil
import pytest

from dplab.measure import TorchrunNodes, torchrun_log
from dplab.measure.torchrun_jobs import read

SCRIPT = """
import os, sys, time
rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank} of {ranks}", flush=True)
while not os.path.exists(f"{__file__}.over"):  # in place of a connection to a rank
    time.sleep(0.1)
sys.exit(ranks == "2")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def processes_of(name):
    return [process for process in psutil.process_iter(["cmdline"])
            if str(name) in (process.info["cmdline"] or [])]


def begin(job, ranks):
    """Follows the job until so many ranks have said that they begin; what they said."""
    seen = []
    while len(seen) < ranks:
        seen += [line.text for line in job.follow(until="rank ") if line.text.startswith("rank ")]
    return sorted(seen)


@pytest.mark.slow
def test_a_rank_and_a_node_are_killed_come_back_and_the_job_goes_on(script, capsys):
    both = ["rank 0 of 2", "rank 1 of 2"]
    with TorchrunNodes(2, 1, script, at_least=1, shown="rank 1.*") as job:
        assert begin(job, 2) == both
        job.kill_rank(1)
        assert begin(job, 2) == both
        with pytest.raises(LookupError, match="rank 7"):
            job.kill_rank(7)
        job.kill_node(1)
        job.kill_rank(0)  # which a rank does itself when its connection closes
        assert begin(job, 1) == ["rank 0 of 1"]
        job.start_node(1)
        assert begin(job, 2) == both
        job.kill_node(1)
        script.with_name(f"{script.name}.over").touch()
        assert [line.text for line in job.follow() if line.text.startswith("rank")] == [
            "rank 0 of 1"]
        assert [line.seconds for line in job.lines] == sorted(line.seconds for line in job.lines)
        assert {line.node for line in job.lines if line.text.startswith("rank")} == {0, 1}
    assert not processes_of(script)
    assert capsys.readouterr().out.count("rank 1 of 2\n") == 3


@pytest.mark.slow
def test_an_interrupt_a_wait_in_vain_and_an_early_end_leave_no_process(script):
    with pytest.raises(KeyboardInterrupt), TorchrunNodes(2, 1, script) as job:
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            job.follow(until="rank 1", seconds=0.1)
        begin(job, 1)
        assert len(processes_of(script)) >= 3
        raise KeyboardInterrupt
    assert not processes_of(script)
    script.with_name(f"{script.name}.over").touch()
    with TorchrunNodes(1, 1, script) as job, pytest.raises(EOFError, match="rank 0 of 1"):
        job.follow(until="rank 1")


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
    torchrun_log("import time\ntime.sleep(300)", 2, timeout=6)
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
