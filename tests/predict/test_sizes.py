"""How large a model's tensors, shards, states and activations are, as published and by hand."""

import math
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from dplab.predict import catalogue, shards
from dplab.predict.activations import activations
from dplab.predict.memory import PRECISIONS, States, states
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


# Shards

UNITS = [[(5, 3), (5,)], [(2, 5), (2,)]]  # 15 + 5 + 10 + 2 elements


@pytest.mark.parametrize(("implementation", "whole", "optimizer"), [
    ("DDP", 32, [(32, 4)] * 3), ("ZeroRedundancyOptimizer", 32, [(15, 1), (10, 1), (7, 2)]),
    # rows of 5, 5, 2, 2 in pieces of 2, 2, 1, 1: the last rank has none of the last two
    ("fully_shard", 14, [(14, 4), (14, 4), (4, 4)])])
def test_shards_that_do_not_divide_by_hand(implementation, whole, optimizer):
    assert shards.real_states(implementation, "fp32", 3, UNITS) == [
        States(4 * whole, 4 * whole, 8 * elements + 4 * tensors) for elements, tensors in optimizer]
    momentum = shards.real_states(implementation, "fp32, SGD with momentum", 3, UNITS)
    assert [each.optimizer for each in momentum] == [4 * elements for elements, _ in optimizer]


@pytest.mark.parametrize(("implementation", "ranks", "elements"), [
    ("fully_shard", 1, 32), ("fully_shard", 3, 42), ("FullyShardedModel", 3, 33),
    ("FullyShardedModel", 5, 20 + 15), ("ShardedOptimizer", 5, 35)])
def test_padding_is_what_equal_shards_need_more(implementation, ranks, elements):
    assert shards.padded_parameters(implementation, ranks, UNITS) == elements


# Activations

GPT = TransformerConfig(2, 24, 4, 96, 50, 16)
LLAMA = TransformerConfig(2, 24, 4, 40, 50, 16, kv_heads=2, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)
SMALL = {"layers": 1, "d_model": 8, "heads": 2, "d_ff": 32, "vocabulary": 9, "context": 4}


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


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: TransformerConfig(**SMALL | {"heads": 3}), ValueError, "3 heads do not divide"),
    (lambda: TransformerConfig(**SMALL | {"heads": 4, "kv_heads": 3}), ValueError, "3 kv_heads do"),
    (lambda: TransformerConfig(**SMALL | {"layers": 0}), ValueError, "layers is at least 1"),
    (lambda: activations(GPT, 1, 17), ValueError, "positions for 16 tokens, not for 17"),
    (lambda: activations(GPT, 1, 8, recompute="some"), ValueError, "'none', 'selective', 'full'"),
    (lambda: states("ZeRO-4", "K = 8", 8, 1), ValueError, "no stage 'ZeRO-4'; there are 'DDP'"),
    (lambda: shards.real_states("FSDP", "fp32", 2, UNITS), ValueError, "no implementation 'FSDP'")])
def test_what_cannot_be_is_refused_in_words(call, error, says):
    with pytest.raises(error, match=says):
        call()
