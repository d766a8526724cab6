"""An all-reduce over two levels: only a chunk of the tensor crosses between nodes."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog, sent_bytes


def hierarchical_all_reduce(tensor, inside, across):
    local = dist.get_world_size(inside)
    chunk = tensor.new_empty(-(-len(tensor) // local))
    whole = tensor.new_zeros(local * len(chunk))
    whole[: len(tensor)] = tensor
    dist.reduce_scatter_single(chunk, whole, group=inside)
    dist.all_reduce(chunk, group=across)
    dist.all_gather_single(whole, chunk, group=inside)
    tensor.copy_(whole[: len(tensor)])


NODES = {1: (1,), 2: (2,), 3: (1, 3), 4: (2, 4, 1)}  # into how many nodes the ranks are put
LENGTHS = (8, 11, 3)

SCATTER = "dist.reduce_scatter_single(chunk, whole, group=inside)"
ACROSS = "dist.all_reduce(chunk, group=across)"
GATHER = "dist.all_gather_single(whole, chunk, group=inside)"
OWN_CHUNK = "chunk.copy_(whole.chunk(local)[dist.get_rank(inside)])"


def instead(lines):
    """The edit that does this in place of all."""
    return {"local =": f"{lines}\nreturn\nlocal ="}


class HierarchicalAllReduce(Exercise):
    number = "12.1"
    title = "An all-reduce over two levels"
    minutes = 25
    seconds = 8.0
    solution = staticmethod(hierarchical_all_reduce)

    def trial(self, attempt):
        facts, ranks, rank = {}, dist.get_world_size(), dist.get_rank()
        for nodes in NODES[ranks]:
            local = ranks // nodes
            columns = torch.arange(ranks).view(nodes, local)
            inside = [dist.new_group(each) for each in columns.tolist()][rank // local]
            across = [dist.new_group(each) for each in columns.T.tolist()][rank % local]
            for n in LENGTHS:
                tensor = of_rank(rank, n)
                with CallLog() as log:
                    attempt(tensor, inside, across)
                calls = [call for call in log.calls if call.operation != "barrier"]
                slow = [call for call in calls if nodes > 1 and call.group != inside.group_name]
                sent = [round(sum(map(sent_bytes, some))) for some in (calls, slow)]
                facts |= of_sum(nodes, local, n, tensor, sent[1], sent[0] - sent[1])
        return facts

    def expected(self, world_size):
        facts = {}
        for nodes in NODES[world_size]:
            local = world_size // nodes
            for n in LENGTHS:
                chunk = -(-n // local)
                facts |= of_sum(
                    nodes, local, n, sum(of_rank(rank, n) for rank in range(world_size)),
                    AtMost(8 * (nodes - 1) * -(-chunk // nodes),
                           "an all-reduce of a chunk is enough"),
                    AtMost(8 * (local - 1) * chunk,
                           "a reduce-scatter and an all-gather are enough"))
        return facts

    def parts(self, world_size, rank):
        return {fact: [of_rank(each, n) for each in range(world_size)]
                for nodes in NODES[world_size] for n in LENGTHS
                for fact in [f"`tensor` {where(nodes, world_size // nodes, n)}"]}

    hints = (
        "Three collectives. Inside the node, a reduce-scatter: each rank has the node's sum of one "
        "chunk. Across nodes, an all-reduce of this chunk. Inside again, an all-gather.",
        "Chunks of ⌈n/L⌉ elements, for L ranks in a node: put the tensor into zeros of L·⌈n/L⌉ "
        "elements first. `dist.get_world_size(inside)` is L.",
        "`dist.reduce_scatter_single(chunk, whole, group=inside)`, `dist.all_reduce(chunk, "
        "group=across)`, `dist.all_gather_single(whole, chunk, group=inside)`; then copy the first "
        "n elements into `tensor`.",
    )
    slips = (
        # The sum is right, and takes too many bytes.
        Slip("The sum is right, by one all-reduce over all ranks. It does not know which links are "
             "slow: use the two groups, so that only a chunk of 1/L crosses between nodes.",
             instead("dist.all_reduce(tensor)")),
        Slip("The sum is right, but every rank of a node sends the whole sum to the other nodes: L "
             "times the bytes. Scatter inside first, so that each sends its own chunk.",
             instead("dist.all_reduce(tensor, group=inside)\n"
                     "dist.all_reduce(tensor, group=across)")),
        Slip("The sum is right, but one rank of each node sends all of it, while the other ranks "
             "and their network cards wait. Let each rank send a chunk.",
             *(instead(f"{first}\nif dist.get_rank(inside) == 0:\n"
                       "    dist.all_reduce(tensor, group=across)\n"
                       "dist.broadcast(tensor, group=inside, group_src=0)")
               for first in ("dist.reduce(tensor, group=inside, group_dst=0)",
                             "dist.all_reduce(tensor, group=inside)"))),
        Slip("`src` and `dst` are ranks of the whole job, also in a group: rank 0 is in one node "
             "only. `group_src` and `group_dst` count inside the group; but better let every rank "
             "send a chunk.",
             instead("dist.reduce(tensor, dst=0, group=inside)\nif dist.get_rank(inside) == 0:\n"
                     "    dist.all_reduce(tensor, group=across)\n"
                     "dist.broadcast(tensor, src=0, group=inside)")),
        Slip("You exchanged the groups: the reduce-scatter and the all-gather go between nodes, "
             "over the slow links, and the all-reduce inside.",
             {"local =": "inside, across = across, inside\nlocal ="}),
        Slip("The sum is right, but inside the node you all-reduce and then cut: half as many "
             "bytes again as needed. Reduce-scatter gives each rank its chunk.",
             {SCATTER: f"dist.all_reduce(whole, group=inside)\n{OWN_CHUNK}"},
             {"local =": "dist.all_reduce(tensor, group=inside)\nlocal =", SCATTER: OWN_CHUNK}),
        Slip("The sum is right, but across nodes you gather all nodes' chunks and add them up "
             "yourself: from three nodes on that sends more than an all-reduce of the chunk.",
             {ACROSS: "chunks = [torch.empty_like(chunk) for _ in range(across.size())]\n"
                      "dist.all_gather(chunks, chunk, group=across)\nchunk.copy_(sum(chunks))"}),
        Slip("You gather from all ranks. Inside the node is enough, `group=inside`: every node has "
             "the same sums.",
             {GATHER: "whole = chunk.new_empty(dist.get_world_size() * len(chunk))\n"
                      "dist.all_gather_single(whole, chunk)"}),
        # The sum is not right.
        Slip("You cut your chunk out of this rank's own tensor: the other ranks of the node are "
             "not in it. Reduce-scatter inside first.", {SCATTER: OWN_CHUNK}),
        Slip("You pick the chunk by `dist.get_rank()`, the rank in the whole job. Inside the node "
             "it is `dist.get_rank(inside)`.",
             {SCATTER: "dist.all_reduce(whole, group=inside)\n"
                       "chunk.copy_(whole.chunk(local)[dist.get_rank()])"}),
        Slip("You all-reduce the chunk over all ranks, and so add chunks of different places. Only "
             "ranks with the same place have the same chunk: `group=across`.",
             {", group=across": ""}),
        Slip("Each node has its own sum: the all-reduce of the chunk across nodes is missing.",
             {ACROSS: ""}),
        Slip("The all-gather is missing: the sum of each chunk stays on the ranks that own it.",
             {GATHER: "whole.chunk(local)[dist.get_rank(inside)].copy_(chunk)"}),
        Slip("The sum stays in tensors of your own. Copy it into `tensor`, which the caller goes "
             "on with.", {"tensor.copy_(": "tensor = ("}),
        Slip("You averaged. Asked is the sum, as from `dist.all_reduce`.",
             *({"tensor.copy_(whole[: len(tensor)]": f"tensor.copy_(whole[: len(tensor)] / {ranks}"}
               for ranks in ("dist.get_world_size()", "local", "across.size()"))),
        # The chunks.
        Slip("You rounded the chunks down, so the last elements are summed by nobody. Round up, "
             "and pad with zeros.",
             {"-(-len(tensor) // local)": "len(tensor) // local",
              "tensor.copy_(whole[: len(tensor)])": "tensor[: len(whole)] = whole",
              "whole[: len(tensor)] = tensor": "whole.copy_(tensor[: len(whole)])"}),
        Slip("The ranks of a node do not divide the length, so that `reduce_scatter_single` "
             "refuses. Pad with zeros to a multiple.",
             {"tensor.new_zeros(local * len(chunk))": "torch.empty_like(tensor)"}),
        Slip("You cut the tensor into as many chunks as the whole job has ranks "
             "(`dist.get_world_size()`). Inside the node there are fewer: "
             "`dist.get_world_size(inside)`.",
             {"dist.get_world_size(inside)": "dist.get_world_size()"}),
        Slip("`tensor_split` makes chunks whose sizes differ by one, and these collectives want "
             "equal ones. Pad with zeros to a multiple of the node's ranks.",
             instead("chunks = [each.clone() for each in tensor.tensor_split(inside.size())]\n"
                     "chunk = torch.empty_like(chunks[dist.get_rank(inside)])\n"
                     "dist.reduce_scatter(chunk, chunks, group=inside)\n"
                     "dist.all_reduce(chunk, group=across)\n"
                     "dist.all_gather(chunks, chunk, group=inside)\n"
                     "tensor.copy_(torch.cat(chunks))")),
        # Who calls.
        Slip("Only rank 0 comes to the all-reduce across nodes, and waits there. Every rank has a "
             "group `across` of its own, and all of its ranks must come.",
             {ACROSS: f"if dist.get_rank() == 0:\n    {ACROSS}"}, hangs=True),
    )


def of_rank(rank, n):
    return seeded(f"rank {rank}", n)


def of_sum(nodes, local, n, tensor, slow, fast):
    of = where(nodes, local, n)
    return {f"`tensor` {of}": tensor,
            f"the bytes that this rank sends between nodes {of}": slow,
            f"the bytes that it sends inside its node {of}": fast}


def where(nodes, local, n):
    return f"({nodes} node{'s' * (nodes > 1)} of {local}, {n} elements)"
