"""When a step holds most, and how much: the formulas beside dry runs of torch's own code."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from predicted_memory import PRECISIONS, STEPS, dry, predicted, title

from dplab import run
from dplab.dryrun.fake_step import Setup, dry_run
from dplab.predict import memory
from dplab.predict.moments import PARTS
from dplab.predict.transformer_config import TransformerConfig

LLAMA = TransformerConfig(3, 128, 4, 512, 4096, 1024, kv_heads=2, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)
GPT = TransformerConfig(3, 128, 4, 512, 4096, 1024)
DEEP = replace(LLAMA, layers=6, vocabulary=256)

# Name of the highest moment: (strategy, model, sequence, precision, recomputed, more).
HIGHEST = {
    "first gathers": ("fully_shard", replace(LLAMA, vocabulary=8192), 16, "fp32", True, {}),
    "last gathers": ("fully_shard", DEEP, 64, "fp32", True, {"reshard_after_forward": False}),
    "logits": ("fully_shard", replace(LLAMA, layers=2, d_ff=128, vocabulary=256), 64, "fp32", False,
               {"reshard_after_forward": False}),
    "loss in forward": ("DDP", DEEP, 16, "mixed", True, {"bucket_views": True}),
    "loss": ("fully_shard", LLAMA, 256, "mixed", False, {}),
    "gradient of the head": ("DDP", replace(DEEP, vocabulary=1024), 32, "fp32", False,
                             {"bucket_views": True}),
    "gradient of the head in fp32": ("DDP", LLAMA, 16, "mixed", False, {"bucket_views": True}),
    "backward of block 5": ("fully_shard", DEEP, 256, "mixed", False, {}),
    "gradients of block 1": ("fully_shard", DEEP, 16, "mixed", True, {}),
    "reduction of block 5": ("fully_shard", DEEP, 64, "mixed", False,
                             {"reshard_after_forward": False}),
    "gradient of the embedding": ("fully_shard", GPT, 16, "bf16", False, {"shard_ranks": 4}),
    "reduction of the root": ("fully_shard", LLAMA, 16, "mixed", False, {}),
    "optimizer step": ("DDP", LLAMA, 16, "fp32", False, {}),
}


NARROW = replace(DEEP, d_model=32, d_ff=128, vocabulary=4096)
MORE = [  # steps in which other terms count
    ("fully_shard", NARROW, 12, "fp32", False, {"reshard_after_forward": False}),
    ("fully_shard", replace(GPT, layers=6, vocabulary=256), 64, "mixed", False, {}),
    ("DDP", DEEP, 256, "mixed", False, {}),
    ("DDP", DEEP, 256, "mixed", True, {}),
    ("DDP", replace(DEEP, vocabulary=1024), 160, "mixed", True, {"bucket_views": True}),
    ("DDP", DEEP, 16, "fp32", False, {"bucket_views": True}),
    ("DDP", GPT, 16, "fp32", False, {"bucket_views": True}),
]


def budget(strategy, model, sequence, precision, recomputed, more, ranks=8, **changed):
    return memory.budget(
        model, more.get("shard_ranks", ranks), 80e9, precision=PRECISIONS[precision],
        stage="DDP" if strategy == "DDP" else "ZeRO-3", sequence=sequence,
        recompute="full" if recomputed else "none",
        reshard=more.get("reshard_after_forward") is not False,
        bucket_views=more.get("bucket_views", False), **changed)


def dry_runs(cases, optimizer=torch.optim.AdamW, ranks=8):
    """All in one process."""
    def every():
        return [dry_run(Setup(strategy, model, ranks, 1, sequence, precision, recomputed,
                              optimizer, **more))
                for strategy, model, sequence, precision, recomputed, more in cases]

    return run(every, 1, backend="gloo", timeout=300)[0]


@functools.cache
def highest():
    return dict(zip(HIGHEST, dry_runs(HIGHEST.values()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", HIGHEST)
def test_each_moment_is_the_highest_of_some_step(name):
    found, measured = budget(*HIGHEST[name]), highest()[name]
    assert found.moment == name
    same(found, measured, within=0.005)
    in_forward = "forward" in name or "gathers" in name or name == "logits"
    phase = "forward" if in_forward else "optimizer" if "optimizer" in name else "backward"
    assert measured.peak_phase == phase


@pytest.mark.slow
def test_terms_that_count_in_other_steps():
    for case, measured in zip(MORE, dry_runs(MORE), strict=True):
        same(budget(*case), measured, within=0.005)


def same(found, measured, within):
    """The peak, and each part of it."""
    assert found.total == pytest.approx(measured.peak, rel=within)
    for part in PARTS:
        assert found.parts[part] == pytest.approx(measured.at_peak[part],
                                                  abs=within * measured.peak), part


@pytest.mark.slow
@pytest.mark.parametrize("step", [*STEPS[::6], STEPS[-1]], ids=title)
def test_published_models_within_3_percent(step):
    same(predicted(step), dry(step), within=0.03)


def random_steps(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        gated, heads = draw.random() < 0.5, draw.choice([2, 4])
        width = draw.choice([64, 128, 256])
        model = TransformerConfig(
            draw.choice([1, 2, 3, 6]), width, heads, width * draw.choice([1, 2, 4]),
            draw.choice([100, 1000, 8192, 20_000]), 1024, kv_heads=2 if gated else heads,
            gated=gated, biases=not gated, norm="rmsnorm" if gated else "layernorm",
            learned_positions=not gated, tied=draw.random() < 0.5)
        strategy = draw.choice(["fully_shard", "fully_shard", "DDP"])
        more = {"bucket_views": draw.random() < 0.5} if strategy == "DDP" else draw.choice(
            [{}, {"reshard_after_forward": False}, {"shard_ranks": 2}])
        yield (strategy, model, draw.choice([8, 64, 128, 512]),
               draw.choice(list(PRECISIONS)), draw.random() < 0.4, more)


@pytest.mark.slow
def test_any_step():
    cases = [*random_steps(15, seed=3)]
    for case, measured in zip(cases, dry_runs(cases), strict=True):
        assert budget(*case).total == pytest.approx(measured.peak, rel=0.03), case


def test_one_rank_gathers_nothing_that_it_has():
    alone, two = (budget("fully_shard", LLAMA, 16, "fp32", False, {}, ranks=ranks)
                  for ranks in (1, 2))
    first = alone.moments[0].parts, two.moments[0].parts
    assert first[0]["communication"] == 0 < first[1]["communication"]
    assert first[0]["gathered"] == first[1]["gathered"]


def test_zero_2_holds_a_block_of_whole_gradients():
    """No code of torch does this; the course's ShardedGradientOptimizer does."""
    found = memory.budget(DEEP, 4, 80e9, stage="ZeRO-2", precision="fp32", sequence=16)
    reduction = next(each for each in found.moments if each.name == "reduction of block 3")
    block, head = 4 * DEEP.block_parameters, 4 * 256 * 128
    assert reduction.parts["communication"] == block
    assert reduction.parts["gradients"] == head + block + 2 * block / 4
    assert reduction.parts["gathered"] == 0


