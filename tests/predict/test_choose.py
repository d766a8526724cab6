"""Recommendations against arithmetic and brute force; their settings on real ranks."""

import ast
import json
import math
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from dplab import run
from dplab.measure import state_bytes
from dplab.predict import choose, settings, shards
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import CHOICES, TIE, option_of, recommend
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.kernels import optimizer_seconds
from dplab.predict.network import collective_seconds
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.transformer import Transformer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NODE = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
LLAMA = MODELS["Llama-3 8B"]
SMALL = TransformerConfig(layers=4, d_model=64, heads=4, d_ff=192, vocabulary=256, context=64)
LIMIT = 0.9 * 81_559 * 2**20  # of the bytes that nvidia-smi shows of an H100


def chosen(recommendation, strategy):
    return next(each for each in recommendation.options if each.strategy == strategy)


def long(name):
    """The model without a limit to its sequences."""
    return replace(MODELS[name], learned_positions=False)


# What each strategy holds, sends and takes


@pytest.mark.parametrize("ranks", [1, 7, 643, 644, 4096])
def test_the_fullest_rank_is_that_of_all_of_them(ranks):
    """40 · 16 + 4 tensors, 242 of them equal: beyond as many ranks, some own nothing."""
    even = TransformerConfig(layers=40, d_model=8, heads=1, d_ff=8, vocabulary=8, context=8)
    assert choose.fullest_rank(even, ranks, "fp32") == max(
        shards.real_states("ZeroRedundancyOptimizer", "fp32", ranks, even.units),
        key=lambda states: states.total)


@pytest.mark.parametrize(("precision", "nbytes"), [("mixed", 4), ("mixed, bf16 reduction", 2)])
def test_strategies_are_simulated_as_their_settings_say(precision, nbytes):
    for strategy, options in {
            "DDP": dict(strategy="DDP", cast_weights=True, gradient_bytes=4),
            "FSDP": dict(gradient_bytes=nbytes),
            "FSDP, kept": dict(gradient_bytes=nbytes, reshard=False),
            "HSDP": dict(strategy="HSDP", gradient_bytes=nbytes)}.items():
        found = option_of(strategy, SMALL, NODE.of(64), batch=1, sequence=64, precision=precision,
                          recompute="none", compiled=True)
        assert found.seconds == predict(Job(SMALL, 1, 64, compiled=True, **options),
                                        NODE.of(64)).seconds


def test_zero_1_is_ddp_with_a_gather_after_a_shorter_optimizer():
    model = MODELS["GPT-2 medium"]
    found = recommend(model, NODE, batch=2, sequence=1024)
    gather = collective_seconds(NODE, "all-gather", 4 * model.parameters)
    states = optimizer_seconds(model.parameters, GPUS["H100"], nbytes=2 * 12 + 4)
    owned = choose.fullest_rank(model, 8, "fp32 shards, bf16 gathered").optimizer / (
        8 * model.parameters)
    assert 1 / 8 < owned < 1
    assert chosen(found, "ZeRO-1").seconds == pytest.approx(
        chosen(found, "DDP").seconds - (1 - owned) * states + gather)


# What is recommended


@pytest.mark.parametrize(("name", "ranks", "batch", "sequence"), [
    ("GPT-2", 8, 1, 512), ("GPT-2", 64, 4, 4096), ("Llama-2 7B", 8, 4, 512),
    ("Llama-2 7B", 64, 1, 4096), ("Llama-2 70B", 8, 1, 512), ("Llama-2 70B", 64, 4, 4096)])
