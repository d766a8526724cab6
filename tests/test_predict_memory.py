"""Model states, activations and parameter counts, against published tables and real modules."""

import math
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dplab.predict import catalogue, shards
from dplab.predict.activations import activations
from dplab.predict.memory import (
    PRECISIONS,
    STAGES,
    Precision,
    States,
    budget,
    bytes_per_parameter,
    deepspeed_estimate,
    fits,
    most_parameters,
    readable,
    states,
)
from dplab.predict.transformer import Transformer

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
BOLD = {("7.5B", "ZeRO-1", 64), ("7.5B", "ZeRO-2", 16), ("7.5B", "ZeRO-3", 4),
        ("128B", "ZeRO-3", 64), ("1T", "ZeRO-3", 1024)}  # the first that fit 32 GB
CELLS = [(model, stage, ranks, cell) for model, rows in TABLE_1.items()
         for stage, cells in rows.items()
         for ranks, cell in zip(RANKS, cells.split(), strict=True)]


@pytest.mark.parametrize(("model", "stage", "ranks", "cell"), CELLS)
def test_table_1_of_the_zero_paper_cell_by_cell(model, stage, ranks, cell):
    # The paper rounds halves up in the first model's columns, and cuts digits off in the others.
    rounding = ROUND_HALF_UP if model == "7.5B" else ROUND_DOWN
    gigabytes = Decimal(states(stage, "K = 12", ranks, SIZES[model]).total) / 10**9
    assert gigabytes.quantize(Decimal(cell), rounding) == Decimal(cell)


def test_bold_cells_are_the_first_that_fit_32_gb():
    first = {(model, stage): next((ranks for ranks in RANKS if states(
        stage, "K = 12", ranks, SIZES[model]).total <= 32e9), None)
        for model, rows in TABLE_1.items() for stage in rows}
    assert {(*cell, ranks) for cell, ranks in first.items() if ranks} == BOLD


@pytest.mark.parametrize(("stage", "printed"), [
    ("DDP", "120"), ("ZeRO-1", "31.4"), ("ZeRO-2", "16.6"), ("ZeRO-3", "1.9")])
def test_figure_1_of_the_zero_paper(stage, printed):
    gigabytes = Decimal(states(stage, "K = 12", 64, SIZES["7.5B"]).total) / 10**9
    assert gigabytes.quantize(Decimal(printed), ROUND_HALF_UP) == Decimal(printed)


@pytest.mark.parametrize(("stage", "printed"), [  # ibid., table 2, row MP = 1: billions at 32 GB
    ("DDP", 2), ("ZeRO-1", 7.6), ("ZeRO-2", 14.4), ("ZeRO-3", 128)])
def test_table_2_of_the_zero_paper(stage, printed):
    found = most_parameters(stage, "K = 12", 64, 32e9)
    assert found / 1e9 == pytest.approx(printed, abs=0.05)
    assert states(stage, "K = 12", 64, found).total <= 32e9
    assert states(stage, "K = 12", 64, found + 1).total > 32e9


@pytest.mark.parametrize(("precision", "gigabytes"), [
    ("K = 8", [840, 350, 227.5, 105]), ("K = 12", [1120, 385, 262.5, 140]),
    ("K = 12, fp32 accumulation", [1400])])
def test_70_billion_parameters_on_8_ranks(precision, gigabytes):
    for stage, expected in zip(STAGES, gigabytes, strict=False):
        assert states(stage, precision, 8, 70 * 10**9).total == expected * 1e9


@pytest.mark.parametrize(("precision", "alone", "fixed", "shared"), [
    # Megatron-LM, docs/source/api-guide/dist_optimizer.md: alone, and fixed + shared / d
    ("K = 16", 20, 4, 16), ("K = 12, fp32 gradients", 18, 6, 12), ("fp32", 16, 8, 8)])
def test_bytes_per_parameter_are_those_of_megatron(precision, alone, fixed, shared):
    assert bytes_per_parameter("DDP", precision, 8).total == PRECISIONS[precision].total == alone
    for ranks in (1, 2, 8, 64):
        assert bytes_per_parameter("ZeRO-1", precision, ranks).total == fixed + shared / ranks


@pytest.mark.parametrize(("size", "plain", "accumulating"), [  # Ultra-Scale Playbook, GB
    (10**9, 16, 20), (7 * 10**9, 112, 140), (70 * 10**9, 1120, 1400), (405 * 10**9, 6480, 8100)])
