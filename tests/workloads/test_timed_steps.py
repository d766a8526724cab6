"""`dplab.workloads.timed_steps`: one live configuration, and layers that sleep."""

import time

import pytest
import torch
from torch import nn

from dplab.predict import cost
from dplab.predict.step import Layer
from dplab.workloads import timed_steps


@pytest.mark.slow
def test_a_step_lasts_at_least_as_long_as_its_all_reduces():
    ranks = 2
    configuration = {"kind": "asleep", "model": "8 layers of 768", "ranks": ranks,
                     "bucket_mib": 4, "link": "slow", "bandwidth": 0.2e9, "latency": 1e-3}
    result = timed_steps.predict_and_measure(configuration, blocks=1)
    model, _ = timed_steps.layered_model(configuration["model"])
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    link = cost.Link("", 0.2e9, 0.0)
    least = cost.seconds("ring all-reduce", ranks, whole, link)
    assert {key: result[key] for key in configuration} == configuration
    assert result["predicted_seconds"] > least and result["measured_seconds"] > least


def test_a_layer_asleep_lasts_as_long_as_it_computed_and_has_the_same_gradients():
    plain, x = nn.Linear(3, 2), torch.randn(1, 3)
    plain(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    asleep = timed_steps._Asleep(plain, Layer(0.02, 0.05, 32))
    times = [time.perf_counter()]
    loss = asleep(x).sum()
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    assert times[1] - times[0] >= 0.02 and times[2] - times[1] >= 0.05
    assert all(map(torch.equal, expected, (parameter.grad for parameter in plain.parameters())))
