"""Exercise B.2: two layers with a relu between them."""

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.exercises.tensor_parallel_sum import _EVERY_OUTPUT, _gathered
from dplab.measure import CallLog, sent_bytes


def two_layers(x, w, v):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    columns = w.tensor_split(world_size, dim=1)[rank]
    rows = v.tensor_split(world_size, dim=0)[rank]
    out = torch.relu(x @ columns) @ rows
    dist.all_reduce(out)
    return out


def _mine(tensor, dim):
    """This rank's part along the dimension."""
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def _hidden(x, w):
    """This rank's columns of the hidden activations."""
    return torch.relu(x @ _mine(w, 1))


def _whole_on_every_rank(x, w, v):
    return torch.relu(x @ w) @ v


def _first_layer_whole(x, w, v):
    return reduced(_mine(torch.relu(x @ w), 1) @ _mine(v, 0))


def _first_layer_whole_and_columns_of_v(x, w, v):
    hidden, widths = torch.relu(x @ w), [each.shape[1] for each in v.tensor_split(
        dist.get_world_size(), dim=1)]
    start = sum(widths[:dist.get_rank()])
    out = torch.zeros(len(x), v.shape[1])
    out[:, start:start + widths[dist.get_rank()]] = hidden @ _mine(v, 1)
    return reduced(out)


def _second_layer_whole(x, w, v):
    return torch.relu(reduced(_mine(x, 1) @ _mine(w, 0))) @ v


def _rows_first(x, w, v):
    partial = _mine(x, 1) @ _mine(w, 0)
    return reduced(torch.relu(partial) @ v)


def _rows_first_and_each_its_rows(x, w, v):
    hidden = torch.relu(_mine(x, 1) @ _mine(w, 0))
    return reduced(_mine(hidden, 1) @ _mine(v, 0))


def _rows_twice(x, w, v):
    hidden = torch.relu(reduced(_mine(x, 1) @ _mine(w, 0)))
    return reduced(_mine(hidden, 1) @ _mine(v, 0))


def _columns_twice(x, w, v):
    hidden = _joined(_hidden(x, w))
    return _joined(hidden @ _mine(v, 1))


def _columns_gathered(x, w, v):
    return _joined(_hidden(x, w)) @ v


def _columns_gathered_and_rows(x, w, v):
    return reduced(_mine(_joined(_hidden(x, w)), 1) @ _mine(v, 0))


def _joined_as_objects(part):
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, part)
    return torch.cat(pieces, dim=1)


def _columns_gathered_as_objects(x, w, v):
    return _joined_as_objects(_hidden(x, w)) @ v


def _columns_gathered_as_objects_and_rows(x, w, v):
    return reduced(_mine(_joined_as_objects(_hidden(x, w)), 1) @ _mine(v, 0))


def _columns_twice_as_objects(x, w, v):
    return _joined_as_objects(_joined_as_objects(_hidden(x, w)) @ _mine(v, 1))


def _hidden_filled_with_zeros(x, w, v):
    widths = [part.shape[1] for part in w.tensor_split(dist.get_world_size(), dim=1)]
    start = sum(widths[:dist.get_rank()])
    hidden = torch.zeros(len(x), w.shape[1])
    hidden[:, start:start + widths[dist.get_rank()]] = _hidden(x, w)
    return reduced(_mine(reduced(hidden), 1) @ _mine(v, 0))


def _no_sum(x, w, v):
    return _hidden(x, w) @ _mine(v, 0)


def _mean(x, w, v):
    return reduced(_hidden(x, w) @ _mine(v, 0)) / dist.get_world_size()


def _hidden_summed(x, w, v):
    return reduced(_hidden(x, w)) @ _mine(v, 0)


def _relu_at_the_end(x, w, v):
    return torch.relu(reduced(x @ _mine(w, 1) @ _mine(v, 0)))


def _relu_of_the_weights(x, w, v):
    return reduced(x @ torch.relu(_mine(w, 1)) @ _mine(v, 0))


def _outputs_gathered(x, w, v):
    return torch.stack(_gathered(_hidden(x, w) @ _mine(v, 0))).sum(dim=0)


def _no_relu(x, w, v):
    return reduced(x @ _mine(w, 1) @ _mine(v, 0))


