"""Each addition rounds at the size of its own result, and the squares of the errors add up."""

import math

import torch

from dplab.checks.compare import BESIDE
from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip


def typical_error(terms, sizes, dtype):
    parts = terms.split(sizes)
    of_ranks = torch.stack([part.sum(dim=0) for part in parts])
    # The first number that is added needs no addition, so each cumsum gives one result too many.
    on_ranks = [part.cumsum(dim=0)[1:] for part in parts]
    between = of_ranks.cumsum(dim=0)[1:]
    results = torch.cat([*on_ranks, between])
    eps = torch.finfo(dtype).eps
    return 0.21 * eps * results.square().sum(dim=0).sqrt()


ADDED_UP = "results.square().sum(dim=0).sqrt()"  # as it stands there
RESULT = ("You take the size of the final sum. Each addition rounds at the size of its own result, "
          "which is a sum of the terms so far. Where terms cancel, these are larger than the final "
          "sum; where they have one sign, smaller.")
ALONE = "that the terms are left alone"
ONE_TERM = "your prediction for a single term, which needs no addition"
ELEMENTS = 4000
GENERATOR = torch.Generator()


class TypicalError(Calculation):
    number = "A.1"
    title = "The typical error of a sum over ranks"
    minutes = 15
    tolerance = 0.15  # what is measured differs from the right prediction, here by up to 9%
    solution = staticmethod(typical_error)

    def prepare(self):
        return cases()

    def trial(self, attempt):
        facts, beside = {ALONE: True}, {}
        for name, terms, sizes, dtype, errors in self.given:
            own, fact = terms.clone(), fact_of(name)
            predicted = attempt(own, list(sizes), dtype)
            facts[ALONE] &= torch.equal(own, terms)
            if not isinstance(predicted, torch.Tensor):
                facts[fact] = None if predicted is None else type(predicted).__name__
            elif predicted.shape != errors.shape:
                facts[fact] = f"a tensor of shape {list(predicted.shape)}"
            else:
                facts[fact] = rms(errors / predicted.double())
                beside[fact] = (f"  the error is typically {rms(errors):.2g}, and you predict "
                                f"{rms(predicted.double()):.2g}")
        single = self.given[0][1][:1]
        return facts | {ONE_TERM: attempt(single.clone(), [1], torch.float32), BESIDE: beside}

    def expected(self, world_size):
        return {ALONE: True, **{fact_of(name): 1.0 for name, *_ in self.given},
                ONE_TERM: torch.zeros(self.given[0][1].shape[1], dtype=torch.float64)}

    hints = (
        "Take one element, and terms a, b, c, d on two ranks of two terms. Write down every "
        "addition that is made. What is the result of each? How large is the error of each?",
        "The results are a + b on rank 0, c + d on rank 1, and (a + b) + (c + d) between the "
        "ranks. Each addition errs by 0.21 · eps times its own result. What do you know of the "
        "variance of a sum of independent numbers?",
        "The squares of the errors add up. `part.cumsum(dim=0)[1:]` are the results of the "
        "additions on one rank; the cumsum of the ranks' sums, again without its first row, are "
        "those between ranks. Return 0.21 · eps · √(sum of the squares of all these results).",
    )
    slips = (
        Slip(f"{RESULT} And there are n − 1 additions, not one.",
             {ADDED_UP: "terms.sum(dim=0).abs()"}),
        Slip(RESULT, {ADDED_UP: "(len(terms) - 1) ** 0.5 * terms.sum(dim=0).abs()"},
             {ADDED_UP: "(len(terms) - 1) * terms.sum(dim=0).abs()"}),
        Slip("You add the errors as if all had the same sign. They are up as often as down, and "
             "independent: what adds up is their squares.",
             {ADDED_UP: "results.abs().sum(dim=0)"}),
        Slip("You add the results with their signs, so they cancel. An error's sign has nothing to "
             "do with the sign of the result: add the squares.",
             {ADDED_UP: "results.sum(dim=0).abs()"}),
        Slip("You take the mean of the squares, which is the error of one addition. The errors of "
             "all additions are in the final sum: add their squares.",
             {".square().sum(": ".square().mean("}),
        Slip("The squares of the errors add up, and you return no root. (Beside that, eps and 0.21 "
             "belong to the error, not to its square.)", {".sqrt()": ""}),
        Slip("You take the sizes of the terms. An addition rounds its *result*, which is a sum of "
             "the terms so far.", {"results.square()": "terms.square()"}),
        Slip("You add absolute values. That bounds the partial sums, and where terms of both signs "
             "cancel, the real partial sums are smaller.", {"terms.split": "terms.abs().split"}),
        Slip("You add all terms one by one, as one process does. Here each rank begins anew with "
             "its own terms, and then the ranks' sums are added.",
             {"torch.cat([*on_ranks, between])": "terms.cumsum(dim=0)[1:]"}),
        Slip("You cut the terms into equal parts. `sizes` says how many terms each rank has: "
             "`terms.split(sizes)`.", {"terms.split(sizes)": "terms.tensor_split(len(sizes))"}),
        Slip("You leave out the additions between the ranks. They have the largest results.",
             {"[*on_ranks, between]": "on_ranks"}),
        Slip("You count the additions between the ranks only. Each rank has added its own terms "
             "before.", {"[*on_ranks, between]": "[between]"}),
        Slip("Beside the additions on the ranks you count one for each rank, of its own sum. "
             "Between N ranks there are N − 1, and the result of each is the sum of the ranks so "
             "far.", {"[*on_ranks, between]": "[*on_ranks, of_ranks]"}),
        Slip("You count one addition too many: the first number of each sum is taken as it is. k "
             "numbers need k − 1 additions.", {"cumsum(dim=0)[1:]": "cumsum(dim=0)"}),
        Slip("eps/2 is the largest error of an addition. The typical one is 0.21 eps.",
             {"0.21": "0.5"}),
        Slip("You take a whole eps for each addition. Typical is 0.21 eps.", {"0.21 * eps": "eps"}),
        Slip("This is a limit: all errors at full size and in one direction. "
             "Here the errors are independent, and of typical size.",
             {f"0.21 * eps * {ADDED_UP}": "len(terms) * eps * terms.abs().sum(dim=0)"},
             {f"0.21 * eps * {ADDED_UP}": "(len(terms) - 1) * eps / 2 * terms.abs().sum(dim=0)"}),
        Slip("You took eps from `terms.dtype`. The terms are given in float64, and the sum is made "
             "in `dtype`.", {"finfo(dtype)": "finfo(terms.dtype)"}),
        Slip("Your error does not follow the dtype of the sum. Take `torch.finfo(dtype).eps`.",
             {"finfo(dtype)": "finfo(torch.float32)"}, {"0.21 * eps": "0.21"}),
        Slip("You divide by n. The function is asked for the error of the sum, not of the mean.",
             {"return 0.21": "return 1 / len(terms) * 0.21"}),
        Slip("You make the sum and look at its error. That is one error, which may be 0 by luck, "
             "and it needs the exact sum. Predict its typical size from the terms.",
             {f"return 0.21 * eps * {ADDED_UP}":
              "sums = [one_by_one(part) for part in terms.to(dtype).split(sizes)]\n"
              "return (one_by_one(sums).double() - terms.sum(dim=0)).abs()"}),
        Slip("The prediction has another shape. Every element is a sum of its own, over the terms: "
             "return one error for each element.",
             {".sqrt()": ".sqrt().norm()"}, {ADDED_UP: "results.abs()"}),
        Slip("You add along a term. The sums go over the terms, which are the rows: `dim=0`.",
             {"results.square().sum(dim=0)": "terms.cumsum(dim=1).square().sum(dim=1)"}),
        Slip("It returns None. Is there a `return`?", {"return ": ""}),
        Slip("You change the terms in place, and the caller still needs them.",
             {"results = ": "terms.copy_(torch.cat([part.cumsum(dim=0) for part in parts]))\n"
                            "results = "}),
    )


