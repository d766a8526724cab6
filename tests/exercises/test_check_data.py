"""What checks give to attempts: what ranks contribute is independent, so a result tells its parts.
"""

import pytest

from dplab.checks import every_exercise, find, observe
from dplab.checks.composition import Held, made_of
from dplab.checks.exercise import Exercise

WITH_PARTS = [each for each in every_exercise() if type(each).parts is not Exercise.parts]


def test_most_exercises_on_ranks_say_what_a_value_is_made_of():
    assert len(WITH_PARTS) >= 20


@pytest.mark.parametrize("exercise", WITH_PARTS, ids=lambda exercise: exercise.slug)
def test_what_the_right_values_are_made_of_can_be_solved_for(exercise):
    exercise.given = exercise.prepare()
    for world_size in {2, 3, 4}.intersection(exercise.world_sizes):
        solved = []
        for rank, facts in enumerate(exercise.expected_of_all(world_size)):
            for fact, parts in exercise.parts(world_size, rank).items():
                named = parts if isinstance(parts, dict) else dict(enumerate(parts))
                solved.append(fact in facts and made_of(facts[fact], named) is not None)
        assert any(solved) or not solved, f"{world_size} ranks"


@pytest.mark.parametrize("exercise", map(find, ("global-mean", "train-by-hand", "uneven-loop")),
                         ids=lambda exercise: exercise.slug)
def test_what_must_be_solved_for_can_be(exercise):
    """What cannot be known is not held against anybody, so it has to be known."""
    exercise.given = exercise.prepare()
    for world_size in (1, 2, 3, 4):
        expected = exercise.expected_of_all(world_size)
        got = observe.alone(exercise.trial, exercise.solution, world_size, seconds=30)
        for right, found in zip(expected, got, strict=True):
            assert None not in [found[fact] for fact in right if isinstance(right[fact], Held)]