def test_totals_of_the_playbook(size, plain, accumulating):
    assert states("DDP", "K = 12", 1, size).total == plain * 1e9
    assert states("DDP", "fp32", 1, size).total == plain * 1e9
    assert states("DDP", "K = 12, fp32 accumulation", 1, size).total == accumulating * 1e9


def test_what_is_sharded_in_which_stage():
    for stage, parts in {"DDP": (8, 8, 48), "ZeRO-1": (8, 8, 12), "ZeRO-2": (8, 2, 12),
                         "ZeRO-3": (2, 2, 12)}.items():
        assert states(stage, "K = 12", 4, 4) == States(*parts)
    assert bytes_per_parameter("DDP", "pure bf16", 3).total == 8


def test_own_precisions_and_how_states_read():
    fp8 = Precision("fp8", 1, 1, 6)
    assert fp8.gathered == 1 and fp8.total == 8
    text = str(states("ZeRO-2", "K = 8", 8, 70 * 10**9))
    assert text == ("parameters 140 GB, gradients 17.5 GB, optimizer 70 GB: together 227.5 GB")
    assert str(states("DDP", fp8, 1, 1000)).endswith("together 8 kB")


# DeepSpeed edaa7221, examples in docs/code-docs/source/memory.rst, one of them as the code has it
# today (11.28, where the page prints 15.93): 2,851 million parameters, largest layer 32 million,
# one node of 8 GPUs; CPU and GPU in 2³⁰ bytes.
@pytest.mark.parametrize(("stage", "options", "cpu", "gpu"), [
    (2, {"offload_optimizer": True}, "127.45", "5.31"),
    (2, {}, "127.45", "11.28"),
    (3, {"offload_optimizer": True, "offload_parameters": True}, "71.69", "0.12"),
    (3, {"offload_optimizer": True, "offload_parameters": True, "zero_init": False},
     "127.45", "0.12"),
    (3, {"offload_optimizer": True}, "63.72", "0.78"),
    (3, {"offload_optimizer": True, "zero_init": False}, "127.45", "0.78"),
    (3, {}, "1.43", "6.09"),
    (3, {"zero_init": False}, "127.45", "6.09"),
])
def test_samples_of_deepspeeds_estimators(stage, options, cpu, gpu):
    found = deepspeed_estimate(stage, 2_851_000_000, largest_layer=32_000_000, gpus_per_node=8,
                               **options)
    assert [f"{size / 2**30:.2f}" for size in found] == [cpu, gpu]


@pytest.mark.parametrize(("stage", "options"), [
    (1, {}), (4, {}), (3, {"offload_parameters": True})])
def test_estimates_that_deepspeed_does_not_make(stage, options):
    with pytest.raises(ValueError, match="stages 2 and 3"):
        deepspeed_estimate(stage, 10**9, **options)


# Published counts: config.json and model cards on huggingface.co.
PARAMETERS = {
    "GPT-2": 124_439_808, "GPT-2 medium": 354_823_168, "GPT-2 large": 774_030_080,
    "GPT-2 XL": 1_557_611_200, "Llama-2 7B": 6_738_415_616, "Llama-2 13B": 13_015_864_320,
    "Llama-2 70B": 68_976_648_192, "Llama-3 8B": 8_030_261_248, "Llama-3 70B": 70_553_706_496,
    "Llama-3.1 405B": 405_853_388_800,
}


def test_parameters_of_published_models():
    assert {name: model.parameters for name, model in catalogue.MODELS.items()} == PARAMETERS
    for name, model in catalogue.MODELS.items():
        assert model.name == name and "huggingface.co" in model.source
        units = model.units
        assert len(units) == model.layers + 1
        assert sum(math.prod(shape) for unit in units for shape in unit) == model.parameters


GPT = Transformer(2, 24, 4, 96, 50, 16)
LLAMA = Transformer(2, 24, 4, 40, 50, 16, kv_heads=2, gated=True, biases=False, norm="rmsnorm",
                    learned_positions=False, tied=False)


