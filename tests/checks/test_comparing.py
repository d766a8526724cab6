"""Where an attempt's facts differ from the expected ones, and what is said of it."""

import fractions
import math

import pytest
import torch

from dplab import RankError
from dplab.checks.compare import (
    BESIDE,
    COMMUNICATED,
    AtMost,
    Overlap,
    agree,
    explained,
    first_difference,
    other_demands,
    overlap,
    wrong_facts,
)
from dplab.checks.composition import Held, fewest, made_of, said
from dplab.checks.trials import seeded

TOLERANCE = 1e-5
A, B, C = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.2345, 2.3456]])
NAN, HALF = float("nan"), torch.tensor([0.5, 0.5])
LIMIT = AtMost(4, "four are enough")
OWN, OTHER = Held({"own": 1.0}), Held({"own": 1.0, "other": 2.0})


@pytest.mark.parametrize(("expected", "right", "wrong"), [
    (A, [A, A + 1e-5], [A + 3e-5, A[None], A * torch.tensor([1.0, NAN]), None, [1.0, 2.0]]),
    (0 * A, [0 * A], [0 * A + 1e-9]),
    (torch.empty(0), [torch.empty(0)], [A]),
    (A * math.inf, [A * math.inf], [-A * math.inf, A * NAN]),
    (torch.tensor([1.0, NAN]), [torch.tensor([1.0, NAN])], [torch.tensor([2.0, NAN]), A]),
    (A.long(), [A.long()], [B.long(), A, A.int()]),
    (LIMIT, [4, 3.5], [5, None, "4"]),
    (7, [7, 7.0], [8, 7.5, True, "7"]),
    (True, [True], [1, 1.0, False]),
    (None, [None], [0, A]),
    (0.5, [0.5000001, HALF[0], HALF[:1], fractions.Fraction(1, 2)], [0.51, "0.5", HALF, None]),
    (0.0, [0.0], [1e-9]),
    (OTHER, [{"own": 1.0, "other": 2.0}, None], [{"own": 1.0, "other": 1.9}, {"own": 1.0}]),
    ({"own": 1.0}, [{"own": 1.0005}], [{"own": 1.1}, {"own": 1.0, "other": 0.0}]),
])
def test_what_is_right_and_what_is_wrong(expected, right, wrong):
    assert [each for each in right if not agree(expected, each, TOLERANCE)] == []
    assert [each for each in wrong if agree(expected, each, TOLERANCE)] == []


@pytest.mark.parametrize(("expected", "got", "note"), [
    ([A, A], [B, B], ""),
    ([A, A], [A, B], "the ranks differ, and should all have the same"),
    ([A, B], [B, B], "it is what rank 1 should have"),
    ([A, B], [0 * A, A], "it is all zeros"),
    ([A, A], [4 * A, B], "it is 4 times the reference"),
    ([A, A], [-A, -A], "it is -1 times the reference"),
    ([A], [None], "it is None"),
    ([A], [3], "it is an int, not a tensor"),
    ([A], [A[None]], "its shape is [1, 2], not [2]"),
    ([A], [A / 0], "it holds inf or nan"),
    ([A.long()], [A], "its dtype is float32, not int64"),
    ([A.long()], [B.long()], ""),
    ([torch.arange(12.0) ** 2], [(torch.arange(12.0) ** 2).flip(0)],
     "it has the right numbers, in another order"),
    ([C], [C.bfloat16().float()], "its numbers have the digits of a bfloat16"),
    ([C], [C.half().float()], "its numbers have the digits of a float16"),
    ([C], [C + 0.01], ""),
    # A single number is always some multiple, and says something if that is whole.
    ([A[:1]], [A[:1] * 1.3], ""),
    ([A[:1]], [A[:1] / 4], "it is 0.25 times the reference"),
    ([0.5], [500.0], "it is 1000 times the reference"),
    ([1923.0556], [1923.0556 / 4226349.3], ""),  # near a whole number since it is so many
    ([1923.0556], [1923.0], ""),  # which has few digits in any dtype
    ([0.5], [0.0], ""),
    ([LIMIT], [5], "four are enough"),
    ([OWN], [{"own": 0.0}], "none of the parts is in it"),
])
def test_what_is_said_of_the_first_difference(expected, got, note):
    right, found = ([{"b": 1, "it": value, "z": 0} for value in each] for each in (expected, got))
    difference = first_difference(right, found, TOLERANCE)
    differ = [rank for rank in range(len(got)) if expected[rank] is not got[rank]]
    assert (difference.note, difference.rank, difference.fact) == (note, differ[0], "it")
    assert wrong_facts(right, found, TOLERANCE) == {(rank, "it") for rank in differ}


def test_a_fact_that_is_missing_is_the_difference_and_an_unreached_gradient_is_explained():
    right = [{"the gradient of `a`": A, "b": 1}]
    missing = first_difference(right, [{"the gradient of `a`": A}], TOLERANCE)
    assert (missing.fact, missing.note) == ("b", "it is missing")
    assert first_difference(right, right, TOLERANCE) is None
    assert wrong_facts(right, [{"the gradient of `a`": A}], TOLERANCE) == {(0, "b")}
    unreached = first_difference(right, [{"the gradient of `a`": None, "b": 1}], TOLERANCE)
    assert unreached.note == "it is None: no `backward` reached it, or it was cleared"


