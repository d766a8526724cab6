"""What is known of kernels: the published rates, and the times that follow from them."""

import json
import math
from dataclasses import replace
from importlib import resources

import pytest

from dplab.predict import kernels, rates
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.pace import PACES, at_pace
from dplab.predict.rates import PUBLISHED
from dplab.predict.transformer_config import TransformerConfig

TABLES = json.loads(resources.files("dplab.predict").joinpath("kernels.json").read_text("utf-8"))
UNITS = {"matmul": "TFLOP/s", "attention": "TFLOP/s", "memory": "GB/s", "launch": "microseconds"}


@pytest.mark.parametrize("table", TABLES["tables"], ids=lambda table: table["source"][:20])
def test_every_table_names_its_source_and_unit_and_stays_below_the_peak(table):
    assert len(table["source"]) > 15 and table["rows"]
    assert table["columns"][-1] == UNITS[table["what"]]
    gpu = GPUS[table["gpu"]]
    peak = table.get("peak", {"TFLOP/s": gpu.bf16_flops / 1e12, "GB/s": gpu.memory_bandwidth / 1e9,
                              "microseconds": math.inf}[table["columns"][-1]])
    for row in table["rows"]:
        assert len(row) == len(table["columns"]) and 0 < row[-1] <= peak


def test_bandwidths_follow_from_the_bytes_and_the_time_where_both_are_published():
    counted = 0
    for table in TABLES["tables"]:
        for row in (table["rows"] if table["what"] == "memory" else ()):
            _, _, elements, nbytes, milliseconds, rate = row
            if milliseconds is not None and elements is not None:
                assert elements * nbytes / (milliseconds / 1e3) / 1e9 == pytest.approx(rate, 0.002)
                counted += 1
    assert counted > 50


def test_a_pace_is_a_percentile_between_the_rates():
    rates = [100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200]
    assert [at_pace(rates[::-1], pace) for pace in PACES] == [110, 150, 190]
    assert [at_pace([1, 2], pace) for pace in PACES] == pytest.approx([1.1, 1.5, 1.9])
    assert [at_pace([7.0], pace) for pace in PACES] == [7.0] * 3
    with pytest.raises(ValueError, match="no pace"):
        at_pace(rates, "usual")
    with pytest.raises(ValueError, match="no rates"):
        at_pace([], "slow")


# Rates

H100, MINE = GPUS["H100"], replace(GPUS["H100"], name="mine", bf16_flops=900e12)


def test_a_measured_shape_has_the_rates_of_its_neighbours():
    rate = PUBLISHED.matmul(H100, 4096, 4096, 4096)
    assert 700e12 < rate.value < 810.5e12  # cuBLAS 716 and 786, and its neighbours
    assert rate.as_asked
    assert "4096 × 4096 × 4096 on H100" in rate.basis
    assert PUBLISHED.matmul(H100, 256, 256, 256).value < 60e12


def test_what_stands_in_for_what_is_said():
    lent = PUBLISHED.matmul(GPUS["H200"], 4096, 4096, 4096)
    assert not lent.as_asked
    assert "H100's" in lent.basis
    share = PUBLISHED.matmul(H100, 4096, 4096, 4096).value / H100.bf16_flops
    unknown = PUBLISHED.matmul(MINE, 4096, 4096, 4096)
    assert unknown.value == pytest.approx(share * 900e12)
    far = PUBLISHED.matmul(H100, 65_536, 131_072, 16_384)
    assert not far.as_asked
    assert "more than a factor of two" in far.basis
    odd = PUBLISHED.attention(H100, 96, 2048)
    assert "head dimension" in odd.basis
    assert not odd.as_asked
    rotary = PUBLISHED.memory(H100, "rotary")
    assert "not measured on H100" in rotary.basis
    assert rotary.value == pytest.approx(843e9 / 2000e9 * 3350e9, rel=1e-3)  # the A100's median
    assert "all compiled kernels" in PUBLISHED.memory(H100, "rotary", "compiled").basis


def test_a_card_of_another_peak_and_a_batch_of_products():
    table = {"what": "matmul", "gpu": "H100", "peak": 494.5, "source": "half a card",
             "columns": ["batch", "m", "n", "k", "TFLOP/s"],
             "rows": [[1, 64, 64, 64, 100], [4, 64, 64, 64, 100]]}
    half = rates.Rates([table]).matmul(H100, 256, 64, 64)
    assert half.value == pytest.approx(200e12)
    assert "the nearest 4 × 64 × 64 × 64" in half.basis  # as one product of 256 rows


def test_attention_is_interpolated_between_the_lengths_and_takes_what_is_like_it():
    at = {length: PUBLISHED.attention(H100, 128, length).value for length in (4096, 5793, 8192)}
    assert at[4096], at[8192] == pytest.approx((319e12, 333e12))
    assert at[5793] == pytest.approx((319e12 + 333e12) / 2, rel=1e-3)
    # backward with a mask: measured together with forward; without forward only without the mask
    assert PUBLISHED.attention(H100, 128, 8192, direction="backward").value == pytest.approx(308e12)
    assert PUBLISHED.attention(H100, 128, 8192, direction="backward", kernel="cuDNN"
                               ).value == pytest.approx(518e12)
    assert "FlashAttention-2" in PUBLISHED.attention(
        GPUS["A100"], 128, 8192, kernel="FlashAttention-3").basis


