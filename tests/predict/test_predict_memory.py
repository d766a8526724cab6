"""Predicted memory, against the papers' tables and arithmetic by hand."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from dplab.predict import catalogue
from dplab.predict.memory import PRECISIONS, Precision, States, budget, states

RANKS = [1, 4, 16, 64, 256, 1024]
# Rajbhandari et al., arXiv:1910.02054v3, table 1, as printed: GB per device, K = 12.
TABLE_1 = {
    "7.5B": {"ZeRO-1": "120 52.5 35.6 31.4 30.4 30.1", "ZeRO-2": "120 41.3 21.6 16.6 15.4 15.1",
             "ZeRO-3": "120 30 7.5 1.88 0.47 0.12"},
    "128B": {"ZeRO-1": "2048 896 608 536 518 513", "ZeRO-2": "2048 704 368 284 263 257",
             "ZeRO-3": "2048 512 128 32 8 2"},
    "1T": {"ZeRO-1": "16000 7000 4750 4187 4046 4011",
           "ZeRO-2": "16000 5500 2875 2218 2054 2013",
           "ZeRO-3": "16000 4000 1000 250 62.5 15.6"},
}
SIZES = {"7.5B": 7_500_000_000, "128B": 128 * 10**9, "1T": 10**12}
def test_table_1_of_the_zero_paper_cell_by_cell():
    for model, rows in TABLE_1.items():
        # The paper rounds halves up in the first model's columns, and cuts digits off in others.
        rounding = ROUND_HALF_UP if model == "7.5B" else ROUND_DOWN
        for stage, cells in rows.items():
            for ranks, cell in zip(RANKS, cells.split(), strict=True):
                gigabytes = Decimal(states(stage, "K = 12", ranks, SIZES[model]).total) / 10**9
                assert gigabytes.quantize(Decimal(cell), rounding) == Decimal(cell), (model, stage)


@pytest.mark.parametrize(("precision", "alone", "fixed", "shared"), [
    # Megatron-LM, docs/source/api-guide/dist_optimizer.md: alone, and fixed + shared / d
    ("K = 16", 20, 4, 16), ("K = 12, fp32 gradients", 18, 6, 12), ("fp32", 16, 8, 8)])
def test_bytes_per_parameter_are_those_of_megatron(precision, alone, fixed, shared):
    assert states("DDP", precision, 8, 1).total == PRECISIONS[precision].total == alone
    assert states("ZeRO-1", precision, 8, 1).total == fixed + shared / 8


def test_what_stands_in_a_precision_unless_it_is_said():
    fp8 = Precision("fp8", 1, 1, 6)
    assert (fp8.gathered, fp8.reduced, fp8.total) == (1, 1, 8)
    accumulating = PRECISIONS["K = 12, fp32 accumulation"]  # Ultra-Scale Playbook: 20 bytes
    assert (accumulating.reduced, accumulating.total) == (4, 20)
    assert states("DDP", "pure bf16", 3, 1) == States(2, 2, 4)


def test_a_budget_adds_up_and_says_when_it_is_highest_and_whether_it_fits():
    model, gpu = catalogue.MODELS["Llama-3 8B"], catalogue.GPUS["H100"].memory_bytes
    found = budget(model, 64, gpu, precision="fp32 shards, bf16 gathered", sequence=4096,
                   recompute="full")
    parameters, tokens, width, vocabulary = 8_030_261_248, 4096, 4096, 128_256
    logits = 4 * tokens * vocabulary  # in fp32
    assert found.moment == "loss"
    assert found.parts == {
        "parameters": 4 * parameters / 64, "optimizer": 8 * parameters / 64,
        "gathered": 2 * (2 * vocabulary * width + width), "gradients": 0, "communication": 0,
        "activations": 2 * (32 + 2) * tokens * width + logits, "other": 2 * logits}
    assert found.total == sum(found.parts.values()) < gpu and found.fits
    assert found.total == max(moment.total for moment in found.moments)
    whole = budget(model, 8, gpu, sequence=16384)
    assert whole.total > gpu and not whole.fits


def test_states_of_a_rank_that_are_known_take_the_place_of_the_formulas():
    model = catalogue.MODELS["GPT-2"]
    held = States(1e9, 2e9, 3e9)
    found = budget(model, 4, 80e9, stage="ZeRO-1", held=held)
    assert found.states == held
    assert (found.parts["parameters"], found.parts["optimizer"]) == (1e9, 3e9)


def test_buckets_are_there_all_the_time_or_are_the_gradients():
    model = catalogue.MODELS["GPT-2"]
    for stage in ("DDP", "ZeRO-1"):
        plain, views = (budget(model, 4, 80e9, stage=stage, precision="fp32", bucket_views=flag)
                        for flag in (False, True))
        for moment in plain.moments:
            assert moment.parts["communication"] == 4 * model.parameters
        for moment in views.moments:
            assert moment.parts["gradients"] == 4 * model.parameters
            assert moment.parts["communication"] == 0


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: states("ZeRO-4", "K = 8", 8, 1), ValueError, "no stage 'ZeRO-4'; there are 'DDP'"),
    (lambda: states("ZeRO-1", "K = 9", 8, 1), ValueError, "no precision 'K = 9'"),
    (lambda: Precision("odd", 2, 2, 0, reduced=-4), ValueError, "reduced")])
def test_what_cannot_be_is_refused_in_words(call, error, says):
    with pytest.raises(error, match=says):
        call()
