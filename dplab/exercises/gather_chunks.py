"""Gathering as a step of autograd: its backward brings each rank the mean for its own chunk."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.broadcast_weights import InPairsToo
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
SCATTER, TORCHS = "ring_reduce_scatter(gradient / ranks, ctx.group)", "own / dist.get_world_size("


class GatherChunks(InPairsToo):
    number = "9.1"
    title = "Gather, and the way back"
    minutes = 15
    world_sizes = (3, 2, 4, 1)
    solution = Gather
    also_right = (GatherByTorch,)

    def facts_of(self, attempt, group):
        rank, ranks = dist.get_rank(), dist.get_world_size(group)
        chunk = seeded(f"chunk of rank {rank}", LENGTH).requires_grad_()
        before = chunk.detach().clone()
        with CallLog() as log:
            whole = attempt.apply(chunk, group)
            there = sum(map(sent_bytes, log.calls))
            # A loss that is linear in the whole, so that its gradient is what was drawn.
            (whole * gradient_of(rank, ranks)).sum().backward()
            back = sum(map(sent_bytes, log.calls)) - there
        return self._named(whole.detach(), chunk.grad, torch.equal(chunk, before), there, back)

    def right(self, ranks):
        count = len(ranks)
        mean = sum(gradient_of(rank, count) for rank in ranks) / count
        most = (count - 1) * LENGTH * 4
        return [self._named(
            torch.cat([seeded(f"chunk of rank {rank}", LENGTH) for rank in ranks]), own, True,
            AtMost(most, "one all-gather sends N-1 chunks, one after another"),
            AtMost(most, "a reduce-scatter sends N-1 chunks; an all-reduce sends twice as much, "
                         "and each rank needs its own chunk alone")) for own in mean.chunk(count)]

    def _named(self, whole, gradient, same, there, back):
        return {"the whole, which forward returns": whole,
                "the gradient of the chunk": gradient,
                "that the chunk is as it was": same,
                "the number of bytes that forward sends": there,
                "the number of bytes that backward sends": back}

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
