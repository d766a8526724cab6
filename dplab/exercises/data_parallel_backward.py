"""Exercise 1.1: the backward of two layers, on many ranks."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog, sent_bytes


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
    number = "1.1"
    title = "The backward of two layers, on many ranks"
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
