"""How many rows take as long in backward as the gradient's all-reduce."""

import math

import torch

from dplab.checks.composition import made_of
from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def rows_to_hide(d, f, ranks, flops, bandwidth, element):
    gradient = element * d * f
    sent = 2 * (ranks - 1) / ranks * gradient
    all_reduce = sent / bandwidth
    product = 2 * d * f  # for one row: each weight is multiplied and added once
    backward_of_a_row = 2 * product / flops
    return all_reduce / backward_of_a_row


SIZES = ("d", "f", "ranks", "flops", "bandwidth", "element")
RESULT = "all_reduce / backward_of_a_row"


class RowsToHide(Calculation):
    number = "1.3"
    title = "Rows that hide the all-reduce"
    minutes = 10
    solution = staticmethod(rows_to_hide)
    # More than the sizes, to solve for them; one needs few rows, so that rounding shows.
    cases = ((2048, 1024, 8, 989e12, 450e9, 2), (300, 700, 3, 2e12, 3e9, 4),
             (512, 96, 2, 9e10, 1e9, 4), (640, 1280, 1, 3e13, 5e9, 2),
             (96, 160, 5, 7e9, 2e9, 1), (4096, 500, 16, 3e14, 2.5e10, 2),
             (250, 64, 6, 5e11, 8e10, 8), (1000, 3000, 32, 6e13, 4e11, 4),
             (768, 200, 4, 2e13, 9e8, 2), (33, 2048, 7, 8e12, 6e10, 4),
             (5000, 48, 12, 4e10, 7e8, 1))

    def trial(self, attempt):
        return of_cases(rows_fact, self.cases, attempt)

    def expected(self, world_size):
        def needed(d, f, ranks, flops, bandwidth, element):
            in_a_second = flops / (4 * d * f)
            return 2 * (1 - 1 / ranks) * d * f * element / bandwidth * in_a_second

        return of_cases(rows_fact, self.cases, needed)

    def described(self, difference, got, world_size):
        """All answers are the right ones times something, where that is so."""
        words = super().described(difference, got, world_size)
        several = [case for case in self.cases if case[2] > 1]
        [right], [found] = self.expected_of_all(world_size), got
        answers, rows = ([facts[name_of(case)] for case in several] for facts in (found, right))
        if all(isinstance(answer, float) and answer > 0 for answer in answers):
            times = product_of_powers(torch.tensor(answers) / torch.tensor(rows), several)
            words += f"\nOn two ranks or more, it is the right number times {times}." * bool(times)
        return words

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
    slips = (
        Slip("You took half of backward's operations. Which gradients does a layer in the middle "
             "compute? And how many operations does each of their products take for one row and "
             "one weight?",
             {"2 * product": "product"}),
        Slip("You took a quarter of backward's operations. A layer has two products in backward, "
             "and each multiplies *and* adds once for every row and weight.",
             {"2 * product": "product / 2"}),
        Slip("You took three quarters of backward's operations, as in exercise 1.1: three products "
             "for two layers. The first layer of a network has one product fewer. Which one, and "
             "what does a layer in the middle compute?", {"2 * product": "1.5 * product"}),
        Slip("You counted forward's product too. The gradient does not exist during forward, so "
             "only backward can hide its all-reduce.", {"2 * product": "3 * product"}),
        Slip("You let a rank send its gradient once. In an all-reduce it sends 2(N−1)/N times the "
             "tensor.", {"2 * (ranks - 1) / ranks": "1"}),
        Slip("These are half of the rows. An all-reduce sends 2(N−1)/N times the tensor: (N−1)/N "
             "would be a reduce-scatter alone. (Or did you count four products in backward?)",
             {"2 * (ranks - 1)": "(ranks - 1)"}),
        # The same as the tensor sent once beside one product, so the sentence is true of both.
        Slip("You need as many rows with 2 ranks as with 32. A rank sends 2(N−1)/N times the "
             "gradient: nearly 2 times with many ranks, once with 2, and nothing with 1. If you "
             "took 1 for this factor, count backward's products again too.",
             {"2 * (ranks - 1) / ranks": "2"}, {"2 * (ranks - 1) / ranks": "2 * (ranks > 1)"}),
        Slip("You let each rank send its whole gradient to every other rank. An all-reduce sends "
             "less: 2(N−1)/N times the tensor.", {"2 * (ranks - 1) / ranks": "(ranks - 1)"}),
        Slip("That is what all ranks send together. They send at the same time, each over its own "
             "link: what counts is what *one* rank sends.",
             {"2 * (ranks - 1) / ranks": "2 * (ranks - 1)"}),
        Slip("The message has the shape of the weights, `(d, f)`: `d * f` numbers, however many "
             "rows there are.",
             {"element * d * f": "element * f"}, {"element * d * f": "element * d"}),
        Slip("Your rows do not depend on `element`. A gradient of `d * f` numbers has "
             "`element * d * f` bytes; the operations are as many, whatever the bytes of a number.",
             {"element * d * f": "d * f"}),
        Slip("You took 2 bytes for every number. `element` says how many there are: 4 in fp32.",
             {"element * d * f": "2 * d * f"}),
        Slip("You multiplied by 8. `bandwidth` is in bytes a second already.",
             {"sent / bandwidth": "8 * sent / bandwidth"}),
        Slip("You divided the rows among the ranks. The question is how many rows *each* rank "
             "needs.", {RESULT: f"{RESULT} / ranks"}),
        Slip("C/W is the limit for bf16 gradients and many ranks. Keep the factor of the "
             "all-reduce, 2(N−1)/N, and the bytes of each number, `element`.",
             {RESULT: "flops / bandwidth"}),
        Slip("This is W/C, and it is upside down: a faster link needs fewer rows. Nor is the rule "
             "of thumb C/W exact: keep 2(N−1)/N and `element`.",
             {RESULT: "bandwidth / flops"}),
        Slip("Your fraction is upside down: a faster link needs fewer rows, and a faster device "
             "needs more.", {RESULT: "backward_of_a_row / all_reduce if all_reduce else 0.0"}),
        Slip("You divide by something that is 0 for one rank, as N−1 and the time of an all-reduce "
             "are. They belong above the line: one rank needs 0 rows, and a faster link needs "
             "fewer.", {RESULT: "backward_of_a_row / all_reduce"}),
        Slip("This is the time of the all-reduce in seconds. How many rows does backward compute "
             "in that time?", {RESULT: "all_reduce"}),
        Slip("You return at least 1. One rank alone sends nothing, so 0 rows are enough for it.",
             {RESULT: f"max(1, {RESULT})"}),
        Slip("You rounded. Return the number as it comes: a part of a row is fine here.",
             {RESULT: f"math.ceil({RESULT})"}, {RESULT: f"int({RESULT})"},
             {RESULT: f"round({RESULT})"}),
    )


def name_of(case):
    d, f, ranks, flops, bandwidth, element = case
    return f"`rows_to_hide({d}, {f}, {ranks}, {flops:g}, {bandwidth:g}, {element})`"


def rows_fact(case, answer):
    return {name_of(case): float(answer) if isinstance(answer, int) else answer}


def product_of_powers(ratios, cases) -> str:
    """What all ratios are, as "0.5 * ranks / (ranks - 1)", solved in logarithms; "" if nothing."""
    sizes = dict(zip(SIZES, torch.tensor(cases, dtype=torch.float64).T, strict=True))
    sizes["(ranks - 1)"] = sizes["ranks"] - 1
    logarithms = {name: size.log() for name, size in sizes.items()}
    powers = made_of(ratios.log(), logarithms | {"constant": torch.ones(len(cases))})
    if powers is None:
        return ""
    constant = f"{math.exp(powers.pop('constant')):.4g}"
    if any(abs(power - round(power)) > 1e-3 for power in powers.values()):
        return ""
    above, below = ([name for name, power in powers.items() for _ in range(round(sign * power))]
                    for sign in (1, -1))
    if constant != "1" or not above:
        above.insert(0, constant)
    words = " / ".join([" * ".join(above), *below])
    return words if words != "1" else ""