def test_the_best_is_the_simplest_of_the_fastest_that_fit(name, ranks, batch, sequence):
    found = recommend(long(name), NODE.of(ranks), batch=batch, sequence=sequence)
    fitting = {each.strategy: each.seconds for each in found.options if each.budget.total <= LIMIT}
    assert all(each.margin == pytest.approx(LIMIT - each.budget.total) for each in found.options)
    if not fitting:
        assert found.best is None
        return
    good = [name for name in CHOICES if fitting.get(name, math.inf)
            <= (1 + TIE) * min(fitting.values())]
    assert [each.strategy for each in found.ties] == good and found.best is found.ties[0]
    for other in good[1:]:
        assert other in found.advice[0].split("as fast as")[1].split("within")[0]
    assert ("as fast as" in found.advice[0]) is (len(good) > 1)
    assert ("Only one" in found.advice[0]) is (len(fitting) == 1)


def test_recomputes_only_where_nothing_else_fits():
    for sequence, strategy, way in ((8192, "FSDP", "none"),  # 70.95 GB in the dry run
                                    (8192, "FSDP, kept", "full"), (9216, "FSDP", "full")):
        option = chosen(recommend(LLAMA, NODE, sequence=sequence), strategy)
        assert option.job.recompute == way
        assert (option.recomputing("none").budget.total > LIMIT) is (way == "full")
    only = recommend(LLAMA, NODE, sequence=9216, recompute=("none",))
    assert only.best is None and "With its blocks recomputed, FSDP fits" in only.advice[0]


@pytest.mark.parametrize(("name", "ranks", "batch", "between"), [
    ("Llama-3 8B", 16, 96, "25 Gb/s"), ("GPT-2 XL", 4, 48, "400 Gb/s"),
    ("Llama-2 70B", 64, 256, "400 Gb/s")])
def test_the_micro_batch_is_the_fastest_of_all(name, ranks, batch, between):
    """Brute force: every micro-batch that divides a rank's share, each way to recompute."""
    machine = replace(NODE, between=LINKS[between]).of(ranks)
    for each in recommend(long(name), machine, global_batch=batch).options:
        every = [option_of(each.strategy, long(name), machine, batch=size, sequence=4096,
                           accumulation=batch // ranks // size, recompute=way)
                 for size in range(1, batch // ranks + 1) if batch // ranks % size == 0
                 for way in choose.BLOCK_RECOMPUTE]
        fitting = [one.seconds for one in every if one.fits]
        assert each.fits is bool(fitting)
        if fitting:
            assert each.seconds <= 1.03 * min(fitting), each
            assert each.job.batch * each.job.accumulation * ranks == batch == each.global_batch


def test_what_does_not_run_says_what_would():
    """Not enough memory, here or anywhere; fewer sequences than GPUs. None is simulated."""
    for name, ranks, fewer in (("Llama-2 70B", 8, lambda enough: enough // 2),
                               ("Llama-3 8B", 1, lambda enough: enough - 1)):
        found = recommend(MODELS[name], NODE.of(ranks))
        enough = found.enough_ranks
        assert found.best is None
        assert found.advice == [f"FSDP, with its blocks recomputed, fits on {enough:,} GPUs."]
        for count, fits in ((enough, True), (fewer(enough), False)):
            assert chosen(recommend(MODELS[name], NODE.of(count)), "FSDP").fits is fits
    never = recommend(MODELS["Llama-3.1 405B"], NODE, sequence=65_536)
    assert never.enough_ranks is None and "tensor or context parallelism" in never.advice[0]
    starved = recommend(LLAMA, NODE.of(1024), global_batch=512, sequence=8192)
    assert starved.best is None and "so 512 of 1,024 GPUs have none" in starved.advice[0]
    assert not any("spans" in vars(each) for each in (*never.options, *found.options))


# Settings to copy


STARTS = ['import os\n', 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n',
          "dist.init_process_group()\n"]
TRAINED = {  # the shares of parameters and of optimizer states that a rank of 2 × 2 holds
    ("DDP", "none", "mixed"): (1, 1), ("ZeRO-1", "full", "mixed"): (1, 1 / 4),
    ("FSDP", "none", "mixed"): (1 / 4, 1 / 4), ("FSDP, kept", "none", "mixed"): (1 / 4, 1 / 4),
    ("HSDP", "full", "mixed, bf16 reduction"): (1 / 2, 1 / 2)}


def build_model():
    torch.manual_seed(0)
    return Transformer(SMALL)


def init_weights(model):
    assert not any(each.is_meta for each in model.parameters())
    set_model_state_dict(model, build_model().state_dict(),
                         options=StateDictOptions(full_state_dict=True))


def trained(code):
    """The losses of three steps, averaged over the ranks, and the bytes of this rank's states."""
    names, losses = {"build_model": build_model, "init_weights": init_weights}, []
    exec(code, names)
    for step in range(3):
        tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step))
        mine = tokens[dist.get_rank()::dist.get_world_size()]
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in code):
            loss = F.cross_entropy(names["model"](mine[:, :-1]).flatten(0, 1),
                                   mine[:, 1:].flatten())
        names["optimizer"].zero_grad()
        loss.backward()
        names["optimizer"].step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    held = state_bytes(names["model"], names["optimizer"])
    return losses, held.parameters, held.optimizer


