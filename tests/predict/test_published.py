"""Predictions beside runs that were published."""

from dataclasses import replace

import pytest

from dplab.predict import published
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.cluster import Cluster, Job, predict

H100 = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])


def test_the_published_models_have_their_published_parameters():
    assert {name: model.parameters for name, model in published.MPT.items()} == {
        "3B": 2_651_837_440, "7B": 6_658_859_008, "13B": 12_853_954_560, "30B": 29_975_214_080,
        "70B": 64_862_437_376}


def test_predictions_beside_published_runs():
    rows = published.published_runs()
    outside = [row for row in rows if row.predicted is None]
    assert {row.ranks for row in outside} == {512, 8192, 16_384}
    assert all(row.error is None and "parallelism" in row.assumptions for row in outside)
    rates = [row for row in rows if row.unit == "tokens/s/GPU"]
    assert len(rates) == 24
    assert all(0 < row.error < 0.9 for row in rates), "an upper bound, within a factor of two"
    # With one run of a series known, ranks and batch are predicted to 3 %, but for MPT 70B, whose
    # first run is 27 % slower than the second for reasons that are not in the model.
    for row in published.runs_with_fitted_share():
        assert abs(row.error) < (0.3 if row.series.startswith("MPT 70B") else 0.03), row


def test_fitting_the_share_finds_it_again():
    job, machine = Job(MODELS["Llama-3 8B"], 1, 4096), replace(H100, matmul_share=0.37)
    rate = predict(job, machine).tokens_per_second / 8
    assert published.fitted_share(job, H100, rate) == pytest.approx(0.37, rel=1e-6)