class Block(nn.Module):
    """A block as `Transformer` describes it, of torch's own modules; attention over each head."""

    def __init__(self, model, flash, dropout):
        super().__init__()
        self.model, self.flash, self.dropout = model, flash, dropout
        norm = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
        self.norm1, self.norm2 = norm(model.d_model), norm(model.d_model)
        for name, shape in model.block.items():
            if name.endswith("weight") and len(shape) == 2:
                self.add_module(name[:-7], nn.Linear(*reversed(shape), bias=model.biases))

    def forward(self, x):
        batch, sequence, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(batch, sequence, -1, self.model.d_model // self.model.heads)
                   .transpose(1, 2) for part in (self.query, self.key, self.value))
        groups = self.model.heads // self.model.kv_heads
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1)
        else:
            k, v = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (k, v))
            scores = torch.softmax(q @ k.transpose(2, 3), -1)
            y = F.dropout(scores, 0.5 if self.dropout else 0.0) @ v
        y = self.out(y.transpose(1, 2).reshape(batch, sequence, -1))
        x = x + (F.dropout(y, 0.5) if self.dropout else y)
        y = self.norm2(x)
        y = F.silu(self.gate(y)) * self.up(y) if self.model.gated else F.gelu(self.up(y))
        y = self.down(y)
        return x + (F.dropout(y, 0.5) if self.dropout else y)


def saved_bytes(block, x):
    """The bytes of the storages that autograd saves, without the block's parameters."""
    known = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)
    nbytes = sum(storage.nbytes() for storage in saved.values())
    del y
    return nbytes


@pytest.mark.parametrize(("model", "flash", "dropout"), [
    (GPT, False, False), (GPT, False, True), (GPT, True, False), (LLAMA, True, False),
    (LLAMA, False, False)])
def test_a_blocks_activations_are_what_autograd_saves(model, flash, dropout):
    batch, sequence = 3, 10
    tokens = batch * sequence
    x = torch.randn(batch, sequence, model.d_model, requires_grad=True)
    measured = saved_bytes(Block(model, flash, dropout), x)
    predicted = activations(model, batch, sequence, element=4, flash=flash, dropout=dropout)
    # What is left out, and what kernels do on a CPU alone: masks as wide as the elements, an
    # RMSNorm in steps that also keeps its output before the weights.
    left_out = 2 * 4 * tokens * (2 if model.norm == "layernorm" else 1)
    if dropout:
        left_out += 3 * tokens * (2 * model.d_model + model.heads * sequence)
    if model.norm == "rmsnorm":
        left_out += 2 * 4 * tokens * model.d_model
    if model.kv_heads < model.heads and not flash:  # repeated for all heads, before the product
        left_out += 2 * 4 * tokens * (model.d_model - model.d_kv)
    assert measured == predicted.blocks // model.layers + left_out


def test_the_loss_keeps_probabilities_in_fp32():
    tokens, width = 30, GPT.vocabulary
    logits = torch.randn(tokens, width, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        F.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long))
    predicted = activations(GPT, 3, 10)
    assert max(saved) == predicted.loss == 4 * tokens * width
    assert predicted.logits == 2 * tokens * width


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name.startswith("GPT")])
def test_blocks_of_gpt_have_the_activations_of_the_paper(name):
    model, s, b = catalogue.MODELS[name], 1024, 3
    a, h, layers = model.heads, model.d_model, model.layers

    def blocks(recompute):
        return activations(model, b, s, recompute=recompute, flash=False, dropout=True)

    # Korthikanti et al., 2022: equations 2 (none), 6 (selective) and table 2 (full), t = 1
    assert blocks("none").blocks == layers * (s * b * h * 34 + 5 * a * s * s * b)
    assert blocks("selective").blocks == layers * 34 * s * b * h
    assert blocks("full").blocks == layers * 2 * s * b * h
    assert blocks("none").recomputed == 0
    assert blocks("selective").recomputed == 5 * a * s * s * b
    assert blocks("full").recomputed == s * b * h * 32 + 5 * a * s * s * b
    # section 4.3, without pipeline: embedding dropout, last norm, head's input, loss
    assert blocks("none").ends == 5 * s * b * h
    assert blocks("none").loss == 4 * s * b * model.vocabulary


def test_flash_attention_makes_memory_linear_in_the_sequence():
    model = catalogue.MODELS["Llama-3 8B"]
    short, long = (activations(model, 1, tokens).total for tokens in (2048, 8192))
    assert long == 4 * short
    eager = [activations(model, 1, tokens, flash=False).blocks for tokens in (2048, 8192)]
    assert eager[1] > 8 * eager[0]
    halved = activations(model, 2, 4096, recompute="selective")
    assert halved == activations(model, 1, 8192), "which never kept scores"


