"""A product of which each rank holds some terms of every sum."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import reduced, seeded  # noqa: F401
from dplab.measure import CallLog, sent_bytes


def einsum_split_over_d(x, w):
    out = torch.einsum("bd,df->bf", x, w)
    dist.all_reduce(out)
    return out


class SplitOverD(Exercise):
    number = "B.1"
    title = "A layer whose d is cut"
    minutes = 5
    solution = staticmethod(einsum_split_over_d)

    def trial(self, attempt):
        x, w = block(dist.get_rank(), dist.get_world_size())
        before = x.clone(), w.clone()
        with CallLog() as log:
            out = attempt(x, w)
        return {"the output": out, "that `x` and `w` are not changed":
                torch.equal(x, before[0]) and torch.equal(w, before[1]),
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of collectives": log.count()}

    def expected(self, world_size):
        x, w = layer()
        output = x @ w
        return {"the output": output, "that `x` and `w` are not changed": True,
                "the number of bytes that this rank sends": AtMost(
                    2 * output.nbytes, "one all-reduce of the partial sums sends less than two "
                    "outputs, on however many ranks; gather neither the inputs nor the partial "
                    "sums", exact=False),
                "the number of collectives": AtMost(2, "each costs its latency again, and one "
                                                    "all-reduce of the whole output is enough")}

    def parts(self, world_size, rank):
        blocks = [block(other, world_size) for other in range(world_size)]
        return {"the output": {
            f"rank {one}'s partial sum" if one == other else
            f"rank {one}'s columns times rank {other}'s rows": x @ w
            for one, (x, _) in enumerate(blocks) for other, (_, w) in enumerate(blocks)
            if x.shape[1] == len(w)}}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "Write one element of the output as a sum over d. Which terms of this sum can this rank "
        "compute from its columns of `x` and its rows of `w`?",
        "Each rank computes a tensor of the output's full shape, in which the other ranks' terms "
        "are missing. Which collective adds tensors, and leaves the sum on every rank?",
        "`out = x @ w`, then `dist.all_reduce(out)`, which changes `out` in place; return `out`.",
    )
    slips = (
        Slip("This is each rank's partial sum: it lacks the terms of d that the other ranks hold. "
             "Add the partial sums over the ranks.", {"dist.all_reduce(out)": ""}),
        Slip("You divided by the world size. The sum over d was cut into pieces, and the pieces "
             "add up to it: here it is a sum, not a mean.",
             {"return out": "return out / dist.get_world_size()"}),
        Slip("You put the ranks' results side by side. They are not parts of the output: each has "
             "the output's full shape and lacks the terms of the other ranks, so they have to be "
             "*added*. (Side by side is right where the weights are split along f.)",
             {"dist.all_reduce(out)": "out = torch.cat(gathered(out), dim=1)"},
             {"dist.all_reduce(out)": "out = torch.cat(gathered(out))"}),
        Slip("`reduce` gives the sum to rank 0 alone. Every rank needs the output: `all_reduce`.",
             {"dist.all_reduce(out)": "dist.reduce(out, dst=0)"}),
        Slip("You broadcast rank 0's partial sum: all ranks agree, on an output that lacks the "
             "terms of the others. Add them with `all_reduce`.",
             {"dist.all_reduce(out)": "dist.broadcast(out, src=0)"}),
        Slip("You all-reduced a copy: the sum never reaches the tensor that you return.",
             {"all_reduce(out)": "all_reduce(out.clone())"}),
        Slip("You summed over the ranks twice: the second all-reduce adds up N tensors that are "
             "the sum already.", {"return out": "return reduced(out)"}),
        Slip("You summed the inputs over the ranks. They are different columns and rows, which do "
             "not add up to anything: multiply first, then add the results.",
             {'bf", x, w': 'bf", reduced(x), reduced(w)', "dist.all_reduce(out)": ""},
             {'bf", x, w': 'bf", reduced(x), w', "dist.all_reduce(out)": ""},
             {'bf", x, w': 'bf", reduced(x.clone()), reduced(w.clone())',
              "dist.all_reduce(out)": ""},
             {'bf", x, w': 'bf", reduced(x.clone()), w', "dist.all_reduce(out)": ""}),
    )


def layer():
    """x (3, 26) and w (26, 5). Only 2 ranks get equally many of the 26."""
    return seeded("x", 3, 26), seeded("w", 26, 5)


def block(rank, world_size):
    """This rank's columns of x and rows of w."""
    x, w = layer()
    return x.tensor_split(world_size, dim=1)[rank].contiguous(), w.tensor_split(world_size)[rank]


def gathered(tensor):
    """The tensors of all ranks, as a list."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors
