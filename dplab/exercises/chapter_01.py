"""Exercises of chapter 01: split the batch, copy the model."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.trials import gradients, of_cases, reduced, seeded
from dplab.measure import CallLog, sent_bytes

# --- 1.1: the backward of two layers, on many ranks ----------------------------------------------


def data_parallel_backward(x, hidden, w2, to_logits):
    to_w2 = hidden.T @ to_logits
    to_hidden = to_logits @ w2.T
    to_w1 = x.T @ (to_hidden * (1 - hidden**2))
    for gradient in (to_w1, to_w2):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return to_w1, to_w2


def own_backward(x, hidden, w2, to_logits):
    to_hidden = to_logits @ w2.T * (1 - hidden**2)
    return x.T @ to_hidden, hidden.T @ to_logits


def only_summed(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    return reduced(to_w1), reduced(to_w2)


def divided_twice(*inputs):
    to_w1, to_w2 = data_parallel_backward(*inputs)
    return to_w1 / dist.get_world_size(), to_w2 / dist.get_world_size()


def divided_by_rows(x, *others):
    to_w1, to_w2 = only_summed(x, *others)
    return to_w1 / len(x), to_w2 / len(x)


def divided_by_all_rows(x, *others):
    to_w1, to_w2 = data_parallel_backward(x, *others)
    return to_w1 / len(x), to_w2 / len(x)


def second_layer_alone(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    return to_w1, reduced(to_w2) / dist.get_world_size()


def first_layer_alone(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    return reduced(to_w1) / dist.get_world_size(), to_w2


def divided_once(*inputs):
    to_w1, to_w2 = only_summed(*inputs)
    return to_w1, to_w2 / dist.get_world_size()


def reduced_at_the_logits(x, hidden, w2, to_logits):
    to_logits = reduced(to_logits.clone()) / dist.get_world_size()
    return own_backward(x, hidden, w2, to_logits)


def reduced_at_the_hidden(x, hidden, w2, to_logits):
    to_hidden = reduced(to_logits @ w2.T) / dist.get_world_size()
    to_w2 = reduced(hidden.T @ to_logits) / dist.get_world_size()
    return x.T @ (to_hidden * (1 - hidden**2)), to_w2


def reduced_at_the_hidden_too(x, hidden, w2, to_logits):
    to_hidden = reduced(to_logits @ w2.T) / dist.get_world_size()
    to_w2 = reduced(hidden.T @ to_logits) / dist.get_world_size()
    to_w1 = reduced(x.T @ (to_hidden * (1 - hidden**2))) / dist.get_world_size()
    return to_w1, to_w2


def reduced_after_the_slope(x, hidden, w2, to_logits):
    to_hidden = reduced(to_logits @ w2.T * (1 - hidden**2)) / dist.get_world_size()
    to_w2 = reduced(hidden.T @ to_logits) / dist.get_world_size()
    return x.T @ to_hidden, to_w2


def signal_divided_too(x, hidden, w2, to_logits):
    to_w2 = reduced(hidden.T @ to_logits) / dist.get_world_size()
    to_hidden = to_logits @ w2.T * (1 - hidden**2) / dist.get_world_size()
    return reduced(x.T @ to_hidden) / dist.get_world_size(), to_w2


def gradients_gathered(*inputs):
    means = []
    for gradient in own_backward(*inputs):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        means.append(sum(parts) / dist.get_world_size())
    return means


def by_autograd(x, hidden, w2, to_logits):
    weights = w2.detach().requires_grad_()
    (hidden @ weights).backward(to_logits)
    to_w1 = x.T @ (to_logits @ w2.T * (1 - hidden**2))
    return (reduced(to_w1) / dist.get_world_size(), reduced(weights.grad) / dist.get_world_size())


def without_tanh(x, hidden, w2, to_logits):
    to_w1, to_w2 = x.T @ (to_logits @ w2.T), hidden.T @ to_logits
    return (reduced(to_w1) / dist.get_world_size(), reduced(to_w2) / dist.get_world_size())


def hidden_not_squared(x, hidden, w2, to_logits):
    to_w1, to_w2 = x.T @ (to_logits @ w2.T * (1 - hidden)), hidden.T @ to_logits
    return (reduced(to_w1) / dist.get_world_size(), reduced(to_w2) / dist.get_world_size())


def hidden_squared(x, hidden, w2, to_logits):
    to_w1, to_w2 = x.T @ (to_logits @ w2.T * hidden**2), hidden.T @ to_logits
    return (reduced(to_w1) / dist.get_world_size(), reduced(to_w2) / dist.get_world_size())


def tanh_twice(x, hidden, w2, to_logits):
    slope = 1 - torch.tanh(hidden) ** 2
    to_w1, to_w2 = x.T @ (to_logits @ w2.T * slope), hidden.T @ to_logits
    return (reduced(to_w1) / dist.get_world_size(), reduced(to_w2) / dist.get_world_size())


def transposed(*inputs):
    to_w1, to_w2 = data_parallel_backward(*inputs)
    return to_w1.T, to_w2.T


def last_layer_first(*inputs):
    to_w1, to_w2 = data_parallel_backward(*inputs)
    return to_w2, to_w1


def what_all_reduce_returns(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    return dist.all_reduce(to_w1), dist.all_reduce(to_w2)


def copies_reduced(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    for gradient in (to_w1, to_w2):
        dist.all_reduce(gradient.clone())
    return to_w1, to_w2


def reduced_to_rank_0(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    for gradient in (to_w1, to_w2):
        dist.reduce(gradient, dst=0)
        gradient /= dist.get_world_size()
    return to_w1, to_w2


def rank_0_for_all(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    dist.broadcast(to_w1, src=0)
    dist.broadcast(to_w2, src=0)
    return to_w1, to_w2


def summed_twice(*inputs):
    to_w1, to_w2 = data_parallel_backward(*inputs)
    return reduced(to_w1), reduced(to_w2)


def on_rank_0_only(*inputs):
    to_w1, to_w2 = own_backward(*inputs)
    if dist.get_rank() == 0:
        dist.all_reduce(to_w1)
        dist.all_reduce(to_w2)
    return to_w1 / dist.get_world_size(), to_w2 / dist.get_world_size()


def whole_batch_gathered(x, hidden, w2, to_logits):
    whole = []
    for tensor in (x, hidden, to_logits):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        whole.append(torch.cat(parts))
    x, hidden, to_logits = whole
    return own_backward(x, hidden, w2, to_logits / dist.get_world_size())


def packed_rows_gathered(x, hidden, w2, to_logits):
    packed = torch.cat([x, hidden, to_logits], dim=1)
    parts = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, packed)
    sizes = x.shape[1], hidden.shape[1], to_logits.shape[1]
    x, hidden, to_logits = torch.cat(parts).split(sizes, dim=1)
    return own_backward(x, hidden, w2, to_logits / dist.get_world_size())


def row_by_row(*inputs):
    mean = []
    for gradient in own_backward(*inputs):
        rows = [reduced(row.clone()) / dist.get_world_size() for row in gradient]
        mean.append(torch.stack(rows))
    return mean


def divides_its_input(x, hidden, w2, to_logits):
    to_logits /= dist.get_world_size()
    to_w1, to_w2 = own_backward(x, hidden, w2, to_logits)
    return reduced(to_w1), reduced(to_w2)


_ALL_ROWS = ("The gradients are right, but every rank received the whole batch and did all the "
             "work: nothing is parallel. What has to travel has the shape of the weights.")
_ONE_OF_TWO = ("Only one of the two gradients is averaged over the ranks. Both are sums over the "
               "rows, and each rank has only its own rows.")
_WITHIN_ROWS = ("You summed a tensor that has one line for each *row* over the ranks. Row 0 of "
                "rank 0 and row 0 of rank 1 are different samples, so their gradients do not add "
                "up to anything. Finish the products first: their results have no rows any more.")
_ROWS_AGAIN = ("You divided by the number of rows. `to_logits` belongs to a mean over this rank's "
               "rows, so that division is in it already.")
_SLOPE = ("The first weights' gradient lacks the slope of tanh. It is 1 − tanh², and `hidden` is "
          "the tanh already: `1 - hidden**2`.")


class DataParallelBackward(Exercise):
    slug = "data-parallel-backward"
    number = "1.1"
    title = "The backward of two layers, on many ranks"
    name = "data_parallel_backward"
    minutes = 20
    hints = (
        "First forget the other ranks. `logits = hidden @ w2`: which two tensors does the gradient "
        "of `w2` depend on, and which product of them has the shape of `w2`?",
        "Back through the layers: `w2`'s gradient is `hidden.T @ to_logits`. The gradient goes on "
        "as `to_logits @ w2.T`, times the slope of tanh, which is `1 - hidden**2`. Now write one "
        "element of each weight's gradient as a sum. Which terms of it does this rank not have?",
        "Compute both gradients from this rank's rows, all-reduce each, and divide by "
        "`dist.get_world_size()`: a mean over N times as many rows is the mean of the ranks' N "
        "means.",
    )
    solution = staticmethod(data_parallel_backward)
    mistakes = (
        Mistake(own_backward, "These are the gradients of this rank's own rows. The rows of the "
                "other ranks belong to the global batch too."),
        Mistake(only_summed, "You added the ranks' gradients and did not divide. Each belongs to a "
                "*mean* over its rank's rows, and the mean over all rows is the mean of these."),
        Mistake(divided_twice, "You divided by the world size twice."),
        Mistake(divided_by_rows, _ROWS_AGAIN),
        Mistake(divided_by_all_rows, _ROWS_AGAIN),
        Mistake(second_layer_alone, _ONE_OF_TWO),
        Mistake(first_layer_alone, _ONE_OF_TWO),
        Mistake(divided_once, "You summed both gradients over the ranks, and divided only one by "
                "the world size."),
        Mistake(reduced_at_the_logits, _WITHIN_ROWS),
        Mistake(reduced_at_the_hidden, _WITHIN_ROWS),
        Mistake(reduced_at_the_hidden_too, _WITHIN_ROWS),
        Mistake(reduced_after_the_slope, _WITHIN_ROWS),
        Mistake(signal_divided_too, "You divided by the world size twice on the way to `w1`: the "
                "gradient that goes back through the layers belongs to this rank's mean, and only "
                "the sum over the ranks is divided."),
        Mistake(gradients_gathered, "The gradients are right, but every rank received those of "
                "all others, one by one. Only their sum is needed: an all-reduce sends no more "
                "than twice the gradient, on however many ranks."),
        Mistake(by_autograd, "Autograd does not record here: write the products of backward "
                "yourself."),
        Mistake(without_tanh, _SLOPE),
        Mistake(hidden_not_squared, "You did not square `hidden` in the slope of tanh. It is "
                "1 − tanh², and `hidden` is the tanh already: `1 - hidden**2`."),
        Mistake(hidden_squared, "You took tanh² for the slope of tanh. It is 1 − tanh², and "
                "`hidden` is the tanh already: `1 - hidden**2`."),
        Mistake(tanh_twice, "You took the tanh of `hidden`, which is a tanh already. The slope is "
                "`1 - hidden**2`."),
        Mistake(transposed, "Your gradients are transposed: each must have the shape of its "
                "weights, `(d, h)` and `(h, f)`."),
        Mistake(last_layer_first, "You return the second layer's gradient first. The order is that "
                "of the layers: `to_w1, to_w2`."),
        Mistake(what_all_reduce_returns, "`dist.all_reduce` changes its tensor in place and "
                "returns None. Keep the tensor, and return that."),
        Mistake(copies_reduced, "You all-reduced a copy: the sum never reaches the gradients that "
                "you return."),
        Mistake(reduced_to_rank_0, "`reduce` gives the sum to rank 0 alone. Every rank updates its "
                "own copy of the weights, so every rank needs the gradients: `all_reduce`."),
        Mistake(rank_0_for_all, "Every rank gets rank 0's gradients, so the rows of the others "
                "teach nobody anything. Combine all ranks' gradients."),
        Mistake(summed_twice, "You summed over the ranks once more after the mean: the ranks' "
                "means are equal by then, and their sum is N times as large."),
        Mistake(on_rank_0_only, "Only rank 0 calls the all-reduce, and waits for ever. A "
                "collective is called by every rank.", hangs=True),
        Mistake(whole_batch_gathered, _ALL_ROWS),
        Mistake(packed_rows_gathered, _ALL_ROWS),
        Mistake(row_by_row, "The gradients are right, but this rank launched more than two "
                "collectives. One all-reduce for each whole gradient is enough, and no barrier is "
                "needed: an all-reduce waits for all ranks anyway."),
        Mistake(divides_its_input, "The gradients are right, but you changed `to_logits`, which "
                "belongs to the caller. Divide a tensor of your own."),
    )
    rows, sizes = 30, (7, 5, 3)

    def quantities(self, world_size, rank):
        return {"the ranks": world_size, "the rows": self.rows}

    def parts(self, world_size, rank):
        own = [own_backward(*_layers(other)) for other in range(world_size)]
        names = "the gradient of `w1`", "the gradient of `w2`"
        return {name: [each[place] / world_size for each in own]
                for place, name in enumerate(names)}

    def trial(self, attempt):
        inputs = _layers(dist.get_rank())
        before = [tensor.clone() for tensor in inputs]
        with torch.no_grad(), CallLog() as log:
            to_w1, to_w2 = attempt(*inputs)
        # One rank alone has nothing to send, so that the gradients on two ranks speak first.
        alone = dist.get_world_size() == 1
        return {"the gradient of `w1`": to_w1, "the gradient of `w2`": to_w2,
                "that the inputs are not changed": all(map(torch.equal, before, inputs)),
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of collectives": 0 if alone else log.count()}

    def expected(self, world_size):
        x, _, w2, to_logits = zip(*map(_layers, range(world_size)), strict=True)
        w1 = _weights()[0].requires_grad_()
        w2 = w2[0].requires_grad_()
        # The loss is linear in the logits here, so that its gradient is to_logits.
        logits = torch.tanh(torch.cat(x) @ w1) @ w2
        (logits * torch.cat(to_logits) / world_size).sum().backward()
        size = w1.grad.nbytes + w2.grad.nbytes
        enough = AtMost(2 * size, "one all-reduce of each gradient sends no more than that, on "
                        "however many ranks", exact=False)
        return {"the gradient of `w1`": w1.grad, "the gradient of `w2`": w2.grad,
                "that the inputs are not changed": True,
                "the number of bytes that this rank sends": enough,
                "the number of collectives": AtMost(2, "one for each gradient is enough",
                                                    exact=False)}


def _weights():
    d, h, f = DataParallelBackward.sizes
    return seeded("w1", d, h) / d**0.5, seeded("w2", h, f)


def _layers(rank):
    """Rank r's x, hidden, w2 and to_logits."""
    rows, (d, _, f) = DataParallelBackward.rows, DataParallelBackward.sizes
    w1, w2 = _weights()
    x = seeded(f"x of rank {rank}", rows, d)
    to_logits = seeded(f"to_logits of rank {rank}", rows, f) / rows
    return x, torch.tanh(x @ w1), w2, to_logits


