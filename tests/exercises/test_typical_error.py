"""The typical error of a sum over ranks: other right and wrong answers than those it knows."""

import pytest
import torch

from dplab.checks import find
from dplab.checks.exercise import PASSED, WRONG

EXERCISE = find("typical-error")
EXERCISE.given = EXERCISE.prepare()


def of_mean_squares(terms, sizes, dtype):
    """An even spread within ±eps/2 of the result has 1/12; of what powers of two lie above it."""
    parts = [part.cumsum(dim=0) for part in terms.split(sizes)]
    sums = torch.stack([part[-1] for part in parts]).cumsum(dim=0)
    results = torch.cat([part[1:] for part in parts] + [sums[1:]]).double()
    spacing = torch.finfo(dtype).eps * 2 ** results.abs().log2().floor()
    return (spacing.square() / 12).sum(dim=0).sqrt()


def test_another_right_prediction_passes():
    verdict = EXERCISE.judge(of_mean_squares)
    assert verdict.outcome == PASSED, verdict


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_wrong_constant_fails(factor):
    verdict = EXERCISE.judge(lambda *given: factor * EXERCISE.solution(*given))
    assert verdict.outcome == WRONG and "in units of your prediction" in verdict.detail, verdict
    assert EXERCISE.given[0][0] in verdict.detail and "and you predict" in verdict.detail


@pytest.mark.parametrize("case", EXERCISE.given, ids=lambda case: case[0])
def test_the_errors_are_those_of_real_sums_of_nearly_these_terms(case):
    _, terms, sizes, dtype, errors = case
    assert torch.equal(terms.to(dtype).double(), terms) and sum(sizes) == len(terms)
    spacing = torch.finfo(dtype).eps * terms.abs().sum(dim=0)
    assert (errors.abs() <= len(terms) * spacing).all() and errors.count_nonzero() > 1000
