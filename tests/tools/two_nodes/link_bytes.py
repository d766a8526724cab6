"""What crosses the link between two nodes in a step, by strategy, beside the prediction."""

import json
import statistics
import tempfile
from pathlib import Path

from dplab.predict import traffic
from two_nodes import training
from two_nodes.hosts import HEADERS, Hosts, start_job
from two_nodes.training import CONFIG, KINDS, PER_NODE

NODES = 2


def measure(rate: float = 400e6, steps: int = 3) -> list[dict]:
    """Makes two hosts, trains on them by each of KINDS, and puts the prediction beside it.

    Of a row, ``predicted``, ``bytes``, ``payload`` and ``packets`` are those that the first node
    sends to the other in a step; ``local`` is what crosses its own loopback interface.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts(rate=rate) as hosts:
        result = Path(folder) / "result.json"
        jobs = start_job(hosts, PER_NODE, [training.__file__, result, "--steps", steps])
        if any([job.wait(timeout=600) for job in jobs]):
            raise RuntimeError("the job on two hosts failed: see above")
        found = json.loads(result.read_text())
    rows = []
    for kind, ranks in found.items():
        first = ranks[0]
        row = {name: first["after"][name] - first["before"][name] for name in first["before"]}
        row = {name: count / steps for name, count in row.items()}
        rows.append({"strategy": kind, "predicted": crossing_bytes(KINDS[kind][0]), **row,
                     "payload": row["bytes"] - HEADERS * row["packets"],
                     "seconds": first["seconds"],
                     "losses": [statistics.mean(step) for step in
                                zip(*(rank["losses"] for rank in ranks), strict=True)]})
    return rows


def crossing_bytes(strategy: str) -> float:
    """Bytes that a node sends to the next one in a step, in fp32 over gloo, by arithmetic.

    Ranks are numbered node by node. A ring through all ranks then leaves each node on one of its
    edges, and an edge carries what a rank sends. Of HSDP's rings, those of a node's own ranks never
    leave it, and those across the nodes leave it once for each of the node's ranks.
    """
    hybrid = strategy == "HSDP"
    collectives = traffic.collectives(strategy, NODES * PER_NODE, CONFIG.units, parameter_bytes=4,
                                      gradient_bytes=4, gloo=True,
                                      shard_ranks=PER_NODE if hybrid else None)
    if not hybrid:
        return sum(each.bytes_sent for each in collectives)
    return PER_NODE * sum(each.bytes_sent for each in collectives
                          if each.of == "shards of gradients")
