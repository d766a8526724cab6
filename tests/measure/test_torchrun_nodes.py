"""torchruns on the loopback: followed, broken, and gone when the block is left."""

import psutil
import pytest

from dplab.measure import TorchrunNodes

pytestmark = pytest.mark.slow
SCRIPT = """
import os, sys, time
rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank} of {ranks}", flush=True)
if ranks == "2":
    while not os.path.exists(f"{__file__}.broken"):  # in place of a connection to a rank
        time.sleep(0.1)
    sys.exit(1)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def texts(lines):
    return sorted(line.text for line in lines if line.text.startswith("rank "))


def processes_of(script):
    return [process for process in psutil.process_iter(["cmdline"])
            if str(script) in (process.info["cmdline"] or [])]


def test_a_rank_and_a_node_are_killed_and_the_job_goes_on(script, capsys):
    with TorchrunNodes(2, 1, script, at_least=1, shown="rank 1.*") as job:
        seen = job.follow(until="rank")
        while texts(seen) != ["rank 0 of 2", "rank 1 of 2"]:
            seen += job.follow(until="rank")
        job.kill_rank(1)
        seen = job.follow(until="rank")
        seen += job.follow(until="rank")
        assert texts(seen) == ["rank 0 of 2", "rank 1 of 2"]
        with pytest.raises(LookupError, match="rank 7"):
            job.kill_rank(7)
        job.kill_node(1)
        script.with_name(f"{script.name}.broken").touch()
        assert texts(job.follow()) == ["rank 0 of 1"]
    assert not processes_of(script)
    assert capsys.readouterr().out.splitlines() == ["node 1 | rank 1 of 2"] * 2


def test_a_node_that_comes_back_is_taken_in(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('if ranks == "2":', 'if True:').replace("sys.exit(1)", ""))
    with TorchrunNodes(2, 1, script, at_least=1) as job:
        seen = job.follow(until="rank")
        while len(texts(seen)) < 2:
            seen += job.follow(until="rank")
        job.kill_node(1)
        job.kill_rank(0)  # which a rank does itself when its connection closes
        assert texts(job.follow(until="rank")) == ["rank 0 of 1"]
        job.start_node(1)
        seen = job.follow(until="rank") + job.follow(until="rank")
        assert texts(seen) == ["rank 0 of 2", "rank 1 of 2"]
    assert not processes_of(script)


def test_an_interrupt_and_a_wait_in_vain_leave_no_process(script):
    with pytest.raises(KeyboardInterrupt), TorchrunNodes(2, 1, script) as job:
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            job.follow(until="rank 1", seconds=0.1)
        job.follow(until="rank 0")
        assert len(processes_of(script)) >= 3
        raise KeyboardInterrupt
    assert not processes_of(script)


def test_a_job_that_ends_without_the_line_says_so(script):
    with TorchrunNodes(1, 1, script) as job, pytest.raises(EOFError, match="rank 0 of 1"):
        job.follow(until="rank 1")