@pytest.mark.parametrize(("call", "match"), [
    (lambda: PUBLISHED.matmul(H100, 0, 1, 1), "m is at least 1"),
    (lambda: PUBLISHED.memory(H100, "norm", "fast"), "no kind 'fast'"),
    (lambda: kernels.block_backward(MODELS["GPT-2"], 1, 128, recompute="some"), "no recompute"),
    (lambda: kernels.seconds([], H100, attention="flash"), "no attention"),
])
def test_what_cannot_be_asked_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_own_rates_replace_the_published_ones_only_where_they_are_handed_on():
    own = rates.Rates([{"what": "matmul", "gpu": "H100", "source": "this card",
                        "columns": ["m", "n", "k", "TFLOP/s"], "rows": [[64, 64, 64, 98.9]]}])
    product = [kernels.Kernel("up", "matmul", (8192, 8192, 8192))]
    assert kernels.seconds(product, H100, rates=own) == pytest.approx(2 * 8192**3 / 98.9e12)
    assert kernels.seconds(product, H100) < 2 * 8192**3 / 600e12
    with pytest.raises(ValueError, match="no rates for attention"):
        own.attention(H100, 64, 128)


# A block

GATED = TransformerConfig(2, 64, 4, 160, 512, 128, kv_heads=2, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)
PLAIN = TransformerConfig(2, 64, 4, 256, 512, 128)


def flops(found):
    return sum(kernel.flops for kernel in found)


def moved(found):
    return sum(kernel.nbytes * kernel.count for kernel in found)