def test_a_budget_adds_up_and_says_whether_it_fits():
    model, gpu = catalogue.MODELS["Llama-3 70B"], catalogue.GPUS["H100"].memory_bytes
    found = budget(model, 64, gpu, sequence=8192, recompute="full")
    block, root = model.block_parameters, model.parameters - 80 * model.block_parameters
    assert root == 2 * 128256 * 8192 + 8192
    assert found.parts == {
        "parameters": 2 * model.parameters / 64, "gradients": 2 * model.parameters / 64,
        "optimizer": 12 * model.parameters / 64, "gathered": 2 * (root + block),
        "gradients in passing": 2 * (root + block), "communication": 4 * block,
        "activations": found.activations.total}
    assert found.total == sum(found.parts.values()) < gpu and found.fits
    assert "of 80 GB, which fits" in str(found)
    without = budget(model, 64, gpu, sequence=8192)
    assert without.total > gpu and not without.fits and "does not fit" in str(without)
    assert not fits(model, 8, gpu, recompute="full"), "140 GB of states, at K = 12"
    assert fits(catalogue.MODELS["GPT-2"], 1, gpu, stage="DDP")


def test_buffers_of_each_stage():
    model = catalogue.MODELS["GPT-2"]
    parts = {stage: budget(model, 4, 80e9, stage=stage, precision="fp32").parts
             for stage in STAGES}
    assert parts["DDP"]["communication"] == 4 * model.parameters
    assert parts["ZeRO-1"]["communication"] == 4 * model.parameters
    assert parts["ZeRO-2"]["communication"] == 4 * model.block_parameters
    assert parts["ZeRO-2"]["gradients in passing"] == 4 * model.block_parameters
    assert parts["ZeRO-1"]["gathered"] == parts["ZeRO-2"]["gathered"] == 0
    views = budget(model, 4, 80e9, stage="DDP", precision="fp32", bucket_views=True)
    assert views.communication == 0


UNITS = [[(5, 3), (5,)], [(2, 5), (2,)]]  # 15 + 5 + 10 + 2 elements


@pytest.mark.parametrize(("implementation", "parameters", "gradients", "optimizer"), [
    ("DDP", [32] * 3, [32] * 3, [(32, 4)] * 3),
    ("ZeroRedundancyOptimizer", [32] * 3, [32] * 3, [(15, 1), (10, 1), (7, 2)]),
    # side by side 32, in chunks of 11: the first ends in the 15, the second in the 10
    ("ShardedOptimizer", [33] * 3, [32] * 3, [(11, 1), (11, 3), (10, 2)]),
    # 20 in chunks of 7, 12 in chunks of 4
    ("ShardedGradientOptimizer", [33] * 3, [11] * 3, [(11, 2), (11, 2), (10, 4)]),
    ("FullyShardedModel", [11] * 3, [11] * 3, [(11, 4), (11, 4), (10, 4)]),
    # rows of 5, 5, 2, 2 in pieces of 2, 2, 1, 1: the last rank has none of the last two
    ("fully_shard", [14] * 3, [14] * 3, [(14, 4), (14, 4), (4, 4)]),
])
def test_shards_that_do_not_divide(implementation, parameters, gradients, optimizer):
    expected = [States(4 * p, 4 * g, 8 * elements + 4 * tensors) for p, g, (elements, tensors)
                in zip(parameters, gradients, optimizer, strict=True)]
    assert shards.real_states(implementation, "fp32", 3, UNITS) == expected