def _relu_once_more(x, w, v):
    return torch.relu(two_layers(x, w, v))


def _other_rows_than_columns(x, w, v):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    columns = w[:, rank::world_size]
    return reduced(torch.relu(x @ columns) @ _mine(v, 0)[:columns.shape[1]])


def _remainder_dropped(x, w, v):
    size = w.shape[1] // dist.get_world_size()
    part = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return reduced(torch.relu(x @ w[:, part]) @ v[part])


def _batch_cut(x, w, v):
    return _joined(torch.relu(_mine(x, 0) @ w) @ v, dim=0)


def _batch_cut_and_summed(x, w, v):
    out = torch.zeros(len(x), v.shape[1])
    _mine(out, 0).copy_(torch.relu(_mine(x, 0) @ w) @ v)
    return reduced(out)


def _sum_on_one_rank(x, w, v):
    out = _hidden(x, w) @ _mine(v, 0)
    dist.reduce(out, dst=0)
    return out


def _copy_summed(x, w, v):
    out = _hidden(x, w) @ _mine(v, 0)
    dist.all_reduce(out.clone())
    return out


def _nothing_returned(x, w, v):
    return dist.all_reduce(_hidden(x, w) @ _mine(v, 0))


def _one_rank_calls(x, w, v):
    out = _hidden(x, w) @ _mine(v, 0)
    if dist.get_rank() == 0:
        dist.all_reduce(out)
    return out


