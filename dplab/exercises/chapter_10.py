"""Exercises of chapter 10: choose, sum over two levels, save what survives, and how often."""

import contextlib
import functools
import io
import operator
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab import RankError
from dplab.exercises import observe
from dplab.exercises.compare import COMMUNICATED, AtMost
from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.trials import of_cases, reduced, seeded
from dplab.measure import CallLog, sent_bytes

# 10.1

# Parameters, ranks, memory, K, activations, gathered: each answer, cases near a limit, and last
# two that need exactly the memory that there is.
CASES = ((1.2e9, 8, 80e9, 12, 10e9, 1e9), (1.5e9, 1, 40e9, 12, 10e9, 1e9),
         (7e9, 8, 80e9, 12, 20e9, 2e9), (8e9, 8, 80e9, 8, 5e9, 2e9), (3e9, 2, 60e9, 16, 1e9, 9e9),
         (13e9, 16, 80e9, 12, 20e9, 3e9), (13e9, 16, 48e9, 12, 12e9, 3e9),
         (6.7e9, 4, 40e9, 12, 6e9, 3e9), (70e9, 64, 80e9, 12, 15e9, 7e9),
         (70e9, 8, 80e9, 12, 10e9, 7e9), (7e9, 8, 40e9, 8, 25e9, 1e9),
         (405e9, 512, 80e9, 16, 50e9, 20e9), (1e9, 4, 20e9, 12, 4e9, 1e9),
         (4e9, 4, 32e9, 12, 14e9, 2e9))
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
            memory=lambda size, ranks: size, fits=operator.le, least=False, nothing=None):
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
                   if fits(compared[name], memory(has, ranks))]
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


class ChooseStrategy(Calculation):
    slug = "choose-strategy"
    number = "10.1"
    title = "The first strategy that fits"
    name = "choose_strategy"
    minutes = 15
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
        Mistake(_choice(order=(0, 2, 3)), "You pass over ZeRO-1. Where it fits, the gradients "
                "need not be sharded as well."),
        Mistake(_choice(fits=operator.lt), "A strategy that needs exactly `memory` fits: these "
                "bytes may be used. Compare with `<=`."),
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
    slug = "hierarchical-all-reduce"
    number = "10.2"
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


# 10.3, judged by jobs that save and die

