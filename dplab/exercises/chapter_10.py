"""Exercises of chapter 10: choose, and sum over two levels (10.3 and 10.4: `checkpoints`)."""

import functools
import operator

import torch
import torch.distributed as dist
from torch import nn

from dplab.exercises.checkpoints import PlanCheckpoints, SurvivingCheckpoint
from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.facts import of_cases, reduced
from dplab.measure import CallLog, sent_bytes

# 10.1

# Parameters, ranks, memory, K, activations, gathered: each answer, and cases near a limit.
CASES = ((1.2e9, 8, 80e9, 12, 10e9, 1e9), (1.5e9, 1, 40e9, 12, 10e9, 1e9),
         (7e9, 8, 80e9, 12, 20e9, 2e9), (8e9, 8, 80e9, 8, 5e9, 2e9), (3e9, 2, 60e9, 16, 1e9, 9e9),
         (13e9, 16, 80e9, 12, 20e9, 3e9), (13e9, 16, 48e9, 12, 12e9, 3e9),
         (6.7e9, 4, 40e9, 12, 6e9, 3e9), (70e9, 64, 80e9, 12, 15e9, 7e9),
         (70e9, 8, 80e9, 12, 10e9, 7e9), (7e9, 8, 40e9, 8, 25e9, 1e9),
         (405e9, 512, 80e9, 16, 50e9, 20e9))
STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")


def choose_strategy(parameters, ranks, memory, K, activations, gathered):
    weights, gradients, optimizer = 2 * parameters, 2 * parameters, K * parameters
    states = {"DDP": weights + gradients + optimizer,
              "ZeRO-1": weights + gradients + optimizer / ranks,
              "ZeRO-2": weights + (gradients + optimizer) / ranks,
              "FSDP": (weights + gradients + optimizer) / ranks + gathered}
    for strategy, held in states.items():
        if held + activations <= memory:
            return strategy, held + activations
    return None


def _choice(first=(3, 2, 1), *, order=range(4), sizes=(2, 2), K=lambda K: K,
            share=operator.truediv, activations=lambda size, ranks, stage: size,
            judged=lambda states, need: need,
            gathered=lambda size, ranks, stage: size * (stage == 3),
            memory=lambda size, ranks: size, least=False, nothing=None):
    """A choice with one thing wrong; ``first``: the strategy from which on each part is sharded."""

    def attempt(parameters, ranks, has, optimizer, saved, whole):
        needs, compared = {}, {}
        for stage in order:
            sizes_held = [share(size, ranks) if stage >= begin else size
                          for begin, size in zip(first, (*sizes, K(optimizer)), strict=True)]
            name, states = STRATEGIES[stage], parameters * sum(sizes_held)
            needs[name] = (states + gathered(whole, ranks, stage)
                           + activations(saved, ranks, stage))
            compared[name] = judged(states, needs[name])
        fitting = [(name, need) for name, need in needs.items()
                   if compared[name] <= memory(has, ranks)]
        if not fitting:
            return nothing and (nothing, needs[nothing])
        return min(fitting, key=operator.itemgetter(1)) if least else fitting[0]

    return attempt


def _what_is_left(parameters, ranks, memory, *rest):
    found = choose_strategy(parameters, ranks, memory, *rest)
    return found and (found[0], memory - found[1])


_LEAST = ("You return the strategy that needs the least memory. Memory that is left over is worth "
          "nothing; communication and machinery cost: take the first that fits, DDP before all.")
_FIXED_K = ("You took a number for K. With an fp32 master copy it is 12, without one 8, with fp32 "
            "gradients in the optimizer 16: use the argument.")


