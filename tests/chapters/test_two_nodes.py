"""Two nodes on one machine: network namespaces on a slow link, with torchrun on each.

They need root, and in CI they are never skipped. That a job goes on after a rank was killed,
chapter 12 shows in its own run, and test_train.py that no loss changes by it.
"""

import json

import pytest
import torch
import two_nodes
from skips import skip_or_fail
from two_nodes import HEADERS, MTU

from dplab.bench.results import FOLDER

pytestmark = pytest.mark.slow
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


def test_the_link_carries_what_is_predicted_and_all_train_alike():
    if why := two_nodes.missing():
        skip_or_fail(why)
    rows = {row["strategy"]: row for row in two_nodes.measure(steps=1)}
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
        assert row["losses"] == pytest.approx(rows["DDP"]["losses"], abs=2e-5)
    # Hybrid sharding gathers inside a node. Two ranks: each gathers half of the parameters from the
    # other, twice, but of the root once, and all-reduces the gradients, over the loopback.
    inside = 2 * (WHOLE / 2 + (WHOLE - ROOT) / 2 + WHOLE)
    assert rows["fully_shard, HSDP"]["local"] == pytest.approx(inside, rel=0.03)
