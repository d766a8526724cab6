"""What takes too long for every change: ``pytest -n 0 -m nightly``."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dplab.exercises import every_exercise
from dplab.exercises.exercise import WRONG

pytestmark = pytest.mark.nightly

SOAK = Path(__file__).with_name("tools") / "soak"
RUNS = 500


@pytest.mark.alone
def test_the_launcher_under_fire():
    """Other runs every day; what went wrong says how to repeat it."""
    seed = int(time.time() // 86400) * RUNS
    done = subprocess.run([sys.executable, SOAK, "--runs", str(RUNS), "--seed", str(seed)],
                          capture_output=True, text=True, timeout=2 * 3600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("exercise", "mistake"), [
    pytest.param(exercise, mistake, id=f"{exercise.slug}-{index}")
    for exercise in every_exercise() for index, mistake in enumerate(exercise.mistakes)])
def test_a_known_mistake_is_named_in_a_fresh_check(exercise, mistake):
    """As a reader's first check finds it: no run is shared with another mistake's test."""
    verdict = type(exercise)().judge(mistake.attempt)
    assert (verdict.outcome, verdict.why) == (WRONG, mistake.why), verdict.detail