SAVED, KILLED, END, BATCH = 3, 5, 8, 12
RANKS_OF_LAST_JOB = {1: 2, 2: 3, 3: 1, 4: 2}
BEGINS = "the step at which the first job begins"
IS_THERE = "that the checkpoint is there, under its path, when `save` returns"
WRITES = "how often all ranks together call `torch.save` in a `save`"
GOES_ON, AT_THE_END = "the step that goes on", "the weights at the end"


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == 0:
            new = self.path.with_name("new")
            torch.save({"step": step, "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "generator": generator.get_state()}, new)
            new.replace(self.path)
        dist.barrier()

    def load(self, model, optimizer, generator):
        if not self.path.exists():
            return 0
        saved = torch.load(self.path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        return saved["step"]


def _replace(saved, path):
    torch.save(saved, f"{path}.new")
    os.replace(f"{path}.new", path)


def _write_in_place(saved, path):
    torch.save(saved, path)  # which the check replaces: the function itself would escape it


def _write_bytes(saved, path):
    whole = io.BytesIO()
    torch.save(saved, whole)
    path.write_bytes(whole.getvalue())


def _remove_first(saved, path):
    path.unlink(missing_ok=True)
    _replace(saved, path)


def _all_states(generator):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, generator.get_state())
    return states


def _checkpoint(write=_replace, *, writers=lambda rank: rank == 0, wait=lambda rank: True,
                readers=lambda rank: True, forget=(), counted=0, asks=True,
                state=lambda generator: generator.get_state(),
                restore=lambda generator, saved: generator.set_state(saved)):
    """A checkpoint with one thing wrong."""

    class Attempt:
        def __init__(self, path):
            self.path = path

        def save(self, step, model, optimizer, generator):
            saved = {"step": step, "model": model.state_dict(),
                     "optimizer": optimizer.state_dict(), "generator": state(generator)}
            if writers(dist.get_rank()):
                write(saved, self.path)
            if wait(dist.get_rank()):
                dist.barrier()

        def load(self, model, optimizer, generator):
            if asks and not self.path.exists():
                return 0
            saved = torch.load(self.path)
            if readers(dist.get_rank()):
                for name, part in (("model", model), ("optimizer", optimizer)):
                    if name not in forget:
                        part.load_state_dict(saved[name])
            restore(generator, saved["generator"])
            return 0 if "step" in forget else saved["step"] + counted

    return Attempt


class SurvivingCheckpoint(Exercise):
    slug = "checkpoint-that-survives"
    number = "10.3"
    title = "A checkpoint that survives"
    name = "Checkpoint"
    minutes = 25
    communicates = False
    hints = (
        "Go through all that a step uses: weights, optimizer state, where in the sequence of "
        "batches, which step. All of it is the same on every rank, so one rank writes one file.",
        "`torch.save(..., new)` to another name in the same folder, then `new.replace(path)`: at "
        "each moment `path` is a whole checkpoint, the old one or the new. And `save` ends for "
        "nobody before that: a barrier for all ranks.",
        "`load` of the first job finds no file. `generator.get_state()` and `set_state` are the "
        "place in the data.",
    )
    solution = Checkpoint
    mistakes = (
        *(Mistake(_checkpoint(write), "The job was killed while it saved, and half a file is all "
                  "that is left under this name. Write to another name in the folder, and "
                  "`replace` the old file when the new one is whole.")
          for write in (_write_in_place, _write_bytes)),
        Mistake(_checkpoint(_remove_first), "The job died while it saved. The next one found no "
                "checkpoint that it could read, the old one removed or overwritten, and began "
                "anew. `replace` puts a new file, once whole, in the old one's place in one step."),
        Mistake(_checkpoint(writers=lambda rank: True), "Every rank writes the same file, and they "
                "write into each other's. One rank writes, the others wait."),
        Mistake(_checkpoint(wait=lambda rank: False), "The other ranks go on before rank 0 has "
                "written: a job that ends now leaves no checkpoint. All have to wait *behind* the "
                "writing, at a barrier at the end of `save`."),
        Mistake(_checkpoint(wait=lambda rank: rank == 0), "Only rank 0 comes to the barrier, and "
                "meets the others' next collective. The barrier stands outside the `if`."),
        Mistake(_checkpoint(asks=False), "In the first job there is no file yet. `load` returns 0 "
                "then, and changes nothing; so the same script starts and restarts."),
        Mistake(_checkpoint(forget=("model",)), "The weights are not restored: the job goes on "
                "from a new model."),
        Mistake(_checkpoint(forget=("optimizer",)), "The optimizer's state is not restored: Adam "
                "goes on without its moments, and counts its steps from 0."),
        *(Mistake(_checkpoint(state=state, restore=restore), "The batches begin anew: the state of "
                  "`generator` is not restored. (`torch.get_rng_state()` is that of another one.)")
          for state, restore in (
              (lambda generator: 0, lambda generator, saved: None),
              (lambda generator: torch.get_rng_state(),
               lambda generator, saved: torch.set_rng_state(saved)))),
        Mistake(_checkpoint(state=_all_states, restore=lambda generator, saved: generator.set_state(
                saved[dist.get_rank()])), "You keep one random state for each rank, and the next "
                "job may have more ranks. All ranks draw the same batches here: save one state."),
        Mistake(_checkpoint(forget=("step",)), "`load` returns 0 although there is a checkpoint, "
                "so the job does its first steps twice. Save the step, too."),
        *(Mistake(_checkpoint(counted=one), "The step is off by one. `step` counts the steps that "
                  "are done; the loop goes on with `range(step, ...)`.") for one in (1, -1)),
        *(Mistake(_checkpoint(readers=lambda rank: rank == 0, restore=restore), "Only rank 0 "
                  "loads. The gradients are averaged, weights and moments are not, so the replicas "
                  "stay different: every rank loads.") for restore in (
            lambda generator, saved: generator.set_state(saved),
            lambda generator, saved: dist.get_rank() or generator.set_state(saved))),
    )

    def _observe(self, attempt, world_size, *, quiet=False):
        """Three jobs: one that saves, one that dies while it saves, and one on other ranks."""
        with tempfile.TemporaryDirectory() as folder:
            how = {"seconds": self._limit, "quiet": quiet}
            given, others = (attempt, folder), RANKS_OF_LAST_JOB[world_size]
            first = observe.alone(_first_job, given, world_size, **how)
            if isinstance(first, RankError) or not any(facts[IS_THERE] for facts in first):
                return first  # and the other jobs tell no more
            died = observe.alone(_killed_job, given, world_size, **how)
            if isinstance(died, RankError) and died.kind != "died":
                return died
            last = observe.alone(_last_job, given, others, **how)
            return last if isinstance(last, RankError) else _of_jobs(first, last)

    def _failure(self, error, world_size):
        """As of any attempt, but the job that failed may have had another number of ranks."""
        verdict = super()._failure(error, world_size)
        of = re.match(r"rank \d+ of (\d+) ", verdict.detail)
        if of and int(of[1]) != world_size:
            said = f"saved on {_ranks(world_size)}, and gone on with on {_ranks(int(of[1]))}"
            verdict.why = verdict.why.replace(f"on {_ranks(world_size)}", said, 1)
        return verdict

    def _observe_all(self, attempts, world_size):
        """The same three jobs for all; who is killed here is only stopped there."""
        with tempfile.TemporaryDirectory() as folder:
            given = [(attempt, os.path.join(folder, str(number)))
                     for number, attempt in enumerate(attempts)]
            for _, own in given:
                os.mkdir(own)
            outcomes = observe.in_turn(_first_job, given, world_size, seconds=self._limit)
            open_ones = [number for number, first in enumerate(outcomes)
                         if first and any(facts[IS_THERE] for facts in first)]
            for task, ranks in ((_stopped_job, world_size),
                                (_last_job, RANKS_OF_LAST_JOB[world_size])):
                found = observe.in_turn(task, [given[number] for number in open_ones], ranks,
                                        seconds=self._limit)
                for number, facts in zip(open_ones, found, strict=True):
                    if facts is None:
                        outcomes[number] = None
                    elif task is _last_job:
                        outcomes[number] = _of_jobs(outcomes[number], facts)
                open_ones = [number for number in open_ones if outcomes[number]]
            return outcomes

    def expected(self, world_size):
        others, (model, optimizer, generator) = RANKS_OF_LAST_JOB[world_size], _fresh(1)
        for step in range(END):
            _train(model, optimizer, generator, step)
        end = {GOES_ON: SAVED, AT_THE_END: parameters_to_vector(model.parameters()).detach()}
        first = {BEGINS: 0, IS_THERE: True, WRITES: 1}
        return _of_jobs([first] * world_size, [end] * others)


def _ranks(count):
    return f"{count} rank{'s' * (count > 1)}"


def _first_job(given):
    """Trains from the beginning, and saves."""
    job = _Job(given, number=1)
    begun = job.train(until=SAVED)
    write = mock.Mock(side_effect=functools.partial(_write_slowly, torch.save))
    with mock.patch.object(torch, "save", write):
        job.save(SAVED)
    is_there, writes = job.path.exists(), torch.tensor(write.call_count)
    dist.all_reduce(writes)
    return {BEGINS: begun, IS_THERE: is_there, WRITES: writes.item()}


def _killed_job(given):
    """Goes on, and is killed at the worst moment of its `save`."""
    job = _Job(given, number=2)
    job.train(until=KILLED)
    with _death(job.path, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        job.save(KILLED)
    return {}


class _Stopped(BaseException):
    """In place of the end of a rank, where the ranks go on with another attempt."""


def _stopped_job(given):
    """As `_killed_job`, for an attempt that clears up nothing behind it."""
    def stop(*_):
        raise _Stopped

    job = _Job(given, number=2)
    job.train(until=KILLED)
    # Who waits for a rank that is dead ends there, too.
    with (contextlib.suppress(_Stopped), _death(job.path, stop),
          mock.patch.object(dist, "barrier", stop)):
        job.save(KILLED)
    return {}


def _last_job(given):
    """Goes on to the end, on another number of ranks."""
    job = _Job(given, number=3)
    begun = job.train(until=END)
    return {GOES_ON: begun, AT_THE_END: parameters_to_vector(job.model.parameters()).detach()}


class _Job:
    def __init__(self, given, number):
        attempt, folder = given
        os.chdir(folder)  # so that errors name the file alike in every attempt
        self.path = Path("checkpoint.pt")
        self.model, self.optimizer, self.generator = _fresh(number)
        self.checkpoint = attempt(self.path)

    def train(self, until):
        """Loads, and takes the steps that are left; returns what `load` did."""
        begun = self.checkpoint.load(self.model, self.optimizer, self.generator)
        for step in range(begun if isinstance(begun, int) else 0, until):
            _train(self.model, self.optimizer, self.generator, step, dist.get_rank(),
                   dist.get_world_size())
        return begun

    def save(self, step):
        self.checkpoint.save(step, self.model, self.optimizer, self.generator)


def _write_slowly(save, *arguments, **options):
    if dist.get_world_size() > 1:  # who does not wait is back first; who all write, do so in turn
        time.sleep(0.1 + 0.3 * dist.get_rank())
    save(*arguments, **options)


@contextlib.contextmanager
def _death(path, die):
    """In this block the rank dies when ``path`` is half written, or has just been removed or moved;
    or else right before another file replaces it.
    """
    whole_save = torch.save

    def save(saved, file, **options):
        if _is_checkpoint(file):
            _end(_halve)
        whole_save(saved, file, **options)

    _deaths.append((Path(path).absolute(), die))
    _hear_of_files()
    try:
        with mock.patch.object(torch, "save", save):
            yield
    finally:
        _deaths.clear()


_deaths: list[tuple] = []  # where this rank dies: the checkpoint's path, and what ends it


def _is_checkpoint(file):
    return (bool(_deaths) and isinstance(file, str | Path)
            and Path(file).absolute() == _deaths[0][0])


@functools.cache
def _hear_of_files():
    sys.addaudithook(_at_a_file)  # which stays to the end of the process


def _at_a_file(event, arguments):
    if event == "open":
        if _is_checkpoint(arguments[0]) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            _end(_halve)
    elif event in ("os.remove", "os.rename") and _is_checkpoint(arguments[0]):
        _end(_remove)
    elif event == "os.rename" and _is_checkpoint(arguments[1]):
        _end(lambda path: None)


def _end(last_change):
    path, die = _deaths.pop()  # of what follows, nothing is heard
    last_change(path)
    die()


def _halve(path):
    whole = path.read_bytes()
    # Of whatever length it was, so short that reading it fails in one way.
    path.write_bytes(whole[: min(512, len(whole) // 2)])


def _remove(path):
    path.unlink()


def _fresh(job):
    """As each job makes them: new weights, and the data's generator at its beginning."""
    torch.manual_seed(job)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return (model, torch.optim.Adam(model.parameters(), lr=0.02, eps=0.01),
            torch.Generator().manual_seed(0))


def _train(model, optimizer, generator, step, rank=0, ranks=1):
    """One step of this rank: the same global batch is drawn by all."""
    x = torch.randn(BATCH, 4, generator=generator)[rank::ranks]
    optimizer.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 6)
    optimizer.zero_grad()
    (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
    for parameter in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()


def _of_jobs(first, last):
    """The facts of a rank of the first job, and below them those of all ranks of the last one."""
    ends = {f"{fact} on rank {rank} of {len(last)} of the last job": value
            for rank, facts in enumerate(last)
            for fact, value in facts.items() if fact != COMMUNICATED}
    return [{**facts, **ends} for facts in first]


# 10.4

# Failures, in days, on ranks; the job's ranks; seconds to save, minutes to restart.
PLANS = ((419, 54, 16_384, 16_384, 60, 10), (419, 54, 16_384, 1_024, 30, 5),
         (3, 30, 256, 2_048, 90, 15))


def plan_checkpoints(failures, days, log_ranks, ranks, save_seconds, restart_minutes):
    between_failures = days * 86_400 * log_ranks / failures / ranks
    interval = (2 * save_seconds * between_failures) ** 0.5
    lost = save_seconds / interval + (interval / 2 + 60 * restart_minutes) / between_failures
    return between_failures / 3600, interval / 60, lost


def _plan(*, mtbf=lambda of_log, log_ranks, ranks: of_log * log_ranks / ranks,
          interval=lambda saving, between: (2 * saving * between) ** 0.5, work=0.5, second=1,
          saved=lambda saving, apart: saving / apart,
          lost=lambda saving, work, restart: saving + work + restart,
          per=lambda apart, between: between,
          day=86_400, minute=60, hours=3600, minutes=60):
    """A plan with one thing wrong."""

    def attempt(failures, days, log_ranks, ranks, save_seconds, restart_minutes):
        between = mtbf(days * day / failures, log_ranks, ranks)
        saving = save_seconds * second
        apart = interval(saving, between)
        shares = (saved(saving, apart), work * apart / between,
                  restart_minutes * minute / per(apart, between))
        return between / hours, apart / minutes, lost(*shares)

    return attempt


def _daly(saving, between):
    ratio = (saving / (2 * between)) ** 0.5
    return (2 * saving * between) ** 0.5 * (1 + ratio / 3 + ratio**2 / 9) - saving


_OF_LOG = ("You took the failures of the log for those of your job. With more ranks they come more "
           "often: the time between them is that of one rank, divided by your ranks.")


class PlanCheckpoints(Calculation):
    slug = "checkpoint-interval"
    number = "10.4"
    title = "How often to save"
    name = "plan_checkpoints"
    minutes = 15
    hints = (
        "Everything in seconds first. One rank fails every `days · log_ranks / failures`; any of "
        "your ranks stops the job, so divide by `ranks`: that is M.",
        "With an interval τ the job loses δ/τ of its time to saving, and at each failure the "
        "restart R and on average half an interval: δ/τ + (τ/2 + R)/M.",
        "That is least where its derivative is zero: δ/τ² = 1/(2M), so τ = √(2δM). Then convert: "
        "hours, minutes, and a share without a unit.",
    )
    solution = staticmethod(plan_checkpoints)
    mistakes = (
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log), _OF_LOG),
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log / ranks), "You divide the "
                "job's time between failures by your ranks, as if one rank had failed so often. "
                "Multiply by the ranks of the log first: that is the time of one rank."),
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log * ranks / log_ranks), "With "
                "twice the ranks your job fails half as often. It is the reverse: divide by your "
                "ranks, multiply by those of the log."),
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log * log_ranks), "You return how "
                "long one rank goes without a failure. The first of all your ranks stops the job: "
                "divide by them."),
        Mistake(_plan(day=3600), "A day has 86,400 seconds; you took it for an hour."),
        Mistake(_plan(hours=1), "The first number is asked in hours, and is in seconds."),
        Mistake(_plan(minutes=1), "The interval is asked in minutes, and is in seconds."),
        Mistake(_plan(minutes=3600), "The interval is asked in minutes, and is in hours."),
        Mistake(_plan(interval=lambda saving, between: (saving * between) ** 0.5), "The 2 is "
                "missing under the root. A failure costs *half* an interval on average, so the "
                "interval can be longer."),
        *(Mistake(_plan(**units), "You left `save_seconds` in seconds beside minutes, so that the "
                  "interval comes out √60 times too long. First bring everything into one unit.")
          for units in (dict(second=60),
                        dict(interval=lambda saving, between: (120 * saving * between) ** 0.5))),
        Mistake(_plan(work=1, interval=lambda saving, between: (saving * between) ** 0.5), "You "
                "count a whole interval as lost at each failure, and so find √(δM). A failure "
                "comes at any moment of an interval: on average half of it is lost."),
        Mistake(_plan(saved=lambda saving, apart: saving / (apart + saving)), "You add the save to "
                "τ. Here τ counts from the start of one save to the start of the next, so the "
                "save is in it: its share is δ/τ."),
        Mistake(_plan(interval=lambda saving, between: 2 * (saving * between) ** 0.5),
                "The 2 belongs under the root: √(2δM)."),
        Mistake(_plan(interval=lambda saving, between: between / 2), "You save twice between two "
                "failures, however long saving takes. Where saving is cheap, more often is better: "
                "weigh δ/τ against τ/2M."),
        Mistake(_plan(interval=_daly), "This interval is Daly's, of a higher order: it is better "
                "where failures are frequent. Asked is the first approximation, √(2δM)."),
        Mistake(_plan(work=1), "The share counts a whole interval as lost at each failure. It "
                "strikes at any moment of it: half of it is lost, on average."),
        Mistake(_plan(work=0), "The share counts one of two losses: the time to save, or the work "
                "since the last checkpoint, which is done twice. (At the best interval both cost "
                "the same.)"),
        Mistake(_plan(lost=lambda saving, work, restart: saving + work), "The share leaves out the "
                "restart: at each failure, so long nobody trains."),
        Mistake(_plan(per=lambda apart, between: apart), "You count a restart for each interval. "
                "There is one for each failure: R/M."),
        Mistake(_plan(minute=1), "The restart is given in minutes; you added it as seconds."),
        Mistake(_plan(lost=lambda *shares: 1 - sum(shares)), "You return the goodput, the share "
                "that is not lost. Asked is what is lost."),
        Mistake(_plan(lost=lambda *shares: 100 * sum(shares)), "You return percent. Asked is a "
                "share, between 0 and 1."),
    )

    def trial(self, attempt):
        return of_cases(_of_plan, PLANS, attempt)

    def expected(self, world_size):
        return of_cases(_of_plan, PLANS, plan_checkpoints)


def _of_plan(plan, found):
    failures, days, log_ranks, ranks, save_seconds, restart_minutes = plan
    of = (f"for {ranks:,} ranks ({failures} failures in {days} days on {log_ranks:,}, "
          f"{save_seconds} s to save, {restart_minutes} minutes to restart)")
    found = found if isinstance(found, tuple | list) and len(found) == 3 else (found, None, None)
    return dict(zip((f"the hours between failures {of}", f"the minutes between checkpoints {of}",
                     f"the share of time that is lost {of}"), found, strict=True))


EXERCISES = (ChooseStrategy, HierarchicalAllReduce, SurvivingCheckpoint, PlanCheckpoints)
