"""Every exercise: right answers in another form pass, and each known mistake is named.

That each solution passes its check shows the run of its chapter.
"""

import ast
import re

import pytest

from dplab import RankError
from dplab.checks import every_exercise, find, observe, solution_source
from dplab.checks.composition import Held, made_of
from dplab.checks.exercise import PASSED, WRONG, Exercise
from dplab.desk.course import place

EXERCISES = every_exercise()
FEW_SIZES = {"exact-resume", "byte-budget"}  # whose ranks train longer
HANGING = 2.0  # seconds for a mistake that hangs: what does not is over much earlier
of_each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.slug)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.also_right],
                         ids=lambda exercise: exercise.slug)
def test_other_right_answers_pass(exercise):
    for answer in exercise.also_right:
        verdict = exercise.judge(answer)
        assert verdict.outcome == PASSED, f"{answer.__name__}: {verdict.why}\n{verdict.detail}"


@pytest.mark.slow
@of_each
def test_known_mistakes_are_named(exercise, monkeypatch):
    """What is not told apart at the first world size at which it is wrong has a check of its own.

    In tests/test_nightly.py all have.
    """
    on_shared_ranks(exercise, monkeypatch)
    left = [mistake for mistake in exercise.known_mistakes.all
            if fault_of(exercise.judge(mistake.attempt), mistake)]
    monkeypatch.undo()
    unnamed = [fault for mistake in left
               if (fault := fault_of(exercise.judge(mistake.attempt), mistake))]
    assert not unnamed, "\n\n".join(unnamed)


def on_shared_ranks(exercise, monkeypatch):
    """From here on, a known mistake that is judged has no ranks of its own.

    It takes what the exercise has found for the other mistakes to be compared with; only what hangs
    or fails is run, once. It is compared at the first world size at which it is wrong alone, and
    with those mistakes alone that are right at the sizes before.
    """
    known, observe_alone, failed, under_way = exercise.known_mistakes, exercise.observe, {}, []
    every, sizes = known.all, exercise.world_sizes

    def right_before(world_size):
        left = every
        for size in sizes[:sizes.index(world_size)]:
            found = known.outcomes(left, size)
            left = [each for each in left if known._is_right(found[each], size) or (
                each.hangs and not isinstance(failed.get((each.attempt, size, True)), RankError))]
        return tuple(left)

    def shared(attempt, world_size, *, quiet=False):
        mistake = next((each for each in every if each.attempt is attempt), None)
        in_groups = exercise.with_groups == type(exercise).with_groups
        if mistake and in_groups and not under_way:
            known.all = right_before(world_size)
        if mistake and in_groups and not mistake.hangs and not under_way:
            under_way.append(mistake)
            found = known.outcomes(known.all, world_size)[mistake]
            under_way.clear()
            if isinstance(found, list):
                return found
        place = attempt, world_size, in_groups
        if place not in failed:
            usual = exercise._limit
            exercise._limit = min(usual, HANGING) if mistake and mistake.hangs else usual
            failed[place] = observe_alone(attempt, world_size, quiet=True)
            exercise._limit = usual
        return failed[place]

    monkeypatch.setattr(exercise, "observe", shared)
    monkeypatch.setattr(known, "all", every)
    monkeypatch.setattr(known, "_sizes", lambda size: (sizes[:sizes.index(size)], [size]))


def fault_of(verdict, mistake):
    """What is not as it should be in the verdict on a known mistake; "" if nothing."""
    if (verdict.outcome, verdict.why) == (WRONG, mistake.why) and verdict.detail:
        return ""
    return (f"{mistake.edits}\nshould be: {mistake.why}\n"
            f"{verdict.outcome}: {verdict.why}\n{verdict.detail or 'without evidence'}")


@of_each
def test_an_exercise_is_complete(exercise):
    assert re.fullmatch(r"(\d+|[A-Z])\.\d+", exercise.number)
    assert len(exercise.hints) == 3
    assert len(exercise.world_sizes) > 2 or not exercise.on_ranks or exercise.slug in FEW_SIZES
    assert len({slip.why for slip in exercise.slips}) >= 3
    source = solution_source(exercise.number)
    assert source.startswith((f"def {exercise.name}(", f"class {exercise.name}"))
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    helpers = {name for name in names - {"_"} if name.startswith("_")}
    assert not helpers, "the reader's notebook has no such helpers"


def test_slugs_are_unique_and_numbers_in_order():
    numbers = [(place(exercise.chapter), int(exercise.number.split(".")[1]))
               for exercise in EXERCISES]
    assert numbers == sorted(set(numbers))
    assert len({exercise.slug for exercise in EXERCISES}) == len(EXERCISES)


WITH_PARTS = [each for each in EXERCISES if type(each).parts is not Exercise.parts]


@pytest.mark.parametrize("exercise", WITH_PARTS, ids=lambda exercise: exercise.slug)
def test_what_the_right_values_are_made_of_can_be_solved_for(exercise):
    """What ranks contribute is independent, so a result tells its parts."""
    exercise.given = exercise.prepare()
    for world_size in {2, 3, 4}.intersection(exercise.world_sizes):
        solved = []
        for rank, facts in enumerate(exercise.expected_of_all(world_size)):
            for fact, parts in exercise.parts(world_size, rank).items():
                named = parts if isinstance(parts, dict) else dict(enumerate(parts))
                solved.append(fact in facts and made_of(facts[fact], named) is not None)
        assert any(solved) or not solved, f"{world_size} ranks"


@pytest.mark.parametrize("slug", ["global-mean", "train-by-hand", "uneven-loop"])
def test_what_must_be_solved_for_can_be(slug):
    """What cannot be known is not held against anybody, so it has to be known."""
    exercise = find(slug)
    exercise.given = exercise.prepare()
    for world_size in (1, 2, 3, 4):
        expected = exercise.expected_of_all(world_size)
        got = observe.alone(exercise.trial, exercise.solution, world_size, seconds=30)
        for right, found in zip(expected, got, strict=True):
            assert None not in [found[fact] for fact in right if isinstance(right[fact], Held)]
