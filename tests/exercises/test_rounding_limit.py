"""The limit of the appendix on rounding: other right and wrong answers than those it knows."""

import pytest
import torch

from dplab.exercises import find
from dplab.exercises.exercise import PASSED, WRONG

EXERCISE = find("rounding-limit")
EXERCISE.given = EXERCISE.prepare()


def of_each_element(terms, dtype):
    sizes = terms.abs().sum(dim=0)
    return torch.finfo(dtype).eps * sizes.norm()


def of_one_by_one(terms, dtype):
    """For each addition, by its own partial sum, and for the division."""
    partial = terms.abs().cumsum(dim=0)[1:].sum(dim=0) + terms.abs().sum(dim=0)
    return torch.finfo(dtype).eps * partial.norm().item() / len(terms)


def without_the_division(terms, dtype):
    lengths = [term.square().sum().sqrt().item() for term in terms]
    return (len(terms) - 1) * torch.finfo(dtype).eps * sum(lengths) / len(lengths)


def with_room(terms, dtype):
    return 2 * len(terms) * torch.finfo(dtype).eps * terms.norm(dim=1).mean().item()


@pytest.mark.parametrize("answer", [of_each_element, of_one_by_one, without_the_division,
                                    with_room])
def test_another_right_limit_passes(answer):
    verdict = EXERCISE.judge(answer)
    assert verdict.outcome == PASSED, verdict


def result_and_root(terms, dtype):
    return len(terms) ** 0.5 * torch.finfo(dtype).eps * terms.mean(dim=0).norm().item()


def elements_and_result(terms, dtype):
    return terms.shape[1] * torch.finfo(dtype).eps * terms.mean(dim=0).norm().item()


@pytest.mark.parametrize(("answer", "said"), [
    (result_and_root, "relative to the result"), (elements_and_result, "relative to the result")])
def test_a_mistake_that_is_not_in_the_list_is_named(answer, said):
    verdict = EXERCISE.judge(answer)
    assert verdict.outcome == WRONG and said in verdict.why, verdict


def test_the_distance_and_the_limit_are_shown():
    verdict = EXERCISE.judge(lambda terms, dtype: 0.0)
    name, _, _, distance, _ = EXERCISE.given[0]
    assert name in verdict.detail and f"{distance:.2g}, and your limit is 0" in verdict.detail


@pytest.mark.parametrize("case", EXERCISE.given, ids=lambda case: case[0])
def test_the_terms_are_exact_in_their_dtype(case):
    _, terms, dtype, *_ = case
    assert torch.equal(terms.to(dtype).double(), terms)
