"""A sum within each node, then across the nodes, in which every rank sends an equal part."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import whole_numbers
from dplab.exercises.ring_all_gather import ring_all_gather, ring_all_reduce
from dplab.exercises.ring_reduce_scatter import ring_reduce_scatter
from dplab.measure import CallLog, sent_messages

IN_A_NODE = 2  # ranks
SUM = "the sum"


def two_level_all_reduce(flat, node, across):
    """The sum over all ranks; ``across``: those with this rank's number, one in each node."""
    chunk = ring_reduce_scatter(flat, node)  # the node's sum of it
    total = ring_all_reduce(chunk, across)
    return ring_all_gather(total, node)


def in_five_calls(flat, node, across):
    chunk = ring_reduce_scatter(flat, node)
    part = ring_reduce_scatter(chunk, across)
    total = ring_all_gather(part, across)
    return ring_all_gather(total, node)


class TwoLevelAllReduce(Exercise):
    number = "3.7"
    title = "An all-reduce that uses every adapter"
    minutes = 15
    solution = staticmethod(two_level_all_reduce)
    also_right = (in_five_calls,)
    world_sizes = (4, 6, 2)  # two nodes, three, and one
    seconds = 8.0

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        nodes = [dist.new_group([first, first + 1]) for first in range(0, ranks, IN_A_NODE)]
        rails = [dist.new_group(range(first, ranks, IN_A_NODE)) for first in range(IN_A_NODE)]
        flat = brought_by(rank, ranks)
        before = flat.clone()
        with sent_messages() as sent, CallLog() as log:
            total = attempt(flat, nodes[rank // IN_A_NODE], rails[rank % IN_A_NODE])
        outside = [message.tensor.nbytes for message in sent
                   if message.to // IN_A_NODE != rank // IN_A_NODE]
        return _named(total, torch.equal(flat, before), sum(outside),
                      sum(message.tensor.nbytes for message in sent) - sum(outside),
                      sum(not call.is_point_to_point for call in log.calls))

    def expected(self, world_size):
        total = torch.stack(list(self.parts(world_size, 0)[SUM].values())).sum(dim=0)
        nodes, chunk = world_size // IN_A_NODE, total.nbytes // IN_A_NODE
        return _named(
            total, True,
            AtMost(2 * (nodes - 1) * chunk // nodes, "its share of what a node must send to the "
                   "other nodes, where all of its ranks send as much"),
            AtMost(2 * (IN_A_NODE - 1) * chunk, "as in an all-reduce among the ranks of its node"),
            AtMost(0, "build it from your own parts"))

    def parts(self, world_size, rank):
        return {SUM: {f"rank {each}'s tensor": brought_by(each, world_size)
                      for each in range(world_size)}}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size, "the nodes": world_size // IN_A_NODE}

    hints = (
        "When a node's sum leaves the node, each of its ranks should send another part of it. "
        "After which of your parts does each rank of a group hold another chunk of the sum?",
        "After a reduce-scatter in the node, rank r of each node has chunk r of its own node's "
        "sum. Which ranks have chunk r of the other nodes' sums, and are they a group?",
        "Three calls: `ring_reduce_scatter` with `node`, `ring_all_reduce` of that chunk with "
        "`across`, and `ring_all_gather` with `node`.",
    )
    slips = (
        Slip("The sum is right, and more bytes than necessary travel between the nodes, where the "
             "links are slow. What could the ranks of a node do among themselves first, so that "
             "each has less to send across?",
             {"chunk = ring_reduce_scatter(flat, node)": "chunk = ring_all_reduce(flat, node)",
              "return ring_all_gather(total, node)": "return total"},
             {"chunk = ring_reduce_scatter(flat, node)": "chunk = ring_all_reduce(flat, across)",
              "total = ring_all_reduce(chunk, across)": "total = ring_all_reduce(chunk, node)",
              "return ring_all_gather(total, node)": "return total"},
             {"ring_reduce_scatter(flat, node)": "ring_reduce_scatter(flat, across)",
              "ring_all_reduce(chunk, across)": "ring_all_reduce(chunk, node)",
              "ring_all_gather(total, node)": "ring_all_gather(total, across)"}),
        Slip("This is one ring through all ranks. From each node a single rank sends to the next "
             "node, and the other ranks' adapters are idle. Use the two groups.",
             {"return ring_all_gather(total, node)": "return ring_all_reduce(flat)",
              "chunk = ring_reduce_scatter(flat, node)": "",
              "total = ring_all_reduce(chunk, across)": ""}),
        Slip("You return one chunk. It is complete, and the ranks of your node have the others: "
             "gather them.", {"return ring_all_gather(total, node)": "return total"}),
        Slip("Only this node's tensors are in your sum: nothing went to the other nodes. Reduce "
             "each chunk among the ranks of `across`.",
             {"total = ring_all_reduce(chunk, across)": "total = chunk"},
             {"total = ring_all_reduce(chunk, across)": "ring_all_reduce(chunk, across)\n"
                                                        "total = chunk"}),
        Slip("You add up in the node twice. The second sum goes across: `across` has the ranks "
             "that hold the same chunk.",
             {"ring_all_reduce(chunk, across)": "ring_all_reduce(chunk, node)"}),
        Slip("You add up chunks among all ranks. The other ranks of a node hold other chunks: pass "
             "`across`, whose ranks hold the same one.",
             {"ring_all_reduce(chunk, across)": "ring_all_reduce(chunk)"}),
        Slip("After the reduce-scatter across the nodes a rank holds a part of its chunk alone. "
             "Gather across the nodes, before you gather in the node.",
             {"total = ring_all_gather(part, across)": "total = part"}),
        Slip("You gather in the order of the scatters. The last one is undone first: gather across "
             "the nodes, then in the node.",
             {"total = ring_all_gather(part, across)": "total = ring_all_gather(part, node)",
              "return ring_all_gather(total, node)": "return ring_all_gather(total, across)"}),
    )


def brought_by(rank, ranks):
    return whole_numbers(f"rank {rank}", 24 * ranks)


def _named(total, same, outside, inside, collectives):
    return {SUM: total, "that `flat` is as it was": same,
            "the number of bytes that this rank sends to other nodes": outside,
            "the number of bytes that this rank sends within its node": inside,
            "the number of collectives": collectives}
