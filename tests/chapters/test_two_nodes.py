"""Two nodes on one machine: network namespaces on a slow link, with torchrun on each.

They need root, and in CI they are never skipped. That a job goes on after a rank was killed,
chapter 12 shows in its own run, and test_train.py that no loss changes by it.
"""

import json

import pytest
import torch
import torch.nn.functional as F
import two_nodes
from skips import skip_or_fail
from two_nodes import HEADERS, MTU

from dplab.bench.results import FOLDER
from dplab.workloads.standard_library import load_source, sample
from dplab.workloads.transformer import Transformer

pytestmark = pytest.mark.slow
STEPS = 1  # that are counted
WHOLE = 4 * two_nodes.CONFIG.parameters  # bytes of all gradients, or of all parameters
ROOT = 4 * sum(torch.Size(shape).numel() for shape in two_nodes.CONFIG.units[-1])
MESSAGES = 1.01  # gloo's own: 48 bytes before each piece of a tensor, and others to announce it
# With 4 ranks in a ring, an edge carries 6/4 of what is all-reduced and 3/4 of what is gathered.
# gloo's reduce-scatter is an all-reduce; the course's own is a ring, as an all-gather is.
CROSSING = {
    "DDP": 6 / 4 * WHOLE,
    "ShardedOptimizer (ZeRO-1)": 3 / 4 * WHOLE + 3 / 4 * WHOLE,
    "FullyShardedModel (ZeRO-3)": 2 * 3 / 4 * WHOLE + 3 / 4 * WHOLE,
    "fully_shard": 3 / 4 * WHOLE + 3 / 4 * (WHOLE - ROOT) + 6 / 4 * WHOLE,
    "fully_shard, HSDP": 2 * (WHOLE / 2),  # two pairs of ranks, each all-reduces half
}


@pytest.fixture(scope="module", autouse=True)
def machine():
    if why := two_nodes.missing():
        skip_or_fail(why)


@pytest.fixture(scope="module")
def rows():
    return {row["strategy"]: row for row in two_nodes.measure(steps=STEPS)}


def test_the_link_carries_what_is_predicted(rows):
    recorded = json.loads((FOLDER / "two_nodes.json").read_text())["rows"]
    assert {*rows} == {row["strategy"] for row in recorded} == {*CROSSING}
    for row in (*rows.values(), *recorded):
        assert row["predicted"] == pytest.approx(CROSSING[row["strategy"]], rel=1e-4)  # padding
        assert 1 <= row["payload"] / row["predicted"] < MESSAGES
    for row in rows.values():
        # At least one packet for each MTU, and few that only acknowledge.
        assert row["packets"] >= row["payload"] / (MTU + HEADERS) / 8
        assert row["bytes"] - row["payload"] == HEADERS * row["packets"] < 0.02 * row["bytes"]
        assert row["seconds"] > 0.9 * 8 * row["bytes"] / 400e6  # as slow as the link
    # Hybrid sharding gathers inside a node. Two ranks: each gathers half of the parameters from the
    # other, twice, but of the root once, and all-reduces the gradients, over the loopback.
    inside = 2 * (WHOLE / 2 + (WHOLE - ROOT) / 2 + WHOLE)
    assert rows["fully_shard, HSDP"]["local"] == pytest.approx(inside, rel=0.03)


def test_two_nodes_train_like_one_process(rows):
    torch.manual_seed(0)
    model, text, expected = Transformer(two_nodes.CONFIG), load_source(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=two_nodes.LEARNING_RATE)
    for number in range(STEPS + 1):
        inputs, targets = sample(text, two_nodes.GLOBAL_BATCH, two_nodes.LENGTH, number)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    torch.manual_seed(0)
    untrained = Transformer(two_nodes.CONFIG)(inputs)
    assert abs(F.cross_entropy(untrained.flatten(0, 1), targets.flatten()) - loss) > 0.05
    for row in rows.values():
        assert row["losses"] == pytest.approx(expected, abs=2e-5)
