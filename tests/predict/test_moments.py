"""When a step holds most, and how much: the formulas beside dry runs of torch's own code."""

import random
from dataclasses import replace

import pytest
import torch

from dplab import dryrun, run
from dplab.dryrun.fake_step import dry_run
from dplab.dryrun.setup import Setup
from dplab.predict import choose, memory
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.job import Cluster
from dplab.predict.moments import PARTS
from dplab.predict.precision import States
from dplab.predict.transformer_config import TransformerConfig

PRECISIONS = {"fp32": "fp32", "mixed": "fp32 shards, bf16 gathered", "bf16": "pure bf16"}
"""Of the dry run, and of `predict.memory`."""
LLAMA = TransformerConfig(3, 128, 4, 512, 4096, 1024, kv_heads=2, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)
GPT = TransformerConfig(3, 128, 4, 512, 4096, 1024)
NODE = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
DEEP = replace(LLAMA, layers=6, vocabulary=256)
KEPT, VIEWS = {"reshard_after_forward": False}, {"bucket_views": True}

HIGHEST = {  # by the name of the highest moment: strategy, model, sequence, precision, recomputed
    "first gathers": ("fully_shard", replace(LLAMA, vocabulary=8192), 16, "fp32", True, {}),
    "last gathers": ("fully_shard", DEEP, 64, "fp32", True, KEPT),
    "logits": ("fully_shard", replace(LLAMA, layers=2, d_ff=128, vocabulary=256), 64, "fp32", False,
               KEPT),
    "loss in forward": ("DDP", DEEP, 16, "mixed", True, VIEWS),
    "loss": ("fully_shard", LLAMA, 256, "mixed", False, {}),
    "gradient of the head": ("DDP", replace(DEEP, vocabulary=1024), 32, "fp32", False, VIEWS),
    "gradient of the head in fp32": ("DDP", LLAMA, 16, "mixed", False, VIEWS),
    "backward of block 5": ("fully_shard", DEEP, 256, "mixed", False, {}),
    "gradients of block 1": ("fully_shard", DEEP, 16, "mixed", True, {}),
    "reduction of block 5": ("fully_shard", DEEP, 64, "mixed", False, KEPT),
    "gradient of the embedding": ("fully_shard", GPT, 16, "bf16", False, {"shard_ranks": 4}),
    "reduction of the root": ("fully_shard", LLAMA, 16, "mixed", False, {}),
    "optimizer step": ("DDP", LLAMA, 16, "fp32", False, {})}
MORE = [  # steps in which other terms count
    ("fully_shard", replace(DEEP, d_model=32, d_ff=128, vocabulary=4096), 12, "fp32", False, KEPT),
    ("fully_shard", replace(GPT, layers=6, vocabulary=256), 64, "mixed", False, {}),
    ("DDP", DEEP, 256, "mixed", False, {}),
    ("DDP", DEEP, 256, "mixed", True, {}),
    ("DDP", replace(DEEP, vocabulary=1024), 160, "mixed", True, VIEWS),
    ("DDP", DEEP, 16, "fp32", False, VIEWS),
    ("DDP", GPT, 16, "fp32", False, VIEWS)]


def budget(strategy, model, sequence, precision, recomputed, more, ranks=8):
    return memory.budget(
        model, more.get("shard_ranks", ranks), 80e9, precision=PRECISIONS[precision],
        stage="DDP" if strategy == "DDP" else "ZeRO-3", sequence=sequence,
        recompute="full" if recomputed else "none", reshard=more is not KEPT,
        bucket_views=more.get("bucket_views", False))


def same(found, measured, within):
    """The peak, and each part of it."""
    assert found.total == pytest.approx(measured.peak, rel=within)
    for part in PARTS:
        assert found.parts[part] == pytest.approx(measured.at_peak[part],
                                                  abs=within * measured.peak), part


