"""The script that readers copy: it goes on as if nothing had happened, whatever happens.

Each training is a real one, by torchrun or in one process, on shards of real text.
"""

import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "chapters" / "launch"
SMALL = ["--width", "32", "--layers", "2", "--batch", "12", "--sequence", "17", "--save-every", "3",
         "--print-every", "1", "--micro-batch", "2"]
LINE = re.compile(r"step (\d+): loss (\S+), norm (\S+),")
TIME_LIMIT = 240
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, LAUNCH / "make_shards.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Step, loss and norm as printed by 2 ranks that nothing interrupts, and the folder."""
    folder = tmp_path_factory.mktemp("whole")
    found = losses(ended(started(data, folder, "--steps", "10", ranks=2)))
    assert [step for step, *_ in found] == [*range(1, 11)]
    assert float(found[-1][1]) < float(found[0][1]) - 0.3
    return found, folder


STARTED = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    for process in STARTED:
        process.kill()


def started(data, folder, *options, ranks, restarts=0, largest_file=None):
    """A training; ``largest_file``: in bytes, as on a disk that is full."""
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "--max-restarts", str(restarts), "--signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    STARTED.append(subprocess.Popen(
        [*start, LAUNCH / "train.py", "--data", data, "--checkpoints", folder, *SMALL, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=largest_file and (
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, most)))))
    return STARTED[-1]


def ended(process, status=0):
    """All that it prints from here on, when it has ended with this status."""
    printed, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == status, printed
    return printed


def follow(process, start):
    """What it prints up to the first line that begins with this pattern."""
    printed = ""
    for line in process.stdout:
        printed += line
        if re.match(start, line):
            return printed
    raise AssertionError(printed)


def losses(printed):
    return [(int(step), loss, norm) for step, loss, norm in LINE.findall(printed)]


def saved(folder):
    return [path.name for path in sorted(folder.iterdir()) if path.is_dir()]


def copied(folder, to, *, until):
    """A training as it was when the last checkpoint was that of this step."""
    to.mkdir()
    for path in folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) <= until:
            shutil.copytree(path, to / path.name)
    return to


def ranks_of(process):
    return [child for child in psutil.Process(process.pid).children(recursive=True)
            if "train.py" in " ".join(child.cmdline()) and "torch.distributed.run" not in
            child.cmdline()]


def assert_same_step_but_for_rounding(found, expected):
    """As on another number of ranks, whose sums are in another order."""
    assert found[0] == expected[0]
    assert float(found[1]) == pytest.approx(float(expected[1]), abs=2e-3)


def test_a_torn_checkpoint_and_a_dead_rank_cost_steps_and_change_no_loss(data, whole, tmp_path):
    """And when torchrun itself dies, its ranks do."""
    expected, folder = whole
    torn = copied(folder, tmp_path / "torn", until=10)
    part = max((torn / "step-00000010").glob("*.distcp"), key=lambda path: path.stat().st_size)
    part.write_bytes(part.read_bytes()[:-1])
    (torn / "unfinished-00000010").mkdir()  # as a save leaves it that was cut off
    process = started(data, torn, "--steps", "100000", ranks=2, restarts=1)
    first = follow(process, "step 14: loss")
    assert f"step-00000010 is torn ({part.name} has" in first and "from step 9" in first
    assert "step-00000009: steps was 10 and is 100000." in first
    assert losses(first)[0] == expected[-1]  # to the last bit
    assert "unfinished-00000010" not in saved(torn)
    ranks_of(process)[1].kill()
    again = follow(process, r".*from step")
    start = int(re.search(r"from step (\d+)", again)[1])
    assert start in (9, 12) and " was " not in again  # the last save may not have been done
    again = losses(follow(process, "step 18: loss"))
    assert [step for step, *_ in again] == [*range(start + 1, 19)]
    assert {*losses(first)} >= {each for each in again if each[0] <= 14}
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(gone) == 2 and not alive
    assert "torn-step-00000010" in saved(torn)


