"""Recommendations against arithmetic, brute force and dry runs; their settings on real ranks."""

import ast
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dplab import dryrun
from dplab.predict import choose, published, settings, shards
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import CHOICES, TIE, option_of, recommend
from dplab.predict.cluster import Cluster, Job, collective_seconds, predict
from dplab.predict.kernels import optimizer_seconds
from dplab.predict.transformer_config import TransformerConfig

ROOT = Path(__file__).resolve().parents[2]
NODE = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
LLAMA = MODELS["Llama-3 8B"]
SMALL = TransformerConfig(layers=4, d_model=64, heads=4, d_ff=192, vocabulary=256, context=64)


def option(recommendation, strategy):
    return next(each for each in recommendation.options if each.strategy == strategy)


# What it holds


def test_what_each_strategy_holds():
    parameters, block, matrix = 8_030_261_248, 218_112_000, 128_256 * 4096
    root, norms = parameters - 32 * block, 65 * 4096
    copied = parameters - norms - (root - 4096) / 2  # autocast copies what multiplies
    gathered = {"FSDP": root, "FSDP, kept": parameters, "HSDP": root, "DDP": copied,
                "ZeRO-1": copied}
    for strategy, ranks in (("FSDP", 64), ("FSDP, kept", 64), ("HSDP", 8), ("DDP", 1),
                            ("ZeRO-1", None)):
        held = budget(strategy)
        loss = next(moment for moment in held.moments if moment.name == "loss")
        assert loss.parts["gathered"] == 2 * gathered[strategy], strategy
        if ranks:
            assert held.states.total == 16 * parameters / ranks
    # Whole tensors are dealt out, so some rank has the head's moments and few others.
    assert held.states.parameters == held.states.gradients == 4 * parameters
    assert held.states.optimizer == pytest.approx(8 * matrix, rel=0.01)


def budget(strategy, model=LLAMA, ranks=64, batch=1, sequence=4096):
    return option_of(strategy, model, NODE.of(ranks), batch=batch, sequence=sequence,
                     recompute="none").budget


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "run", "options"), [
    ("DDP", dryrun.ddp, {"bucket_views": True}),
    ("ZeRO-1", dryrun.zero_1, {"bucket_views": True}),
    ("FSDP", dryrun.fully_shard, {}), ("HSDP", dryrun.fully_shard, {"shard_ranks": 8}),
    ("FSDP, kept", dryrun.fully_shard, {"reshard_after_forward": False})])
def test_bytes_beside_a_dry_run_of_the_real_code(strategy, run, options):
    model = replace(SMALL, d_model=256, d_ff=1024, learned_positions=False)
    measured = run(model, 16, batch=4, sequence=64, precision="mixed", **options).peak
    assert budget(strategy, model, 16, 4, 64).total == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("ranks", [1, 7, 643, 644, 4096])
def test_the_fullest_rank_is_that_of_all_of_them(ranks):
    """40 · 16 + 4 tensors, 242 of them equal: beyond as many ranks, some own nothing."""
    even = TransformerConfig(layers=40, d_model=8, heads=1, d_ff=8, vocabulary=8, context=8)
    every = shards.real_states("ZeroRedundancyOptimizer", "fp32", ranks, even.units)
    assert choose.fullest_rank(even, ranks, "fp32") == max(
        every, key=lambda states: states.total)


def test_an_option_that_does_not_fit_is_not_simulated(monkeypatch):
    found = recommend(MODELS["Llama-3.1 405B"], NODE.of(1024), sequence=8192)
    assert not any(each.fits for each in found.options)
    monkeypatch.setattr(choose, "job_spans", lambda *_: pytest.fail("simulated in vain"))
    assert found.advice


# What it recommends


@pytest.mark.parametrize(("name", "ranks", "batch", "sequence"), [*itertools.product(
    ("GPT-2", "Llama-2 7B", "Llama-2 70B"), (8, 64), (1, 4), (512, 4096))])
def test_the_best_is_the_simplest_of_the_fastest_that_fit(name, ranks, batch, sequence):
    model = replace(MODELS[name], learned_positions=False)
    found = recommend(model, NODE.of(ranks), batch=batch, sequence=sequence)
    fitting = {each.strategy: each.seconds for each in found.options
               if each.budget.total <= 0.9 * 81_559 * 2**20}
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
    found = recommend(LLAMA, NODE.of(8), sequence=8192)
    assert option(found, "FSDP").job.recompute == "none"  # 70.95 GB in the dry run
    assert option(found, "FSDP, kept").job.recompute == "full"
    longer = recommend(LLAMA, NODE.of(8), sequence=9216)
    assert option(longer, "FSDP").job.recompute == "full"
    for each in (e for r in (8, 64) for e in recommend(LLAMA, NODE.of(r), sequence=8192).options):
        if each.job.recompute == "full":
            assert each.recomputing("none").budget.total > 72e9
    only = recommend(LLAMA, NODE, sequence=9216, recompute=("none",))
    assert only.best is None and "With its blocks recomputed, FSDP fits" in only.advice[0]


