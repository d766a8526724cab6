"""The gradients of two cut layers, of which one has to be added up."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import reduced, seeded  # noqa: F401
from dplab.exercises.tensor_parallel_sum import gathered  # noqa: F401
from dplab.exercises.two_layers_one_sum import joined, layers  # noqa: F401
from dplab.measure import CallLog, sent_bytes


def two_layers_backward(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    to_hidden = g @ rows.T * (hidden > 0)
    to_columns = x.T @ to_hidden
    to_rows = hidden.T @ g
    to_x = to_hidden @ columns.T
    dist.all_reduce(to_x)
    return to_x, to_columns, to_rows


class TwoLayersBackward(Exercise):
    number = "B.3"
    title = "The backward of the two layers"
    minutes = 10
    solution = staticmethod(two_layers_backward)

    def trial(self, attempt):
        inputs = given_to(dist.get_rank(), dist.get_world_size())
        before = [tensor.clone() for tensor in inputs]
        with CallLog() as log:
            to_x, to_columns, to_rows = attempt(*inputs)
        alone = dist.get_world_size() == 1  # it has nothing to send
        return {"the gradient of `x`": to_x, "the gradient of `columns`": to_columns,
                "the gradient of `rows`": to_rows,
                "that the inputs are not changed": all(map(torch.equal, inputs, before)),
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of collectives": 0 if alone else log.count()}

    def expected(self, world_size):
        x, w, v = (tensor.requires_grad_() for tensor in layers())
        (torch.relu(x @ w) @ v).backward(output_gradient())
        return [{"the gradient of `x`": x.grad, "the gradient of `columns`": to_columns,
                 "the gradient of `rows`": to_rows, "that the inputs are not changed": True,
                 "the number of bytes that this rank sends": AtMost(
                     2 * x.nbytes, "one all-reduce of the gradient of `x` sends no more than that, "
                     "on however many ranks; no gradient needs the output, or what is another "
                     "rank's", exact=False),
                 "the number of collectives": AtMost(
                     1, "one is enough, for the gradient of `x`; no gradient needs the output",
                     exact=False)}
                for to_columns, to_rows in zip(w.grad.tensor_split(world_size, dim=1),
                                               v.grad.tensor_split(world_size), strict=True)]

    def parts(self, world_size, rank):
        gradients = [of_one_rank(*given_to(other, world_size)) for other in range(world_size)]
        names, own = ("`x`", "`columns`", "`rows`"), given_to(rank, world_size)[:3]
        return {f"the gradient of {name}": {f"{name} itself": tensor} | {
                    f"rank {other}'s": gradient for other, gradient in enumerate(of_ranks)
                    if gradient.shape == tensor.shape}
                for name, tensor, of_ranks in zip(names, own, zip(*gradients, strict=True),
                                                  strict=True)}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "Write the five products of `pair_backward` as einsums. h is the letter that is cut. In "
        "which of the five is h the letter that is summed, and missing in the result?",
        "In forward the sum over h is the second product, and B.2 has done it. In backward it is "
        "the product that makes the gradient of `x`. The others have h in their result: each rank "
        "has its part of it, complete.",
        "`to_x, to_columns, to_rows = pair_backward(x, columns, rows, g)`, then "
        "`dist.all_reduce(to_x)`; return the three.",
    )
    slips = (
        # What is added up.
        Slip("The gradient of `x` is this rank's partial sum: `x` goes into the hidden columns of "
             "*all* ranks. Add the partial sums over the ranks.", {"dist.all_reduce(to_x)": ""}),
        Slip("You divided the gradient of `x` by the world size. The ranks hold different terms of "
             "one sum: add them, and divide by nothing.",
             {"return to_x": "return to_x / dist.get_world_size()"}),
        Slip("You combined gradients of weights over the ranks, as data parallelism does. Here "
             "each rank has *other* columns and rows, so their gradients do not belong together. "
             "Each rank sees the whole batch, so its own are complete.",
             {"x.T @ to_hidden": "reduced(x.T @ to_hidden)"},
             {"hidden.T @ g": "reduced(hidden.T @ g)"},
             *({"x.T @ to_hidden": f"reduced(x.T @ to_hidden){mean}",
                "hidden.T @ g": f"reduced(hidden.T @ g){mean}", "dist.all_reduce(to_x)": to_x}
               for mean, to_x in (("", "dist.all_reduce(to_x)"), ("", ""),
                                  (" / dist.get_world_size()", ""),
                                  (" / dist.get_world_size()", "dist.all_reduce(to_x)"),
                                  (" / dist.get_world_size()",
                                   "to_x = reduced(to_x) / dist.get_world_size()")))),
        Slip("Where the relu gives 0, its slope is 0, and you go on with another one, such as −1. "
             "It is 1 where the hidden number is positive, and 0 elsewhere.",
             {"(hidden > 0)": "(x @ columns).sign()"}),
        Slip("`g` counts N times too often, or too seldom, in all three gradients. It is the "
             "gradient of the output, the same on every rank, and complete: nothing has to be "
             "added or divided.",
             {"hidden = torch": "g = reduced(g.clone())\nhidden = torch"},
             {"hidden = torch": "reduced(g)\nhidden = torch"},
             {"hidden = torch": "g = g / dist.get_world_size()\nhidden = torch"}),
        Slip("You summed hidden values, or their gradient, over the ranks. Each rank has other "
             "hidden columns, which do not add up to anything.",
             {"= g @ rows.T * (hidden > 0)": "= reduced(g @ rows.T * (hidden > 0))",
              "dist.all_reduce(to_x)": ""},
             {"= g @ rows.T * (hidden > 0)": "= reduced(g @ rows.T * (hidden > 0))"},
             {"torch.relu(x @ columns)": "torch.relu(reduced(x @ columns))"}),
        Slip("You put the ranks' gradients of `x` side by side. Each has the full shape, and lacks "
             "the terms of the other ranks: add them.",
             {"dist.all_reduce(to_x)": "to_x = torch.cat(gathered(to_x), dim=1)"},
             {"dist.all_reduce(to_x)": "to_x = torch.cat(gathered(to_x))"}),
        Slip("Every rank received all weights, and returns the gradients of all. A rank needs "
             "those of its own columns and rows.",
             {"hidden = torch": "columns, rows = joined(columns), joined(rows, dim=0)\n"
                                "hidden = torch", "dist.all_reduce(to_x)": ""}),
        Slip("`reduce` gives the sum to rank 0 alone. Every rank goes on with the gradient of `x` "
             "in the layers below: `all_reduce`.",
             {"dist.all_reduce(to_x)": "dist.reduce(to_x, dst=0)"}),
        Slip("You all-reduced a copy: the sum never reaches the gradient that you return.",
             {"all_reduce(to_x)": "all_reduce(to_x.clone())"}),
        # The relu.
        Slip("The slope of relu is missing: where a hidden value is 0, no gradient goes back.",
             {" * (hidden > 0)": ""}),
        Slip("You multiplied with the hidden values. The slope of relu is 1 where they are above "
             "0, and 0 elsewhere: `hidden > 0`.", {"(hidden > 0)": "hidden"}),
        Slip("You left out the relu of the hidden values. The gradient of the second weights needs "
             "what the second layer was given: `relu(x @ columns)`.",
             {"torch.relu(x @ columns)": "x @ columns"}),
        Slip("You set `g` to 0 where the *output* is not above 0. The relu stands between the "
             "layers, and the output has none: `g @ rows.T * (hidden > 0)`.",
             *({"to_hidden = g": f"g = g * ({output} > 0)\nto_hidden = g", " * (hidden > 0)": slope}
               for output in ("hidden @ rows", "reduced(hidden @ rows)")
               for slope in ("", " * (hidden > 0)"))),
        # What is returned.
        Slip("The order is another: the gradient of `x` comes first, then that of the columns, "
             "then that of the rows.",
             {"return to_x, to_columns, to_rows": "return to_columns, to_rows, to_x"},
             {"return to_x, to_columns, to_rows": "return to_x, to_rows, to_columns"}),
    )


def output_gradient():
    return seeded("gradient of the output", 3, 12)


def given_to(rank, world_size):
    """x, this rank's columns of w and rows of v, and the gradient of the output."""
    x, w, v = layers()
    return (x, w.tensor_split(world_size, dim=1)[rank].contiguous(),
            v.tensor_split(world_size)[rank], output_gradient())


def of_one_rank(x, columns, rows, g):
    """The gradients of a rank that adds nothing up."""
    hidden = torch.relu(x @ columns)
    to_hidden = g @ rows.T * (hidden > 0)
    return to_hidden @ columns.T, x.T @ to_hidden, hidden.T @ g
