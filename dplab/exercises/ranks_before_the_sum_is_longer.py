"""Exercise B.4: where the all-reduce takes half of the time."""

import math

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases


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
    number = "B.4"
    title = "Where the all-reduce takes half of the time"
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
