"""Every exercise: right answers in another form pass, and each known mistake is named.

That each solution passes its check shows the run of its chapter.
"""

import ast
import re

import pytest
from attempts import on_shared_ranks

from dplab.checks import every_exercise, solution_source
from dplab.checks.exercise import PASSED, WRONG
from dplab.desk.course import place

EXERCISES = every_exercise()
FEW_SIZES = {"exact-resume", "byte-budget"}  # whose ranks train longer
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


def fault_of(verdict, mistake):
    """What is not as it should be in the verdict on a known mistake; "" if nothing."""
    if (verdict.outcome, verdict.why) == (WRONG, mistake.why) and verdict.detail:
        return ""
    return (f"{mistake.edits}\nshould be: {mistake.why}\n"
            f"{verdict.outcome}: {verdict.why}\n{verdict.detail or 'without evidence'}")


@of_each
def test_an_exercise_is_complete(exercise):
    assert re.fullmatch(r"(\d+|[A-Z])\.\d+", exercise.number)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", exercise.slug)
    assert len(exercise.hints) == 3
    assert len(exercise.world_sizes) > 2 or not exercise.on_ranks or exercise.slug in FEW_SIZES
    assert len({slip.why for slip in exercise.slips}) >= 3
    source = exercise.solution_source()
    assert source.startswith((f"def {exercise.name}(", f"class {exercise.name}"))
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    helpers = {name for name in names - {"_"} if name.startswith("_")}
    assert not helpers, "the reader's notebook has no such helpers"


def test_slugs_are_unique_and_numbers_in_order():
    numbers = [(place(exercise.chapter), int(exercise.number.split(".")[1]))
               for exercise in EXERCISES]
    assert numbers == sorted(set(numbers))
    assert len({exercise.slug for exercise in EXERCISES}) == len(EXERCISES)


def test_solution_source_is_that_of_the_name():
    assert solution_source("4.5").startswith("def train_uneven(")