def test_on_other_ranks_it_takes_the_same_samples_and_told_to_stop_it_saves(data, whole, tmp_path):
    expected, folder = whole
    other = copied(folder, tmp_path / "other", until=9)
    process = started(data, other, "--steps", "100000", "--save-every", "100000", "--keep", "1",
                      "--strategy", "hsdp", ranks=3)
    printed = follow(process, "step 10: loss")
    process.send_signal(signal.SIGUSR1)
    printed += ended(process, status=1)  # torchrun's own, after a signal
    assert_same_step_but_for_rounding(losses(printed)[0], expected[-1])
    stopped = int(re.search(r"told to stop: saved at step (\d+)", printed)[1])
    assert stopped == losses(printed)[-1][0] >= 10 and saved(other) == [f"step-{stopped:08}"]


def test_a_full_disk_costs_the_checkpoint_and_no_training_on_one_rank(data, whole, tmp_path):
    """When there is room again, it is told to stop."""
    expected, folder = whole
    before = copied(folder, tmp_path / "full", until=9)
    files = {path: path.read_bytes() for path in before.glob("*/*")}
    process = started(data, before, "--steps", "100000", "--clip", "2", largest_file=20_000,
                      ranks=1)
    printed = follow(process, "step 12: NOT SAVED")
    assert "step-00000009: steps was 10 and is 100000; clip was 1.0 and is 2.0." in printed
    assert re.search(r"step 12: NOT SAVED, \w+Error: .*step-00000009\n", printed)
    assert_same_step_but_for_rounding(losses(printed)[0], expected[-1])
    assert "step-00000009" in saved(before)
    assert {path: path.read_bytes() for path in files} == files
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    process.send_signal(signal.SIGTERM)
    stopped = int(re.search(r"told to stop: saved at step (\d+)", ended(process))[1])
    assert saved(before)[-1] == f"step-{stopped:08}" and stopped >= 12


def test_another_model_or_data_set_is_refused(data, whole, tmp_path):
    _, folder = whole
    other = shutil.copytree(data, tmp_path / "other")
    shard = other / "shard-0001.bin"
    shard.write_bytes(bytes(2) + shard.read_bytes()[2:])
    printed = ended(started(other, folder, "--width", "64", ranks=1), status=1)
    assert "width was 32 and is 64" in printed and re.search(r"data was \w+ and is \w+", printed)
    assert saved(folder)[-1] == "step-00000010"


@pytest.fixture
def train(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(LAUNCH)
    return importlib.import_module("train")


def test_shards_that_are_cut_off_or_missing_and_a_batch_that_does_not_divide_are_refused(
        data, train, tmp_path, monkeypatch):
    short = shutil.copytree(data, tmp_path / "short")
    shard = short / "shard-0001.bin"
    os.truncate(shard, 1000)
    with pytest.raises(SystemExit, match=f"{shard} should have .* has 500"):
        train.Tokens(short, 17)
    shard.unlink()
    with pytest.raises(SystemExit, match=f"{shard} should have .* is missing"):
        train.Tokens(short, 17)
    monkeypatch.setattr(train, "join_job", lambda timeout: None)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch", "13"])
    with pytest.raises(SystemExit, match="2 ranks do not divide a batch of 13"):
        train.main()


def test_every_sample_comes_once_an_epoch_and_the_next_epoch_is_another_order(data, train):
    tokens = train.Tokens(data, 4099)
    rows = [tuple(tokens.sample(number)[:40].tolist()) for number in range(2 * tokens.total)]
    first, second = rows[:tokens.total], rows[tokens.total:]
    assert sorted(first) == sorted(second) and first != second
    assert len({*first}) > 0.99 * tokens.total and len(tokens.sample(3)) == 4100
    there = sum(json.loads((data / "index.json").read_text()).values())
    assert 0 <= there - 4100 * tokens.total < 3 * 4100


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(50))
def test_a_kill_at_any_moment_loses_at_most_an_interval(data, whole, tmp_path, seed):
    expected, _ = whole
    chance = random.Random(seed)
    process = started(data, tmp_path, "--steps", "100", "--save-every", "2", ranks=2)
    printed = follow(process, f"step {chance.randint(1, 9)}:")
    time.sleep(chance.uniform(0, 0.3))
    chance.choice([process, *ranks_of(process)]).kill()  # torchrun, and its ranks with it; or one
    printed += process.communicate(timeout=TIME_LIMIT)[0]
    again = ended(started(data, tmp_path, "--steps", "12", ranks=2))
    start = int(re.search(r"from step (\d+)", again)[1])
    assert "torn" not in again and losses(printed)[-1][0] - start <= 2 * 2 + 1
    assert losses(again)[:max(0, 10 - start)] == expected[start:]
