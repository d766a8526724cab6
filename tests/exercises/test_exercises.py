"""Every exercise: its solution passes, and each known mistake is named."""

import ast
import re
from collections.abc import Callable

import pytest
from attempts import from_shared_ranks

from dplab.checks import every_exercise, solution_source
from dplab.checks.exercise import PASSED, WRONG, Exercise
from dplab.desk.course import place

EXERCISES = every_exercise()
MISTAKES = [pytest.param(exercise, mistake, id=f"{exercise.slug}-{index}")
            for exercise in EXERCISES for index, mistake in enumerate(exercise.known)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.slug)
def test_the_solution_passes(exercise):
    verdict = exercise.judge(exercise.solution)
    assert verdict.outcome == PASSED, f"{verdict.why}\n{verdict.detail}"
    on_ranks = {"choose-units": [2, 3, 4], "exchange": [2, 3, 4],
                "exact-resume": [2, 3]}.get(exercise.slug, [1, 2, 3, 4])
    assert verdict.world_sizes == (on_ranks if len(exercise.world_sizes) > 1 else [])


@pytest.mark.parametrize(("exercise", "answer"), [
    pytest.param(exercise, answer, id=f"{exercise.slug}-{answer.__name__}")
    for exercise in EXERCISES for answer in exercise.also_right])
def test_another_right_answer_passes(exercise, answer):
    verdict = exercise.judge(answer)
    assert verdict.outcome == PASSED, f"{verdict.why}\n{verdict.detail}"


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_a_known_mistake_is_named(exercise, mistake, monkeypatch):
    for kind in {Exercise, *map(type, EXERCISES)}:
        if "_observe" in vars(kind):
            monkeypatch.setattr(kind, "_observe", SHARED.setdefault(
                kind, from_shared_ranks(kind._observe)))
    names_it(exercise, mistake)


SHARED: dict[type, Callable] = {}


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "mistake"), [
    pytest.param(exercise, mistake, id=exercise.slug) for exercise in EXERCISES
    for mistake in exercise.known[-1:]])
def test_a_known_mistake_is_named_by_a_run_of_its_own(exercise, mistake):
    names_it(exercise, mistake)


def names_it(exercise, mistake):
    verdict = exercise.judge(mistake.attempt)
    assert (verdict.outcome, verdict.why) == (WRONG, mistake.why), verdict.detail
    assert verdict.detail, "the evidence is missing"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.slug)
def test_an_exercise_is_complete(exercise):
    assert re.fullmatch(r"(\d+|[A-Z])\.\d+", exercise.number)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", exercise.slug)
    assert len(exercise.hints) == 3
    assert len({mistake.why for mistake in exercise.known}) >= 3
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
