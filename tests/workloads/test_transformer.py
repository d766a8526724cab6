"""The course's transformer: its parameters, its masks and its heads."""

from dataclasses import replace

import pytest
import torch
from small_transformers import GPT, LLAMA

from dplab.predict.catalogue import MODELS
from dplab.workloads.transformer import Transformer, rotated, rotation_table


@pytest.mark.parametrize("config", [GPT, LLAMA, MODELS["GPT-2"],
                                    replace(MODELS["Llama-3 70B"], layers=2)])
def test_the_model_has_the_parameters_that_are_predicted(config):
    with torch.device("meta"):
        model = Transformer(config)
    block = sorted(tuple(parameter.shape) for parameter in model.blocks[0].parameters())
    assert block == sorted(config.block.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["GPT", "Llama"])
def test_no_position_sees_a_later_one(config):
    torch.manual_seed(0)
    model, tokens = Transformer(config), torch.randint(101, (2, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 101
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:12].max() < 1e-6 < 1e-4 < difference[12:].min()


def test_rotary_attention_depends_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    table = rotation_table(10, 8, "cpu", torch.float64)
    queries, keys = (rotated(vector.expand(1, 10, 1, 8), table)[0, :, 0] for vector in (query, key))
    scores = queries @ keys.T
    assert scores[7, 4] == pytest.approx(scores[3, 0].item())
    assert scores[7, 4] != pytest.approx(scores[7, 3].item())


def test_the_model_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="65 tokens, and learned positions for 64"):
        Transformer(GPT)(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ValueError, match="a head has 3 elements"):
        Transformer(replace(LLAMA, d_model=12))
