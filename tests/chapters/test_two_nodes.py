"""Two nodes on one machine: network namespaces on a slow link, with torchrun on each.

They need root, and in CI they are never skipped.
"""

import copy
import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
import torch
import torch.nn.functional as F
import two_nodes
from two_nodes import HEADERS, MTU, missing

from dplab.bench.results import FOLDER
from dplab.workloads.standard_library import load_source, sample
from dplab.workloads.transformer import Transformer

pytestmark = pytest.mark.skipif(missing() is not None and "CI" not in os.environ,
                                reason=str(missing()))
pytestmark = [pytestmark, pytest.mark.slow]
STEPS = 2
WHOLE = 4 * two_nodes.CONFIG.parameters  # bytes of all gradients, or of all parameters
ROOT = 4 * sum(torch.Size(shape).numel() for shape in two_nodes.CONFIG.units[-1])
MESSAGES = 1.01  # gloo's own: 48 bytes before each piece of a tensor, and others to announce it


@pytest.fixture(scope="module")
def rows():
    return {row["strategy"]: row for row in two_nodes.measure(steps=STEPS)}


# With 4 ranks in a ring, an edge carries 6/4 of what is all-reduced and 3/4 of what is gathered.
# gloo's reduce-scatter is an all-reduce; the course's own is a ring, as an all-gather is.
CROSSING = {
    "DDP": 6 / 4 * WHOLE,
    "ManualDDP": 6 / 4 * WHOLE,
    "ShardedOptimizer (ZeRO-1)": 3 / 4 * WHOLE + 3 / 4 * WHOLE,
    "FullyShardedModel (ZeRO-3)": 2 * 3 / 4 * WHOLE + 3 / 4 * WHOLE,
    "fully_shard": 3 / 4 * WHOLE + 3 / 4 * (WHOLE - ROOT) + 6 / 4 * WHOLE,
    "fully_shard, HSDP": 2 * (WHOLE / 2),  # two pairs of ranks, each all-reduces half
}


@pytest.mark.parametrize("strategy", two_nodes.KINDS)
def test_the_link_carries_what_is_predicted(rows, strategy):
    row = rows[strategy]
    assert row["predicted"] == pytest.approx(CROSSING[strategy], rel=1e-4)  # but for padding
    assert 1 <= row["payload"] / row["predicted"] < MESSAGES
    # At least one packet for each MTU, and few that only acknowledge.
    assert row["packets"] >= row["payload"] / (MTU + HEADERS) / 8
    assert row["bytes"] - row["payload"] == HEADERS * row["packets"] < 0.02 * row["bytes"]
    assert row["seconds"] > 0.9 * 8 * row["bytes"] / 400e6  # as slow as the link


def test_hybrid_sharding_keeps_gathers_inside_a_node(rows):
    flat, hybrid = rows["fully_shard"], rows["fully_shard, HSDP"]
    assert hybrid["payload"] < MESSAGES * WHOLE < flat["payload"] / 2.5
    # Two ranks: each gathers half of the parameters from the other, twice, but of the root once,
    # and all-reduces the gradients, over the loopback.
    inside = 2 * (WHOLE / 2 + (WHOLE - ROOT) / 2 + WHOLE)
    assert hybrid["local"] == pytest.approx(inside, rel=0.03)


def test_the_record_is_of_this_code():
    record = json.loads((FOLDER / "two_nodes.json").read_text())
    assert [row["strategy"] for row in record["rows"]] == list(two_nodes.KINDS)
    for row in record["rows"]:
        assert row["predicted"] == two_nodes.crossing_bytes(two_nodes.KINDS[row["strategy"]][0])
        assert 1 <= row["payload"] / row["predicted"] < MESSAGES


def test_two_nodes_train_like_one_process(rows):
    torch.manual_seed(0)
    model, text, expected = Transformer(two_nodes.CONFIG), load_source(), []
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=two_nodes.LEARNING_RATE)
    for number in range(STEPS + 1):
        inputs, targets = sample(text, two_nodes.GLOBAL_BATCH, two_nodes.LENGTH, number)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    untrained = F.cross_entropy(start(inputs).flatten(0, 1), targets.flatten()).item()
    assert abs(expected[-1] - untrained) > 0.05
    for row in rows.values():
        assert row["losses"] == pytest.approx(expected, abs=2e-5)


def test_a_rank_dies_and_the_loss_goes_on(tmp_path):
    """Of chapter 12's training script. What is done twice has the same losses both times."""
    scripts = FOLDER.parent / "launch"
    subprocess.run([sys.executable, scripts / "make_shards.py", tmp_path / "data"], check=True)
    small = {"steps": 24, "batch": 8, "save-every": 10, "print-every": 1, "width": 32, "layers": 2,
             "data": tmp_path / "data", "checkpoints": tmp_path / "run"}
    printed = ""
    with two_nodes.Hosts() as hosts:
        reader, writer = os.pipe()
        jobs = hosts.start_job("--max-restarts", 2, scripts / "train.py", *(
            f"--{name}={value}" for name, value in small.items()), stdout=writer)
        os.close(writer)
        with open(reader) as output:
            for line in output:
                if line.startswith("step 14:") and "step 14:" not in printed:
                    os.kill(pid_of(3, hosts), signal.SIGKILL)
                printed += line
        assert [job.wait() for job in jobs] == [0, 0]
    first, again = re.findall(r"from step (\d+)(.*?)(?=from step|\Z)", printed, re.DOTALL)
    (start, first), (restart, again) = ((int(step), dict(re.findall(
        r"step (\d+): loss (\S+),", text))) for step, text in (first, again))
    assert (start, restart) == (0, 10) and list(again) == [str(step) for step in range(11, 25)]
    twice = first.keys() & again.keys()
    assert "14" in twice and all(first[step] == again[step] for step in twice)


def pid_of(rank, hosts):
    """The process that torchrun started as this rank, on whichever host."""
    return next(pid for pid in hosts.pids()
                if psutil.Process(pid).environ().get("RANK") == str(rank))
