"""Exercise A.1: the typical error of a sum over ranks."""

import math

import torch

from dplab.checks.compare import BESIDE
from dplab.checks.exercise import Calculation, Mistake


def typical_error(terms, sizes, dtype):
    parts = terms.split(sizes)
    of_ranks = torch.stack([part.sum(dim=0) for part in parts])
    # The first number that is added needs no addition, so each cumsum gives one result too many.
    results = torch.cat([each.cumsum(dim=0)[1:] for each in (*parts, of_ranks)])
    return 0.21 * torch.finfo(dtype).eps * results.square().sum(dim=0).sqrt()


# Each of these is what somebody writes at first. The exercise names it.


def _results(terms, sizes):
    """What each addition gives: on every rank, then between the ranks."""
    parts = terms.split(sizes)
    of_ranks = torch.stack([part.sum(dim=0) for part in parts])
    return torch.cat([each.cumsum(dim=0)[1:] for each in (*parts, of_ranks)])


def _of_the_result(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * terms.sum(dim=0).abs()


def _result_and_root_of_n(terms, sizes, dtype):
    additions = len(terms) - 1
    return 0.21 * torch.finfo(dtype).eps * additions**0.5 * terms.sum(dim=0).abs()


def _result_and_n(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * (len(terms) - 1) * terms.sum(dim=0).abs()


def _errors_added(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * _results(terms, sizes).abs().sum(dim=0)


def _results_added(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * _results(terms, sizes).sum(dim=0).abs()


def _mean_of_squares(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * _results(terms, sizes).square().mean(dim=0).sqrt()


def _without_the_root(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * _results(terms, sizes).square().sum(dim=0)


def _sizes_of_the_terms(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * terms.square().sum(dim=0).sqrt()


def _absolute_partial_sums(terms, sizes, dtype):
    results = _results(terms.abs(), sizes)
    return 0.21 * torch.finfo(dtype).eps * results.square().sum(dim=0).sqrt()


def _as_one_process(terms, sizes, dtype):
    results = terms.cumsum(dim=0)[1:]
    return 0.21 * torch.finfo(dtype).eps * results.square().sum(dim=0).sqrt()


def _equal_parts(terms, sizes, dtype):
    parts = terms.tensor_split(len(sizes))
    return typical_error(terms, [len(part) for part in parts], dtype)


def _inside_the_ranks_only(terms, sizes, dtype):
    results = torch.cat([part.cumsum(dim=0)[1:] for part in terms.split(sizes)])
    return 0.21 * torch.finfo(dtype).eps * results.square().sum(dim=0).sqrt()


def _between_the_ranks_only(terms, sizes, dtype):
    of_ranks = torch.stack([part.sum(dim=0) for part in terms.split(sizes)])
    return 0.21 * torch.finfo(dtype).eps * of_ranks.cumsum(dim=0)[1:].square().sum(dim=0).sqrt()


def _sums_of_ranks_as_results(terms, sizes, dtype):
    of_ranks = torch.stack([part.sum(dim=0) for part in terms.split(sizes)])
    inside = [part.cumsum(dim=0)[1:] for part in terms.split(sizes)]
    results = torch.cat([*inside, of_ranks])
    return 0.21 * torch.finfo(dtype).eps * results.square().sum(dim=0).sqrt()


def _first_number_counted(terms, sizes, dtype):
    parts = terms.split(sizes)
    of_ranks = torch.stack([part.sum(dim=0) for part in parts])
    results = torch.cat([each.cumsum(dim=0) for each in (*parts, of_ranks)])
    return 0.21 * torch.finfo(dtype).eps * results.square().sum(dim=0).sqrt()


def _at_most(terms, sizes, dtype):
    return 0.5 * torch.finfo(dtype).eps * _results(terms, sizes).square().sum(dim=0).sqrt()


def _a_whole_eps(terms, sizes, dtype):
    return torch.finfo(dtype).eps * _results(terms, sizes).square().sum(dim=0).sqrt()


def _limit(terms, sizes, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.abs().sum(dim=0)


def _limit_of_one_sum(terms, sizes, dtype):
    return (len(terms) - 1) * torch.finfo(dtype).eps / 2 * terms.abs().sum(dim=0)


def _eps_of_the_terms(terms, sizes, dtype):
    eps = torch.finfo(terms.dtype).eps
    return 0.21 * eps * _results(terms, sizes).square().sum(dim=0).sqrt()


def _eps_of_float32(terms, sizes, dtype):
    eps = torch.finfo(torch.float32).eps
    return 0.21 * eps * _results(terms, sizes).square().sum(dim=0).sqrt()


def _without_eps(terms, sizes, dtype):
    return 0.21 * _results(terms, sizes).square().sum(dim=0).sqrt()


def _of_the_mean(terms, sizes, dtype):
    return typical_error(terms, sizes, dtype) / len(terms)


def _measured_once(terms, sizes, dtype):
    sums = []
    for part in terms.to(dtype).split(sizes):
        total = part[0].clone()
        for term in part[1:]:
            total += term
        sums.append(total)
    found = sums[0].clone()
    for each in sums[1:]:
        found += each
    return (found.double() - terms.sum(dim=0)).abs()


def _of_the_whole_vector(terms, sizes, dtype):
    return typical_error(terms, sizes, dtype).norm()


def _of_each_addition(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * _results(terms, sizes).abs()


def _along_a_term(terms, sizes, dtype):
    return 0.21 * torch.finfo(dtype).eps * terms.cumsum(dim=1).square().sum(dim=1).sqrt()


def _without_return(terms, sizes, dtype):
    typical_error(terms, sizes, dtype)


def _in_place(terms, sizes, dtype):
    for part in terms.split(sizes):
        for k in range(1, len(part)):
            part[k] += part[k - 1]
    of_ranks = torch.stack([part[-1] for part in terms.split(sizes)])
    results = [part[1:] for part in terms.split(sizes)]
    squares = torch.cat([*results, of_ranks.cumsum(dim=0)[1:]]).square().sum(dim=0)
    return 0.21 * torch.finfo(dtype).eps * squares.sqrt()

RESULT = ("You take the size of the final sum. Each addition rounds at the size of its own result, "
          "which is a sum of the terms so far. Where terms cancel, these are larger than the final "
          "sum; where they have one sign, smaller.")

ADDED = ("You add the errors as if all had the same sign. They are up as often as down, and "
         "independent: what adds up is their squares.")

LIMIT = ("This is a limit, as in chapter 02: all errors at full size and in one direction. Here "
         "the errors are independent, and of typical size.")

FOLLOWS = "Your error does not follow the dtype of the sum. Take `torch.finfo(dtype).eps`."

ONE_EACH = ("The prediction has another shape. Every element is a sum of its own, over the terms: "
            "return one error for each element.")


class TypicalError(Calculation):
    number = "A.1"
    title = "The typical error of a sum over ranks"
    minutes = 15
    tolerance = 0.15  # what is measured differs from the right prediction, here by up to 9%
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
    solution = staticmethod(typical_error)
    mistakes = (
        Mistake(_of_the_result, f"{RESULT} And there are n − 1 additions, not one."),
        *(Mistake(attempt, RESULT) for attempt in (_result_and_root_of_n, _result_and_n)),
        Mistake(_errors_added, ADDED),
        Mistake(_results_added, "You add the results with their signs, so they cancel. An error's "
                "sign has nothing to do with the sign of the result: add the squares."),
        Mistake(_mean_of_squares, "You take the mean of the squares, which is the error of one "
                "addition. The errors of all additions are in the final sum: add their squares."),
        Mistake(_without_the_root, "The squares of the errors add up, and you return no root. "
                "(Beside that, eps and 0.21 belong to the error, not to its square.)"),
        Mistake(_sizes_of_the_terms, "You take the sizes of the terms. An addition rounds its "
                "*result*, which is a sum of the terms so far."),
        Mistake(_absolute_partial_sums, "You add absolute values. That bounds the partial sums, "
                "and where terms of both signs cancel, the real partial sums are smaller."),
        Mistake(_as_one_process, "You add all terms one by one, as one process does. Here each "
                "rank begins anew with its own terms, and then the ranks' sums are added."),
        Mistake(_equal_parts, "You cut the terms into equal parts. `sizes` says how many terms "
                "each rank has: `terms.split(sizes)`."),
        Mistake(_inside_the_ranks_only, "You leave out the additions between the ranks. They have "
                "the largest results."),
        Mistake(_between_the_ranks_only, "You count the additions between the ranks only. Each "
                "rank has added its own terms before."),
        Mistake(_sums_of_ranks_as_results, "Between the ranks you take each rank's own sum. The "
                "result of such an addition is the sum of all ranks so far."),
        Mistake(_first_number_counted, "You count one addition too many: the first number of "
                "each sum is taken as it is. k numbers need k − 1 additions."),
        Mistake(_at_most, "eps/2 is the largest error of an addition. The typical one is 0.21 "
                "eps."),
        Mistake(_a_whole_eps, "You take a whole eps for each addition. Typical is 0.21 eps."),
        *(Mistake(attempt, LIMIT) for attempt in (_limit, _limit_of_one_sum)),
        Mistake(_eps_of_the_terms, "You took eps from `terms.dtype`. The terms are given in "
                "float64, and the sum is made in `dtype`."),
        *(Mistake(attempt, FOLLOWS) for attempt in (_eps_of_float32, _without_eps)),
        Mistake(_of_the_mean, "You divide by n. The function is asked for the error of the sum, "
                "not of the mean."),
        Mistake(_measured_once, "You make the sum and look at its error. That is one error, which "
                "may be 0 by luck, and it needs the exact sum. Predict its typical size from the "
                "terms."),
        *(Mistake(attempt, ONE_EACH) for attempt in (_of_the_whole_vector, _of_each_addition)),
        Mistake(_along_a_term, "You add along a term. The sums go over the terms, which are the "
                "rows: `dim=0`."),
        Mistake(_without_return, "It returns None. Is there a `return`?"),
        Mistake(_in_place, "You change the terms in place, and the caller still needs them."),
    )

    def prepare(self):
        return _cases()

    def trial(self, attempt):
        facts, beside = {ALONE: True}, {}
        for name, terms, sizes, dtype, errors in self.given:
            own, fact = terms.clone(), _fact(name)
            predicted = attempt(own, list(sizes), dtype)
            facts[ALONE] &= torch.equal(own, terms)
            if not isinstance(predicted, torch.Tensor):
                facts[fact] = None if predicted is None else type(predicted).__name__
            elif predicted.shape != errors.shape:
                facts[fact] = f"a tensor of shape {list(predicted.shape)}"
            else:
                facts[fact] = _rms(errors / predicted.double())
                beside[fact] = (f"  the error is typically {_rms(errors):.2g}, and you predict "
                                f"{_rms(predicted.double()):.2g}")
        single = self.given[0][1][:1]
        return facts | {ONE_TERM: attempt(single.clone(), [1], torch.float32), BESIDE: beside}

    def expected(self, world_size):
        return {ALONE: True, **{_fact(name): 1.0 for name, *_ in self.given},
                ONE_TERM: torch.zeros(self.given[0][1].shape[1], dtype=torch.float64)}

ALONE = "that the terms are left alone"

ONE_TERM = "your prediction for a single term, which needs no addition"


def _fact(name):
    return f"the measured error in units of your prediction, for {name},"


def _rms(numbers):
    return min(numbers.square().mean().sqrt().nan_to_num(nan=1e9).item(), 1e9)


def _cases():
    """(name, terms, sizes, dtype, measured errors of sums of nearly the same terms).

    The errors are those of other sums, whose terms differ from these by one part in some hundred:
    so an error that was measured with these terms is no prediction.
    """
    f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
    mixed, opposed = _numbers(24), _numbers(16)
    opposed[8:] = -opposed[:8] + 0.05 * opposed[8:]
    cases = [
        ("24 terms on 1 rank in float32", mixed, [24], f32),
        ("24 terms on 4 ranks in float32", mixed, [6, 6, 6, 6], f32),
        ("2 terms on 2 ranks in float32", _numbers(2), [1, 1], f32),
        ("300 positive terms on 3 ranks in float32", _numbers(300).abs(), [150, 100, 50], f32),
        ("16 terms on 2 ranks, whose sums nearly cancel, in float32", opposed, [8, 8], f32),
        ("20 terms on 3 ranks in bfloat16", _numbers(20), [12, 1, 7], bf16),
        ("12 terms on 2 ranks in float64", _numbers(12), [4, 8], f64),
    ]
    return [(name, _near(terms, dtype), sizes, dtype, _errors(_near(terms, dtype), sizes, dtype))
            for name, terms, sizes, dtype in cases]

ELEMENTS = 4000

_generator = torch.Generator()


def _numbers(n):
    """Numbers of both signs; each element is at another place between two powers of two."""
    _generator.manual_seed(n)
    scales = 2 ** torch.rand(ELEMENTS, generator=_generator, dtype=torch.float64)
    return scales * torch.randn(n, ELEMENTS, generator=_generator, dtype=torch.float64)


def _near(terms, dtype):
    noise = torch.randn(terms.shape, generator=_generator, dtype=torch.float64)
    return (terms * (1 + noise / 128)).to(dtype).double()


def _errors(terms, sizes, dtype):
    """What the rounding of real sums leaves, exactly."""
    found = _one_by_one([_one_by_one(part) for part in terms.to(dtype).split(sizes)]).double()
    return torch.tensor([math.fsum([*(-terms[:, column]).tolist(), found[column].item()])
                         for column in range(ELEMENTS)], dtype=torch.float64)


def _one_by_one(numbers):
    total = numbers[0]
    for each in numbers[1:]:
        total = total + each
    return total