# --- 1.2: rows that hide the all-reduce ----------------------------------------------------------


def rows_to_hide(d, f, ranks, flops, bandwidth, element):
    all_reduce = 2 * (ranks - 1) / ranks * element * d * f / bandwidth
    backward_of_a_row = 2 * (2 * d * f) / flops
    return all_reduce / backward_of_a_row


def _seconds(d, f, ranks, bandwidth, element):
    """Of the all-reduce."""
    return 2 * (ranks - 1) / ranks * element * d * f / bandwidth


def one_product(d, f, ranks, flops, bandwidth, element):
    return _seconds(d, f, ranks, bandwidth, element) * flops / (2 * d * f)


def forward_too(d, f, ranks, flops, bandwidth, element):
    return _seconds(d, f, ranks, bandwidth, element) * flops / (6 * d * f)


def one_product_without_additions(d, f, ranks, flops, bandwidth, element):
    return _seconds(d, f, ranks, bandwidth, element) * flops / (d * f)


def three_products_for_two_layers(d, f, ranks, flops, bandwidth, element):
    return _seconds(d, f, ranks, bandwidth, element) * flops / (3 * d * f)


def tensor_once(d, f, ranks, flops, bandwidth, element):
    return element * d * f / bandwidth * flops / (4 * d * f)