class ChooseStrategy(Exercise):
    id = "10.1"
    title = "The cheapest strategy that fits"
    name = "choose_strategy"
    minutes = 15
    communicates = False
    hints = (
        "Write down the bytes of one rank for all four strategies first, and compare afterwards: "
        "2 + 2 + K bytes for each parameter, and each strategy divides one more summand by the "
        "ranks than the one before it.",
        "To all four come this rank's activations, undivided: they belong to its own samples. To "
        "FSDP alone comes what it has gathered.",
        "Go through the four in their order and return the first that fits. After the loop: None.",
    )
    solution = staticmethod(choose_strategy)
    mistakes = (
        Mistake(_choice(order=(3, 2, 1, 0)), _LEAST),
        Mistake(_choice(least=True), _LEAST),
        Mistake(_choice(order=(0, 3)), "Where DDP does not fit you go to FSDP at once. In between, "
                "ZeRO-1 and ZeRO-2 keep the parameters whole, so that nothing is gathered in "
                "forward and backward."),
        Mistake(_choice(order=(0, 2, 3)), "You pass over ZeRO-1. Where it fits, there is no reason "
                "to shard the gradients as well."),
        Mistake(_choice(nothing="FSDP"), "Where nothing fits you return FSDP all the same. Return "
                "None: this needs more ranks, fewer activations, or another kind of parallelism."),
        Mistake(_choice((3, 1, 1)), "Your ZeRO-1 shards the gradients, too: that is ZeRO-2."),
        Mistake(_choice((2, 2, 1)), "Your ZeRO-2 shards the parameters, too. On each rank they "
                "stay whole until stage 3, which is FSDP."),
        Mistake(_choice((3, 3, 1)), "Your ZeRO-2 has whole gradients. It shards them, besides the "
                "optimizer state."),
        Mistake(_choice((4, 2, 1)), "Your FSDP has whole parameters. It shards them, too; what is "
                "whole for a moment is `gathered`."),
        Mistake(_choice((0, 0, 0)), "You divide the states by the ranks in every strategy. DDP "
                "holds all of them on each rank."),
        Mistake(_choice(K=lambda K: 8), _FIXED_K),
        Mistake(_choice(K=lambda K: 12), _FIXED_K),
        Mistake(_choice(K=lambda K: K - 4), "You took K for all the bytes of a parameter. It is "
                "the optimizer's part: the parameter and its gradient have 2 more each."),
        Mistake(_choice(sizes=(2, 0)), "You left out the gradients: 2 bytes for each parameter."),
        Mistake(_choice(sizes=(4, 4)), "You took 4 bytes for parameters and gradients. In mixed "
                "precision they have 2 each; what is kept in fp32 is in K."),
        Mistake(_choice(share=operator.floordiv), "You divide bytes per parameter by the ranks "
                "with `//`, which rounds down: 12 // 8 is 1, and a share is 1.5."),
        Mistake(_choice(judged=lambda states, need: states), "You compare the states alone with "
                "the memory, and add activations and `gathered` to the answer afterwards. All of "
                "it has to fit: add first, compare then."),
        *(Mistake(_choice(activations=lambda *_: 0, gathered=gathered), "You forgot the "
                  "activations: the states have to fit into what these leave.") for gathered in (
            lambda size, ranks, stage: size * (stage == 3), lambda *_: 0)),
        Mistake(_choice(activations=lambda size, ranks, stage: size / ranks ** (stage == 3)),
                "You divide FSDP's activations by the ranks. It shards all of the states, and no "
                "activations: those belong to each rank's own samples."),
        Mistake(_choice(activations=lambda size, ranks, stage: size / ranks),
                "You divide the activations by the ranks. They are those of this rank's own "
                "samples, and no stage shards them."),
        Mistake(_choice(activations=lambda size, ranks, stage: size * ranks), "You multiply the "
                "activations by the ranks. They are bytes of one rank, as is the memory."),
        Mistake(_choice(gathered=lambda *_: 0), "You forgot `gathered`. FSDP holds more "
                "than its shards: the units in use are whole."),
        Mistake(_choice(gathered=lambda size, ranks, stage: size / ranks * (stage == 3)), "You "
                "divide `gathered` by the ranks. The units in use are whole on each rank, whatever "
                "the number of ranks."),
        Mistake(_choice(gathered=lambda size, ranks, stage: size), "You add `gathered` to every "
                "strategy. Only FSDP gathers parameters."),
        Mistake(_choice(memory=lambda size, ranks: size * 2**30 / 1e9), "You mix decimal and "
                "binary units: needs divided by 2³⁰ against a memory divided by 10⁹. All are bytes "
                "here, so divide nothing."),
        Mistake(_what_is_left, "You return what is left of the memory. Asked is what a rank "
                "holds."),
        Mistake(_choice(memory=lambda size, ranks: size * ranks), "You compare what one rank needs "
                "with the memory of all of them. Each rank has `memory` bytes for itself."),
    )

    def trial(self, attempt):
        return of_cases(_of_choice, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_of_choice, CASES, choose_strategy)


def _of_choice(case, found):
    parameters, ranks, memory, K, activations, gathered = case
    of = (f"for {parameters / 1e9:g}e9 parameters on {ranks} ranks of {memory / 1e9:g}e9 bytes, "
          f"K = {K}, activations {activations / 1e9:g}e9, gathered {gathered / 1e9:g}e9")
    name, need = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
    return {f"the strategy {of}": name, f"the bytes of a rank {of}": need}


# 10.2

NODES = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (2, 4, 1)}  # into how many nodes the ranks are put
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


def _uneven(tensor, inside, across):
    chunks = [chunk.clone() for chunk in tensor.tensor_split(dist.get_world_size(inside))]
    own = torch.empty_like(chunks[dist.get_rank(inside)])
    dist.reduce_scatter(own, chunks, group=inside)
    dist.all_reduce(own, group=across)
    dist.all_gather(chunks, own, group=inside)
    tensor.copy_(torch.cat(chunks))


class HierarchicalAllReduce(Exercise):
    id = "10.2"
    title = "An all-reduce over two levels"
    name = "hierarchical_all_reduce"
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
    return torch.cos(torch.arange(float(n)) + 3 * rank)


def _of_sum(nodes, local, n, tensor, slow, fast):
    of = f"({nodes} node{'s' * (nodes > 1)} of {local}, {n} elements)"
    return {f"`tensor` {of}": tensor,
            f"the bytes that this rank sends between nodes {of}": slow,
            f"the bytes that it sends inside its node {of}": fast}


EXERCISES = (ChooseStrategy, HierarchicalAllReduce, SurvivingCheckpoint, PlanCheckpoints)