@pytest.mark.slow
def test_each_moment_is_the_highest_of_some_step():
    cases = [*HIGHEST.values(), *MORE]
    measured, = run(lambda: [
        dry_run(Setup(strategy, model, 8, 1, sequence, precision, recomputed, torch.optim.AdamW,
                      **more))
        for strategy, model, sequence, precision, recomputed, more in cases], 1, backend="gloo",
        timeout=300)
    found = [budget(*case) for case in cases]
    for each, dry in zip(found, measured, strict=True):
        same(each, dry, within=0.005)
    for name, each, dry in zip(HIGHEST, found, measured, strict=False):
        assert each.moment == name
        in_forward = "forward" in name or "gathers" in name or name == "logits"
        assert dry.peak_phase == ("forward" if in_forward else "optimizer"
                                  if name == "optimizer step" else "backward")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name", "ranks", "batch", "sequence", "recompute", "run"), [
    ("FSDP", "Llama-3 8B", 8, 1, 8192, "none", dryrun.fully_shard),
    ("FSDP, kept", "Llama-3 8B", 16, 1, 512, "full", dryrun.fully_shard),
    ("HSDP", "Llama-2 13B", 64, 1, 2048, "full", dryrun.fully_shard),
    ("DDP", "GPT-2", 16, 2, 512, "none", dryrun.ddp),
    ("ZeRO-1", "GPT-2", 8, 2, 1024, "none", dryrun.zero_1)])
def test_what_the_chooser_says_of_published_models(strategy, name, ranks, batch, sequence,
                                                   recompute, run):
    options = {"DDP": VIEWS, "ZeRO-1": VIEWS, "FSDP": {"full": False}, "FSDP, kept": KEPT | {
        "full": False}, "HSDP": {"shard_ranks": 8, "full": False}}[strategy]
    measured = run(MODELS[name], ranks, batch=batch, sequence=sequence, precision="mixed",
                   checkpointing=recompute == "full", **options)
    found = choose.option_of(strategy, MODELS[name], NODE.of(ranks), batch=batch,
                             sequence=sequence, recompute=recompute)
    same(found.budget, measured, within=0.03)


def test_one_rank_gathers_nothing_that_it_has():
    alone, two = (budget("fully_shard", LLAMA, 16, "fp32", False, {}, ranks=ranks).moments[0].parts
                  for ranks in (1, 2))
    assert alone["communication"] == 0 < two["communication"]
    assert alone["gathered"] == two["gathered"]


def test_zero_2_holds_a_block_of_whole_gradients():
    """No code of torch does this; the course's ShardedGradientOptimizer does."""
    found = memory.budget(DEEP, 4, 80e9, stage="ZeRO-2", precision="fp32", sequence=16)
    reduction = next(each for each in found.moments if each.name == "reduction of block 3")
    block, head = 4 * DEEP.block_parameters, 4 * 256 * 128
    assert reduction.parts["communication"] == block and reduction.parts["gathered"] == 0
    assert reduction.parts["gradients"] == head + block + 2 * block / 4


def test_what_is_held_all_the_time():
    """States that are known; buckets, or gradients that are their views; a sum of gradients."""
    model, held = MODELS["GPT-2"], States(1e9, 2e9, 3e9)
    for stage in ("DDP", "ZeRO-1"):
        plain, views = (memory.budget(model, 4, 80e9, stage=stage, precision="fp32", held=held,
                                      bucket_views=flag) for flag in (False, True))
        assert plain.states == held and plain.parts["optimizer"] == 3e9
        assert {each.parts["communication"] for each in plain.moments} == {4 * model.parameters}
        assert {each.parts["communication"] for each in views.moments[:-1]} == {0}
        assert {each.parts["gradients"] for each in views.moments[:-1]} == {4 * model.parameters}
    once, summed = (memory.budget(model, 4, 80e9, stage="ZeRO-3", accumulates=flag)
                    for flag in (False, True))
    for one, two in zip(once.moments[:-1], summed.moments[:-1], strict=True):
        assert two.total - one.total == pytest.approx(2 * model.parameters / 4)
    assert once.moments[-1] == summed.moments[-1]


def test_the_outermost_blocks_have_the_peak_of_all():
    """Between them what is held grows or shrinks evenly, so that no block inside holds more."""
    chance = random.Random(0)
    for _ in range(60):
        heads = chance.choice((1, 4, 6))
        model = TransformerConfig(
            chance.choice((1, 2, 3, 5, 9, 32)), heads * chance.choice((8, 64, 256)), heads,
            chance.choice((16, 512, 4096)), chance.choice((10, 1000, 50_000)), 10**6,
            gated=chance.random() < 0.5, tied=chance.random() < 0.5, biases=chance.random() < 0.5)
        found = memory.budget(
            model, chance.choice((1, 3, 8, 4096)), 80e9, stage=chance.choice(list(memory.STAGES)),
            precision=chance.choice(list(memory.PRECISIONS)), batch=chance.choice((1, 5)),
            sequence=chance.choice((1, 64, 4096)), recompute=chance.choice(("none", "full")),
            reshard=chance.random() < 0.5, bucket_views=chance.random() < 0.5)
        assert found.total == pytest.approx(max(each.total for each in found.moments), rel=1e-14)