def half_an_all_reduce(d, f, ranks, flops, bandwidth, element):
    return (ranks - 1) / ranks * element * d * f / bandwidth * flops / (4 * d * f)


def many_ranks(d, f, ranks, flops, bandwidth, element):
    return 2 * element * d * f / bandwidth * flops / (4 * d * f)


def to_each_other_rank(d, f, ranks, flops, bandwidth, element):
    return (ranks - 1) * element * d * f / bandwidth * flops / (4 * d * f)


def sent_by_all(*sizes):
    ranks = sizes[2]
    return ranks * rows_to_hide(*sizes)


def rows_of_all(d, f, ranks, flops, bandwidth, element):
    return _seconds(d, f, ranks, bandwidth, element) * flops / (4 * d * f) / ranks


def numbers_not_bytes(d, f, ranks, flops, bandwidth, element):
    return rows_to_hide(d, f, ranks, flops, bandwidth, 1)


def always_bf16(d, f, ranks, flops, bandwidth, element):
    return rows_to_hide(d, f, ranks, flops, bandwidth, 2)


def bits(d, f, ranks, flops, bandwidth, element):
    return rows_to_hide(d, f, ranks, flops, bandwidth / 8, element)


def rule_of_thumb(d, f, ranks, flops, bandwidth, element):
    return flops / bandwidth


def upside_down(*sizes):
    return 1 / rows_to_hide(*sizes) if rows_to_hide(*sizes) else 0.0


def divided_by_what_is_sent(d, f, ranks, flops, bandwidth, element):
    return 4 * d * f / flops / _seconds(d, f, ranks, bandwidth, element)


def thumb_upside_down(d, f, ranks, flops, bandwidth, element):
    return bandwidth / flops


def at_least_one(*sizes):
    return max(1, rows_to_hide(*sizes))


def rounded_up(*sizes):
    return math.ceil(rows_to_hide(*sizes))


def rounded_down(*sizes):
    return int(rows_to_hide(*sizes))


def rounded(*sizes):
    return round(rows_to_hide(*sizes))


def seconds_of_the_all_reduce(d, f, ranks, flops, bandwidth, element):
    return _seconds(d, f, ranks, bandwidth, element)


def activations_sent(d, f, ranks, flops, bandwidth, element):
    return 2 * (ranks - 1) / ranks * element * f / bandwidth * flops / (4 * d * f)


_SENT_BY_A_RANK = ("That is what all ranks send together. They send at the same time, each over "
                   "its own link: what counts is what *one* rank sends.")
