"""Where an attempt's facts and the solution's differ, and what is said of it."""

import fractions

import pytest
import torch

from dplab import RankError
from dplab.checks.compare import (
    COMMUNICATED,
    AtMost,
    Overlap,
    agree,
    explained,
    first_difference,
    other_demands,
    overlap,
)
from dplab.checks.composition import fewest, made_of, said
from dplab.checks.trials import seeded


def facts(count, weights=1.0):
    return [{"calls": count, "weights": torch.full((2,), weights), COMMUNICATED: True}]


ENOUGH = [{"calls": AtMost(4, "four are enough"), "weights": torch.ones(2)}]


@pytest.mark.parametrize(("mine", "theirs", "explained", "unexplained", "contradicted"), [
    (5, 5, 1, 0, False), (5, 6, 0, 1, False), (5, 3, 0, 1, False), (2, 4, 0, 0, False),
    (4, 5, 0, 0, True)])
def test_a_mistake_explains_a_count_above_the_limit_if_it_is_the_same(
        mine, theirs, explained, unexplained, contradicted):
    found = overlap(ENOUGH, facts(mine), facts(theirs), 1e-5)
    assert found == Overlap(explained > 0, explained, unexplained, contradicted)


def test_any_count_above_a_limit_that_is_not_exact_is_the_same():
    roughly = [{"calls": AtMost(4, "four are enough", exact=False)}]
    assert overlap(roughly, facts(5), facts(60), 1e-5) == Overlap(True, 1, 0, False)
    assert overlap(roughly, facts(5), facts(3), 1e-5) == Overlap(False, 0, 1, False)


def test_a_mistake_that_gets_wrong_what_the_attempt_gets_right_is_not_its_mistake():
    assert overlap(ENOUGH, facts(5), facts(5, weights=2.0), 1e-5).contradicted
    both = overlap(ENOUGH, facts(5, weights=2.0), facts(5), 1e-5)
    assert both == Overlap(True, 1, 1, False)


def test_ranks_that_are_stuck_are_compared_whatever_the_limit():
    mine, theirs = (RankError(f"rank 1 did not come to all_reduce number 5 within {seconds} s",
                              rank=1, kind="stuck") for seconds in (7.3, 10))
    assert overlap([{}, {}], mine, theirs, 1e-5).first


def test_a_mistake_that_fails_explains_no_facts():
    assert overlap(ENOUGH, facts(5), None, 1e-5).contradicted


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fact", ["weights", "calls", "right"])
def test_an_outcome_is_another_where_one_fact_of_one_rank_differs(fact, rank):
    def wrong():
        return [{"weights": torch.ones(2), "calls": 3, "right": None, COMMUNICATED: True}
                for _ in range(2)]

    expected = [{"weights": torch.zeros(2), "calls": 1, "right": True}] * 2
    other = wrong()
    assert overlap(expected, wrong(), other, 1e-5) == Overlap(True, 6, 0, False)
    other[rank][fact] = other[rank][fact] * 1.001 if fact == "weights" else False
    first = (fact, rank) != ("weights", 0)
    assert overlap(expected, wrong(), other, 1e-5) == Overlap(first, 5, 1, False)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_calls_a_collective_does_not_have_the_mistake_of_one_who_calls_none(rank):
    mine, other = ([{"it": it, COMMUNICATED: True} for _ in range(2)] for it in (2, 3))
    other[rank][COMMUNICATED] = False
    right = [{"it": 1}] * 2
    assert overlap(right, mine, other, 1e-5, communicates=True).contradicted
    assert overlap(right, mine, other, 1e-5) == Overlap(False, 0, 2, False)
    assert overlap(right, other, mine, 1e-5, communicates=True) == Overlap(False, 0, 3, False)


@pytest.mark.parametrize(("expected", "got", "right"), [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]), True),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), False),
    (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]]), False),
    (torch.tensor([1.0]), torch.tensor([float("nan")]), False),
    (torch.tensor([3]), torch.tensor([3]), True),
    (torch.tensor([3]), torch.tensor([4]), False),
    (torch.tensor([3]), torch.tensor([3.0]), False),
    (torch.tensor([1.0]), None, False),
    (AtMost(4, ""), 4, True),
    (AtMost(4, ""), 5, False),
    (7, 7, True),
    (7, 8, False),
    (0.5, 0.5000001, True),
    (0.5, 0.51, False),
    (0.5, torch.tensor(0.5), True),
    (0.5, torch.tensor([0.5, 0.5]), False),
    (0.5, fractions.Fraction(1, 2), True),
    (0.5, "0.5", False),
])
def test_agreement(expected, got, right):
    assert agree(expected, got, 1e-5) is right