def fact_of(name):
    return f"the measured error in units of your prediction, for {name},"


def rms(numbers):
    return min(numbers.square().mean().sqrt().nan_to_num(nan=1e9).item(), 1e9)


def cases():
    """(name, terms, sizes, dtype, measured errors of sums of nearly the same terms).

    The errors are those of other sums, whose terms differ from these by one part in some hundred:
    so an error that was measured with these terms is no prediction.
    """
    f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
    mixed, opposed = numbers_of(24), numbers_of(16)
    opposed[8:] = -opposed[:8] + 0.05 * opposed[8:]
    listed = [
        ("24 terms on 1 rank in float32", mixed, [24], f32),
        ("24 terms on 4 ranks in float32", mixed, [6, 6, 6, 6], f32),
        ("2 terms on 2 ranks in float32", numbers_of(2), [1, 1], f32),
        ("300 positive terms on 3 ranks in float32", numbers_of(300).abs(), [150, 100, 50], f32),
        ("16 terms on 2 ranks, whose sums nearly cancel, in float32", opposed, [8, 8], f32),
        ("20 terms on 3 ranks in bfloat16", numbers_of(20), [12, 1, 7], bf16),
        ("12 terms on 2 ranks in float64", numbers_of(12), [4, 8], f64),
    ]
    return [(name, near(terms, dtype), sizes, dtype, errors_of(near(terms, dtype), sizes, dtype))
            for name, terms, sizes, dtype in listed]


def numbers_of(n):
    """Numbers of both signs; each element is at another place between two powers of two."""
    GENERATOR.manual_seed(n)
    scales = 2 ** torch.rand(ELEMENTS, generator=GENERATOR, dtype=torch.float64)
    return scales * torch.randn(n, ELEMENTS, generator=GENERATOR, dtype=torch.float64)


def near(terms, dtype):
    noise = torch.randn(terms.shape, generator=GENERATOR, dtype=torch.float64)
    return (terms * (1 + noise / 128)).to(dtype).double()


def errors_of(terms, sizes, dtype):
    """What the rounding of real sums leaves, exactly."""
    found = one_by_one([one_by_one(part) for part in terms.to(dtype).split(sizes)]).double()
    return torch.tensor([math.fsum([*(-terms[:, column]).tolist(), found[column].item()])
                         for column in range(ELEMENTS)], dtype=torch.float64)


def one_by_one(numbers):
    total = numbers[0]
    for each in numbers[1:]:
        total = total + each
    return total