_ROUNDED = "You rounded. Return the number as it comes: a part of a row is fine here."


class RowsToHide(Calculation):
    slug = "rows-to-hide"
    number = "1.2"
    title = "Rows that hide the all-reduce"
    name = "rows_to_hide"
    minutes = 10
    hints = (
        "Two times must be equal. What is the first one: how many bytes does a rank send, and how "
        "long does that take?",
        "The second is that of backward: in exercise 1.1, how many products did you write for the "
        "*second* layer, which has a layer before it? And how often does each of them use one "
        "weight, if there is one row? It multiplies and adds each time.",
        "The gradient has `element * d * f` bytes, so a rank sends `2 * (ranks - 1) / ranks` times "
        "that. A product takes `2 * d * f` operations a row, and backward has two products. Divide "
        "the first time by backward's time for one row.",
    )
    solution = staticmethod(rows_to_hide)
    mistakes = (
        Mistake(one_product, "You took half of backward's operations. Backward of a layer computes "
                "the gradient of its weights, and that of its input, which the layer before it "
                "needs. How many products are these? Each multiplies *and* adds once for every "
                "row and weight."),
        Mistake(forward_too, "You counted forward's product too. The gradient does not exist "
                "during forward, so only backward can hide its all-reduce."),
        Mistake(one_product_without_additions, "You took a quarter of backward's operations. A "
                "layer has two products in backward, and each multiplies *and* adds once for "
                "every row and weight."),
        Mistake(three_products_for_two_layers, "You took three quarters of backward's operations, "
                "as in exercise 1.1: three products for two layers. The first layer of a network "
                "has one product fewer. Which one, and what does a layer in the middle compute?"),
        Mistake(tensor_once, "You let a rank send its gradient once. In an all-reduce it sends "
                "2(N−1)/N times the tensor."),
        Mistake(half_an_all_reduce, "You let a rank send (N−1)/N of the tensor. That is a "
                "reduce-scatter alone; an all-reduce is twice that."),
        # The same as the tensor sent once beside one product, so the sentence is true of both.
        Mistake(many_ranks, "Your rows do not depend on the number of ranks. A rank sends "
                "2(N−1)/N times the gradient: nearly 2 times with many ranks, once with 2, and "
                "nothing with 1. If you took 1 for this factor, count backward's products again "
                "too."),
        Mistake(to_each_other_rank, "You let each rank send its whole gradient to every other "
                "rank. An all-reduce sends less: 2(N−1)/N times the tensor."),
        Mistake(sent_by_all, _SENT_BY_A_RANK),
        Mistake(rows_of_all, "You divided the rows among the ranks. The question is how many rows "
                "*each* rank needs."),
        Mistake(numbers_not_bytes, "You counted numbers and not bytes. A gradient of `d * f` "
                "numbers has `element * d * f` bytes."),
        Mistake(always_bf16, "You took 2 bytes for every number. `element` says how many there "
                "are: 4 in fp32."),
        Mistake(bits, "You multiplied by 8. `bandwidth` is in bytes a second already."),
        Mistake(rule_of_thumb, "C/W is the limit for bf16 gradients and many ranks. Keep the "
                "factor of the all-reduce, 2(N−1)/N, and the bytes of each number, `element`."),
        Mistake(upside_down, "Your fraction is upside down: a faster link needs fewer rows, and a "
                "faster device needs more."),
        Mistake(thumb_upside_down, "This is W/C, and it is upside down: a faster link needs fewer "
                "rows. Nor is the rule of thumb C/W exact: keep 2(N−1)/N and `element`."),
        Mistake(divided_by_what_is_sent, "You divide by something that is 0 for one rank, as N−1 "
                "and the time of an all-reduce are. They belong above the line: one rank needs 0 "
                "rows, and a faster link needs fewer."),
        Mistake(at_least_one, "You return at least 1. One rank alone sends nothing, so 0 rows are "
                "enough for it."),
        Mistake(rounded_up, _ROUNDED),
        Mistake(rounded_down, _ROUNDED),
        Mistake(rounded, _ROUNDED),
        Mistake(seconds_of_the_all_reduce, "This is the time of the all-reduce in seconds. How "
                "many rows does backward compute in that time?"),
        Mistake(activations_sent, "The message has the shape of the weights, `(d, f)`: `d * f` "
                "numbers, however many rows there are."),
    )
    cases = ((2048, 1024, 8, 989e12, 450e9, 2), (300, 700, 3, 2e12, 3e9, 4),
             (512, 96, 2, 9e10, 1e9, 4), (640, 1280, 1, 3e13, 5e9, 2))

    def trial(self, attempt):
        return of_cases(_rows_fact, self.cases, attempt)

    def expected(self, world_size):
        # The same by a search: the rows at which backward takes as long as the all-reduce.
        def needed(d, f, ranks, flops, bandwidth, element):
            sent = sum(2 * element * d * f / ranks for _ in range(ranks - 1))
            return sent / bandwidth / (2 * 2 * d * f / flops)

        return of_cases(_rows_fact, self.cases, needed)


def _rows_fact(case, answer):
    d, f, ranks, flops, bandwidth, element = case
    return {f"`rows_to_hide({d}, {f}, {ranks}, {flops:g}, {bandwidth:g}, {element})`": (
        float(answer) if isinstance(answer, int) else answer)}


# --- 1.3: bytes per parameter --------------------------------------------------------------------


def bytes_per_parameter(model, optimizer, others=()):
    parameters = list(model.parameters())
    tensors = [*parameters, *others]
    tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]

    sizes = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
    return sum(sizes.values()) / sum(parameter.numel() for parameter in parameters)


def _held(model, optimizer, others=()) -> list:
    """Every tensor that counts; one that is in it twice, or shares its memory, is there twice."""
    return [*model.parameters(), *_gradients(model), *_state(optimizer), *others]


def _gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _state(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()
            if torch.is_tensor(value)]


