"""The errors of predicted steps, what sharing cores does to them, and the committed grid."""

import json

import pytest

from dplab.bench.predicted_steps import FASTER, errors, errors_of_sharing
from dplab.bench.results import FOLDER


def test_errors_are_absolute_parts_of_what_was_measured():
    results = [{"predicted_seconds": predicted, "measured_seconds": 2.0}
               for predicted in (1.0, 2.2, 2.0, 1.8, 2.4)]
    assert errors(results) == pytest.approx((0.1, 0.38))


def committed():
    return json.loads((FOLDER / "predicted_steps.json").read_text())["rows"]


def test_sharing_is_told_from_the_faster_link_by_ranks_buckets_and_kind_of_step():
    rows = [("emulated", 2, 4, FASTER, 0.8), ("emulated", 2, 1, FASTER, 0.9),
            ("emulated", 2, 100, FASTER, 1.1), ("asleep", 2, 4, f"{FASTER}, asleep", 0.99),
            ("emulated", 4, 12, FASTER, 0.7), ("emulated", 2, 4, "0.1 GB/s", 3.0)]
    results = [{"kind": kind, "ranks": ranks, "bucket_mib": bucket, "link": link,
                "model": "12 layers of 512", "predicted_seconds": predicted, "measured_seconds": 1}
               for kind, ranks, bucket, link, predicted in rows]
    assert errors_of_sharing(results) == {  # the biases make 12 layers of 1 MiB more than 12 MiB
        (2, "several"): pytest.approx({"emulated": -0.15, "asleep": -0.01}),
        (2, "one"): pytest.approx({"emulated": 0.1}),
        (4, "several"): pytest.approx({"emulated": -0.3})}


def test_committed_predictions_are_further_off_where_buckets_travel_beside_backward():
    found = errors_of_sharing(committed())
    for ranks in {ranks for ranks, _ in found}:
        several, one = (found[ranks, buckets]["emulated"] for buckets in ("several", "one"))
        assert several < min(one, 0)  # one bucket travels after backward


def test_the_committed_grid_covers_models_ranks_and_buckets_and_meets_its_bars():
    results = committed()
    emulated, real = ([result for result in results if result["kind"] == kind]
                      for kind in ("emulated", "real"))
    assert len(emulated) >= 24 and len(real) >= 12
    for of_one_kind in (emulated, real):
        points = {(r["ranks"], r["model"], r["bucket_mib"], r["link"]) for r in of_one_kind}
        assert len(points) == len(of_one_kind)
        assert all(len(set(values)) >= 2 for values in list(zip(*points, strict=True))[:3])
    median, p90 = errors(emulated)
    assert median <= 0.10 and p90 <= 0.25
