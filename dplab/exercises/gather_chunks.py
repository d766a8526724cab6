"""Gathering as a step of autograd: its backward brings each rank the mean for its own chunk."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.exercises.ring_reduce_scatter import ring_reduce_scatter
from dplab.measure import CallLog, sent_bytes


class Gather(torch.autograd.Function):
    """From each rank's chunk to the whole; backward, to the mean of the ranks' gradients."""

    @staticmethod
    def forward(ctx, chunk, group):
        ctx.group = group
        return ring_all_gather(chunk, group)

    @staticmethod
    def backward(ctx, gradient):
        ranks = dist.get_world_size(ctx.group)
        return ring_reduce_scatter(gradient / ranks, ctx.group), None


class GatherByTorch(torch.autograd.Function):
    """The same with torch's collectives."""

    @staticmethod
    def forward(ctx, chunk, group):
        ctx.group = group
        whole = chunk.new_empty(len(chunk) * dist.get_world_size(group))
        dist.all_gather_single(whole, chunk, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.chunk(dist.get_world_size(ctx.group))[0].clone()
        dist.reduce_scatter_single(own, gradient.contiguous(), group=ctx.group)
        return own / dist.get_world_size(ctx.group), None


LENGTH = 23  # of a chunk: more than there are parts in its gradient
IN_A_PAIR = ", in a group of two ranks"
SCATTER, TORCHS = "ring_reduce_scatter(gradient / ranks, ctx.group)", "own / dist.get_world_size("


class GatherChunks(Exercise):
    number = "9.1"
    title = "Gather, and the way back"
    minutes = 15
    world_sizes = (3, 2, 4, 1)
    with_groups = True
    solution = Gather
    also_right = (GatherByTorch,)

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        facts = self._facts("", attempt, rank, range(ranks), None)
        if ranks == 4 and self.with_groups:
            pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
            facts |= self._facts(IN_A_PAIR, attempt, rank, [rank % 2, rank % 2 + 2], pair)
        return facts

    def _facts(self, where, attempt, rank, members, group):
        chunk = seeded(f"chunk of rank {rank}", LENGTH).requires_grad_()
        before = chunk.detach().clone()
        with CallLog() as log:
            whole = attempt.apply(chunk, group)
            there = sum(map(sent_bytes, log.calls))
            # A loss that is linear in the whole, so that its gradient is what was drawn.
            (whole * gradient_of(rank, len(members))).sum().backward()
            back = sum(map(sent_bytes, log.calls)) - there
        return self._named(where, whole.detach(), chunk.grad, torch.equal(chunk, before), there,
                           back)

    def expected(self, world_size):
        every = range(world_size)
        facts = [self._right("", rank, every) for rank in every]
        if world_size == 4:
            facts = [known | self._right(IN_A_PAIR, rank, [rank % 2, rank % 2 + 2])
                     for rank, known in enumerate(facts)]
        return facts

    def _right(self, where, rank, members):
        ranks = len(members)
        mean = sum(gradient_of(each, ranks) for each in members) / ranks
        most = (ranks - 1) * LENGTH * 4
        return self._named(
            where, torch.cat([seeded(f"chunk of rank {each}", LENGTH) for each in members]),
            mean.chunk(ranks)[list(members).index(rank)], True,
            AtMost(most, "one all-gather sends N-1 chunks, one after another"),
            AtMost(most, "a reduce-scatter sends N-1 chunks; an all-reduce sends twice as much, "
                         "and each rank needs its own chunk alone"))

    def _named(self, where, whole, gradient, same, there, back):
        return {f"the whole, which forward returns{where}": whole,
                f"the gradient of the chunk{where}": gradient,
                f"that the chunk is as it was{where}": same,
                f"the number of bytes that forward sends{where}": there,
                f"the number of bytes that backward sends{where}": back}

    def parts(self, world_size, rank):
        return {"the gradient of the chunk": {
            f"chunk {number} of rank {other}'s gradient": chunk / world_size
            for other in range(world_size)
            for number, chunk in enumerate(gradient_of(other, world_size).chunk(world_size))}}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "Take two ranks and chunks of one number each. Rank 0's number stands in the whole on "
        "both ranks. Through which two losses does it act, and which rank computes the gradient "
        "of which?",
        "On each rank backward gets the gradient of that rank's own loss for *all* chunks. Chunk "
        "r's gradient is the sum of what all ranks have for chunk r, and rank r alone needs it. "
        "You have written the collective that does just this.",
        "`forward` keeps `ctx.group` and returns `ring_all_gather(chunk, group)`. `backward` "
        "divides by N, for the mean of the losses, and returns two values: the reduce-scatter of "
        "that, and None for `group`.",
    )
    slips = (
        Slip("Backward gives each chunk the sum of the ranks' gradients. What is trained is the "
             "mean of the ranks' losses: divide by the number of ranks.",
             {"gradient / ranks": "gradient"}, {f"{TORCHS}ctx.group)": "own"}),
        Slip("Backward divides by the number of ranks twice.",
             {"gradient / ranks": "gradient / ranks**2"},
             {f"{TORCHS}ctx.group)": "own / dist.get_world_size(ctx.group) ** 2"}),
        Slip("Each rank's chunk gets the gradient of that rank's own loss alone. But the chunk was "
             "used on all ranks, so all of them have a part of its gradient.",
             {SCATTER: "gradient.chunk(ranks)[dist.get_rank(ctx.group)]"},
             {SCATTER: "gradient.chunk(ranks)[dist.get_rank(ctx.group)] / ranks"}),
        Slip("Backward takes this rank's gradients of all chunks together. Chunk r's gradient is "
             "made of what each rank has for chunk r.",
             {SCATTER: "gradient.view(ranks, -1).mean(dim=0)"},
             {SCATTER: "gradient.view(ranks, -1).sum(dim=0)"}),
        Slip("The gradient is right, and came by an all-reduce, which sends twice the bytes: every "
             "rank got the sums of all chunks, and kept its own.",
             {SCATTER: "ring_reduce_scatter(ring_all_gather(ring_reduce_scatter(gradient / ranks, "
                       "ctx.group), ctx.group) / ranks, ctx.group)"},
             {"dist.reduce_scatter_single(own, gradient.contiguous(), group=ctx.group)":
              "total = gradient.clone()\ndist.all_reduce(total, group=ctx.group)\n"
              "own = total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]"}),
        Slip("Forward fills the whole with copies of this rank's own chunk. The others' chunks "
             "have to be gathered.",
             {"ring_all_gather(chunk, group)": "chunk.repeat(dist.get_world_size(group))"}),
        Slip("Forward adds up the chunks. They are different parts of the whole: side by side.",
             {"ring_all_gather(chunk, group)":
              "sum(ring_all_gather(chunk, group).chunk(dist.get_world_size(group))).repeat("
              "dist.get_world_size(group))"}),
    )


def gradient_of(rank, ranks):
    """What this rank's loss has as its gradient for the whole of so many chunks."""
    return seeded(f"gradient of rank {rank}", 4 * LENGTH)[: ranks * LENGTH]