def _once(tensors: Iterable[torch.Tensor]):
    """The bytes under the tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _numbers(model):
    return sum(parameter.numel() for parameter in model.parameters())


def each_tensor_by_itself(model, optimizer, others=()):
    total = sum(tensor.nbytes for tensor in _held(model, optimizer, others))
    return total / _numbers(model)


def each_object_once(model, optimizer, others=()):
    tensors = {id(tensor): tensor for tensor in _held(model, optimizer, others)}
    return sum(tensor.nbytes for tensor in tensors.values()) / _numbers(model)


def by_their_own_address(model, optimizer, others=()):
    tensors = {tensor.data_ptr(): tensor for tensor in _held(model, optimizer, others)}
    return sum(tensor.nbytes for tensor in tensors.values()) / _numbers(model)


def storages_not_compared(model, optimizer, others=()):
    held = _held(model, optimizer, others)
    return sum(tensor.untyped_storage().nbytes() for tensor in held) / _numbers(model)


def parameters_alone(model, optimizer, others=()):
    return _once(model.parameters()) / _numbers(model)


def gradients_alone(model, optimizer, others=()):
    return _once(_gradients(model)) / _numbers(model)


def state_alone(model, optimizer, others=()):
    return _once(_state(optimizer)) / _numbers(model)


def no_gradients(model, optimizer, others=()):
    return _once([*model.parameters(), *_state(optimizer), *others]) / _numbers(model)


def no_optimizer(model, optimizer, others=()):
    return _once([*model.parameters(), *_gradients(model), *others]) / _numbers(model)


def no_others(model, optimizer, others=()):
    return _once(_held(model, optimizer)) / _numbers(model)


def no_parameters(model, optimizer, others=()):
    return _once([*_gradients(model), *_state(optimizer), *others]) / _numbers(model)


def parameters_and_gradients(model, optimizer, others=()):
    return _once([*model.parameters(), *_gradients(model)]) / _numbers(model)


def parameters_and_state(model, optimizer, others=()):
    return _once([*model.parameters(), *_state(optimizer)]) / _numbers(model)


def parameters_and_others(model, optimizer, others=()):
    return _once([*model.parameters(), *others]) / _numbers(model)


def gradients_and_state(model, optimizer, others=()):
    return _once([*_gradients(model), *_state(optimizer)]) / _numbers(model)


def gradients_and_others(model, optimizer, others=()):
    return _once([*_gradients(model), *others]) / _numbers(model)


def state_and_others(model, optimizer, others=()):
    return _once([*_state(optimizer), *others]) / _numbers(model)


def four_times_the_parameters(model, optimizer, others=()):
    return 4 * _once(model.parameters()) / _numbers(model)


def always_adam(model, optimizer, others=()):
    return 16.0


def always_two_moments(model, optimizer, others=()):
    parameters = _once(model.parameters())
    return (parameters + _once(_gradients(model)) + 2 * parameters + _once(others)) / _numbers(
        model)


def always_four_bytes(model, optimizer, others=()):
    return sum(4 * tensor.numel() for tensor in _held(model, optimizer, others)) / _numbers(model)


def one_tensor_of_each_storage(model, optimizer, others=()):
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes
                for tensor in _held(model, optimizer, others)}
    return sum(storages.values()) / _numbers(model)


def four_bytes_of_each_storage(model, optimizer, others=()):
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel()
                for tensor in _held(model, optimizer, others)}
    return 4 * sum(storages.values()) / _numbers(model)


def without_steps(model, optimizer, others=()):
    moments = [value for state in optimizer.state.values() for name, value in state.items()
               if name != "step" and torch.is_tensor(value)]
    return _once([*model.parameters(), *_gradients(model), *moments, *others]) / _numbers(model)


def one_moment(model, optimizer, others=()):
    firsts = [next(iter(state.values())) for state in optimizer.state.values()]
    moments = [tensor for tensor in firsts if tensor is not None]
    return _once([*model.parameters(), *_gradients(model), *moments, *others]) / _numbers(model)


def only_what_trains(model, optimizer, others=()):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = _once([*trained, *_gradients(model), *_state(optimizer), *others])
    return total / sum(parameter.numel() for parameter in trained)


def frozen_left_out(model, optimizer, others=()):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _once([*trained, *_gradients(model), *_state(optimizer), *others]) / _numbers(model)


def divided_by_what_trains(model, optimizer, others=()):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _once(_held(model, optimizer, others)) / sum(each.numel() for each in trained)


def gradients_that_are_none(model, optimizer, others=()):
    found = [parameter.grad for parameter in model.parameters()]
    return _once([*model.parameters(), *found, *_state(optimizer), *others]) / _numbers(model)


def state_that_is_none(model, optimizer, others=()):
    state = [value for each in optimizer.state.values() for value in each.values()]
    return _once([*model.parameters(), *_gradients(model), *state, *others]) / _numbers(model)


def with_buffers(model, optimizer, others=()):
    held = [*model.state_dict().values(), *_gradients(model), *_state(optimizer), *others]
    return _once(held) / _numbers(model)


def elements_of_the_state_dict(model, optimizer, others=()):
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    return _once(_held(model, optimizer, others)) / numbers


def not_divided(model, optimizer, others=()):
    return float(_once(_held(model, optimizer, others)))


def for_each_tensor(model, optimizer, others=()):
    return _once(_held(model, optimizer, others)) / len(list(model.parameters()))


_NOT_ONCE = ("You count memory twice where tensors share it: two parameters, or a gradient that "
             "is a piece of a bucket. Ask each tensor for its storage, and count each storage "
             "once, by its `data_ptr()`.")
_ADAM = ("You assume what the optimizer holds. SGD holds less than Adam, and frozen parameters "
         "have no state: count the tensors in `optimizer.state`.")
_FROZEN = ("Frozen parameters have no gradient and no state, but they are parameters, and lie in "
           "memory. Count all of `model.parameters()`, above and below the fraction bar.")
_STATE_DICT = ("`state_dict()` has buffers too, such as BatchNorm's running mean, and a tied "
               "weight under both names. Walk through `model.parameters()`.")


class BytesPerParameter(Calculation):
    slug = "bytes-per-parameter"
    number = "1.3"
    title = "Bytes per parameter, counted"
    name = "bytes_per_parameter"
    minutes = 15
    hints = (
        "Make one list of all tensors that count. Where does a gradient lie, and where does the "
        "optimizer keep what it remembers of a parameter?",
        "`optimizer.state` maps each parameter to a dict, whose tensors count. Can two tensors of "
        "your list share memory? A tensor is a view on a *storage*, `untyped_storage()`, and "
        "several tensors can share one. It has `.nbytes()`, and an address, `.data_ptr()`.",
        "Put `storage.data_ptr(): storage.nbytes()` of each tensor into a dict, add up its values, "
        "and divide by the sum of `parameter.numel()`.",
    )
    solution = staticmethod(bytes_per_parameter)
    mistakes = (
        Mistake(each_tensor_by_itself, _NOT_ONCE),
        Mistake(each_object_once, _NOT_ONCE),
        Mistake(storages_not_compared, _NOT_ONCE),
        Mistake(by_their_own_address, "You compare the addresses of the *tensors*. A piece of a "
                "bucket begins somewhere inside it, so its own address is another; the address of "
                "the storage is the same: `tensor.untyped_storage().data_ptr()`."),
        Mistake(parameters_alone, "You counted the parameters alone. Gradients, the optimizer's "
                "state and `others` lie in memory beside them."),
        Mistake(gradients_alone, "You counted the gradients alone. The parameters themselves, the "
                "optimizer's state and `others` lie in memory beside them."),
        Mistake(state_alone, "You counted the optimizer's state alone. Parameters, gradients and "
                "`others` lie in memory beside it."),
        Mistake(no_gradients, "The gradients are missing: each parameter's `.grad`, where there "
                "is one."),
        Mistake(no_optimizer, "The optimizer's state is missing: the tensors in "
                "`optimizer.state`."),
        Mistake(no_others, "The tensors in `others` are missing."),
        Mistake(no_parameters, "The parameters are missing: their own bytes count too."),
        Mistake(parameters_and_gradients, "The optimizer's state and `others` are missing."),
        Mistake(parameters_and_state, "The gradients and `others` are missing."),
        Mistake(parameters_and_others, "The gradients and the optimizer's state are missing."),
        Mistake(gradients_and_state, "The parameters and `others` are missing."),
        Mistake(gradients_and_others, "The parameters and the optimizer's state are missing."),
        Mistake(state_and_others, "The parameters and gradients are missing."),
        Mistake(four_times_the_parameters, "You return four times the parameters' bytes, whatever "
                "there is. SGD holds less than Adam, a frozen parameter has no gradient, and "
                "`others` count too: add up the tensors."),
        Mistake(always_adam, "You return 16 whatever there is. Count: other dtypes, another "
                "optimizer, frozen parameters and buckets change the number."),
        Mistake(always_two_moments, _ADAM),
        Mistake(one_moment, "You took only one tensor of each parameter's state. Adam has more: "
                "two moments and a counter of steps."),
        Mistake(without_steps, "Adam's counter `step` is missing: it is a tensor of 4 bytes in the "
                "state of each parameter, beside the two moments."),
        Mistake(one_tensor_of_each_storage, "You count each storage once, but with the bytes of "
                "one of its tensors. A tensor may be a piece of its storage: take "
                "`storage.nbytes()`."),
        Mistake(four_bytes_of_each_storage, "You took 4 bytes for every number. In bf16 it is 2: "
                "take the bytes of the storages, `storage.nbytes()`."),
        Mistake(always_four_bytes, "You took 4 bytes for every number. In bf16 it is 2, and "
                "memory that is shared counts once: take the bytes of the storages."),
        Mistake(only_what_trains, _FROZEN),
        Mistake(frozen_left_out, _FROZEN),
        Mistake(divided_by_what_trains, _FROZEN),
        Mistake(gradients_that_are_none, "A parameter without a gradient has None in `.grad`, "
                "such as a frozen one. Leave it out."),
        Mistake(state_that_is_none, "The optimizer's state has None among its values. Leave it "
                "out: only tensors have memory."),
        Mistake(with_buffers, "You count buffers too, such as BatchNorm's running mean. They are "
                "no parameters, though `state_dict()` has them: walk through "
                "`model.parameters()`."),
        Mistake(elements_of_the_state_dict, _STATE_DICT),
        Mistake(not_divided, "This is the sum of all bytes. Divide it by the number of "
                "parameters, as in `parameter.numel()`."),
        Mistake(for_each_tensor, "You divided by the number of tensors. A parameter, here, is one "
                "number: add up `parameter.numel()`."),
    )

    def trial(self, attempt):
        facts = {}
        for name, case in _cases():
            try:
                answer = attempt(*case)
            except Exception as error:
                error.add_note(f"It was called with {name}.")
                raise
            facts[f"the bytes per parameter of {name}"] = _plain(answer)
        return facts

    def expected(self, world_size):
        """By hand: bytes of each kind; Adam has a counter of four bytes for each tensor."""
        numbers, tensors = 39, 4  # of two linear layers: 5 × 4 + 4 and 4 × 3 + 3
        adam = (16 * numbers + 4 * tensors) / numbers
        by_hand = {
            "a model trained with Adam and its counters": adam,
            "a model trained with SGD without momentum": 8.0,
            "a model in bf16, trained with SGD with momentum": 6.0,
            "a model whose first layer is frozen, trained with SGD with momentum":
                (12 * 15 + 4 * 24) / numbers,
            "a model with BatchNorm and a tied weight": (16 * 32 + 4 * 3) / 32,
            "a model under DDP": adam + 4,
            "a model under DDP whose first layer is frozen, and whose gradients are views into "
            "the buckets": (16 * 15 + 4 * 2 + 4 * 24) / numbers,
            "a model with two copies of its weights in bf16, one of them listed twice":
                adam + 2 * 32 / numbers,
            "a model whose parameters are pieces of one tensor": 8.0,
            "a model whose gradients are cleared, and whose optimizer's state has None": 4.0,
        }
        return {f"the bytes per parameter of {name}": number for name, number in by_hand.items()}


def _plain(answer):
    return float(answer) if isinstance(answer, int) else answer


def _cases():
    """(name, arguments) of each model, after one step of training."""
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    yield "a model trained with Adam and its counters", _stepped(_small(), adam)
    yield "a model trained with SGD without momentum", _stepped(_small(), sgd)
    yield ("a model in bf16, trained with SGD with momentum",
           _stepped(_small().bfloat16(), sgd, momentum=0.9))
    frozen = _small()
    frozen[0].requires_grad_(False)
    yield ("a model whose first layer is frozen, trained with SGD with momentum",
           _stepped(frozen, sgd, momentum=0.9))
    yield "a model with BatchNorm and a tied weight", _stepped(_Tied(), adam)
    for name, views in (("a model under DDP", False),
                        ("a model under DDP whose first layer is frozen, and whose gradients are "
                         "views into the buckets", True)):
        model, buckets = _small(), []
        model[0].requires_grad_(not views)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        ddp.register_comm_hook(buckets, _keep)
        yield name, (*_stepped(ddp, adam), buckets)
    model = _small()
    copies = [layer.weight.detach().bfloat16() for layer in model]
    yield ("a model with two copies of its weights in bf16, one of them listed twice",
           (*_stepped(model, adam), [*copies, copies[0]]))
    model = _small()
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    pieces = flat.split([each.numel() for each in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.data = piece.view_as(parameter)
    yield "a model whose parameters are pieces of one tensor", _stepped(model, sgd)
    model, optimizer = _stepped(_small(), sgd)
    optimizer.state.update({each: {"momentum_buffer": None} for each in model.parameters()})
    optimizer.zero_grad()
    yield ("a model whose gradients are cleared, and whose optimizer's state has None",
           (model, optimizer))


class _Tied(nn.Module):
    """32 parameters in three tensors: a matrix of 6 × 4 with two names, and a BatchNorm's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x[:, 0].long())))