def shown(expected, got, **more):
    return str(first_difference([{"it": expected}], [{"it": got, **more}], TOLERANCE))


def test_a_difference_is_shown_by_both_values_as_far_as_they_differ():
    assert shown(A, B) == "it is not as expected\n  expected  [1, 2]\n  got       [3, 4]"
    assert "expected  [33554433]" in shown(torch.tensor([33554433]), torch.tensor([33554432]))
    long = torch.arange(8.0).view(2, 4)
    late, early = long.clone(), long.clone()
    late[1, 2], early[0, 0] = -1, -1
    assert shown(long, late).splitlines()[1:] == ["  most at [1, 2]: expected 6, got -1"]
    assert shown(long, early).splitlines()[1:] == [
        "  expected  [0, 1, 2, 3, …]", "  got       [-1, 1, 2, 3, …]",
        "  most at [0, 0]: expected 0, got -1"]
    assert shown(LIMIT, 12345.5).splitlines()[1:] == ["  at most   4", "  got       12,345.5"]
    assert shown(OWN, {"own": 0.0}) == "it is not as expected: none of the parts is in it"
    assert shown(1, 2, **{BESIDE: {"it": "look here"}}).splitlines()[-1] == "look here"
    right, wrong = ({"that all is well": so} for so in (True, False))
    assert str(first_difference([right], [wrong], TOLERANCE)) == (
        "the exercise asks that all is well, and that is not so here")


def test_two_more_demands_that_are_not_met_are_listed_and_other_facts_are_not():
    right = {"sum": 3, "mean": 1.0, "that `x` is left alone": True, "bytes": LIMIT, "size": None}
    found = {"sum": 2, "mean": 0.5, "that `x` is left alone": False, "bytes": 9, "size": 0}
    first = first_difference([right], [found], TOLERANCE)
    assert other_demands(first, [right], [found], TOLERANCE) == [
        "Besides, the exercise asks that `x` is left alone, and that is not so here.",
        "Besides, bytes is 9: four are enough."]
    found |= {"bytes": 4}
    assert other_demands(first, [right], [found], TOLERANCE)[1:] == [
        "Besides, size is 0, and should be None."]
    assert other_demands(first, [right], [right | {"sum": 2, "bytes": 4}], TOLERANCE) == []


# What a value is made of

QUANTITIES = {"the ranks": 2, "the slices": 5, "own": 3, "all": 7}
ALONE, *PARTS = (seeded(name, 8) for name in ("alone", "part of rank 0", "part of rank 1"))
SUM = PARTS[0] + PARTS[1]