@pytest.mark.parametrize("implementation", shards.IMPLEMENTATIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_nothing_is_lost_between_the_ranks(implementation, ranks):
    parameters, gradients, optimizer = shards.IMPLEMENTATIONS[implementation]
    owned = sum(elements for elements, _ in optimizer(UNITS, ranks))
    assert owned == (32 * ranks if implementation == "DDP" else 32)
    for way in (parameters, gradients):
        assert sum(elements for elements, _ in way(UNITS, ranks)) >= 32
    assert len(shards.real_states(implementation, "fp32", ranks, UNITS)) == ranks


def test_shards_that_divide_are_those_of_the_formula():
    model = catalogue.MODELS["Llama-3 8B"]
    free = Precision("no counters", 2, 2, 12, per_tensor=0)
    for implementation, stage in {"DDP": "DDP", "ShardedOptimizer": "ZeRO-1",
                                  "ShardedGradientOptimizer": "ZeRO-2",
                                  "FullyShardedModel": "ZeRO-3", "fully_shard": "ZeRO-3"}.items():
        formula = states(stage, free, 8, model.parameters)
        assert shards.real_states(implementation, free, 8, model.units) == [formula] * 8


def test_padding_is_what_n_equal_shards_need_more():
    assert shards.padded_parameters("fully_shard", 3, UNITS) == 42
    assert shards.padded_parameters("FullyShardedModel", 3, UNITS) == 33
    assert shards.padded_parameters("ShardedOptimizer", 5, UNITS) == 35
    assert shards.padded_parameters("FullyShardedModel", 5, UNITS) == 20 + 15
    assert shards.padded_parameters("fully_shard", 1, UNITS) == 32


def test_gradient_buckets_close_when_they_reach_their_size():
    shapes = [shape for unit in UNITS for shape in unit]
    at = [shards.gradient_buckets(shapes, 4, 4 * size / 2**20) for size in (12, 13, 1000)]
    assert at == [[[(2,), (2, 5)], [(5,), (5, 3)]], [[(2,), (2, 5), (5,)], [(5, 3)]],
                  [[(2,), (2, 5), (5,), (5, 3)]]]


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (227.5e9, "227.5 GB"), (1.4e12, "1.4 TB"),
    (999_960, "1 MB")])
def test_bytes_read_in_decimal_units(nbytes, text):
    assert readable(nbytes) == text


SMALL = {"layers": 1, "d_model": 8, "heads": 2, "d_ff": 32, "vocabulary": 9, "context": 4}


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"heads": 3}, ValueError, "3 heads do not divide d_model = 8"),
    ({"heads": 4, "kv_heads": 3}, ValueError, "3 kv_heads do not divide 4 heads"),
    ({"layers": 0}, ValueError, "layers is at least 1"),
    ({"vocabulary": -5}, ValueError, "vocabulary is at least 1"),
    ({"d_ff": 2.0}, TypeError, "d_ff is an integer"),
    ({"heads": True}, TypeError, "heads is an integer, not True"),
    ({"norm": "batchnorm"}, ValueError, "layernorm, rmsnorm"),
])
def test_configurations_that_cannot_be_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        Transformer(**{**SMALL, **change})


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: states("ZeRO-4", "K = 8", 8, 1), ValueError, "no stage 'ZeRO-4'; there are DDP"),
    (lambda: states("ZeRO-1", "K = 9", 8, 1), ValueError, "no precision 'K = 9'"),
    (lambda: states("DDP", "K = 8", 0, 1), ValueError, "world size is at least 1"),
    (lambda: states("DDP", "K = 8", True, 1), TypeError, "world size is an integer"),
    (lambda: states("DDP", "K = 8", 8, 7e9), TypeError, "parameters is an integer"),
    (lambda: states("DDP", "K = 8", 8, 0), ValueError, "parameters is at least 1"),
    (lambda: Precision("odd", 2, -1, 0), ValueError, "at least 0"),
    (lambda: Precision("odd", 2.5, 1, 0), TypeError, "integer"),
    (lambda: activations(GPT, 0, 8), ValueError, "batch is at least 1"),
    (lambda: activations(GPT, 1, 17), ValueError, "positions for 16 tokens, not for 17"),
    (lambda: activations(GPT, 1, 8, recompute="some"), ValueError, "none, selective, full"),
    (lambda: shards.real_states("FSDP", "fp32", 2, UNITS), ValueError, "no implementation 'FSDP'"),
    (lambda: shards.real_states("DDP", "fp32", 2, []), ValueError, "at least one tensor"),
    (lambda: shards.real_states("DDP", "fp32", 2, [[()]]), ValueError, "without dimensions"),
    (lambda: shards.real_states("DDP", "fp32", 2, [[(3, 0)]]), ValueError, "at least 1, not 0"),
    (lambda: shards.real_states("DDP", "fp32", 0, UNITS), ValueError, "world size"),
])
def test_what_cannot_be_is_refused_in_words(call, error, says):
    with pytest.raises(error, match=says):
        call()
