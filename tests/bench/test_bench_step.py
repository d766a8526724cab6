"""`dplab.bench.step`: one live configuration, and the committed grid that chapter 06 shows."""

import pytest

from dplab.bench import step
from dplab.bench.results import committed
from dplab.predict import cost


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_emulated_step_lasts_at_least_as_long_as_its_all_reduces(ranks):
    configuration = {"kind": "emulated", "model": "8 layers of 768", "ranks": ranks,
                     "bucket_mib": 4, "link": "slow", "bandwidth": 0.2e9, "latency": 1e-3}
    result = step.measure(configuration, blocks=1)
    model, _ = step._model(configuration["model"])
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    link = cost.Link("", 0.2e9, 0.0)
    least = cost.seconds("ring all-reduce", ranks, whole, link)
    assert {key: result[key] for key in configuration} == configuration
    assert result["predicted_seconds"] > least and result["measured_seconds"] > least


def test_errors_are_absolute_parts_of_what_was_measured():
    results = [{"predicted_seconds": predicted, "measured_seconds": 2.0}
               for predicted in (1.0, 2.2, 2.0, 1.8, 2.4)]
    assert step.errors(results) == pytest.approx((0.1, 0.38))


def test_the_committed_grid_covers_what_the_chapter_says_and_meets_its_bars():
    results = committed("step")["rows"]
    emulated, real = ([result for result in results if result["kind"] == kind]
                      for kind in ("emulated", "real"))
    assert len(emulated) >= 24 and len(real) >= 12
    for of_one_kind in (emulated, real):
        points = {(r["ranks"], r["model"], r["bucket_mib"], r["link"]) for r in of_one_kind}
        assert len(points) == len(of_one_kind)
        assert all(len(set(values)) >= 2 for values in list(zip(*points, strict=True))[:3])
    median, p90 = step.errors(emulated)
    assert median <= 0.10 and p90 <= 0.25
