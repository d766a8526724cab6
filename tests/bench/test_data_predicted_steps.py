"""chapters/data/predicted_steps: how errors are counted, and the committed grid."""

import json

import pytest
from predicted_steps import errors

from dplab.bench.results import FOLDER


def test_errors_are_absolute_parts_of_what_was_measured():
    results = [{"predicted_seconds": predicted, "measured_seconds": 2.0}
               for predicted in (1.0, 2.2, 2.0, 1.8, 2.4)]
    assert errors(results) == pytest.approx((0.1, 0.38))


def test_the_committed_grid_covers_models_ranks_and_buckets_and_meets_its_bars():
    results = json.loads((FOLDER / "predicted_steps.json").read_text())["rows"]
    emulated, real = ([result for result in results if result["kind"] == kind]
                      for kind in ("emulated", "real"))
    assert len(emulated) >= 24 and len(real) >= 12
    for of_one_kind in (emulated, real):
        points = {(r["ranks"], r["model"], r["bucket_mib"], r["link"]) for r in of_one_kind}
        assert len(points) == len(of_one_kind)
        assert all(len(set(values)) >= 2 for values in list(zip(*points, strict=True))[:3])
    median, p90 = errors(emulated)
    assert median <= 0.10 and p90 <= 0.25
