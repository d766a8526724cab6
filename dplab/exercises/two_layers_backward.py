"""Exercise B.3: the backward of the two layers."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.exercises.tensor_parallel_sum import _gathered
from dplab.exercises.two_layers_one_sum import _joined, _two_layers
from dplab.measure import CallLog, sent_bytes


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
    number = "B.3"
    title = "The backward of the two layers"
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