@pytest.mark.slow
def test_settings_for_torch_train_alike_and_hold_what_they_say():
    """Each text runs as it is printed, but for its start: the ranks are there, and "cpu" they are.
    """
    codes = []
    for strategy, recompute, precision in TRAINED:
        code = settings.in_torch(strategy, 4, 2, recompute=recompute, precision=precision)
        for line in STARTS:
            assert code.count(line) == 1
            code = code.replace(line, "")
        codes.append(code.replace("cuda", "cpu"))
    found, *_ = run(lambda: [trained(code) for code in codes], 4, backend="gloo")
    size = 4 * SMALL.parameters
    for (losses, parameters, states), shares in zip(found, TRAINED.values(), strict=True):
        assert losses == pytest.approx(found[0][0], rel=0.02) and losses[-1] < losses[0]
        assert parameters == pytest.approx(shares[0] * size, rel=0.01)
        assert states == pytest.approx(2 * shares[1] * size, rel=0.1)


def test_what_the_settings_say_beyond_that():
    text = settings.in_torch("HSDP", 16, recompute="full", compiled=True, accumulation=3)
    assert "(2, 8)" in text and "block.compile()" in text and "is divided by 3" in text
    assert "checkpoint_wrapper(block)" in text and "set_requires_all_reduce(is_last)" in text
    assert "no_sync" in settings.in_torch("DDP", 8, accumulation=2)
    assert "no_sync" not in settings.in_torch("DDP", 8)
    assert settings.torchrun(1, 4) == "torchrun --standalone --nproc-per-node 4 train.py"
    line = " ".join(settings.torchrun(8, 4).split())
    assert "--nnodes 8 --nproc-per-node 4" in line and "--rdzv-endpoint FIRST_HOST:29500" in line


@pytest.mark.parametrize(("strategy", "stage"), [
    ("DDP", 0), ("ZeRO-1", 1), ("FSDP, kept", 2), ("HSDP", 3)])
def test_settings_for_deepspeed_are_those_that_it_knows_and_torchs(strategy, stage):
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    found = json.loads(settings.in_deepspeed(strategy, batch=2, per_node=4, accumulation=3))
    known = zero_config.DeepSpeedZeroConfig
    assert set(found["zero_optimization"]) <= set(known.model_fields)
    assert known(**found["zero_optimization"]).stage == stage
    assert found["zero_optimization"].get("zero_hpz_partition_size") == (
        4 if strategy == "HSDP" else None)
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"],
            found["gradient_clipping"]) == (2, 3, 0.0)
    [call] = [node for node in ast.walk(ast.parse(settings.in_torch(strategy, 8)))
              if isinstance(node, ast.Call)
              and ast.unparse(node.func).endswith(("AdamW", "ZeroRedundancyOptimizer"))]
    in_torch = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert in_torch.pop("fused"), "what DeepSpeed's own AdamW is without a word"
    assert in_torch == found["optimizer"]["params"] | {"betas": (0.9, 0.95)}