def _joined(part, dim=1):
    """The parts of all ranks in one tensor; they may differ in size."""
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, part.shape[dim])
    shape = [max(sizes) if each == dim else size for each, size in enumerate(part.shape)]
    padded = torch.zeros(shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    pieces = _gathered(padded)
    return torch.cat([piece.narrow(dim, 0, size) for piece, size in
                      zip(pieces, sizes, strict=True)], dim)

_RELU_OF_PARTS = ("You cut the first layer along d, so each rank has partial sums of the hidden "
                  "activations, and you took their relu. The relu of a sum is not the sum of the "
                  "relus. Cut the first layer so that each rank has *complete* hidden "
                  "activations, though not all of them.")

_HIDDEN_SENT = ("The output is right, and you sent the hidden activations. The second layer can be "
                "cut so that a rank needs only the hidden columns that it has already.")

_TWO_SUMS = ("The output is right, with a sum in the middle. You cut both layers along the letter "
             "that is summed. Cut the first one so that its results are complete at once.")

_COMPUTED_TWICE = ("The output is right, but each rank computed more than its share: every rank "
                   "multiplied with the whole of `w` or of `v`. Each rank is to use a part of "
                   "both.")

_ROWS_OF_X = ("You cut the batch. That is data parallelism: each rank needs the whole of both "
              "matrices, and here a batch of few rows cannot be divided evenly. Cut `w` and `v`.")


class TwoLayers(Exercise):
    number = "B.2"
    title = "Two layers with a relu between them"
    minutes = 15
    hints = (
        "Between the two products stands a relu. Is the relu of a sum the sum of the relus? Which "
        "cut of `w` gives a rank hidden activations that are complete?",
        "A rank that has some columns of `w` has the same columns of the hidden activations. Which "
        "part of `v` do just these columns multiply?",
        "`torch.relu(x @ columns) @ rows`, with this rank's columns of `w` and the same rows of "
        "`v`, is a partial sum of the output. One all-reduce makes it whole.",
    )
    solution = staticmethod(two_layers)
    mistakes = (
        Mistake(_rows_first, _RELU_OF_PARTS),
        Mistake(_rows_first_and_each_its_rows, _RELU_OF_PARTS),
        Mistake(_rows_twice, _TWO_SUMS),
        Mistake(_columns_twice, _HIDDEN_SENT),
        Mistake(_columns_gathered, _HIDDEN_SENT),
        Mistake(_columns_gathered_and_rows, _HIDDEN_SENT),
        Mistake(_columns_twice_as_objects, _HIDDEN_SENT),
        Mistake(_columns_gathered_as_objects, _HIDDEN_SENT),
        Mistake(_columns_gathered_as_objects_and_rows, _HIDDEN_SENT),
        Mistake(_hidden_filled_with_zeros, _HIDDEN_SENT),
        Mistake(_whole_on_every_rank, _COMPUTED_TWICE),
        Mistake(_first_layer_whole, _COMPUTED_TWICE),
        Mistake(_first_layer_whole_and_columns_of_v, _COMPUTED_TWICE),
        Mistake(_second_layer_whole, _COMPUTED_TWICE),
        Mistake(_batch_cut, _ROWS_OF_X),
        Mistake(_batch_cut_and_summed, _ROWS_OF_X),
        Mistake(_no_sum, "This is each rank's partial sum of the output: it lacks what the hidden "
                "columns of the other ranks contribute. Add the partial sums over the ranks."),
        Mistake(_mean, "You divided by the world size. The ranks hold different terms of one sum: "
                "add them, and divide by nothing."),
        Mistake(_hidden_summed, "You summed the hidden activations over the ranks. Each rank has "
                "other columns of them, which do not add up to anything: multiply with the second "
                "layer first."),
        Mistake(_relu_at_the_end, "The relu stands between the two layers, before the second "
                "product. You took it of the output."),
        Mistake(_relu_of_the_weights, "You took the relu of the weights. It belongs around the "
                "first product: `relu(x @ w)`."),
        Mistake(_outputs_gathered, _EVERY_OUTPUT),
        Mistake(_no_relu, "The relu between the two layers is missing."),
        Mistake(_relu_once_more, "You took the relu of the output too. It stands between the two "
                "layers only."),
        Mistake(_other_rows_than_columns, "A rank multiplies hidden columns with other rows than "
                "theirs: you cut `w` in turn and `v` in one piece. Cut both in the same way."),
        Mistake(_remainder_dropped, "h does not always divide evenly: with `h // world_size` "
                "columns each, the last ones are computed by nobody. `tensor_split` makes parts "
                "for any number of ranks."),
        Mistake(_sum_on_one_rank, "`reduce` gives the sum to rank 0 alone. Every rank needs the "
                "output: `all_reduce`."),
        Mistake(_copy_summed, "You all-reduced a copy: the sum never reaches the tensor that you "
                "return."),
        Mistake(_nothing_returned, "`dist.all_reduce` changes its tensor in place and returns "
                "None. Keep the tensor, and return that."),
        Mistake(_one_rank_calls, "Only rank 0 calls the all-reduce, and waits for ever: every rank "
                "has to call it.", hangs=True),
    )

    def parts(self, world_size, rank):
        x, w, v = _two_layers()
        pieces = zip(w.tensor_split(world_size, dim=1), v.tensor_split(world_size), strict=True)
        return {"the output": [torch.relu(x @ columns) @ rows for columns, rows in pieces]}

    def trial(self, attempt):
        inputs = _two_layers()
        before = [tensor.clone() for tensor in inputs]
        with CallLog() as log, FlopCounterMode(display=False) as flops:
            out = attempt(*inputs)
        alone = dist.get_world_size() == 1  # it has nothing to send: the output on two speaks first
        return {"the output": out,
                "that `x`, `w` and `v` are not changed": all(map(torch.equal, inputs, before)),
                "the number of multiplications in this rank's matrix products":
                flops.get_total_flops() // 2,
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of collectives": 0 if alone else log.count()}

    def expected(self, world_size):
        x, w, v = _two_layers()
        output = torch.relu(x @ w) @ v
        columns = -(-w.shape[1] // world_size)
        return {"the output": output, "that `x`, `w` and `v` are not changed": True,
                "the number of multiplications in this rank's matrix products": AtMost(
                    2 * len(x) * len(w) * columns, "a rank's share of `w` and of `v` needs no "
                    "more", exact=False),
                "the number of bytes that this rank sends": AtMost(
                    2 * output.nbytes, "one all-reduce of the output sends no more than that, on "
                    "however many ranks", exact=False),
                "the number of collectives": AtMost(1, "one is enough")}


def _two_layers():
    """x (3, 5), w (5, 26) and v (26, 5). Only 2 ranks divide h evenly."""
    return seeded("x", 3, 5), seeded("w", 5, 26), seeded("v", 26, 5)
