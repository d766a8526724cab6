"""Two layers with a relu between them, cut so that one all-reduce serves both."""

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import reduced, seeded  # noqa: F401
from dplab.measure import CallLog, sent_bytes


def two_layers(x, w, v):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    columns = w.tensor_split(world_size, dim=1)[rank]
    rows = v.tensor_split(world_size, dim=0)[rank]
    hidden = torch.relu(x @ columns)  # complete, though only some of its columns
    out = hidden @ rows
    dist.all_reduce(out)
    return out


FEW = 5  # hidden columns, of which `chunk` makes three parts for four ranks
OF_FEW = f"the output with {FEW} hidden columns"
FEWER_PARTS = ("`chunk` may give fewer parts than there are ranks: of 5 columns it makes 2, 2 and "
               "1 for 4 ranks. `tensor_split` gives every rank one, an empty one if need be, and "
               "every rank makes the all-reduce.")


class TwoLayers(Exercise):
    number = "B.2"
    title = "Two layers with a relu between them"
    minutes = 15
    solution = staticmethod(two_layers)

    def trial(self, attempt):
        inputs = layers()
        before = [tensor.clone() for tensor in inputs]
        with CallLog() as log, FlopCounterMode(display=False) as flops:
            out = attempt(*inputs)
        alone = dist.get_world_size() == 1  # it has nothing to send: the output on two speaks first
        few = attempt(*layers(FEW))
        return {"the output": out, OF_FEW: few,
                "that `x`, `w` and `v` are not changed": all(map(torch.equal, inputs, before)),
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of multiplications in this rank's matrix products":
                flops.get_total_flops() // 2,
                "the number of collectives": 0 if alone else log.count()}

    def expected(self, world_size):
        x, w, v = layers()
        output = torch.relu(x @ w) @ v
        columns = -(-w.shape[1] // world_size)
        x, w, v = layers(FEW)
        return {"the output": output, OF_FEW: torch.relu(x @ w) @ v,
                "that `x`, `w` and `v` are not changed": True,
                "the number of bytes that this rank sends": AtMost(
                    2 * output.nbytes, "one all-reduce of the output sends no more than that, on "
                    "however many ranks, and nothing else has to be sent", exact=False),
                "the number of multiplications in this rank's matrix products": AtMost(
                    2 * len(x) * len(w) * columns, "each rank is to multiply with its part of `w` "
                    "and with its part of `v`, and with the whole of neither", exact=False),
                "the number of collectives": AtMost(
                    1, "one, of the whole output, is enough for both layers", exact=False)}

    def parts(self, world_size, rank):
        x, w, v = layers()
        hidden = [torch.relu(x @ columns) for columns in w.tensor_split(world_size, dim=1)]
        return {"the output": {
            f"rank {one}'s part" if one == other else
            f"rank {one}'s hidden columns times rank {other}'s rows": mine @ rows
            for one, mine in enumerate(hidden) for other, rows in
            enumerate(v.tensor_split(world_size)) if mine.shape[1] == len(rows)}}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "Between the two products stands a relu. Is the relu of a sum the sum of the relus? Which "
        "cut of `w` gives a rank hidden activations that are complete?",
        "A rank that has some columns of `w` has the same columns of the hidden activations. Which "
        "part of `v` do just these columns multiply?",
        "`torch.relu(x @ columns) @ rows`, with this rank's columns of `w` and the same rows of "
        "`v`, is a partial sum of the output. One all-reduce makes it whole.",
    )
    slips = (
        # The cut.
        Slip("You cut the first layer along d, so each rank has partial sums of the hidden "
             "activations, and you took their relu. The relu of a sum is not the sum of the relus. "
             "Cut the first layer so that each rank has *complete* hidden activations, though not "
             "all of them.",
             {"x @ columns": "my(x, 1) @ my(w, 0)", "hidden @ rows": "hidden @ v"},
             {"x @ columns": "my(x, 1) @ my(w, 0)", "hidden @ rows": "my(hidden, 1) @ rows"}),
        Slip("The output is right, but the ranks send hidden activations between the layers. Cut "
             "the first layer so that a rank's are complete at once, and the second so that it "
             "needs only the hidden columns that it has already.",
             {"torch.relu(x @ columns)": "torch.relu(reduced(my(x, 1) @ my(w, 0)))",
              "hidden @ rows": "my(hidden, 1) @ rows"},
             {"torch.relu(x @ columns)": "joined(torch.relu(x @ columns))",
              "hidden @ rows": "hidden @ v", "dist.all_reduce(out)": ""},
             {"hidden = torch.relu(x @ columns)": "hidden = torch.zeros(len(x), w.shape[1])\n"
              "my(hidden, 1).copy_(torch.relu(x @ columns))\nreduced(hidden)",
              "out = hidden @ rows": "out = hidden @ v", "dist.all_reduce(out)": ""}),
        Slip("The output is right, but each rank computed more than its share: every rank "
             "multiplied with the whole of `w` or of `v`. Each rank is to use a part of both.",
             {"x @ columns": "x @ w", "hidden @ rows": "hidden @ v", "dist.all_reduce(out)": ""},
             {"x @ columns": "x @ w", "hidden @ rows": "my(hidden, 1) @ rows"}),
        Slip("You cut the batch. That is data parallelism: each rank needs the whole of both "
             "matrices, and here a batch of few rows cannot be divided evenly. Cut `w` and `v`.",
             {"x @ columns": "my(x, 0) @ w", "hidden @ rows": "hidden @ v",
              "dist.all_reduce(out)": "out = joined(out, dim=0)"},
             {"x @ columns": "my(x, 0) @ w", "out = hidden @ rows": "out = torch.zeros(len(x), "
              "v.shape[1])\nmy(out, 0).copy_(hidden @ v)"}),
        Slip("A rank multiplies hidden columns with other rows than theirs: you cut one of `w` and "
             "`v` in turn and the other in one piece. Cut both in the same way.",
             {"w.tensor_split(world_size, dim=1)[rank]": "w[:, rank::world_size]"},
             {"v.tensor_split(world_size, dim=0)[rank]": "v[rank::world_size]"}),
        Slip("h does not always divide evenly: with `h // world_size` columns each, the last ones "
             "are computed by nobody. `tensor_split` makes parts for any number of ranks.",
             {"w.tensor_split(world_size, dim=1)": "w.split(w.shape[1] // world_size, dim=1)",
              "v.tensor_split(world_size, dim=0)": "v.split(len(v) // world_size)"}),
        Slip(FEWER_PARTS, {"w.tensor_split": "w.chunk", "v.tensor_split": "v.chunk"}),
        Slip(FEWER_PARTS,
             {"w.tensor_split(world_size, dim=1)[rank]": "w.chunk(world_size, dim=1)\n"
              "if rank >= len(columns):\n    return torch.zeros(len(x), v.shape[1])",
              "v.tensor_split(world_size, dim=0)[rank]": "v.chunk(world_size)[rank]",
              "x @ columns": "x @ columns[rank]"}, hangs=True),
        # The relu.
        Slip("The relu between the two layers is missing.",
             {"torch.relu(x @ columns)": "x @ columns"}),
        Slip("You took the relu of the output. It stands between the two layers only.",
             {"return out": "return torch.relu(out)"},
             {"hidden @ rows": "torch.relu(hidden @ rows)"}),
        Slip("You took the relu of the weights. It belongs around the first product: `relu(x @ "
             "w)`.", {"torch.relu(x @ columns)": "x @ torch.relu(columns)"}),
        # The sum.
        Slip("This is each rank's partial sum of the output: it lacks what the hidden columns of "
             "the other ranks contribute. Add the partial sums over the ranks.",
             {"dist.all_reduce(out)": ""}),
        Slip("You divided by the world size. The ranks hold different terms of one sum: add them, "
             "and divide by nothing.", {"return out": "return out / world_size"}),
        Slip("You summed the hidden activations over the ranks. Each rank has other columns of "
             "them, which do not add up to anything: multiply with the second layer first.",
             {"torch.relu(x @ columns)": "reduced(torch.relu(x @ columns))",
              "dist.all_reduce(out)": ""},
             {"torch.relu(x @ columns)": "reduced(torch.relu(x @ columns))"},
             {"torch.relu(x @ columns)": "torch.relu(reduced(x @ columns))"}),
        Slip("`reduce` gives the sum to rank 0 alone. Every rank needs the output: `all_reduce`.",
             {"dist.all_reduce(out)": "dist.reduce(out, dst=0)"}),
        Slip("You all-reduced a copy: the sum never reaches the tensor that you return.",
             {"all_reduce(out)": "all_reduce(out.clone())"}),
    )


def layers(hidden=50):
    """x (3, 12), w (12, 50) and v (50, 12). Only 2 ranks divide h evenly, and all divide d.

    Half of the hidden activations has more bytes than a rank may send.
    """
    return seeded("x", 3, 12), seeded("w", 12, hidden), seeded("v", hidden, 12)


def my(tensor, dim):
    """This rank's part along the dimension."""
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def joined(part, dim=1):
    """The parts of all ranks in one tensor; they may differ in size."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts, dim)
