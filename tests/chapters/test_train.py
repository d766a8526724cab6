"""The script that readers copy: it goes on as if nothing had happened, whatever happens.

Each training is a real one, by torchrun or in one process, on shards of real text.
"""

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
    return losses(trained(data, folder, "--steps", "10", ranks=2)), folder


def command(data, folder, *options, ranks, restarts=0):
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "--max-restarts", str(restarts), "--signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    return [*start, LAUNCH / "train.py", "--data", data, "--checkpoints", folder, *SMALL, *options]


def started(*arguments, **settings):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    limit = settings.pop("largest_file", None)
    return subprocess.Popen(
        command(*arguments, **settings), env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, preexec_fn=limit and (
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))


def trained(*arguments, status=0, ranks=1, **settings):
    """All that was printed, when the training has ended with this status."""
    process = started(*arguments, ranks=ranks, **settings)
    try:
        printed, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        process.kill()
    assert process.returncode == status, printed
    return printed


def follow(process, start):
    """What it prints up to the first line that begins with this pattern."""
    printed = ""
    for line in process.stdout:
        printed += line
        if re.match(start, line):
            break
    return printed


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


def test_it_goes_on_bit_for_bit_and_on_other_ranks_with_the_same_samples(data, whole, tmp_path):
    expected, folder = whole
    assert [step for step, *_ in expected] == [*range(1, 11)] and saved(folder) == [
        "step-00000009", "step-00000010"]
    assert float(expected[-1][1]) < float(expected[0][1]) - 0.3
    first = copied(folder, tmp_path / "same", until=9)
    printed = trained(data, first, "--steps", "10", ranks=2)
    assert losses(printed) == expected[-1:] and " was " not in printed  # as of another schedule
    [other] = losses(trained(data, copied(folder, tmp_path / "3", until=9), "--steps", "10",
                             "--strategy", "hsdp", ranks=3))
    assert other != expected[-1]  # sums in another order
    assert_it_is_step_10_of(expected, other)


def assert_it_is_step_10_of(expected, other):
    assert other[0] == 10
    assert float(other[1]) == pytest.approx(float(expected[-1][1]), abs=2e-3)


@pytest.mark.parametrize(("name", "ranks"), [("SIGTERM", 1), ("SIGUSR1", 2)])
def test_told_to_stop_it_saves_first(data, tmp_path, name, ranks):
    process = started(data, tmp_path, "--steps", "100000", "--save-every", "100000", ranks=ranks)
    follow(process, "step 5:")
    process.send_signal(getattr(signal, name))
    printed, _ = process.communicate(timeout=TIME_LIMIT)
    stopped = int(re.search(r"told to stop: saved at step (\d+)", printed)[1])
    assert stopped >= 5 and saved(tmp_path) == [f"step-{stopped:08}"]
    if ranks == 2:
        assert f"from step {stopped}" in trained(data, tmp_path, "--steps", str(stopped), ranks=1)


def test_a_rank_dies_and_torchrun_goes_on_from_the_last_checkpoint(data, whole, tmp_path):
    """And when torchrun itself dies, its ranks do."""
    expected, _ = whole
    process = started(data, tmp_path, "--steps", "100000", ranks=2, restarts=1)
    assert "from step 0" in follow(process, "step 2:")
    ranks_of(process)[1].kill()
    start = int(re.search(r"from step (\d+)", follow(process, r".*from step"))[1])
    assert start in (0, 3, 6)  # the last save may not have been done
    assert losses(follow(process, "step 10:")) == expected[start:]  # as warm as 10 steps alone
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(gone) == 2 and not alive


def ranks_of(process):
    return [child for child in psutil.Process(process.pid).children(recursive=True)
            if "train.py" in " ".join(child.cmdline()) and "torch.distributed.run" not in
            child.cmdline()]


# Bad input: it says which, and nothing is lost


def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(data, whole, tmp_path):
    expected, folder = whole
    torn = copied(folder, tmp_path / "torn", until=10)
    part = max((torn / "step-00000010").glob("*.distcp"), key=lambda path: path.stat().st_size)
    part.write_bytes(part.read_bytes()[:-1])
    (torn / "unfinished-00000012").mkdir()  # as a save leaves it that was cut off
    printed = trained(data, torn, "--steps", "10", ranks=2)
    assert f"step-00000010 is torn ({part.name} has" in printed and "from step 9" in printed
    assert losses(printed) == expected[-1:] and "unfinished-00000012" not in saved(torn)
    assert "step 10: saved" in printed  # its name is free again
    assert saved(torn) == ["step-00000009", "step-00000010", "torn-step-00000010"]


REFUSED = """
import runpy, sys, torch.distributed as dist
for words in {}:
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        print(error)
    dist.destroy_process_group()
"""


def test_another_model_or_data_set_is_refused(data, whole, tmp_path):
    """In one process, one after another."""
    _, folder = whole
    beginnings, short, absent = (shutil.copytree(data, tmp_path / name) for name in "abc")
    shard = beginnings / "shard-0001.bin"
    shard.write_bytes(bytes(2) + shard.read_bytes()[2:])
    os.truncate(short / "shard-0001.bin", 1000)
    (absent / "shard-0001.bin").unlink()
    tried = [(data, "--width", "64"), (beginnings,), (short,), (absent,)]
    words = [[*map(str, command(each, folder, *options, ranks=1)[1:])] for each, *options in tried]
    done = subprocess.run([sys.executable, "-c", REFUSED.format(words)], capture_output=True,
                          text=True, timeout=TIME_LIMIT, env=os.environ | {
                              "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(LAUNCH)})
    model, other, cut, missing = done.stdout.splitlines()
    assert "width was 32 and is 64" in model and re.search(r"data was \w+ and is \w+", other)
    assert f"{short / 'shard-0001.bin'} should have" in cut and "500" in cut
    assert "is missing" in missing and saved(folder)[-1] == "step-00000010"
    assert "2 ranks do not divide a batch of 13" in trained(data, folder, "--batch", "13",
                                                            status=1, ranks=2)


def test_a_full_disk_costs_the_checkpoint_and_no_training_on_one_rank(data, whole, tmp_path):
    """Its schedule is another one, which is said."""
    expected, folder = whole
    before = copied(folder, tmp_path / "full", until=9)
    files = {path: path.read_bytes() for path in before.glob("*/*")}
    printed = trained(data, before, "--steps", "12", "--clip", "2", largest_file=20_000, ranks=1)
    assert ("step-00000009: steps was 10 and is 12; clip was 1.0 and is 2.0." in printed
            and "from step 9" in printed)
    assert re.search(r"step 12: NOT SAVED, \w+Error: .*step-00000009\n", printed)
    assert [step for step, *_ in losses(printed)] == [10, 11, 12]
    assert_it_is_step_10_of(expected, losses(printed)[0])
    assert saved(before) == ["step-00000009"]
    assert {path: path.read_bytes() for path in files} == files


# Samples


def test_every_sample_comes_once_an_epoch_and_the_next_epoch_is_another_order(data, tmp_path):
    script = f"""
import sys, pathlib; sys.path.insert(0, {str(LAUNCH)!r})
import train
tokens = train.Tokens(pathlib.Path({str(data)!r}), 4099)
rows = [tuple(tokens.sample(number)[:40].tolist()) for number in range(2 * tokens.total)]
first, second = rows[:tokens.total], rows[tokens.total:]
assert sorted(first) == sorted(second) and first != second
print(tokens.total, len(set(first)), len(tokens.sample(3)))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=True)
    total, different, length = map(int, done.stdout.split())
    tokens = sum(json.loads((data / "index.json").read_text()).values())
    assert length == 4100 and different > 0.99 * total and 0 <= tokens - 4100 * total < 3 * 4100


# Kills at random moments


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(50))
def test_a_kill_at_any_moment_loses_at_most_an_interval(data, whole, tmp_path, seed):
    expected, _ = whole
    chance = random.Random(seed)
    process = started(data, tmp_path, "--steps", "100", "--save-every", "2", ranks=2)
    until = chance.randint(1, 9)
    follow(process, f"step {until}:")
    time.sleep(chance.uniform(0, 0.3))
    if chance.random() < 0.5:
        process.kill()  # torchrun, and its ranks with it
    else:
        chance.choice(ranks_of(process)).kill()
    printed, _ = process.communicate(timeout=TIME_LIMIT)
    seen = max((int(step) for step in re.findall(r"step (\d+): loss", printed)), default=until)
    again = trained(data, tmp_path, "--steps", "12", ranks=2)
    start = int(re.search(r"from step (\d+)", again)[1])
    assert "torn" not in again and seen - start <= 2 * 2 + 1
    assert losses(again)[:max(0, 10 - start)] == expected[start:]
