"""`dplab.workloads.timed_steps`: one live configuration."""

import pytest

from dplab.predict import cost
from dplab.workloads import timed_steps


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_emulated_step_lasts_at_least_as_long_as_its_all_reduces(ranks):
    configuration = {"kind": "emulated", "model": "8 layers of 768", "ranks": ranks,
                     "bucket_mib": 4, "link": "slow", "bandwidth": 0.2e9, "latency": 1e-3}
    result = timed_steps.predict_and_measure(configuration, blocks=1)
    model, _ = timed_steps.layered_model(configuration["model"])
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    link = cost.Link("", 0.2e9, 0.0)
    least = cost.seconds("ring all-reduce", ranks, whole, link)
    assert {key: result[key] for key in configuration} == configuration
    assert result["predicted_seconds"] > least and result["measured_seconds"] > least
