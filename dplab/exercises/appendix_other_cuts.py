"""Exercises of the appendix on other cuts: layers of which each rank has a part, and how small."""

import math

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.trials import of_cases, reduced, seeded
from dplab.measure import CallLog, sent_bytes

# B.1


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
    slug = "tensor-parallel-sum"
    number = "B.1"
    title = "A layer whose d is cut"
    name = "einsum_split_over_d"
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


# B.2


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
    slug = "two-layers-one-sum"
    number = "B.2"
    title = "Two layers with a relu between them"
    name = "two_layers"
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


# B.3


def two_layers_backward(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    to_hidden = g @ rows.T * (hidden > 0)
    to_x = to_hidden @ columns.T
    dist.all_reduce(to_x)
    return to_x, x.T @ to_hidden, hidden.T @ g


def _own_gradients(x, columns, rows, g):
    """Of one process that knows nothing of the others."""
    hidden = torch.relu(x @ columns)
    to_hidden = g @ rows.T * (hidden > 0)
    return to_hidden @ columns.T, x.T @ to_hidden, hidden.T @ g


def _all_three_summed(*inputs):
    return tuple(reduced(gradient) for gradient in _own_gradients(*inputs))


def _weights_summed(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return to_x, reduced(to_columns), reduced(to_rows)


def _weights_averaged(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    ranks = dist.get_world_size()
    return to_x, reduced(to_columns) / ranks, reduced(to_rows) / ranks


def _first_weights_summed(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return reduced(to_x), reduced(to_columns), to_rows


def _second_weights_summed(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return reduced(to_x), to_columns, reduced(to_rows)


def _mean_of_to_x(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return reduced(to_x) / dist.get_world_size(), to_columns, to_rows


def _all_three_averaged(*inputs):
    ranks = dist.get_world_size()
    return tuple(reduced(gradient) / ranks for gradient in _own_gradients(*inputs))


def _g_summed(x, columns, rows, g):
    return two_layers_backward(x, columns, rows, reduced(g.clone()))


def _g_summed_alone(x, columns, rows, g):
    return _own_gradients(x, columns, rows, reduced(g.clone()))


def _g_averaged(x, columns, rows, g):
    return two_layers_backward(x, columns, rows, g / dist.get_world_size())


def _hidden_gradient_summed(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    to_hidden = reduced(g @ rows.T * (hidden > 0))
    return to_hidden @ columns.T, x.T @ to_hidden, hidden.T @ g


def _hidden_recomputed_and_summed(x, columns, rows, g):
    hidden = torch.relu(reduced(x @ columns))
    to_hidden = g @ rows.T * (hidden > 0)
    return reduced(to_hidden @ columns.T), x.T @ to_hidden, hidden.T @ g


def _forward_again(x, columns, rows, g):
    reduced(torch.relu(x @ columns) @ rows)
    return two_layers_backward(x, columns, rows, g)


def _slope_of_the_output(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    g = g * (reduced(hidden @ rows) > 0)
    to_hidden = g @ rows.T
    return reduced(to_hidden @ columns.T), x.T @ to_hidden, hidden.T @ g


def _slope_of_the_output_too(x, columns, rows, g):
    output = reduced(torch.relu(x @ columns) @ rows)
    return two_layers_backward(x, columns, rows, g * (output > 0))


def _slope_of_the_partial_output(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    g = g * (hidden @ rows > 0)
    to_hidden = g @ rows.T
    return reduced(to_hidden @ columns.T), x.T @ to_hidden, hidden.T @ g


def _slope_of_the_partial_output_too(x, columns, rows, g):
    output = torch.relu(x @ columns) @ rows
    return two_layers_backward(x, columns, rows, g * (output > 0))


def _no_slope(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    to_hidden = g @ rows.T
    return reduced(to_hidden @ columns.T), x.T @ to_hidden, hidden.T @ g


def _times_hidden(x, columns, rows, g):
    hidden = torch.relu(x @ columns)
    to_hidden = g @ rows.T * hidden
    return reduced(to_hidden @ columns.T), x.T @ to_hidden, hidden.T @ g


def _hidden_without_relu(x, columns, rows, g):
    hidden = x @ columns
    to_hidden = g @ rows.T * (hidden > 0)
    return reduced(to_hidden @ columns.T), x.T @ to_hidden, hidden.T @ g


def _to_x_gathered(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return torch.stack(_gathered(to_x)).sum(dim=0), to_columns, to_rows


def _to_x_side_by_side(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return torch.cat(_gathered(to_x), dim=1), to_columns, to_rows


def _weights_gathered(x, columns, rows, g):
    to_x, *_ = _own_gradients(x, _joined(columns, 1), _joined(rows, 0), g)
    return to_x, *_own_gradients(x, columns, rows, g)[1:]


def _weights_of_all_returned(x, columns, rows, g):
    return _own_gradients(x, _joined(columns, 1), _joined(rows, 0), g)


def _to_x_on_one_rank(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    dist.reduce(to_x, dst=0)
    return to_x, to_columns, to_rows


def _copy_of_to_x_summed(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    dist.all_reduce(to_x.clone())
    return to_x, to_columns, to_rows


def _what_the_sum_returns(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    return dist.all_reduce(to_x), to_columns, to_rows


def _weights_first(*inputs):
    to_x, to_columns, to_rows = two_layers_backward(*inputs)
    return to_columns, to_rows, to_x


def _rank_0_sums(*inputs):
    to_x, to_columns, to_rows = _own_gradients(*inputs)
    if dist.get_rank() == 0:
        dist.all_reduce(to_x)
    return to_x, to_columns, to_rows


_AS_IN_DATA_PARALLEL = ("You summed gradients of weights over the ranks, as data parallelism does. "
                        "Here each rank has *other* columns and rows, so their gradients do not "
                        "belong together. Each rank sees the whole batch, so its own are complete.")
_G_IS_WHOLE = ("You combined `g` over the ranks. It is the gradient of the output, the same on "
               "every rank, and complete: nothing has to be added or divided.")
_SLOPE_OF_OUTPUT = ("You set `g` to 0 where the *output* is not above 0. The relu stands between "
                    "the layers, and the output has none: `g @ rows.T * (hidden > 0)`.")
_OTHER_COLUMNS = ("You summed hidden values, or their gradient, over the ranks. Each rank has "
                  "other hidden columns, which do not add up to anything.")


class TwoLayersBackward(Exercise):
    slug = "two-layers-backward"
    number = "B.3"
    title = "The backward of the two layers"
    name = "two_layers_backward"
    minutes = 10
    hints = (
        "Write the five products of `pair_backward` as einsums. h is the letter that is cut. In "
        "which of the five is h the letter that is summed, and missing in the result?",
        "In forward the sum over h is the second product, and B.2 has done it. In backward it is "
        "the product that makes the gradient of `x`. The others have h in their result: each rank "
        "has its part of it, complete.",
        "`to_x, to_columns, to_rows = pair_backward(x, columns, rows, g)`, then "
        "`dist.all_reduce(to_x)`; return the three.",
    )
    solution = staticmethod(two_layers_backward)
    mistakes = (
        Mistake(_own_gradients, "The gradient of `x` is this rank's partial sum: `x` goes into the "
                "hidden columns of *all* ranks. Add the partial sums over the ranks."),
        Mistake(_all_three_summed, _AS_IN_DATA_PARALLEL),
        Mistake(_all_three_averaged, _AS_IN_DATA_PARALLEL),
        Mistake(_weights_summed, _AS_IN_DATA_PARALLEL),
        Mistake(_weights_averaged, _AS_IN_DATA_PARALLEL),
        Mistake(_first_weights_summed, _AS_IN_DATA_PARALLEL),
        Mistake(_second_weights_summed, _AS_IN_DATA_PARALLEL),
        Mistake(_mean_of_to_x, "You divided the gradient of `x` by the world size. The ranks hold "
                "different terms of one sum: add them, and divide by nothing."),
        Mistake(_g_summed, _G_IS_WHOLE),
        Mistake(_g_summed_alone, _G_IS_WHOLE),
        Mistake(_g_averaged, _G_IS_WHOLE),
        Mistake(_hidden_gradient_summed, _OTHER_COLUMNS),
        Mistake(_hidden_recomputed_and_summed, _OTHER_COLUMNS),
        Mistake(_no_slope, "The slope of relu is missing: where a hidden value is 0, no gradient "
                "goes back."),
        Mistake(_slope_of_the_output, _SLOPE_OF_OUTPUT),
        Mistake(_slope_of_the_output_too, _SLOPE_OF_OUTPUT),
        Mistake(_slope_of_the_partial_output, _SLOPE_OF_OUTPUT),
        Mistake(_slope_of_the_partial_output_too, _SLOPE_OF_OUTPUT),
        Mistake(_forward_again, "The gradients are right, but you also computed the output, with "
                "its all-reduce. No gradient needs the output: `hidden` is enough."),
        Mistake(_times_hidden, "You multiplied with the hidden values. The slope of relu is 1 "
                "where they are above 0, and 0 elsewhere: `hidden > 0`."),
        Mistake(_hidden_without_relu, "You left out the relu of the hidden values. The gradient of "
                "the second weights needs what the second layer was given: `relu(x @ columns)`."),
        Mistake(_to_x_gathered, "The gradients are right, but each rank received every other "
                "rank's partial sum. An all-reduce sends less than two tensors, whatever N is."),
        Mistake(_to_x_side_by_side, "You put the ranks' gradients of `x` side by side. Each has "
                "the full shape, and lacks the terms of the other ranks: add them."),
        Mistake(_weights_gathered, "The gradients are right, but every rank received all weights "
                "and computed with them: nothing is cut."),
        Mistake(_weights_of_all_returned, "Every rank received all weights, and returns the "
                "gradients of all. A rank needs those of its own columns and rows."),
        Mistake(_to_x_on_one_rank, "`reduce` gives the sum to rank 0 alone. Every rank goes on "
                "with the gradient of `x` in the layers below: `all_reduce`."),
        Mistake(_copy_of_to_x_summed, "You all-reduced a copy: the sum never reaches the gradient "
                "that you return."),
        Mistake(_what_the_sum_returns, "`dist.all_reduce` changes its tensor in place and returns "
                "None. Keep the tensor, and return that."),
        Mistake(_weights_first, "The order is another: the gradient of `x` comes first, then that "
                "of the columns, then that of the rows."),
        Mistake(_rank_0_sums, "Only rank 0 calls the all-reduce, and waits for ever: every rank "
                "has to call it.", hangs=True),
    )

    def parts(self, world_size, rank):
        own = [_own_gradients(*_given(other, world_size)) for other in range(world_size)]
        return {"the gradient of `x`": [to_x for to_x, _, _ in own]}

    def trial(self, attempt):
        inputs = _given(dist.get_rank(), dist.get_world_size())
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
        x, w, v, g = (tensor.requires_grad_() for tensor in (*_two_layers(), _output_gradient()))
        (torch.relu(x @ w) @ v).backward(g.detach())
        parts = zip(w.grad.tensor_split(world_size, 1), v.grad.tensor_split(world_size),
                    strict=True)
        return [{"the gradient of `x`": x.grad, "the gradient of `columns`": to_columns,
                 "the gradient of `rows`": to_rows, "that the inputs are not changed": True,
                 "the number of bytes that this rank sends": AtMost(
                     2 * x.nbytes, "no rank needs to send more than that, on however many ranks",
                     exact=False),
                 "the number of collectives": AtMost(1, "one is enough", exact=False)}
                for to_columns, to_rows in parts]


def _output_gradient():
    return seeded("gradient of the output", 3, 5)


def _given(rank, world_size):
    """x, this rank's columns of w and rows of v, and the gradient of the output."""
    x, w, v = _two_layers()
    return (x, w.tensor_split(world_size, 1)[rank].contiguous(), v.tensor_split(world_size)[rank],
            _output_gradient())


# B.4


def ranks_at_equal_times(b, d, h, flops, bandwidth, element):
    # Of a rank: 2 · 2·b·d·h / N operations, and 2(N−1)/N · element·b·d bytes. Everything but N − 1
    # and h stands on both sides.
    return 1 + 2 * h * bandwidth / (element * flops)


def _limit(h, flops, bandwidth, element, *, products=2, passes=2):
    """N of products · 2·b·d·h / N / C = passes · (N−1)/N · element·b·d / W."""
    return 1 + 2 * products / passes * h * bandwidth / (element * flops)


def _one_product(b, d, h, flops, bandwidth, element):
    return _limit(h, flops, bandwidth, element, products=1)


def _backward_too(b, d, h, flops, bandwidth, element):
    return _limit(h, flops, bandwidth, element, products=6)


def _backward_and_its_sum_too(b, d, h, flops, bandwidth, element):
    return _limit(h, flops, bandwidth, element, products=6, passes=4)


def _two_sums(b, d, h, flops, bandwidth, element):
    return _limit(h, flops, bandwidth, element, passes=4)


def _no_additions(b, d, h, flops, bandwidth, element):
    return 1 + h * bandwidth / (element * flops)


def _half_an_all_reduce(b, d, h, flops, bandwidth, element):
    return _limit(h, flops, bandwidth, element, passes=1)


def _two_of_many_ranks(b, d, h, flops, bandwidth, element):
    return 2 * h * bandwidth / (element * flops)


def _output_sent_once(b, d, h, flops, bandwidth, element):
    return 4 * h * bandwidth / (element * flops)


def _products_not_divided(b, d, h, flops, bandwidth, element):
    share = 2 * h * bandwidth / (element * flops)  # (N−1)/N, if each rank did all the work
    return 1 / (1 - share)


def _sum_divided_again(b, d, h, flops, bandwidth, element):
    ratio = 2 * h * bandwidth / (element * flops)  # (N−1)/N
    return (1 + math.sqrt(1 + 4 * ratio)) / 2


def _hidden_sent(b, d, h, flops, bandwidth, element):
    return 1 + 2 * d * bandwidth / (element * flops)


def _weights_sent(b, d, h, flops, bandwidth, element):
    return 1 + b * bandwidth / (element * flops)


def _numbers_not_bytes(b, d, h, flops, bandwidth, element):
    return ranks_at_equal_times(b, d, h, flops, bandwidth, 1)


def _always_bf16(b, d, h, flops, bandwidth, element):
    return ranks_at_equal_times(b, d, h, flops, bandwidth, 2)


def _bits(b, d, h, flops, bandwidth, element):
    return ranks_at_equal_times(b, d, h, flops, bandwidth / 8, element)


def _upside_down(b, d, h, flops, bandwidth, element):
    return 1 + element * flops / (2 * h * bandwidth)


def _rounded(*sizes):
    return int(ranks_at_equal_times(*sizes))


def _columns_of_a_rank(b, d, h, flops, bandwidth, element):
    return h / ranks_at_equal_times(b, d, h, flops, bandwidth, element)


_HALF = ("Your N − 1 is half of what it should be. Did you count one product? Forward has two, one "
         "for each layer. Or multiplications alone? Each comes with an addition. Or two "
         "all-reduces? One serves both layers.")
_ONE_LESS = ("Your answer is one too small. Either it is N − 1, or you took 2 for 2(N−1)/N, which "
             "is right for many ranks only: keep N on both sides.")


class RanksAtEqualTimes(Calculation):
    slug = "ranks-before-the-sum-is-longer"
    number = "B.4"
    title = "Where the all-reduce takes half of the time"
    name = "ranks_at_equal_times"
    minutes = 15
    hints = (
        "Two times must be equal. Which products does a rank compute in forward, with which "
        "shapes? What does it send, and of which shape?",
        "A product of (b, d) and (d, h / N) takes `2 * b * d * h / N` operations. An all-reduce of "
        "a tensor makes a rank send 2(N−1)/N times its bytes. Write both times, and cancel what "
        "stands on both sides.",
        "`4 * b * d * h / N / flops = 2 * (N - 1) / N * element * b * d / bandwidth`: b, d and the "
        "1/N cancel. Solve for N − 1.",
    )
    solution = staticmethod(ranks_at_equal_times)
    mistakes = (
        Mistake(_one_product, _HALF),
        Mistake(_backward_too, "You counted the products of backward too, and not its all-reduce. "
                "The question is about forward alone."),
        Mistake(_backward_and_its_sum_too, "You counted backward too. The question is about "
                "forward alone."),
        Mistake(_two_sums, _HALF),
        Mistake(_no_additions, _HALF),
        Mistake(_half_an_all_reduce, "You let a rank send (N−1)/N of the output. That is a "
                "reduce-scatter alone; an all-reduce is twice that."),
        Mistake(_two_of_many_ranks, _ONE_LESS),
        Mistake(_output_sent_once, "You let a rank send the output once. In an all-reduce it sends "
                "2(N−1)/N times the tensor."),
        Mistake(_products_not_divided, "You let every rank compute the whole products. Each rank "
                "has 1/N of h, so its products take 1/N of the time."),
        Mistake(_sum_divided_again, "You divided the all-reduce among the ranks. Every rank has "
                "partial sums of the *whole* output, so it sends 2(N−1)/N times the whole."),
        Mistake(_hidden_sent, "You let the ranks send the hidden activations, of shape (b, h). "
                "What is summed is the output, of shape (b, d)."),
        Mistake(_weights_sent, "You let the ranks send gradients of weights. In forward the ranks "
                "add up the output, of shape (b, d)."),
        Mistake(_numbers_not_bytes, "You counted numbers and not bytes. An output of `b * d` "
                "numbers has `element * b * d` bytes."),
        Mistake(_always_bf16, "You took 2 bytes for every number. `element` says how many there "
                "are: 4 in fp32."),
        Mistake(_bits, "You multiplied by 8. `bandwidth` is in bytes a second already."),
        Mistake(_upside_down, "Your fraction is upside down: with a faster link the times are "
                "equal at more ranks, and with a faster device at fewer."),
        Mistake(_rounded, "You rounded. Return the number as it comes: a part of a rank is fine "
                "here."),
        Mistake(_columns_of_a_rank, "This is how many of the h columns each rank has. Return the "
                "number of ranks."),
    )
    cases = ((5120, 2048, 16384, 989e12, 450e9, 2), (300, 700, 900, 2e12, 3e9, 4),
             (64, 96, 512, 9e10, 1e9, 4), (8, 640, 30, 3e13, 5e12, 1))

    def trial(self, attempt):
        return of_cases(_ranks_fact, self.cases, attempt)

    def expected(self, world_size):
        # The same by a search: the N at which products and all-reduce take equally long.
        def searched(b, d, h, flops, bandwidth, element):
            def late(ranks):
                products = sum(2 * b * d * h / ranks for _ in ("first layer", "second layer"))
                return 2 * (ranks - 1) / ranks * element * b * d / bandwidth > products / flops

            low, high = 1.0, 1e6
            for _ in range(100):
                middle = (low + high) / 2
                low, high = (low, middle) if late(middle) else (middle, high)
            return low

        return of_cases(_ranks_fact, self.cases, searched)


def _ranks_fact(case, answer):
    b, d, h, flops, bandwidth, element = case
    return {f"`ranks_at_equal_times({b}, {d}, {h}, {flops:g}, {bandwidth:g}, {element})`": (
        float(answer) if isinstance(answer, int) else answer)}


EXERCISES = (SplitOverD, TwoLayers, TwoLayersBackward, RanksAtEqualTimes)
