"""The typical error of a sum over ranks: other right and wrong answers than those it knows."""

import pytest
import torch

from dplab.checks import find
from dplab.checks.exercise import PASSED, WRONG

EXERCISE = find("typical-error")
EXERCISE.given = EXERCISE.prepare()


def in_a_loop(terms, sizes, dtype):
    """Addition by addition, in the dtype, with the variance of an even spread."""
    eps, variance, sums, first = torch.finfo(dtype).eps, 0.0, [], 0
    for size in sizes:
        total = terms[first].to(dtype)
        for term in terms[first + 1:first + size]:
            total = total + term.to(dtype)
            variance = variance + (0.2124 * eps * total.double()) ** 2
        sums.append(total)
        first += size
    total = sums[0]
    for each in sums[1:]:
        total = total + each
        variance = variance + (0.2124 * eps * total.double()) ** 2
    return torch.as_tensor(variance) ** 0.5 + torch.zeros(terms.shape[1])


def of_mean_squares(terms, sizes, dtype):
    """An even spread within ±eps/2 of the result has 1/12; of what powers of two lie above it."""
    parts = [part.cumsum(dim=0) for part in terms.split(sizes)]
    sums = torch.stack([part[-1] for part in parts]).cumsum(dim=0)
    results = torch.cat([part[1:] for part in parts] + [sums[1:]]).double()
    spacing = torch.finfo(dtype).eps * 2 ** results.abs().log2().floor()
    return (spacing.square() / 12).sum(dim=0).sqrt()


@pytest.mark.parametrize("answer", [in_a_loop, of_mean_squares])
def test_another_right_prediction_passes(answer):
    verdict = EXERCISE.judge(answer)
    assert verdict.outcome == PASSED, verdict


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_wrong_constant_fails(factor):
    verdict = EXERCISE.judge(lambda *given: factor * EXERCISE.solution(*given))
    assert verdict.outcome == WRONG and "in units of your prediction" in verdict.detail, verdict
    assert EXERCISE.given[0][0] in verdict.detail and "and you predict" in verdict.detail


def limit_of_one_rank(terms, sizes, dtype):
    return max(sizes) * torch.finfo(dtype).eps * terms.abs().sum(dim=0)


def zeros(terms, sizes, dtype):
    return torch.zeros(terms.shape[1])


def many_errors(terms, sizes, dtype):
    """Measures the error of neighbouring sums, and so needs what it is to predict."""
    return (terms.to(dtype).sum(dim=0).double() - terms.sum(dim=0)).abs()


@pytest.mark.parametrize("answer", [limit_of_one_rank, zeros, many_errors])
def test_what_is_no_prediction_fails(answer):
    assert EXERCISE.judge(answer).outcome == WRONG


@pytest.mark.parametrize("case", EXERCISE.given, ids=lambda case: case[0])
def test_the_errors_are_those_of_real_sums_of_nearly_these_terms(case):
    _, terms, sizes, dtype, errors = case
    assert torch.equal(terms.to(dtype).double(), terms) and sum(sizes) == len(terms)
    spacing = torch.finfo(dtype).eps * terms.abs().sum(dim=0)
    assert (errors.abs() <= len(terms) * spacing).all() and errors.count_nonzero() > 1000
