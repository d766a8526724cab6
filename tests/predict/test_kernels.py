"""What is known of kernels: the published rates, and the times that follow from them."""

import math
from dataclasses import replace

import pytest

from dplab.predict import kernels
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.cluster import Cluster, Job
from dplab.predict.pace import PACES, at_pace
from dplab.predict.rates import PUBLISHED
from dplab.predict.transformer_config import TransformerConfig

H100 = GPUS["H100"]
TRITON = "FlashAttention in Triton"


def test_a_pace_is_a_percentile_between_the_rates():
    rates = [100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200]
    assert [at_pace(rates[::-1], pace) for pace in PACES] == [110, 150, 190]
    assert [at_pace([7.0], pace) for pace in PACES] == [7.0] * 3


# Rates


def matmul(gpu, *shape):
    return PUBLISHED.matmul(gpu, *shape)


def attention(gpu, head_dim, sequence, **which):
    return PUBLISHED.attention(GPUS[gpu], head_dim, sequence, **which)


def test_a_product_has_the_rates_of_those_that_resemble_it():
    measured = matmul(H100, 4096, 4096, 4096)
    assert 700e12 < measured.value < 810.5e12  # cuBLAS 716 and 786, and its neighbours
    assert measured.as_asked and "4096 × 4096 × 4096 on H100" in measured.basis
    assert matmul(H100, 256, 256, 256).value < 60e12
    assert H100.ridge_point == pytest.approx(989 / 3.35)
    mine = replace(H100, name="mine", bf16_flops=900e12)
    assert matmul(mine, 4096, 4096, 4096).value == pytest.approx(measured.value * 900 / 989)
    lent, far = matmul(GPUS["H200"], 4096, 4096, 4096), matmul(H100, 65_536, 131_072, 16_384)
    assert not lent.as_asked and "H100's" in lent.basis
    assert not far.as_asked and "more than a factor of two" in far.basis


@pytest.mark.parametrize(("gpu", "shape", "which", "teraflops"), [
    ("H100", (128, 4096), {}, 319), ("H100", (128, 8192), {}, 333),
    ("H100", (128, 5793), {}, (319 + 333) / 2),  # in the middle of a factor of two
    # backward with a mask: measured together with forward; alone only without the mask
    ("H100", (128, 8192), {"direction": "backward"}, 308),
    ("H100", (128, 8192), {"direction": "backward", "kernel": "cuDNN"}, 518),
    ("H100", (128, 2048), {"kernel": "unfused"}, 57),
    # measured on an A100 alone, with 80 of FlashAttention-2's 189
    ("H100", (128, 16384), {"direction": "backward", "kernel": TRITON}, 328 * 80 / 189),
    # made for another GPU: no faster here
    ("A100", (128, 16384), {"kernel": "FlashAttention-3"}, 189)])
def test_attention_is_what_was_measured_of_what_is_like_it(gpu, shape, which, teraflops):
    assert attention(gpu, *shape, **which).value == pytest.approx(1e12 * teraflops, rel=1e-3)


def test_what_stands_in_is_said():
    for rate, words in (
            (attention("H100", 96, 2048), "head dimension"),
            (attention("H100", 128, 16384, kernel=TRITON), "measured on A100"),
            (PUBLISHED.memory(H100, "rotary"), "not measured on H100"),
            (PUBLISHED.memory(H100, "rotary", "compiled"), "all compiled kernels")):
        assert not rate.as_asked and words in rate.basis
    assert attention("H100", 128, 8192).as_asked
    rotary = PUBLISHED.memory(H100, "rotary").value
    assert rotary == pytest.approx(843 / 2000 * 3350e9, rel=1e-3)  # the A100's median


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
    weights = sum(math.prod(shape) for shape in model.block.values() if len(shape) == 2)
    scores = 2 * 2 * 128**2 * model.d_model  # two products, the causal half of each
    forward = kernels.block_forward(model, 2, 128, compiled=compiled)
    backward = kernels.block_backward(model, 2, 128, compiled=compiled)
    assert flops(forward) == 2 * 256 * weights + scores
    assert flops(backward) == 4 * 256 * weights + 2.5 * scores