def _small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def _stepped(model, kind, **options):
    optimizer = kind([each for each in model.parameters() if each.requires_grad], lr=0.1, **options)
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 5, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def _keep(buckets, bucket):
    """A communication hook that sends nothing and keeps each bucket's tensor."""
    buckets.append(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# --- 1.4: gradient accumulation ------------------------------------------------------------------


def accumulate_gradients(model, images, labels, micro_batch):
    for x, y in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _slices(images, labels, micro_batch):
    return zip(images.split(micro_batch), labels.split(micro_batch), strict=True)


def _sum_over_ranks(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def _average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _own(model, images, labels, micro_batch):
    """The gradients of this rank's local batch, right but for the other ranks."""
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()


def means_added(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y).backward()
    _average(model)


def means_averaged(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / count).backward()
    _average(model)


def divided_by_full_ones(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / (len(labels) // micro_batch)).backward()
    _average(model)


def share_and_count(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels) / count).backward()
    _average(model)


def all_weighed_as_full(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * micro_batch / len(labels)).backward()
    _average(model)


def losses_summed(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    _average(model)


def sum_over_micro_batch(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y, reduction="sum") / micro_batch).backward()
    _average(model)


def cleared_each_time(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        model.zero_grad()
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
    _average(model)


def mean_over_micro_batch(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / micro_batch).backward()
    _average(model)


def mean_over_local_batch(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / len(labels)).backward()
    _average(model)


def last_one_left_out(model, images, labels, micro_batch):
    for start in range(0, len(images) - micro_batch + 1, micro_batch):
        x, y = (each[start : start + micro_batch] for each in (images, labels))
        (F.cross_entropy(model(x), y) * micro_batch / len(labels)).backward()
    _average(model)


def mean_of_the_full_ones(model, images, labels, micro_batch):
    count = len(images) // micro_batch
    for number in range(count):
        mine = slice(number * micro_batch, (number + 1) * micro_batch)
        (F.cross_entropy(model(images[mine]), labels[mine]) / count).backward()
    _average(model)


def not_cut(model, images, labels, micro_batch):
    F.cross_entropy(model(images), labels).backward()
    _average(model)


def cut_by_chunk(model, images, labels, micro_batch):
    for x, y in zip(images.chunk(micro_batch), labels.chunk(micro_batch), strict=True):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
    _average(model)


def one_backward(model, images, labels, micro_batch):
    loss = 0
    for x, y in _slices(images, labels, micro_batch):
        loss = loss + F.cross_entropy(model(x), y) * len(y) / len(labels)
    loss.backward()
    _average(model)


def averaged_each_time(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
        _average(model)


def summed_each_time(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
        _sum_over_ranks(model)


def own_of_each_reduced(model, images, labels, micro_batch):
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in _slices(images, labels, micro_batch):
        model.zero_grad()
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
        _average(model)
        total = [one + parameter.grad for one, parameter in zip(total, model.parameters(),
                                                                strict=True)]
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = gradient


def summed_each_time_divided_once(model, images, labels, micro_batch):
    summed_each_time(model, images, labels, micro_batch)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def means_summed_each_time_divided_once(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y).backward()
        _sum_over_ranks(model)
    for parameter in model.parameters():
        parameter.grad /= count * dist.get_world_size()


def loss_all_reduced(model, images, labels, micro_batch):
    _own(model, images, labels, micro_batch)
    dist.all_reduce(torch.zeros(()))


def never_divided(model, *batch):
    _own(model, *batch)
    _sum_over_ranks(model)


def divided_by_ranks_twice(model, *batch):
    _own(model, *batch)
    _average(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def means_added_and_summed(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y).backward()
    _sum_over_ranks(model)


def means_averaged_and_summed(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / count).backward()
    _sum_over_ranks(model)


def losses_summed_and_summed(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    _sum_over_ranks(model)


def under_ddp(model, *batch):
    _own(DistributedDataParallel(model), *batch)


def weights_averaged(model, *batch):
    _own(model, *batch)
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def cleared_at_the_end(model, *batch):
    accumulate_gradients(model, *batch)
    model.zero_grad()


def stepped(model, *batch):
    accumulate_gradients(model, *batch)
    torch.optim.SGD(model.parameters(), 0.1).step()


_TWO_THINGS = ("Two things are missing: the weight of each micro-batch's mean, its share of the "
               "local batch, and the division of the sum over the ranks by the world size.")
_MEAN_ALREADY = ("Each micro-batch's loss is a mean already, and you divided it by a number of "
                 "samples once more. Weigh it by its share: its own samples over the local batch.")
_EACH_TIME = ("The gradients are right, but you all-reduce after every micro-batch, and each costs "
              "a message. Let the micro-batches' gradients add up on this rank, and all-reduce "
              "once, after the last one.")
_COMPOUND = ("You all-reduce after every micro-batch. By then `.grad` holds the sum over the ranks "
             "from the micro-batches before, and you sum that over the ranks again, so it grows "
             "with each slice. All-reduce once, after the last one, and divide.")
_LEFT_OUT = "The last, smaller micro-batch is left out: its samples belong to the batch."


class AccumulateGradients(Exercise):
    slug = "accumulate-gradients"
    number = "1.4"
    title = "Gradient accumulation over micro-batches"
    name = "accumulate_gradients"
    minutes = 15
    hints = (
        "`backward()` adds to the `.grad` that is there. So call it once for each micro-batch, and "
        "clear nothing in between: `images.split(micro_batch)` makes the slices.",
        "The mean over the local batch is not the sum of the micro-batches' means. Weigh each mean "
        "by its share of the samples, `len(x) / len(images)`, before its `backward()`: the last "
        "one may be smaller.",
        "Nothing has to be sent before the last micro-batch is done. Then average over the ranks: "
        "one all-reduce for each gradient, and a division by `dist.get_world_size()`.",
    )
    solution = staticmethod(accumulate_gradients)
    mistakes = (
        Mistake(means_added, "You add up the micro-batches' means, so the gradient "
                "grows with their number. Weigh each mean by its share of the local batch."),
        Mistake(means_averaged, "You divide by the number of micro-batches, as if all "
                "were equally large. The last one is smaller, so its samples count too much: weigh "
                "each mean by its share of the samples."),
        Mistake(divided_by_full_ones, "You divide by the number of *full* micro-batches, "
                "and add the smaller one as well. Weigh each mean by its share of the samples."),
        Mistake(share_and_count, "You weigh each mean by its share, and divide by the "
                "number of micro-batches too. The shares add up to 1 already."),
        Mistake(all_weighed_as_full, "Every micro-batch is weighed as a full one. The "
                "last one is smaller, and so is its share: its own samples over the local batch."),
        Mistake(losses_summed, "You summed the losses of all samples and never divided: "
                "the mean over the local batch divides by its size."),
        Mistake(sum_over_micro_batch, "You divided by the size of a micro-batch. "
                "The mean is over the whole local batch: divide by its size."),
        Mistake(cleared_each_time, "The gradients are cleared before each micro-batch, so "
                "only the last one counts. Let `backward()` add them up."),
        Mistake(mean_over_micro_batch, _MEAN_ALREADY),
        Mistake(mean_over_local_batch, _MEAN_ALREADY),
        Mistake(last_one_left_out, _LEFT_OUT),
        Mistake(mean_of_the_full_ones, _LEFT_OUT),
        Mistake(not_cut, "The whole local batch went "
                "through the model at once. The gradient is right, but the activations of all "
                "samples were in memory together."),
        Mistake(cut_by_chunk, "`chunk(n)` makes n slices, of whatever size. You "
                "want slices of at most n samples: `split(n)`."),
        Mistake(one_backward, "You add up the losses and call `backward` at the end. "
                "Until then autograd keeps every micro-batch's activations: call it for each."),
        Mistake(averaged_each_time, _EACH_TIME),
        Mistake(own_of_each_reduced, _EACH_TIME),
        Mistake(summed_each_time, "You all-reduce after every "
                "micro-batch, what was summed before too. All-reduce once, and divide."),
        Mistake(summed_each_time_divided_once, _COMPOUND),
        Mistake(means_summed_each_time_divided_once, _COMPOUND),
        Mistake(_own, "Each rank has accumulated its own local batch, and "
                "the ranks were never averaged: their gradients still differ."),
        Mistake(loss_all_reduced, "The ranks exchange something, but not gradients: each rank "
                "keeps those of its own local batch. (An all-reduce of the *loss* changes the "
                "number that you log, and no gradient.)"),
        Mistake(never_divided, "You summed over the ranks and did not divide by "
                "the world size."),
        Mistake(divided_by_ranks_twice, "You divided by the world "
                "size twice (`ReduceOp.AVG` and `average_gradients` divide already)."),
        *(Mistake(attempt, _TWO_THINGS) for attempt in (
            means_added_and_summed, means_averaged_and_summed, losses_summed_and_summed)),
        Mistake(under_ddp, "DDP all-reduces in every `backward`. Put all micro-batches but the "
                "last into `with ddp.no_sync():`, forward pass and all."),
        Mistake(weights_averaged, "You averaged the weights, which are equal on all ranks. "
                "What has to be averaged is each parameter's `.grad`."),
        Mistake(cleared_at_the_end, "At the end `.grad` is None. The gradients have to be there: "
                "do not clear them, and do not return them instead."),
        Mistake(stepped, "You took an optimizer's step, which changes the weights: stop "
                "at the gradients."),
    )
    micro_batch = 3

    def quantities(self, world_size, rank):
        return {"the ranks": world_size, "the samples of a micro-batch": 3, "the micro-batches": 5,
                "the samples of a local batch": 13}

    def trial(self, attempt):
        model, sizes, held, by_ddp = _classifier(), [], [], []

        def forward_hook(_, inputs, output):
            sizes.append(len(output))
            held.append(sum(held[-1:]) + len(output))
            ddp = DistributedDataParallel._get_active_ddp_module()
            by_ddp.append(ddp is not None and ddp.require_backward_grad_sync)
            if output.requires_grad:
                output.register_hook(lambda gradient: held.append(held[-1] - len(gradient)))

        model.register_forward_hook(forward_hook)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with CallLog() as log:
            attempt(model, *_labelled(dist.get_rank()), self.micro_batch)
        size = sum(parameter.nbytes for parameter in model.parameters())
        unchanged = all(map(torch.equal, before, model.parameters()))
        return {**gradients(model), "that the weights are not changed": unchanged,
                "the number of samples that this rank computed": sum(sizes),
                "the number of samples in a forward pass": max(sizes, default=0),
                "the number of samples whose activations are kept at a time": max(held, default=0),
                "how often the gradients travel": round(log.bytes() / size) + sum(by_ddp)}

    def expected(self, world_size):
        model = _classifier()
        parts = [_labelled(rank) for rank in range(world_size)]
        images, labels = map(torch.cat, zip(*parts, strict=True))
        F.cross_entropy(model(images), labels).backward()
        at_once = AtMost(self.micro_batch, "no more than a micro-batch")
        return {**gradients(model), "that the weights are not changed": True,
                "the number of samples that this rank computed": len(images) // world_size,
                "the number of samples in a forward pass": at_once,
                "the number of samples whose activations are kept at a time": at_once,
                "how often the gradients travel": AtMost(1, "once per step is enough")}


def _classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _labelled(rank):
    """Rank r's thirteen samples of seven features, with a class for each."""
    return (seeded(f"images of rank {rank}", 13, 7),
            seeded(f"labels of rank {rank}", 13, 3).argmax(dim=1))


EXERCISES = (DataParallelBackward, RowsToHide, BytesPerParameter, AccumulateGradients)
