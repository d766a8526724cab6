"""Exercise 10.2: an all-reduce over two levels."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog, sent_bytes

NODES = {1: (1,), 2: (2,), 3: (1, 3), 4: (2, 4, 1)}  # into how many nodes the ranks are put

LENGTHS = (8, 11, 3)


def hierarchical_all_reduce(tensor, inside, across):
    local = dist.get_world_size(inside)
    chunk = tensor.new_empty(-(-len(tensor) // local))
    whole = tensor.new_zeros(local * len(chunk))
    whole[: len(tensor)] = tensor
    dist.reduce_scatter_single(chunk, whole, group=inside)
    dist.all_reduce(chunk, group=across)
    dist.all_gather_single(whole, chunk, group=inside)
    tensor.copy_(whole[: len(tensor)])


def _scatter(whole, size, group):
    chunk = whole.new_empty(size)
    dist.reduce_scatter_single(chunk, whole, group=group)
    return chunk


def _gather(whole, chunk, group):
    dist.all_gather_single(whole, chunk.contiguous(), group=group)
    return whole


def _two_levels(scatter=_scatter, between=reduced, gather=_gather, *, swap=False, pad=True,
                size=lambda n, local: -(-n // local), factor=lambda inside, across: 1, back=True):
    """The sum over two levels with one thing wrong."""

    def attempt(tensor, inside, across):
        if swap:
            inside, across = across, inside
        local, n = dist.get_world_size(inside), len(tensor)
        chunk_size = size(n, local)
        whole = nn.functional.pad(tensor, (0, max(0, local * chunk_size - n) if pad else 0))
        part = whole[: local * chunk_size].clone()
        between(chunk := scatter(part, chunk_size, inside), across)
        found = gather(part, chunk, inside)[:n] * factor(inside, across)
        if back:
            tensor[: len(found)] = found

    return attempt


def _keep_own(whole, chunk, group):
    whole.split(len(chunk))[dist.get_rank(group)].copy_(chunk)
    return whole


def _gather_from_all(whole, chunk, group):
    return _gather(whole.new_empty(dist.get_world_size() * len(chunk)), chunk, None)


def _own_chunk(whole, size, group):
    return whole.split(size)[dist.get_rank(group)].clone()


def _summed_by_parts(chunk, group):
    parts = [torch.empty_like(chunk) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, chunk, group=group)
    return chunk.copy_(torch.stack(parts).sum(0))


def _sum_and_cut(tensor, inside, across):
    """As by `_own_chunk`, with the padding after the sum."""
    whole = nn.functional.pad(reduced(tensor, inside), (0, -len(tensor) % inside.size()))
    chunk = _own_chunk(whole, len(whole) // inside.size(), inside)
    tensor.copy_(_gather(whole, reduced(chunk, across), inside)[: len(tensor)])


def _leader_of_all(tensor, inside, across):
    """As `_by_leaders`, with an all-reduce in place of the reduce."""
    reduced(tensor, inside)
    if dist.get_rank(inside) == 0:
        reduced(tensor, across)
    dist.broadcast(tensor, group=inside, group_src=0)


def _by_leaders(tensor, inside, across, **first):
    dist.reduce(tensor, group=inside, **first)
    if dist.get_rank(inside) == 0:
        dist.all_reduce(tensor, group=across)
    dist.broadcast(tensor, group=inside, **{name.replace("dst", "src"): 0 for name in first})


def _for_all_ranks(tensor, inside, across):
    ranks = dist.get_world_size()
    whole = nn.functional.pad(tensor, (0, -len(tensor) % ranks))
    chunk = _scatter(whole, len(whole) // ranks, inside)
    tensor.copy_(_gather(whole, reduced(chunk, across), inside)[: len(tensor)])


def _uneven(tensor, inside, across):
    chunks = [chunk.clone() for chunk in tensor.tensor_split(dist.get_world_size(inside))]
    own = torch.empty_like(chunks[dist.get_rank(inside)])
    dist.reduce_scatter(own, chunks, group=inside)
    dist.all_reduce(own, group=across)
    dist.all_gather(chunks, own, group=inside)
    tensor.copy_(torch.cat(chunks))


class HierarchicalAllReduce(Exercise):
    number = "10.2"
    title = "An all-reduce over two levels"
    minutes = 25
    seconds = 8.0
    hints = (
        "Three collectives. Inside the node, a reduce-scatter: each rank has the node's sum of one "
        "chunk. Across nodes, an all-reduce of this chunk. Inside again, an all-gather.",
        "Chunks of ⌈n/L⌉ elements, for L ranks in a node: put the tensor into zeros of L·⌈n/L⌉ "
        "elements first. `dist.get_world_size(inside)` is L.",
        "`dist.reduce_scatter_single(chunk, whole, group=inside)`, `dist.all_reduce(chunk, "
        "group=across)`, `dist.all_gather_single(whole, chunk, group=inside)`; then copy the first "
        "n elements into `tensor`.",
    )
    solution = staticmethod(hierarchical_all_reduce)
    mistakes = (
        Mistake(lambda tensor, inside, across: dist.all_reduce(tensor), "The sum is right, by one "
                "all-reduce over all ranks. It does not know which links are slow: use the two "
                "groups, so that only a chunk of 1/L crosses between nodes."),
        Mistake(lambda tensor, inside, across: reduced(reduced(tensor, inside), across), "The sum "
                "is right, but every rank of a node sends the whole sum to the other nodes: L "
                "times the bytes. Scatter inside first, so that each sends its own chunk."),
        *(Mistake(by_leaders, "The sum is right, but one rank of each node sends all of it, while "
                  "the other ranks and their network cards wait. Let each rank send a chunk.")
          for by_leaders in (functools.partial(_by_leaders, group_dst=0), _leader_of_all)),
        Mistake(functools.partial(_by_leaders, dst=0), "`src` and `dst` are ranks of the whole "
                "job, also in a group: rank 0 is in one node only. `group_src` and `group_dst` "
                "count inside the group; but better let every rank send a chunk."),
        Mistake(_two_levels(swap=True), "You exchanged the groups: the reduce-scatter and the "
                "all-gather go between nodes, over the slow links, and the all-reduce inside."),
        *(Mistake(cut, "The sum is right, but inside the node you all-reduce and then cut: half as "
                  "many bytes again as needed. Reduce-scatter gives each rank its chunk.")
          for cut in (_sum_and_cut, _two_levels(lambda whole, size, group: _own_chunk(
              reduced(whole, group), size, group)))),
        Mistake(_two_levels(_own_chunk), "You cut your chunk out of this rank's own tensor: the "
                "other ranks of the node are not in it. Reduce-scatter inside first."),
        Mistake(_two_levels(lambda whole, size, group: reduced(whole, group).split(size)[
                dist.get_rank()]), "You pick the chunk by `dist.get_rank()`, the rank in the whole "
                "job. Inside the node it is `dist.get_rank(inside)`."),
        Mistake(_two_levels(between=lambda chunk, group: reduced(chunk, None)), "You all-reduce "
                "the chunk over all ranks, and so add chunks of different places. Only ranks with "
                "the same place have the same chunk: `group=across`."),
        Mistake(_two_levels(between=_summed_by_parts), "The sum is right, but across nodes you "
                "gather all nodes' chunks and add them up yourself: from three nodes on that sends "
                "more than an all-reduce of the chunk."),
        Mistake(_two_levels(between=lambda chunk, group: chunk), "Each node has its own sum: the "
                "all-reduce of the chunk across nodes is missing."),
        Mistake(_two_levels(gather=_gather_from_all), "You gather from all ranks. Inside the node "
                "is enough, `group=inside`: every node has the same sums."),
        Mistake(_two_levels(gather=_keep_own), "The all-gather is missing: "
                "the sum of each chunk stays on the ranks that own it."),
        Mistake(_two_levels(back=False), "The sum stays in tensors of your own. Copy it into "
                "`tensor`, which the caller goes on with."),
        Mistake(_two_levels(size=lambda n, local: n // local), "You rounded the chunks down, so "
                "the last elements are summed by nobody. Round up, and pad with zeros."),
        Mistake(_two_levels(pad=False), "The ranks of a node do not divide the length, so that "
                "`reduce_scatter_single` refuses. Pad with zeros to a multiple."),
        Mistake(_for_all_ranks, "You cut the tensor into as many chunks as the whole job has ranks "
                "(`dist.get_world_size()`). Inside the node there are fewer: "
                "`dist.get_world_size(inside)`."),
        Mistake(_uneven, "`tensor_split` makes chunks whose sizes differ by one, and these "
                "collectives want equal ones. Pad with zeros to a multiple of the node's ranks."),
        *(Mistake(_two_levels(factor=factor), "You averaged. Asked is the sum, as from "
                  "`dist.all_reduce`.") for factor in (
            lambda inside, across: 1 / dist.get_world_size(),
            lambda inside, across: 1 / dist.get_world_size(inside),
            lambda inside, across: 1 / dist.get_world_size(across))),
        Mistake(_two_levels(between=lambda chunk, group: dist.get_rank() or reduced(chunk, group)),
                "Only rank 0 comes to the all-reduce across nodes, and waits there. Every rank has "
                "a group `across` of its own, and all of its ranks must come.", hangs=True),
    )

    def trial(self, attempt):
        facts, ranks, rank = {}, dist.get_world_size(), dist.get_rank()
        for nodes in NODES[ranks]:
            local = ranks // nodes
            columns = torch.arange(ranks).view(nodes, local)
            inside = [dist.new_group(each) for each in columns.tolist()][rank // local]
            across = [dist.new_group(each) for each in columns.T.tolist()][rank % local]
            for n in LENGTHS:
                tensor = _of_rank(rank, n)
                with CallLog() as log:
                    attempt(tensor, inside, across)
                calls = [call for call in log.calls if call.operation != "barrier"]
                slow = [call for call in calls if nodes > 1 and call.group != inside.group_name]
                sent = [round(sum(map(sent_bytes, some))) for some in (calls, slow)]
                facts |= _of_sum(nodes, local, n, tensor, sent[1], sent[0] - sent[1])
        return facts

    def expected(self, world_size):
        facts = {}
        for nodes in NODES[world_size]:
            local = world_size // nodes
            for n in LENGTHS:
                chunk = -(-n // local)
                facts |= _of_sum(
                    nodes, local, n, sum(_of_rank(rank, n) for rank in range(world_size)),
                    AtMost(8 * (nodes - 1) * -(-chunk // nodes),
                           "an all-reduce of a chunk is enough"),
                    AtMost(8 * (local - 1) * chunk,
                           "a reduce-scatter and an all-gather are enough"))
        return facts


def _of_rank(rank, n):
    return seeded(f"rank {rank}", n)


def _of_sum(nodes, local, n, tensor, slow, fast):
    of = f"({nodes} node{'s' * (nodes > 1)} of {local}, {n} elements)"
    return {f"`tensor` {of}": tensor,
            f"the bytes that this rank sends between nodes {of}": slow,
            f"the bytes that it sends inside its node {of}": fast}