@pytest.mark.parametrize(("got", "note"), [
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
def test_what_a_wrong_tensor_is_made_of(got, note):
    difference = first_difference([{"it": SUM}], [{"it": got}], TOLERANCE)
    assert explained(difference, {"it": ALONE}, QUANTITIES, {"it": PARTS}, TOLERANCE).note == note
    if "1 / the slices" in note:  # where two quantities are equal, it may be either
        found = explained(difference, {}, {"the ranks": 5, "own": 5}, {}, TOLERANCE)
        assert found.note.endswith("(1 / the ranks, or 1 / own)")


CHUNKS = {f"rank {rank}'s chunk {chunk}": seeded(f"chunk {chunk} of rank {rank}", 10)
          for rank in range(3) for chunk in range(3)}
NAMES = list(CHUNKS)
RIGHT = dict.fromkeys(NAMES[1::3], 1.0)  # chunk 1 of all ranks
SHOULD = "and should hold rank 0's chunk 1, rank 1's chunk 1 and rank 2's chunk 1"


@pytest.mark.parametrize(("got", "words"), [
    (RIGHT, ""),
    ({**RIGHT, NAMES[7]: 0.0}, "rank 2's chunk 1 is missing"),
    ({**RIGHT, NAMES[7]: 2.0}, "rank 2's chunk 1 is in it twice"),
    ({**RIGHT, NAMES[4]: 0.0, NAMES[5]: 1.0},
     f"it holds rank 0's chunk 1, rank 1's chunk 2 and rank 2's chunk 1, {SHOULD}"),
    (dict.fromkeys(RIGHT, 1 / 3),
     f"it holds 1/3 of rank 0's chunk 1, rank 1's chunk 1 and rank 2's chunk 1, {SHOULD}"),
    ({NAMES[0]: 1 / 3, NAMES[1]: 1 / 3, NAMES[2]: 1 / 3, NAMES[3]: -2.0},
     f"it holds 1/3 of each of rank 0's, and −2 of rank 1's chunk 0, {SHOULD}"),
    ({NAMES[0]: 0.0}, "none of the parts is in it"),
])
def test_what_a_value_holds_is_solved_for(got, words):
    value = sum((times * CHUNKS[name] for name, times in got.items()), torch.zeros(10))
    found = made_of(value, CHUNKS)
    assert all(abs(found[name] - got.get(name, 0)) < 1e-4 for name in CHUNKS)
    assert said(found, RIGHT, {"each of rank 0's": NAMES[:3]}) == words


def test_nothing_is_said_where_another_composition_would_do():
    one, two = CHUNKS[NAMES[0]], CHUNKS[NAMES[1]]
    assert made_of(one + two, {"a": one, "b": two, "both": one + two}) is None  # a sum of others
    assert made_of(one + two, {"a": one}) is None  # no sum of these
    assert made_of((one + two)[:2], {"a": one[:2], "b": two[:2]}) is None  # anything is
    assert made_of(one * NAN, {"a": one}) is None and made_of(None, {"a": one}) is None
    assert said(None, RIGHT) == ""


CASES = {"weights": (2.0, 10.0, 6.0, 8.0), "half the weights": (1.0, 5.0, 3.0, 4.0),
         "state": (7.0, 3.0, 5.0, 1.0), "one case": (0.0, 0.0, 9.0, 0.0)}


@pytest.mark.parametrize(("values", "without", "found"), [
    ((16.0, 16.0, 16.0, 10.0), "half the weights", {"weights": 1.0, "state": 2.0}),
    ((16.0, 16.0, 17.0, 10.0), "half the weights", None),  # some of "one case" would explain it
    ((0.246, 1.23, 0.738, 0.984), "half the weights", None),  # nobody writes 0.123 of a term
    ((2.0, 10.0, 6.0, 8.0), "", None),  # of the weights, or of twice their half
    ((NAN, 1.0, 2.0, 3.0), "", None),
])
def test_the_fewest_terms_that_explain_all_cases_are_found(values, without, found):
    terms = {name: term for name, term in CASES.items() if name != without}
    assert fewest(values, terms) == (found and pytest.approx(found))


# Whether a known mistake is the attempt's


def facts(calls, weights=1.0):
    return [{"calls": calls, "weights": torch.full((2,), weights), COMMUNICATED: True}]


@pytest.mark.parametrize(("mine", "theirs", "exact", "found"), [
    (facts(5), facts(5), True, Overlap(True, 1, 0)),
    (facts(5), facts(6), True, Overlap(False, 0, 1)),
    (facts(5), facts(6), False, Overlap(True, 1, 0)),
    (facts(5), facts(3), False, Overlap(False, 0, 1)),
    (facts(4), facts(5), True, Overlap(False, 0, 0, True)),  # wrong where the attempt is right
    (facts(5), facts(5, 2.0), True, Overlap(True, 1, 0, True)),
    (facts(5, 2.0), facts(5), True, Overlap(True, 1, 1)),
    (facts(5), None, True, Overlap(False, contradicted=True)),  # it fails
])
def test_what_a_mistake_explains_of_an_attempt(mine, theirs, exact, found):
    expected = [{"calls": AtMost(4, "", exact), "weights": torch.ones(2)}]
    assert overlap(expected, mine, theirs, TOLERANCE) == found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fact", "value"), [
    ("weights", 1.001 * torch.ones(2)), ("calls", 2), ("right", False)])
def test_a_mistake_is_another_where_one_fact_of_one_rank_differs(fact, value, rank):
    mine, other = ([{"weights": torch.ones(2), "calls": 3, "right": None, COMMUNICATED: True}
                    for _ in range(2)] for _ in range(2))
    expected = [{"weights": torch.zeros(2), "calls": 1, "right": True}] * 2
    other[rank][fact] = value
    first = (fact, rank) != ("weights", 0)
    assert overlap(expected, mine, other, TOLERANCE) == Overlap(first, 5, 1)
    del other[rank][fact]
    assert overlap(expected, mine, other, TOLERANCE) == Overlap(first, 5, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_calls_a_collective_does_not_have_the_mistake_of_one_who_calls_none(rank):
    mine, other = ([{"it": it, COMMUNICATED: True} for _ in range(2)] for it in (2, 3))
    other[rank][COMMUNICATED] = False
    right = [{"it": 1}] * 2
    assert overlap(right, mine, other, TOLERANCE, communicates=True).contradicted
    assert overlap(right, mine, other, TOLERANCE) == Overlap(False, 0, 2)
    assert overlap(right, other, mine, TOLERANCE, communicates=True) == Overlap(False, 0, 3)


def failed(words, rank=1, kind="stuck"):
    return RankError(words, rank=rank, kind=kind)


@pytest.mark.parametrize(("theirs", "same"), [
    (failed("rank 1 did not come to all_reduce number 5 within 10 s\n\nmore"), True),
    (failed("rank 1 did not come to all_reduce number 5 within 7 s", rank=0), False),
    (failed("rank 1 did not come to all_reduce number 5 within 7 s", kind="died"), False),
    (failed("rank 1 did not come to broadcast number 5 within 7 s"), False),
    ([{}, {}], False)])
def test_failures_are_alike_by_kind_rank_and_words_but_for_numbers(theirs, same):
    mine = failed("rank 1 did not come to all_reduce number 4 within 7.3 s")
    assert overlap([{}, {}], mine, theirs, TOLERANCE) == Overlap(same, int(same), int(not same))