@pytest.mark.parametrize("model", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_blocks_arithmetic_is_two_and_four_flops_a_weight_and_attention(model, compiled):
    batch, sequence = 2, 128
    weights = math.prod((model.d_model, 2 * model.d_model + 2 * model.d_kv
                         + (3 if model.gated else 2) * model.d_ff))
    scores = 2 * batch * sequence**2 * model.d_model  # two products, the causal half of each
    forward = kernels.block_forward(model, batch, sequence, compiled=compiled)
    backward = kernels.block_backward(model, batch, sequence, compiled=compiled)
    assert flops(forward) == 2 * batch * sequence * weights + scores
    assert flops(backward) == 4 * batch * sequence * weights + 2.5 * scores


def test_an_eager_block_moves_the_bytes_of_its_operations():
    """A gated block on 256 tokens: the stream has 64 numbers a token, 160 inside, 32 in the keys.

    Forward: each norm reads and writes 64; each addition reads 128, writes 64; silu 160 and 160,
    the product 320 and 160; rotary 9 for each of 64 + 32 numbers. Backward: a norm reads input and
    gradient for either gradient, writes one; gradients meet twice for query, key and value, once
    for gate and up, twice in the stream; silu and both factors of the product 3 × 160 each.
    """
    forward = 2 * (64 + 64) + 2 * (128 + 64) + 320 + 480 + 9 * 96
    backward = 2 * 5 * 64 + 5 * 3 * 64 + 3 * 480 + 9 * 96
    assert moved(kernels.block_forward(GATED, 2, 128)) == 256 * 2 * forward
    assert moved(kernels.block_backward(GATED, 2, 128)) == 256 * 2 * backward
    # plain: no rotary, GELU alone (2 and 3 × 256), no third product; biases read each gradient:
    plain = 2 * 5 * 64 + 4 * 3 * 64 + 3 * 256 + (5 * 64 + 256)
    assert moved(kernels.block_forward(PLAIN, 2, 128)) == 256 * 2 * (
        2 * 128 + 2 * 192 + 2 * 256)
    assert moved(kernels.block_backward(PLAIN, 2, 128)) == 256 * 2 * plain


def test_a_compiled_block_moves_less():
    # norm 2 × 64, addition and norm 4 × 64, silu and product 3 × 160, addition 3 × 64, rotary
    assert moved(kernels.block_forward(GATED, 2, 128, compiled=True)) == 256 * 2 * (
        9 * 64 + 3 * 160 + 2 * 96)
    for model in (GATED, PLAIN):
        eager, compiled = (kernels.block_backward(model, 2, 128, compiled=each)
                           for each in (False, True))
        assert moved(compiled) < moved(eager)


def test_computing_again_adds_what_is_computed_again():
    forward = kernels.block_forward(GATED, 2, 128)
    none, selective, full = (kernels.block_backward(GATED, 2, 128, recompute=each)
                             for each in kernels.RECOMPUTE)
    assert flops(full) == flops(none) + flops(forward)
    assert moved(full) == moved(none) + moved(forward)
    products = sum(kernel.flops for kernel in forward if kernel.what == "matmul")
    assert flops(selective) == flops(none) + products / 2
    assert moved(selective) == moved(none) + moved(forward)


def test_the_ends_are_a_head_and_a_loss_in_fp32():
    logits = 256 * 512
    forward, backward = kernels.ends_forward(GATED, 2, 128), kernels.ends_backward(GATED, 2, 128)
    assert (flops(forward), flops(backward)) == (2 * logits * 64, 4 * logits * 64)
    assert moved(forward) == 2 * 256 * 64 * (2 + 2) + logits * (6 + 16)
    assert moved(backward) == 2 * 256 * 64 * (5 + 2) + 2 * 512 * 64 + logits * (20 + 6)
    assert moved(kernels.ends_forward(GATED, 2, 128, compiled=True)) < moved(forward) / 2


# Times

NODE = Cluster(H100, 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
LLAMA = Job(MODELS["Llama-3 8B"], 1, 8192)


def test_a_block_takes_the_sum_of_its_kernels():
    one = kernels.Kernel("up", "matmul", (8192, 14336, 4096))
    norm = kernels.Kernel("norm", "norm", nbytes=2 * 8192 * 4096 * 2, count=2)
    up = 2 * 8192 * 14336 * 4096 / PUBLISHED.matmul(H100, 8192, 14336, 4096).value
    norms = 2 * norm.nbytes / PUBLISHED.memory(H100, "norm").value
    assert kernels.seconds([one, norm], H100) == pytest.approx(up + norms)
    shape = (1, 32, 8192, 128)
    half = 2 * 32 * 8192**2 * 128
    for what, flops_done, rate in (("attention", half, 333e12),
                                   ("attention backward", 2.5 * half, 308e12)):
        assert kernels.seconds([kernels.Kernel(what, what, shape)], H100) == pytest.approx(
            flops_done / rate)


def test_a_small_kernel_takes_its_launch():
    small = [kernels.Kernel("norm", "norm", nbytes=64, count=3)]
    assert kernels.seconds(small, H100) == pytest.approx(3 * 9.66e-6)
    assert kernels.seconds(small, H100, compiled=True) == pytest.approx(3 * 2.5e-6)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("gpu", [GPUS["A100"], GPUS["B200"]], ids=lambda gpu: gpu.name)
def test_a_slow_pace_takes_longer_than_a_typical_than_a_fast_one(gpu, compiled):
    job = replace(LLAMA, compiled=compiled)
    clusters = [replace(NODE, gpu=gpu, pace=pace) for pace in PACES]
    units = [[*kernels.unit_costs(job, each)[0][:1], kernels.unit_costs(job, each)[1]]
             for each in clusters]
    for found in (
            [predict(job, each).compute_seconds for each in clusters],
            *([getattr(unit[place], name) for unit in units] for place in (0, 1)
              for name in ("forward_seconds", "backward_seconds"))):
        assert found[0] > found[1] > found[2]


def test_a_jobs_switches_cost_what_they_do():
    def compute(**changes):
        (block, *_), root = kernels.unit_costs(replace(LLAMA, **changes), NODE)
        return block.forward_seconds, block.backward_seconds, root.backward_seconds

    base = compute()
    assert compute(compiled=True) < base
    assert compute(attention="FlashAttention-3") < base
    full, parameters = compute(recompute="full"), LLAMA.model.block_parameters
    copy = PUBLISHED.memory(H100, "copy").value
    # the copy of a gathered unit is no part of what is computed again
    assert full[1] == pytest.approx(base[1] + base[0] - 4 * parameters / copy)
    assert base[1] - compute(reshard=False)[1] == pytest.approx(4 * parameters / copy)
    cast = compute(cast_weights=True)
    assert cast[0] - base[0] == pytest.approx(6 * parameters / copy)
    # cast once more in backward; gradients cast to fp32 (6), and copied from fp32 (2 more)
    assert cast[1] - base[1] == pytest.approx((6 + 6 + 2) * parameters / copy)
    assert base[0] - compute(strategy="DDP")[0] == pytest.approx(4 * parameters / copy)


def test_the_optimizer_moves_its_bytes_and_fused_is_faster():
    fused = kernels.optimizer_seconds(1e9, H100)
    assert fused == pytest.approx(28e9 / 1889e9, rel=1e-3)
    assert kernels.optimizer_seconds(1e9, H100, fused=False) > fused
    assert kernels.optimizer_seconds(1e9, H100, nbytes=14) == pytest.approx(fused / 2)
    assert kernels.optimizer_seconds(0, H100) == 0


def test_a_kernel_measured_elsewhere_is_as_much_slower_than_the_usual_one_here():
    """A100, 16,384 tokens, head dimension 128, causal: 80 against 189 TFLOP/s; H100: 328."""
    found = PUBLISHED.attention(GPUS["H100"], 128, 16384, direction="backward",
                                kernel="FlashAttention in Triton")
    assert found.value == pytest.approx(328e12 * 80 / 189)
    assert not found.as_asked and "measured on A100" in found.basis
    unfused = PUBLISHED.attention(GPUS["H100"], 128, 2048, kernel="unfused")
    assert unfused.value == pytest.approx(57e12)
    newer = PUBLISHED.attention(GPUS["A100"], 128, 16384, kernel="FlashAttention-3")
    assert newer.value == pytest.approx(189e12), "made for another GPU: no faster here"
