"""Every exercise: its right answers pass, and each known mistake is named."""

import ast
import re

import pytest
from attempts import on_shared_ranks

from dplab.checks import every_exercise, solution_source
from dplab.checks.exercise import PASSED, WRONG
from dplab.desk.course import place

EXERCISES = every_exercise()
of_each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.slug)


@of_each
def test_right_answers_pass(exercise):
    for answer in exercise.right_answers:
        verdict = exercise.judge(answer)
        assert verdict.outcome == PASSED, f"{answer.__name__}: {verdict.why}\n{verdict.detail}"
    on_ranks = {"choose-units": [2, 3, 4], "exchange": [2, 3, 4],
                "exact-resume": [2, 3], "two-level-all-reduce": [2, 4, 6],
                "byte-budget": [2, 4]}.get(exercise.slug, [1, 2, 3, 4])
    assert verdict.world_sizes == (on_ranks if len(exercise.world_sizes) > 1 else [])


@pytest.mark.slow
@of_each
def test_known_mistakes_are_named(exercise, monkeypatch):
    on_shared_ranks(exercise, monkeypatch)
    unnamed = [fault for mistake in exercise.known_mistakes.all
               if (fault := fault_of(exercise.judge(mistake.attempt), mistake))]
    assert not unnamed, "\n\n".join(unnamed)


@pytest.mark.slow
@of_each
def test_a_known_mistake_is_named_by_a_run_of_its_own(exercise):
    mistake = exercise.known_mistakes.all[-1]
    assert not (fault := fault_of(exercise.judge(mistake.attempt), mistake)), fault


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
    assert solution_source("4.4").startswith("def train_uneven(")