def test_the_outermost_blocks_have_the_peak_of_all():
    """Between them what is held grows or shrinks evenly, so that no block inside holds more."""
    chance = random.Random(0)
    for _ in range(60):
        heads = chance.choice((1, 4, 6))
        model = TransformerConfig(
            chance.choice((1, 2, 3, 4, 5, 9, 32)), heads * chance.choice((8, 64, 256)), heads,
            chance.choice((16, 512, 4096)), chance.choice((10, 1000, 50_000)), 10**6,
            gated=chance.random() < 0.5, tied=chance.random() < 0.5, biases=chance.random() < 0.5)
        found = memory.budget(
            model, chance.choice((1, 3, 8, 4096)), 80e9, stage=chance.choice(list(memory.STAGES)),
            precision=chance.choice(list(memory.PRECISIONS)), batch=chance.choice((1, 5)),
            sequence=chance.choice((1, 64, 4096)), recompute=chance.choice(("none", "full")),
            reshard=chance.random() < 0.5, bucket_views=chance.random() < 0.5)
        highest = max(found.moments, key=lambda moment: moment.total)
        assert found.total == pytest.approx(highest.total, rel=1e-14)
        assert found.moment in {moment.name for moment in found.moments
                                if moment.total >= found.total * (1 - 1e-14)}
        assert len(found.moments) > 2 * model.layers or found.moments[0].name != "first gathers"
