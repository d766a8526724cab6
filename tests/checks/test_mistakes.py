"""Mistakes made by edits of right answers: one at a time, and two at once."""

import pytest
import torch
import torch.distributed as dist

from dplab.checks.exercise import WRONG, Exercise
from dplab.checks.mistakes import Mistake, Slip, both
from dplab.checks.trials import seeded


def scaled_mean(values, weight):
    total = values.sum()
    dist.all_reduce(total)
    mean = total / dist.get_world_size()
    if weight > 1:
        mean = mean * weight
    return mean


def in_one_line(values, weight):
    return sum(values) * max(weight, 1)


UNDIVIDED = Slip("Divide by the number of ranks.", {" / dist.get_world_size()": ""})
UNWEIGHTED = Slip("Multiply by the weight.", {"mean * weight": "mean"})
IN_EITHER = Slip("Multiply.", {"mean * weight": "mean"}, {" * max(weight, 1)": ""})
NEGATIVE = Slip("The sign is wrong.", {"values.sum()": "-values.sum()"})
OF_NEITHER = Slip("Nobody has written this.", {"median": "mean"})


def test_a_slip_is_made_in_each_right_answer_that_has_a_place_for_it():
    [divided] = UNDIVIDED.made_in([scaled_mean, in_one_line])
    one, other = IN_EITHER.made_in([scaled_mean, in_one_line])
    assert (divided.why, divided.hangs) == (UNDIVIDED.why, False)
    assert other.attempt(torch.tensor([1.0, 2.0]), 5) == 3.0
    assert one.edits == {"mean * weight": "mean"}
    assert in_one_line(torch.tensor([1.0, 2.0]), 5) == 15.0  # it is as it was


def test_lines_of_an_edit_go_as_far_in_as_its_place():
    [made] = Slip("It doubles.", {"mean = mean * weight": "mean = mean * weight\nmean = 2 * mean"}
                  ).made_in([with_no_ranks])
    assert (made.attempt(3.0, 2), made.attempt(3.0, 1)) == (12.0, 3.0)


def with_no_ranks(mean, weight):
    if weight > 1:
        mean = mean * weight
    return mean


def test_an_edit_that_no_right_answer_has_a_place_for_is_an_error():
    with pytest.raises(ValueError, match="median"):
        list(OF_NEITHER.made_in([scaled_mean, in_one_line]))


def made(slip, answer=scaled_mean):
    return next(slip.made_in([answer]))


def test_two_slips_are_made_at_once_where_they_lie_on_different_lines():
    assert len(list(both(made(UNDIVIDED), made(UNWEIGHTED), [scaled_mean, in_one_line]))) == 1
    same_line = Slip("No division by 2.", {"total / dist": "total / 2 / dist"})
    assert not list(both(made(UNDIVIDED), made(same_line), [scaled_mean]))
    assert not list(both(made(UNDIVIDED), made(UNDIVIDED), [scaled_mean]))
    written_out = Mistake(in_one_line, "It is written out.")
    assert not list(both(made(UNDIVIDED), written_out, [scaled_mean]))


class ScaledMean(Exercise):
    slug = number = "sample"
    name = "scaled_mean"
    world_sizes = (1, 2, 3)
    solution = staticmethod(scaled_mean)
    slips = (UNDIVIDED, UNWEIGHTED, NEGATIVE)

    def trial(self, attempt):
        values = seeded(f"values of rank {dist.get_rank()}", 5)
        return {f"the mean with weight {weight}": attempt(values, weight) for weight in (1, 3)}

    def expected(self, world_size):
        sums = [seeded(f"values of rank {rank}", 5).sum() for rank in range(world_size)]
        mean = torch.stack(sums).sum() / world_size
        return {"the mean with weight 1": mean, "the mean with weight 3": 3 * mean}


def with_a_local_name(values, weight):
    dist.all_reduce(values := values.sum())
    return -values / dist.get_world_size() * max(1, weight)


def forgets_both(values, weight):
    dist.all_reduce(own := values.sum())
    return own


def forgets_all_three(values, weight):
    dist.all_reduce(own := values.sum())
    return -own


def with_the_root(values, weight):
    dist.all_reduce(own := values.sum())
    return own.abs().sqrt()


@pytest.mark.parametrize(("attempt", "whys"), [
    (with_a_local_name, {NEGATIVE.why}),
    (forgets_both, {UNDIVIDED.why, UNWEIGHTED.why}),
    (forgets_all_three, set()),
    (with_the_root, set()),
])
def test_a_check_names_one_mistake_or_two(attempt, whys):
    verdict = ScaledMean().judge(attempt)
    assert verdict.outcome == WRONG
    assert {slip.why for slip in ScaledMean.slips if slip.why in verdict.why} == whys, verdict.why


class OneRankLast(ScaledMean):
    world_sizes = (2, 3, 1)
    slips = (Slip("On one rank it is too much.", {"mean = total / dist.get_world_size()": (
        "mean = total / dist.get_world_size()\nmean += dist.get_world_size() == 1")}),
        Slip("It is a seventh.", {" / dist.get_world_size()": " / 7"}))


def fails_on_one_rank(values, weight):
    if dist.get_world_size() == 1:
        raise ValueError("no other rank")
    return scaled_mean(values, weight)


def adds_one_on_one_rank(values, weight):
    return scaled_mean(values, weight) + max(weight, 1) * (dist.get_world_size() == 1)


def is_a_seventh_on_one_rank(values, weight):
    return scaled_mean(values, weight) / (7 if dist.get_world_size() == 1 else 1)


@pytest.mark.parametrize(("attempt", "whys"), [
    (fails_on_one_rank, set()), (adds_one_on_one_rank, {OneRankLast.slips[0].why}),
    (is_a_seventh_on_one_rank, set())])  # that slip is wrong where this attempt is right
def test_what_fails_at_the_last_size_is_compared_there(attempt, whys):
    verdict = OneRankLast().judge(attempt)
    assert {slip.why for slip in OneRankLast.slips if slip.why in verdict.why} == whys, verdict


def test_each_place_of_an_edit_has_its_own_depth():
    [made] = Slip("It adds.", {"pass": "number += 1\nnumber += 1"}).made_in([at_two_depths])
    assert made.attempt(0) == 2


def at_two_depths(number):
    pass
    if number > 9:
        pass
    return number
