"""Exercise B.1: a layer whose d is cut."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog, sent_bytes


def einsum_split_over_d(x, w):
    out = torch.einsum("bd,df->bf", x, w)
    dist.all_reduce(out)
    return out


def _only_its_own_terms(x, w):
    return x @ w


def _mean_of_the_ranks(x, w):
    return reduced(x @ w) / dist.get_world_size()


def _side_by_side(x, w):
    return torch.cat(_gathered(x @ w), dim=1)


def _one_below_the_other(x, w):
    return torch.cat(_gathered(x @ w))


def _every_output_to_everyone(x, w):
    return torch.stack(_gathered(x @ w)).sum(dim=0)


def _row_by_row(x, w):
    return torch.stack([reduced(row) for row in x @ w])


def _column_by_column(x, w):
    return torch.stack([reduced(column.contiguous()) for column in (x @ w).T], dim=1)


def _inputs_gathered(x, w):
    blocks = [None] * dist.get_world_size()
    dist.all_gather_object(blocks, (x, w))
    return torch.cat([x for x, _ in blocks], dim=1) @ torch.cat([w for _, w in blocks])


def _inputs_gathered_as_tensors(x, w):
    return torch.cat(_gathered(x), dim=1) @ torch.cat(_gathered(w))


def _sum_on_rank_0_alone(x, w):
    out = x @ w
    dist.reduce(out, dst=0)
    return out


def _output_of_rank_0(x, w):
    out = x @ w
    dist.broadcast(out, src=0)
    return out


def _sum_of_a_copy(x, w):
    out = x @ w
    dist.all_reduce(out.clone())
    return out


def _what_all_reduce_returns(x, w):
    return dist.all_reduce(x @ w)


def _rank_0_calls_alone(x, w):
    out = x @ w
    if dist.get_rank() == 0:
        dist.all_reduce(out)
    return out


def _summed_twice(x, w):
    return reduced(reduced(x @ w))


def _inputs_summed(x, w):
    return reduced(x) @ reduced(w)


def _activations_summed(x, w):
    return reduced(x) @ w


def _gathered(tensor):
    """The tensors of all ranks, as a list."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts

_NOT_STACKED = ("You put the ranks' results side by side. They are not parts of the output: each "
                "has the output's full shape and lacks the terms of the other ranks, so they have "
                "to be *added*. (Side by side is right where the weights are split along f.)")

_EVERY_OUTPUT = ("The output is right, but each rank received every other rank's partial sum: N−1 "
                 "whole outputs. An all-reduce sends less than two, whatever N is.")

_MANY_MESSAGES = ("The output is right, in many messages: each all-reduce costs its latency again. "
                  "Compute the whole product, and all-reduce it once.")

_ALL_EVERYWHERE = ("You gathered the inputs: every rank holds all of `x` and `w`, and nothing is "
                   "split. Multiply what this rank has, and add the results.")

_NOT_INPUTS = ("You summed the inputs over the ranks. They are different columns and rows, which "
               "do not add up to anything: multiply first, then add the results.")


class SplitOverD(Exercise):
    number = "B.1"
    title = "A layer whose d is cut"
    minutes = 5
    hints = (
        "Write one element of the output as a sum over d. Which terms of this sum can this rank "
        "compute from its columns of `x` and its rows of `w`?",
        "Each rank computes a tensor of the output's full shape, in which the other ranks' terms "
        "are missing. Which collective adds tensors, and leaves the sum on every rank?",
        "`out = x @ w`, then `dist.all_reduce(out)`, which changes `out` in place; return `out`.",
    )
    solution = staticmethod(einsum_split_over_d)
    mistakes = (
        Mistake(_only_its_own_terms, "This is each rank's partial sum: it lacks the terms of d "
                "that the other ranks hold. Add the partial sums over the ranks."),
        Mistake(_mean_of_the_ranks, "You divided by the world size. The sum over d was cut into "
                "pieces, and the pieces add up to it: here it is a sum, not a mean."),
        Mistake(_side_by_side, _NOT_STACKED),
        Mistake(_one_below_the_other, _NOT_STACKED),
        Mistake(_every_output_to_everyone, _EVERY_OUTPUT),
        Mistake(_row_by_row, _MANY_MESSAGES),
        Mistake(_column_by_column, _MANY_MESSAGES),
        Mistake(_inputs_gathered_as_tensors, _ALL_EVERYWHERE),
        Mistake(_inputs_gathered, _ALL_EVERYWHERE),
        Mistake(_sum_on_rank_0_alone, "`reduce` gives the sum to rank 0 alone. Every rank needs "
                "the output: `all_reduce`."),
        Mistake(_output_of_rank_0, "You broadcast rank 0's partial sum: all ranks agree, on an "
                "output that lacks the terms of the others. Add them with `all_reduce`."),
        Mistake(_sum_of_a_copy, "You all-reduced a copy: the sum never reaches the tensor that you "
                "return."),
        Mistake(_what_all_reduce_returns, "`dist.all_reduce` changes its tensor in place and "
                "returns None. Keep the tensor, and return that."),
        Mistake(_rank_0_calls_alone, "Only rank 0 calls the all-reduce, and waits for ever: every "
                "rank has to call it.", hangs=True),
        Mistake(_summed_twice, "You summed over the ranks twice: the second all-reduce adds up N "
                "tensors that are the sum already."),
        Mistake(_inputs_summed, _NOT_INPUTS),
        Mistake(_activations_summed, _NOT_INPUTS),
    )

    def parts(self, world_size, rank):
        blocks = [_block(other, world_size) for other in range(world_size)]
        return {"the output": [x @ w for x, w in blocks]}

    def trial(self, attempt):
        x, w = _block(dist.get_rank(), dist.get_world_size())
        before = x.clone(), w.clone()
        with CallLog() as log:
            out = attempt(x, w)
        return {"the output": out, "that `x` and `w` are not changed":
                torch.equal(x, before[0]) and torch.equal(w, before[1]),
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of collectives": log.count()}

    def expected(self, world_size):
        x, w = _layer()
        output = x @ w
        enough = AtMost(2 * output.nbytes, "one all-reduce of the output sends no more than that, "
                        "on however many ranks", exact=False)
        return {"the output": output, "that `x` and `w` are not changed": True,
                "the number of bytes that this rank sends": enough,
                "the number of collectives": AtMost(
                    2, "one all-reduce of the whole output is enough")}


def _layer():
    """x (3, 26) and w (26, 5). Only 2 ranks get equally many of the 26."""
    return seeded("x", 3, 26), seeded("w", 26, 5)


def _block(rank, world_size):
    """This rank's columns of x and rows of w."""
    x, w = _layer()
    return x.tensor_split(world_size, dim=1)[rank].contiguous(), w.tensor_split(world_size)[rank]