def test_a_block_moves_the_bytes_of_its_operations():
    """A gated block on 256 tokens: the stream has 64 numbers a token, 160 inside, 32 in the keys.

    Forward: each norm reads and writes 64; each addition reads 128, writes 64; silu 160 and 160,
    the product 320 and 160; rotary 9 for each of 64 + 32 numbers. Backward: a norm reads input and
    gradient for either gradient, writes one; gradients meet twice for query, key and value, once
    for gate and up, twice in the stream; silu and both factors of the product 3 × 160 each.
    """
    def per_token(blocks, model, **options):
        return moved(blocks(model, 2, 128, **options)) / (256 * 2)

    forward, backward = kernels.block_forward, kernels.block_backward
    assert per_token(forward, GATED) == 2 * 2 * 64 + 2 * 3 * 64 + (2 + 3) * 160 + 9 * 96
    assert per_token(backward, GATED) == 2 * 5 * 64 + 5 * 3 * 64 + 3 * 3 * 160 + 9 * 96
    # plain: no rotary, GELU alone (2 and 3 × 256), no third product; biases read each gradient
    assert per_token(forward, PLAIN) == 2 * 2 * 64 + 2 * 3 * 64 + 2 * 256
    assert per_token(backward, PLAIN) == 2 * 5 * 64 + 4 * 3 * 64 + 3 * 256 + 5 * 64 + 256
    # compiled: norm, addition and norm, silu and product in one, addition, rotary in one
    assert per_token(forward, GATED, compiled=True) == (2 + 4 + 3) * 64 + 3 * 160 + 2 * 96
    assert per_token(backward, GATED, compiled=True) == (5 + 6) * 64 + 5 * 160 + 2 * 96
    assert per_token(backward, PLAIN, compiled=True) == (4 + 6) * 64 + 3 * 256 + 5 * 64 + 256


def test_computing_again_adds_what_is_computed_again():
    forward = kernels.block_forward(GATED, 2, 128)
    none, selective, full = (kernels.block_backward(GATED, 2, 128, recompute=each)
                             for each in kernels.RECOMPUTE)
    assert flops(full) == flops(none) + flops(forward)
    assert moved(full) == moved(selective) == moved(none) + moved(forward)
    products = sum(kernel.flops for kernel in forward if kernel.what == "matmul")
    assert flops(selective) == flops(none) + products / 2


def test_the_ends_are_a_head_and_a_loss_in_fp32():
    logits = 256 * 512
    forward, backward = kernels.ends_forward(GATED, 2, 128), kernels.ends_backward(GATED, 2, 128)
    assert (flops(forward), flops(backward)) == (2 * logits * 64, 4 * logits * 64)
    assert moved(forward) == 2 * 256 * 64 * (2 + 2) + logits * (6 + 16)
    assert moved(backward) == 2 * 256 * 64 * (5 + 2) + 2 * 512 * 64 + logits * (20 + 6)
    compiled = [moved(ends(GATED, 2, 128, compiled=True))
                for ends in (kernels.ends_forward, kernels.ends_backward)]
    assert compiled == [moved(forward) - logits * 20, moved(backward) - logits * 22]


# Times

NODE = Cluster(H100, 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
LLAMA = Job(MODELS["Llama-3 8B"], 1, 8192)


def test_kernels_take_their_work_at_their_rate_and_no_less_than_their_launch():
    def seconds(*found, **options):
        return kernels.seconds(found, H100, **options)

    shape, up = (1, 32, 8192, 128), (8192, 14336, 4096)
    half, width = 2 * 32 * 8192**2 * 128, 8192 * 4096 * 2
    norm = PUBLISHED.memory(H100, "norm").value
    assert seconds(kernels.Kernel("up", "matmul", up), kernels.Kernel(
        "norm", "norm", nbytes=2 * width, count=2)) == pytest.approx(
            2 * math.prod(up) / matmul(H100, *up).value + 2 * 2 * width / norm)
    assert seconds(kernels.Kernel("", "attention", shape)) == pytest.approx(half / 333e12)
    assert seconds(kernels.Kernel("", "attention backward", shape)) == pytest.approx(
        2.5 * half / 308e12)
    small = kernels.Kernel("norm", "norm", nbytes=64, count=3)
    assert seconds(small) == pytest.approx(3 * 9.66e-6)
    assert seconds(small, compiled=True) == pytest.approx(3 * 2.5e-6)


def test_a_jobs_switches_cost_what_they_do():
    def compute(**changes):
        (block, *_), root = kernels.unit_costs(replace(LLAMA, **changes), NODE)
        return block.forward_seconds, block.backward_seconds, root.backward_seconds

    base, full, cast = compute(), compute(recompute="full"), compute(cast_weights=True)
    parameter = LLAMA.model.block_parameters / PUBLISHED.memory(H100, "copy").value
    for faster in (compute(compiled=True), compute(attention="FlashAttention-3")):
        assert faster[:2] < base[:2] and faster[1] < base[1] and faster[2] <= base[2]
    # the copy of a gathered unit is no part of what is computed again
    assert full[1] == pytest.approx(base[1] + base[0] - 4 * parameter)
    assert base[1] - compute(reshard=False)[1] == pytest.approx(4 * parameter)
    assert cast[0] - base[0] == pytest.approx(6 * parameter)
    # cast once more in backward; gradients cast to fp32 (6), and copied from fp32 (2 more)
    assert cast[1] - base[1] == pytest.approx((6 + 6 + 2) * parameter)
    assert base[0] - compute(strategy="DDP")[0] == pytest.approx(4 * parameter)