@pytest.mark.parametrize(("name", "ranks", "batch", "between"), [
    ("Llama-3 8B", 8, 64, "400 Gb/s"), ("Llama-3 8B", 16, 96, "25 Gb/s"),
    ("GPT-2 XL", 4, 48, "400 Gb/s"), ("Llama-2 70B", 64, 256, "400 Gb/s")])
def test_the_micro_batch_is_the_fastest_of_all(name, ranks, batch, between):
    """Brute force: every micro-batch that divides a rank's share, each way to recompute."""
    model = replace(MODELS[name], learned_positions=False)
    cluster = replace(NODE, between=LINKS[between]).of(ranks)
    found = recommend(model, cluster, global_batch=batch, sequence=4096)
    for each in found.options:
        every = [option_of(each.strategy, model, cluster, batch=size, sequence=4096,
                           accumulation=batch // ranks // size, recompute=way)
                 for size in range(1, batch // ranks + 1) if batch // ranks % size == 0
                 for way in choose.BLOCK_RECOMPUTE]
        fitting = [one.seconds for one in every if one.fits]
        assert each.fits is bool(fitting)
        if fitting:
            assert each.seconds <= 1.03 * min(fitting), each
            assert each.job.batch * each.job.accumulation * ranks == batch == each.global_batch


def test_micro_batches_send_once_or_each_time_and_hold_the_sum():
    """Of DDP the sum goes once; FSDP sends for each; HSDP sends between nodes once."""
    cluster = replace(NODE, between=LINKS["25 Gb/s"]).of(16)
    for strategy, once in (("DDP", True), ("ZeRO-1", True), ("FSDP", False), ("HSDP", None)):
        one, four = (option_of(strategy, MODELS["GPT-2 medium"], cluster, batch=1, sequence=1024,
                               accumulation=count, recompute="none") for count in (1, 4))
        update = one.spans[-1].seconds
        if once is False:
            assert four.seconds == pytest.approx(4 * one.seconds - 3 * update)
        else:
            assert four.seconds < one.seconds + 3.2 * one.compute_seconds + 3 * (once is None)
            assert four.exposed_seconds < 1.5 * one.exposed_seconds
        sent = [(each.of, four.times_sent(each)) for each in four.transfers]
        assert all(times == (1 if once or "shards of" in of else 4) for of, times in sent)
        held = four.budget.total - one.budget.total
        shard = 4 * MODELS["GPT-2 medium"].parameters / {"FSDP": 16, "HSDP": 8}.get(strategy, 1)
        assert held == pytest.approx(shard) if once is not True else held == 0
        assert four.mfu == pytest.approx(4 * one.mfu * one.seconds / four.seconds)


def test_strategies_are_simulated_as_their_settings_say():
    model = MODELS["GPT-2 medium"]
    for precision, nbytes in (("mixed", 4), ("mixed, bf16 reduction", 2)):
        jobs = {"DDP": dict(strategy="DDP", cast_weights=True, gradient_bytes=4),
                "FSDP": dict(gradient_bytes=nbytes), "FSDP, kept": dict(
                    gradient_bytes=nbytes, reshard=False),
                "HSDP": dict(strategy="HSDP", gradient_bytes=nbytes)}
        for strategy, options in jobs.items():
            found = option_of(strategy, model, NODE.of(64), batch=1, sequence=256,
                              precision=precision, recompute="none")
            assert found.seconds == predict(Job(model, 1, 256, **options), NODE.of(64)).seconds


def test_what_each_strategy_sends():
    """The simulator counts no padding, and Llama's sizes need none among 8 ranks."""
    for strategy, kinds in (("HSDP", ("gather", "gather", "reduce-scatter", "all-reduce")),
                            ("FSDP, kept", ("gather", "reduce-scatter")), ("DDP", ("all-reduce",))):
        found = option_of(strategy, LLAMA, NODE.of(64), batch=1, sequence=8192)
        carried = {kind: sum(span.nbytes for span in found.spans if span.name.startswith(kind))
                   for kind in kinds}
        for each, kind in zip(found.transfers, kinds, strict=True):
            carried[kind] -= each.tensor_bytes
        assert not any(map(round, carried.values())), strategy
    sent = option_of("ZeRO-1", LLAMA, NODE, batch=1, sequence=8192)
    assert [each.tensor_bytes for each in sent.transfers] == [4 * LLAMA.parameters] * 2


def test_zero_1_is_ddp_with_a_gather_after_a_shorter_optimizer():
    cluster, model = NODE.of(8), MODELS["GPT-2 medium"]
    found = recommend(model, cluster, batch=2, sequence=1024)
    gather = collective_seconds(cluster, "all-gather", 4 * model.parameters)
    states = optimizer_seconds(model.parameters, GPUS["H100"], nbytes=2 * 12 + 4)
    owned = choose.fullest_rank(model, 8, "fp32 shards, bf16 gathered").optimizer / (
        8 * model.parameters)
    assert 1 / 8 < owned < 1
    assert option(found, "ZeRO-1").seconds == pytest.approx(
        option(found, "DDP").seconds - (1 - owned) * states + gather)


def test_a_tie_is_as_wide_as_the_ratios_of_published_runs_are_off():
    sizes = []
    for ranking in published.rankings():
        setups = [(published.ROWS[run]["strategy"], published.ROWS[run]["ranks"])
                  for run in ranking.runs]
        sizes += [abs(error) for (one, other), error in zip(
            itertools.combinations(setups, 2), ranking.ratio_errors, strict=True) if one != other]
    assert statistics.median(sizes) == pytest.approx(choose.TIE, abs=0.01)


# What to change


def test_enough_ranks_are_where_it_fits_and_fewer_are_not():
    for name, here, fewer in (("Llama-2 70B", 8, lambda enough: enough // 2),
                              ("Llama-3 8B", 1, lambda enough: enough - 1)):
        found = recommend(MODELS[name], NODE.of(here), sequence=4096)
        assert found.best is None
        enough = found.enough_ranks
        assert found.advice == [f"FSDP, with its blocks recomputed, fits on {enough:,} GPUs."]
        for ranks, fits in ((enough, True), (fewer(enough), False)):
            there = recommend(MODELS[name], NODE.of(ranks), sequence=4096)
            assert option(there, "FSDP").fits is fits
    never = recommend(MODELS["Llama-3.1 405B"], NODE, sequence=65_536)
    assert never.enough_ranks is None and "tensor or context parallelism" in never.advice[0]


@pytest.mark.parametrize(("name", "ranks", "batch", "between"), [
    ("Llama-3 8B", 16, 64, "25 Gb/s"), ("GPT-2", 8, 512, "400 Gb/s"),
    ("Llama-2 13B", 32, 64, "1 Gb/s")])
def test_each_change_is_predicted_anew_and_told_where_it_matters(name, ranks, batch, between):
    """What each sentence promises, asked of the engine in other words."""
    model = replace(MODELS[name], learned_positions=False)
    node = replace(NODE, between=LINKS[between])
    found = recommend(model, node.of(ranks), global_batch=batch, sequence=2048)
    twice = replace(LINKS[between], bandwidth=2 * LINKS[between].bandwidth)
    again = {
        "Twice the global batch": (node, 2 * batch, {}),
        "A network twice as fast": (replace(node, between=twice), batch, {}),
        "torch.compile": (node, batch, {"compiled": True}),
        "Gradients reduced in bf16": (node, batch, {"precision": "mixed, bf16 reduction"})}
    told = " ".join(found.advice)
    for what, speed in found.changes.items():
        machine, size, options = again[what]
        there = recommend(model, machine.of(ranks), global_batch=size, sequence=2048, **options)
        expected = there.wish.option(found.best.strategy).tokens_per_second
        assert speed == pytest.approx(expected / found.best.tokens_per_second)
        assert (f"{what}: {speed:.2f} times" in told) is (speed > 1 + TIE)
    assert set(found.changes) == set(again) - (set() if ranks > 8 else {
        "A network twice as fast", "Gradients reduced in bf16"})


def test_a_global_batch_with_fewer_sequences_than_gpus():
    starved = recommend(LLAMA, NODE.of(1024), global_batch=512, sequence=8192)
    assert starved.best is None and not starved.changes
    assert "so 512 of 1,024 GPUs have none" in starved.advice[0]


@pytest.mark.parametrize("wrong", [
    dict(batch=0), dict(sequence=-1), dict(global_batch=0), dict(precision="fp8"),
    dict(recompute=("some",))])
def test_refuses_what_cannot_be(wrong):
    with pytest.raises(ValueError, match=r"at least 1|no precision|no recompute"):
        recommend(LLAMA, NODE, **wrong)


# Settings to copy


TRAIN = """
import gc, json, os, socket
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from dplab.measure import state_bytes
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.transformer import Transformer

def build_model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**SIZES))

def init_weights(model):
    assert not any(each.is_meta for each in model.parameters())
    set_model_state_dict(model, build_model().state_dict(), options=StateDictOptions(
        full_state_dict=True))

def trained(code):
    names = {"build_model": build_model, "init_weights": init_weights}
    exec(code, names)
    model, optimizer, losses = names["model"], names["optimizer"], []
    for step in range(3):
        tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step))
        mine = tokens[dist.get_rank() :: dist.get_world_size()]
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in code):
            loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    held = state_bytes(model, optimizer)
    return losses, held.parameters, held.optimizer

found = []
for code in CODES:
    found.append(trained(code))
    gc.collect()  # a model that outlived its group would wait for it
    with socket.socket() as free:  # for the next group: torchrun's own store knows this one
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port[0]), TORCHELASTIC_USE_AGENT_STORE="False")
if os.environ["RANK"] == "0":
    json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def under_all(tmp_path_factory):
    """Losses of three steps and bytes of rank 0, by strategy, recomputation and precision.

    Each text is run as it is printed, by the line of torchrun that is printed above it, on four
    gloo ranks; for that "cuda" is "cpu".
    """
    folder = tmp_path_factory.mktemp("settings")
    cases = [*((name, "none", "mixed") for name in CHOICES), ("DDP", "full", "mixed"),
             ("HSDP", "full", "mixed, bf16 reduction")]
    codes = [settings.in_torch(name, 4, 2, recompute=recompute, precision=precision)
             .replace("cuda", "cpu") for name, recompute, precision in cases]
    (folder / "train.py").write_text(
        f"SIZES, CODES = {dataclasses.asdict(SMALL)!r}, {codes!r}\n{TRAIN}")
    command, *arguments = settings.torchrun(1, 4).split()
    assert command == "torchrun"
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments], cwd=folder,
                          capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cases, json.loads((folder / "found.json").read_text()), strict=True))


@pytest.mark.slow
def test_settings_for_torch_train_alike_and_hold_what_they_say(under_all):
    parts = {"DDP": (1, 1), "ZeRO-1": (1, 1 / 4), "FSDP": (1 / 4, 1 / 4),
             "FSDP, kept": (1 / 4, 1 / 4), "HSDP": (1 / 2, 1 / 2)}
    for (strategy, _, _), found in under_all.items():
        losses, parameter_bytes, optimizer_bytes = found
        parameters = 4 * SMALL.parameters
        assert losses == pytest.approx(under_all["DDP", "none", "mixed"][0], rel=0.02)
        assert losses[-1] < losses[0]
        of_parameters, of_states = parts[strategy]
        assert parameter_bytes == pytest.approx(of_parameters * parameters, rel=0.01)
        assert optimizer_bytes == pytest.approx(2 * of_states * parameters, rel=0.1)


@pytest.mark.parametrize("strategy", ["ZeRO-1", "FSDP, kept"])
def test_settings_have_the_same_adamw_for_torch_and_for_deepspeed(strategy):
    [call] = [node for node in ast.walk(ast.parse(settings.in_torch(strategy, 8)))
              if isinstance(node, ast.Call)
              and ast.unparse(node.func).endswith(("AdamW", "ZeroRedundancyOptimizer"))]
    in_torch = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert in_torch.pop("fused"), "what DeepSpeed's own AdamW is without a word"
    found = json.loads(settings.in_deepspeed(strategy, batch=1))
    in_deepspeed = found["optimizer"]["params"]
    assert in_torch == in_deepspeed | {"betas": tuple(in_deepspeed["betas"])}
    assert in_torch["betas"] == (0.9, 0.95)


def test_settings_refuse_what_they_do_not_have():
    with pytest.raises(ValueError, match="no strategy 'ZeRO-2'"):
        settings.in_torch("ZeRO-2", 8)
    for ranks in (4, 12):
        with pytest.raises(ValueError, match=f"{ranks} ranks do not fill nodes of 8"):
            settings.in_torch("HSDP", ranks)
    with pytest.raises(ValueError, match="no recompute"):
        settings.in_torch("DDP", 8, recompute="some")
    assert settings.torchrun(1, 8) == "torchrun --standalone --nproc-per-node 8 train.py"
    line = " ".join(settings.torchrun(8, 4).split())
    assert "--nnodes 8 --nproc-per-node 4" in line and "--rdzv-endpoint FIRST_HOST:29500" in line


@pytest.mark.parametrize(("strategy", "stage"), [
    ("DDP", 0), ("FSDP, kept", 2), ("HSDP", 3)])
def test_settings_for_deepspeed_are_those_that_it_knows(strategy, stage):
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    found = json.loads(settings.in_deepspeed(strategy, batch=2, per_node=4))
    known = zero_config.DeepSpeedZeroConfig
    assert set(found["zero_optimization"]) <= set(known.model_fields)
    assert known(**found["zero_optimization"]).stage == stage
    assert found["zero_optimization"].get("zero_hpz_partition_size") == (
        4 if strategy == "HSDP" else None)
    assert found["train_micro_batch_size_per_gpu"] == 2 and found["gradient_clipping"] == 0.0
