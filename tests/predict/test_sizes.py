"""How large a model's tensors, states and activations are, as published and by hand."""

import math
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from dplab.predict import catalogue
from dplab.predict.activations import activations
from dplab.predict.memory import PRECISIONS, states
from dplab.predict.transformer_config import TransformerConfig

LLAMA_8B = catalogue.MODELS["Llama-3 8B"]
PARAMETERS = {  # published: config.json and model cards on huggingface.co
    "GPT-2": 124_439_808, "GPT-2 medium": 354_823_168, "GPT-2 large": 774_030_080,
    "GPT-2 XL": 1_557_611_200, "Llama-2 7B": 6_738_415_616, "Llama-2 13B": 13_015_864_320,
    "Llama-2 70B": 68_976_648_192, "Llama-3 8B": 8_030_261_248, "Llama-3 70B": 70_553_706_496,
    "Llama-3.1 405B": 405_853_388_800}


def test_parameters_of_published_models():
    assert {name: model.parameters for name, model in catalogue.MODELS.items()} == PARAMETERS
    for name, model in catalogue.MODELS.items():
        assert model.name == name and "huggingface.co" in model.source
        assert len(model.units) == model.layers + 1
        assert sum(math.prod(shape) for unit in model.units for shape in unit) == model.parameters


# States

RANKS = [1, 4, 16, 64, 256, 1024]
TABLE_1 = {  # Rajbhandari et al., arXiv:1910.02054v3, as printed: GB per device, K = 12
    7_500_000_000: {"ZeRO-1": "120 52.5 35.6 31.4 30.4 30.1",
                    "ZeRO-2": "120 41.3 21.6 16.6 15.4 15.1",
                    "ZeRO-3": "120 30 7.5 1.88 0.47 0.12"},
    128 * 10**9: {"ZeRO-1": "2048 896 608 536 518 513", "ZeRO-2": "2048 704 368 284 263 257",
                  "ZeRO-3": "2048 512 128 32 8 2"},
    10**12: {"ZeRO-1": "16000 7000 4750 4187 4046 4011",
             "ZeRO-2": "16000 5500 2875 2218 2054 2013",
             "ZeRO-3": "16000 4000 1000 250 62.5 15.6"}}


@pytest.mark.parametrize("parameters", TABLE_1)
def test_table_1_of_the_zero_paper_cell_by_cell(parameters):
    # The paper rounds halves up in the first model's columns, and cuts digits off in others.
    rounding = ROUND_HALF_UP if parameters < 10**10 else ROUND_DOWN
    for stage, cells in TABLE_1[parameters].items():
        for ranks, cell in zip(RANKS, cells.split(), strict=True):
            gigabytes = Decimal(states(stage, "K = 12", ranks, parameters).total) / 10**9
            assert gigabytes.quantize(Decimal(cell), rounding) == Decimal(cell), (stage, ranks)


@pytest.mark.parametrize(("precision", "alone", "fixed", "shared"), [
    # Megatron-LM, docs/source/api-guide/dist_optimizer.md: alone, and fixed + shared / d
    ("K = 16", 20, 4, 16), ("K = 12, fp32 gradients", 18, 6, 12), ("fp32", 16, 8, 8),
    # Ultra-Scale Playbook; everything in bf16
    ("K = 12, fp32 accumulation", 20, 8, 12), ("pure bf16", 8, 4, 4)])
def test_bytes_per_parameter_are_those_that_are_published(precision, alone, fixed, shared):
    assert states("DDP", precision, 8, 1).total == PRECISIONS[precision].total == alone
    assert states("ZeRO-1", precision, 8, 1).total == fixed + shared / 8


# Activations

GPT = TransformerConfig(2, 24, 4, 96, 50, 16)
LLAMA = TransformerConfig(2, 24, 4, 40, 50, 16, kv_heads=2, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_what_is_recomputed_is_not_kept(model):
    """Selective: of a block its input, what four products give, and attention's output."""
    none, selective, full = (activations(model, 3, 10, recompute=way)
                             for way in ("none", "selective", "full"))
    for each in (selective, full):
        assert each.blocks // 2 + each.recomputed == none.blocks // 2
        assert (each.ends, each.logits, each.loss) == (none.ends, none.logits, none.loss)
    assert full.blocks == 2 * 30 * 2 * 24 and none.recomputed == 0
    assert selective.blocks == 2 * 30 * (
        2 * (4 * 24 + model.d_kv + model.d_ff) + 4 * model.heads)
