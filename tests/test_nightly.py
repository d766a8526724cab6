"""What takes too long for every change: ``pytest -n 0 -m nightly``."""

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dplab.checks import every_exercise
from dplab.checks.exercise import WRONG
from dplab.checks.mistakes import AT_LEAST, both

pytestmark = pytest.mark.nightly

SOAK = Path(__file__).with_name("tools") / "soak"
RUNS = 500
PAIRS = 40


@pytest.mark.alone
def test_the_launcher_under_fire():
    """Other runs every day; what went wrong says how to repeat it."""
    seed = int(time.time() // 86400) * RUNS
    done = subprocess.run([sys.executable, SOAK, "--runs", str(RUNS), "--seed", str(seed)],
                          capture_output=True, text=True, timeout=2 * 3600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("exercise", "mistake"), [
    pytest.param(exercise, mistake, id=f"{exercise.slug}-{index}")
    for exercise in every_exercise()
    for index, mistake in enumerate(exercise.known_mistakes.all)])
def test_a_known_mistake_is_named_in_a_fresh_check(exercise, mistake):
    """As a reader's first check finds it: no run is shared with another mistake's test."""
    verdict = type(exercise)().judge(mistake.attempt)
    assert (verdict.outcome, verdict.why) == (WRONG, mistake.why), verdict.detail


@pytest.mark.parametrize("exercise", every_exercise(), ids=lambda exercise: exercise.slug)
def test_of_two_known_mistakes_in_one_answer_no_third_is_named(exercise, monkeypatch):
    """Rarely, two mistakes together begin as a third one does, and nothing speaks against that."""
    pairs = [(first.why, second.why, attempt) for first, second in itertools.combinations(
        [mistake for mistake in exercise.known_mistakes.all if not mistake.hangs], 2)
        for attempt in both(first, second, exercise.right_answers)]
    pairs = random.Random(exercise.slug).sample(pairs, min(PAIRS, len(pairs)))
    exercise.given = exercise.prepare()
    attempts = [attempt for *_, attempt in pairs]
    found = {size: dict(zip(attempts, exercise.observe_all(attempts, size), strict=True))
             for size in exercise.world_sizes}
    monkeypatch.setattr(exercise, "observe", lambda attempt, size, **how: found[size][attempt])
    named = [(AT_LEAST in why, why.removeprefix(AT_LEAST) in mistakes)
             for *mistakes, attempt in pairs if all(found[size][attempt] for size in found)
             and (why := exercise.judge(attempt).why)]
    thirds = named.count((True, False))  # one that explains everything is right, whichever it is
    assert thirds <= 0.1 * len(named)
