"""Two nodes on one machine: network namespaces on a slow link, with torchrun on each.

They need root, and in CI they are never skipped.
"""

import copy
import json
import os

import pytest
import torch
import torch.nn.functional as F
from two_nodes import link_bytes, restart, training
from two_nodes.hosts import HEADERS, MTU, missing

from dplab.bench.results import FOLDER
from dplab.workloads.standard_library import load_source, sample
from dplab.workloads.transformer import Transformer

pytestmark = pytest.mark.skipif(missing() is not None and "CI" not in os.environ,
                                reason=str(missing()))
pytestmark = [pytestmark, pytest.mark.slow]
STEPS = 2
WHOLE = 4 * training.CONFIG.parameters  # bytes of all gradients, or of all parameters
ROOT = 4 * sum(torch.Size(shape).numel() for shape in training.CONFIG.units[-1])
MESSAGES = 1.01  # gloo's own: 48 bytes before each piece of a tensor, and others to announce it


@pytest.fixture(scope="module")
def rows():
    return {row["strategy"]: row for row in link_bytes.measure(steps=STEPS)}


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


@pytest.mark.parametrize("strategy", training.KINDS)
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
    assert [row["strategy"] for row in record["rows"]] == list(training.KINDS)
    for row in record["rows"]:
        assert row["predicted"] == link_bytes.crossing_bytes(training.KINDS[row["strategy"]][0])
        assert 1 <= row["payload"] / row["predicted"] < MESSAGES


def test_two_nodes_train_like_one_process(rows):
    torch.manual_seed(0)
    model, text, expected = Transformer(training.CONFIG), load_source(), []
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE)
    for number in range(STEPS + 1):
        inputs, targets = sample(text, training.GLOBAL_BATCH, training.LENGTH, number)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    untrained = F.cross_entropy(start(inputs).flatten(0, 1), targets.flatten()).item()
    assert abs(expected[-1] - untrained) > 0.05
    for row in rows.values():
        assert row["losses"] == pytest.approx(expected, abs=2e-5)


def test_a_rank_dies_and_the_loss_goes_on():
    whole = restart.one_process(24)
    broken = restart.killed(24, after=14, rank=3)
    assert broken["status"] == [0, 0] and broken["starts"] == [0, 10]
    steps = [step for step, _ in broken["losses"]]
    again = steps.index(11, 11)
    assert steps[again:] == list(range(11, 25)) and steps[:again][-1] >= 14
    expected = dict(whole)
    for step, loss in broken["losses"]:
        assert loss == pytest.approx(expected[step], abs=1e-3)