def test_the_first_rank_and_fact_that_differ_are_named():
    right = [{"a": torch.ones(2), "b": 1}] * 2
    got = [{"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2}]
    difference = first_difference(right, got, 1e-5)
    assert (difference.rank, difference.fact) == (1, "b")
    assert first_difference(right, [right[0], {"a": torch.ones(2)}], 1e-5).fact == "b"


A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(("expected", "got", "said"), [
    ((A, A), (B, B), ""),
    ((A, A), (A, B), "the ranks differ, and should all have the same"),
    ((A, B), (B, B), "it is what rank 1 should have"),
    ((A, A), (4 * A, B), "it is 4 times the reference"),
    ((A, A), (0 * A, A), "it is all zeros"),
    ((A[:1], A[:1]), (A[:1] * 1.3, A[:1] * 1.3), ""),
    ((A[:1], A[:1]), (A[:1] / 4, A[:1] / 4), "it is 0.25 times the reference"),
    ((A, A), (None, A), "it is None"),
    ((0.5, 0.5), (500.0, 500.0), "it is 1000 times the reference"),
    ((0.5, 0.5), (0.7, 0.7), ""),
    # 4,226,349.3 times smaller: near a whole number of times only because it is so many.
    ((1923.0556,), (1923.0556 / 4226349.3,), ""),
    ((1923.0556,), (1923.0,), ""),  # which has few digits in any dtype
    ((0.5, 0.5), (0.0, 0.0), ""),
    ((A.long(), A.long()), (A, A), "its dtype is float32, not int64"),
])
def test_what_is_said_of_a_difference(expected, got, said):
    right, found = ([{"it": value} for value in values] for values in (expected, got))
    assert first_difference(right, found, 1e-5).note == said


QUANTITIES = {"the ranks": 2, "the slices": 5, "own": 3, "all": 7}
ALONE, *PARTS = (seeded(name, 8) for name in ("alone", "part of rank 0", "part of rank 1"))
SUM = PARTS[0] + PARTS[1]


@pytest.mark.parametrize(("got", "said"), [
    (5 * SUM, "it is 5 times the reference (the slices)"),
    (SUM / 5, "it is 0.2 times the reference (1 / the slices)"),
    (SUM * 3 / 7, "it is 0.4286 times the reference (own / all)"),
    (SUM / 4, "it is 0.25 times the reference (1 / (the ranks · the ranks))"),
    (SUM * 7 / 6, "it is 1.167 times the reference (all / (own · the ranks))"),
    (SUM * 10, "it is 10 times the reference (the ranks · the slices)"),
    (SUM * 1.234, "it is 1.234 times the reference"),
    (SUM + PARTS[0], "rank 0's part is in it twice"),
    (PARTS[1], "it holds rank 1's part alone"),
    (PARTS[0] + PARTS[1] / 3, "rank 1's part is in it 1/3 times"),
    (torch.cat([SUM[:4], PARTS[0][4:]]), "in chunk 1, it holds rank 0's part alone"),
    (SUM + 0.5, ""),
    (ALONE, "it is what rank 0 alone would have"),
])
def test_what_a_wrong_tensor_is_made_of(got, said):
    difference = first_difference([{"it": SUM}], [{"it": got}], 1e-5)
    assert explained(difference, {"it": ALONE}, QUANTITIES, {"it": PARTS}, 1e-5).note == said


CHUNKS = {f"rank {rank}'s chunk {chunk}": seeded(f"chunk {chunk} of rank {rank}", 10)
          for rank in range(3) for chunk in range(3)}
WHOLE = dict.fromkeys(["rank 0's chunk 1", "rank 1's chunk 1", "rank 2's chunk 1"], 1.0)


@pytest.mark.parametrize(("got", "words"), [
    (WHOLE, ""),
    ({**WHOLE, "rank 2's chunk 1": 0.0}, "rank 2's chunk 1 is missing"),
    ({**WHOLE, "rank 1's chunk 1": 0.0, "rank 1's chunk 2": 1.0},
     "it holds rank 0's chunk 1, rank 1's chunk 2 and rank 2's chunk 1, and should hold "
     "rank 0's chunk 1, rank 1's chunk 1 and rank 2's chunk 1"),
    (dict.fromkeys(WHOLE, 1 / 3),
     "it holds 1/3 of rank 0's chunk 1, rank 1's chunk 1 and rank 2's chunk 1, and should hold "
     "rank 0's chunk 1, rank 1's chunk 1 and rank 2's chunk 1"),
    ({"rank 0's chunk 0": 0.0}, "none of the parts is in it"),
])
def test_what_a_value_holds_is_solved_for(got, words):
    value = sum((times * CHUNKS[name] for name, times in got.items()), torch.zeros(10))
    found = made_of(value, CHUNKS)
    assert all(abs(found[name] - got.get(name, 0)) < 1e-4 for name in CHUNKS)
    assert said(found, WHOLE) == words


def test_nothing_is_said_where_another_composition_would_do():
    names = list(CHUNKS)
    one, two = CHUNKS[names[0]], CHUNKS[names[1]]
    assert made_of(one + two, {"a": one, "b": two, "both": one + two}) is None  # a sum of others
    assert made_of(one + two, {"a": one}) is None  # no sum of these
    assert made_of((one + two)[:2], {"a": one[:2], "b": two[:2]}) is None  # anything is


CASES = {"weights": (2.0, 10.0, 6.0, 8.0), "half the weights": (1.0, 5.0, 3.0, 4.0),
         "state": (7.0, 3.0, 5.0, 1.0), "one case": (0.0, 0.0, 9.0, 0.0)}


@pytest.mark.parametrize(("values", "found"), [
    ((16.0, 16.0, 16.0, 10.0), {"weights": 1.0, "state": 2.0}),
    ((16.0, 16.0, 17.0, 10.0), None),  # which some of "one case" would explain
    ((0.123 * 2, 0.123 * 10, 0.123 * 6, 0.123 * 8), None),
    ((2.0, 10.0, 6.0, 8.0), None),  # of the weights, or of twice their half
    ((float("nan"), 1.0, 2.0, 3.0), None),
])
def test_the_fewest_terms_that_explain_all_cases_are_found(values, found):
    terms = dict(CASES)
    if found:
        del terms["half the weights"]
    got = fewest(values, terms)
    assert got == (found and pytest.approx(found))


def test_a_group_stands_for_its_parts():
    groups = {"each of rank 0's": list(CHUNKS)[:3], "each of rank 1's": list(CHUNKS)[3:6]}
    own, all_of_two = dict.fromkeys(list(CHUNKS)[:3], 1 / 3), dict.fromkeys(list(CHUNKS)[:6], 1 / 6)
    assert said(own, all_of_two, groups) == (
        "it holds 1/3 of each of rank 0's, and should hold 1/6 of each of rank 0's and each of "
        "rank 1's")


def test_digits_of_a_narrow_dtype_are_seen():
    right = torch.tensor([1.2345, 2.3456])
    for dtype in (torch.bfloat16, torch.float16):
        narrow = first_difference([{"it": right}], [{"it": right.to(dtype).float()}], 1e-5)
        assert str(dtype).removeprefix("torch.") in narrow.note
    assert first_difference([{"it": right}], [{"it": right + 0.01}], 1e-5).note == ""


def test_what_should_hold_is_said_as_such():
    difference = first_difference([{"that all is well": True}], [{"that all is well": False}], 0)
    assert str(difference) == "the exercise asks that all is well, and that is not so here"


def test_quantities_that_are_equal_are_both_named():
    difference = first_difference([{"it": SUM}], [{"it": SUM / 2}], 1e-5)
    said = explained(difference, {}, {"the ranks": 2, "own": 2}, {}, 1e-5).note
    assert said == "it is 0.5 times the reference (1 / the ranks, or 1 / own)"


def test_an_int_has_its_article():
    assert "it is an int, not" in str(first_difference([{"it": SUM}], [{"it": 3}], 1e-5))


def test_whole_numbers_are_shown_in_full():
    difference = first_difference([{"it": torch.tensor([33554433])}],
                                  [{"it": torch.tensor([33554432])}], 1e-5)
    assert "[33554433]" in str(difference) and "[33554432]" in str(difference)


def test_two_equal_beginnings_are_not_shown_one_below_the_other():
    right = torch.arange(8.0)
    wrong = right.clone()
    wrong[6] = -1
    said = str(first_difference([{"it": right}], [{"it": wrong}], 1e-5))
    assert said.splitlines()[1:] == ["  most at [6]: expected 6, got -1"]
    wrong[0] = -1
    assert "\n  expected  [0" in str(first_difference([{"it": right}], [{"it": wrong}], 1e-5))


def test_the_right_numbers_in_another_order_are_said_to_be_that():
    right = torch.arange(12.0) ** 2
    turned, other = right.flip(0), right.flip(0) + 1
    assert "in another order" in str(first_difference([{"it": right}], [{"it": turned}], 1e-5))
    assert "order" not in str(first_difference([{"it": right}], [{"it": other}], 1e-5))


def test_demands_that_are_not_met_either_are_listed_and_other_facts_are_not():
    right = {"sum": 3, "mean": 1.0, "that `x` is left alone": True, "bytes": AtMost(8, "too many"),
             "size": None}
    found = {"sum": 2, "mean": 0.5, "that `x` is left alone": False, "bytes": 4, "size": 0}
    first = first_difference([right], [found], 1e-5)
    besides = other_demands(first, [right], [found], 1e-5)
    assert len(besides) == 2
    assert "left alone" in besides[0] and "should be None" in besides[1]
    assert other_demands(first, [right], [right | {"sum": 2, "bytes": 8}], 1e-5) == []
