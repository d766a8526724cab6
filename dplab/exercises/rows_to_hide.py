"""Exercise 1.2: rows that hide the all-reduce."""

import math

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases


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
    number = "1.2"
    title = "Rows that hide the all-reduce"
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
