"""A plan against the functions that it is made of, asked directly, and against arithmetic by hand.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from test_fields import random_query

from dplab.predict import cluster, plan, reached, settings
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import BLOCK_RECOMPUTE, CHOICES, recommend
from dplab.predict.cluster import Cluster, predict
from dplab.predict.fields import MOST_GPUS, query_of

ROOT = Path(__file__).resolve().parents[2]
NODE = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
LLAMA = MODELS["Llama-3 8B"]
Ψ = 8_030_261_248  # Llama-3 8B's parameters
LIMIT = 0.9 * 81_559 * 2**20  # of the bytes that nvidia-smi shows of an H100
ONCE = {"global_batch": 64.0 * 8192}  # one sequence for each of 64 GPUs


def near(value):
    """What an answer says, in six digits, where the prediction is ``value``."""
    return pytest.approx(value, rel=1e-5)


def asked(part="all", **values):
    found = json.loads(plan.answer(query_of(values), part))
    assert not found["errors"], found["errors"]
    return found


def named(parts, key="bytes"):
    return {part.get("name", part.get("resource")): part[key] for part in parts}


# Against arithmetic by hand


def test_what_fsdp_holds_and_sends_by_hand():
    found = asked(strategy="FSDP", recompute="none", **ONCE)["plan"]
    parts = named(found["memory"]["parts"])
    assert parts["parameters"] == near(4 * Ψ / 64) and parts["optimizer"] == near(8 * Ψ / 64)
    root = 2 * 128_256 * 4096 + 4096
    assert parts["gathered"] == near(2 * root)  # at the loss, in bf16
    assert found["memory"]["moment"] == "loss"
    assert found["memory"]["limit"] == pytest.approx(LIMIT)
    sent = named(found["traffic"]["parts"])
    # All but the root are gathered twice; each of 64 ranks sends 63 of 64 parts.
    assert sent["all-gather of parameters"] == pytest.approx(
        63 / 64 * 2 * (2 * (Ψ - root) + root), rel=1e-5)
    assert sent["reduce-scatter of gradients"] == near(63 / 64 * 4 * Ψ)
    assert found["traffic"]["sent_bytes"] == near(sum(sent.values()))
    assert found["step"]["global_tokens"] == 64 * 8192


def test_what_ddp_holds_and_sends_by_hand():
    gpt = MODELS["GPT-2"].parameters
    found = asked(model="GPT-2", gpus=8, strategy="DDP", sequence=1024)["plan"]
    parts = named(found["memory"]["parts"])
    assert [parts[name] for name in ("parameters", "gradients", "optimizer")] == near(
        [4 * gpt, 4 * gpt, 8 * gpt])
    # in micro-batches or not: the sum goes once
    assert found["traffic"]["sent_bytes"] == near(2 * 4 * gpt * 7 / 8)


def test_hybrid_sharding_sends_within_and_between_nodes():
    found = asked(strategy="HSDP", **ONCE)["plan"]
    sent, ranks = named(found["traffic"]["parts"]), named(found["traffic"]["parts"], "ranks")
    assert sent["all-reduce of shards of gradients"] == pytest.approx(
        2 * 7 / 8 * 4 * Ψ / 8, rel=1e-5)
    assert ranks == {"all-gather of parameters": 8, "reduce-scatter of gradients": 8,
                     "all-reduce of shards of gradients": 8}
    assert named(found["traffic"]["parts"], "where") == {
        "all-gather of parameters": "inside a node", "reduce-scatter of gradients": "inside a node",
        "all-reduce of shards of gradients": plan.BETWEEN}
    lanes = {span["lane"] for span in found["step"]["spans"]}
    assert lanes == {"compute", "communication", plan.BETWEEN}


# Against the functions, asked directly


@pytest.mark.parametrize(("what", "strategy", "precision", "recompute"), [*itertools.product(
    (("GPT-2", 8, 1024), ("Llama-3 8B", 64, 8192)), ("recommended", *CHOICES),
    ("mixed", "mixed, bf16 reduction"), ("as needed", "full"))][::7])
def test_a_plan_says_what_the_predictions_say(what, strategy, precision, recompute):
    name, gpus, sequence = what
    shown = asked("plan", model=name, gpus=gpus, sequence=sequence, strategy=strategy,
                  precision=precision, recompute=recompute)["plan"]
    ways = BLOCK_RECOMPUTE if recompute == "as needed" else (recompute,)
    found = recommend(MODELS[name], NODE.of(gpus), global_batch=4_194_304 // sequence,
                      sequence=sequence, precision=precision, recompute=ways)
    option = found.best if strategy == "recommended" else found.wish.option(strategy)
    assert (shown["strategy"], shown["recompute"]) == (option.strategy, option.job.recompute)
    budget, memory = option.budget, shown["memory"]
    assert named(memory["parts"]) == near(budget.parts) and memory["total"] == near(budget.total)
    assert (memory["moment"], memory["fits"]) == (budget.moment, budget.total <= LIMIT)
    assert shown["runs"] is memory["fits"] is (shown["step"] is not None)
    if memory["fits"] and option.strategy != "ZeRO-1":
        predicted, step = predict(option.job, NODE.of(gpus)), shown["step"]
        assert step["seconds"] == near(predicted.seconds) and step["mfu"] == near(predicted.mfu)
        assert named(step["savings"], "seconds") == near(predicted.savings)
        assert step["bound"] == predicted.bound
        assert step["exposed_seconds"] == near(predicted.exposed_seconds)
        assert shown["speeds"]["allowed"] == near(predicted.tokens_per_second)
        assert shown["basis"] == predicted.basis and shown["stand_ins"] == predicted.stand_ins
    assert shown["launch"]["torch"] == settings.in_torch(
        option.strategy, gpus, 8, recompute=option.job.recompute, precision=precision,
        accumulation=option.job.accumulation)


@pytest.mark.parametrize("values", [
    {"gpus": 8, "precision": "mixed, bf16 reduction", "recompute": "full", "compile": True},
    {"model": "Llama-3.1 405B", "gpus": 256}, {"gpus": 1024, "batch": 1}])
def test_the_recommendation_is_the_one_that_recommend_gives(values):
    found = asked("recommendation", **values)
    assert found["plan"] is None
    expected = recommend(
        MODELS[values.get("model", "Llama-3 8B")], NODE.of(values["gpus"]), global_batch=512,
        sequence=8192, batch=values.get("batch"), precision=values.get("precision", "mixed"),
        recompute=("full",) if "recompute" in values else BLOCK_RECOMPUTE,
        compiled=values.get("compile", False))
    shown = found["recommendation"]
    assert shown["advice"] == expected.advice
    for row, option in zip(shown["options"], expected.options, strict=True):
        assert row["strategy"] == option.strategy and row["bytes"] == near(option.budget.total)
        assert row["best"] is (option is expected.best) and row["fits"] is option.fits
        if option.fits and values["gpus"] <= 512:
            assert row["seconds"] == near(option.seconds) and row["bound"] == option.bound
        else:
            assert row["seconds"] is row["bound"] is None


# The run: batch, days and money


def test_the_global_batch_is_shared_by_micro_batches_that_fit():
    """512 sequences on 64 GPUs are 8 each; on 48 about 11, which is said."""
    for gpus, sequences in ((64, 512), (48, 528)):
        found = asked("plan", gpus=gpus, strategy="FSDP")["plan"]
        batch = found["batch"]
        assert batch["micro"] * batch["accumulation"] * gpus == sequences
        assert found["step"]["global_tokens"] == 8192 * sequences
        assert any("evenly" in line for line in found["warnings"]) is (sequences != 512)
    fixed = asked("plan", batch=2, strategy="FSDP")["plan"]["batch"]
    assert fixed == {"micro": 2, "accumulation": 4}


def test_more_gpus_than_sequences_do_not_run_and_say_how_others_did():
    found = asked(model="Llama-3.1 405B", gpus=16_384, global_batch=16e6)
    shown = found["plan"]
    assert not shown["runs"] and shown["rent"] is shown["step"] is None
    assert "1,953 sequences" in " ".join(found["recommendation"]["advice"])
    first, *_ = shown["other_ways"]
    assert first["rate"] == pytest.approx(422_175 / 2048, rel=1e-3)
    assert "dgxc-benchmarking" in first["source"] and "TP 8" in first["how"]


def test_days_and_money_by_hand():
    shown = asked("plan", tokens=2e12, price=3.0)["plan"]
    rent, speed = shown["rent"], shown["speeds"]["middle"]
    assert rent["checkpoint_bytes"] == near(12 * Ψ)  # fp32 weights and both moments
    assert rent["save_seconds"] == near(12 * Ψ / 64 / (2.45e12 / 360 / 60))
    assert rent["failures_a_day"] == pytest.approx(419 / 54 * 64 / 16_384, rel=1e-5)
    middle = rent["middle"]
    assert middle["days"] == near(2e12 / speed / 86_400 / rent["goodput"])
    assert middle["gpu_hours"] == near(64 * 24 * middle["days"])
    assert middle["money"] == near(3 * middle["gpu_hours"])
    assert 0.99 < rent["goodput"] < 1 and asked("plan")["plan"]["rent"]["middle"]["money"] is None


def test_the_range_is_that_of_runs_like_it_or_there_is_none():
    shown = asked("plan")["plan"]
    found, speeds = reached.reached("H100", 64), shown["speeds"]
    for end in ("low", "middle", "high"):
        assert speeds[end] == near(getattr(found, end) * speeds["allowed"])
    assert str(found.runs) in shown["range"] and f"{found.held_out:.0%}" in shown["range"]
    assert len(shown["nearest"]) == 3 and all(each["source"] for each in shown["nearest"])
    for values, said in (({"gpu": "B200"}, "No runs like yours"),
                         ({"gpus": 4096, "global_batch": 1e9}, "Outside what was compared")):
        none = asked("plan", **values)["plan"]
        assert none["speeds"]["middle"] is None and none["rent"]["allowed"]["days"] > 0
        assert none["range"].startswith(said)


def test_who_wastes_the_gpus_is_warned_and_nobody_is_recommended_to():
    found = asked(gpus=1024, global_batch=16e6, between="1 Gb/s", nics=1)
    assert any("wastes the GPUs" in line for line in found["plan"]["warnings"])
    marks = [row["mark"] for row in found["recommendation"]["options"]]
    assert "fastest, and a waste" in marks and "recommended" not in marks


def test_one_gpu_has_no_wrapper_no_traffic_and_no_advice_to_share():
    found = asked(gpus=1, model="GPT-2")
    shown, advice = found["plan"], " ".join(found["recommendation"]["advice"])
    assert (shown["strategy"], shown["name"]) == ("DDP", "no wrapper")
    assert not shown["traffic"]["parts"] and not shown["traffic"]["sent_bytes"]
    assert "distributed" not in shown["launch"]["torch"] and shown["launch"]["deepspeed"] is None
    assert shown["launch"]["torchrun"] == "python train.py"
    assert "One GPU has nothing to share" in advice


def test_the_curve_keeps_the_global_batch_and_stops_where_cluster_says():
    values = {"model": "GPT-2", "gpus": 8, "strategy": "FSDP", "global_batch": 65536.0}
    scaling = asked("recommendation", **values)["recommendation"]["scaling"]
    counts = [point["gpus"] for point in scaling["points"]]
    assert counts == [1, 2, 4, 8, 16, 32, 64]
    expected = [recommend(MODELS["GPT-2"], NODE.of(count), global_batch=64, sequence=1024
                          ).wish.option("FSDP") for count in counts]
    assert {option.global_batch for option in expected} == {64}
    assert [point["allowed"] for point in scaling["points"]] == near(
        [option.tokens_per_second for option in expected])
    curve = [(count, option.tokens_per_second)
             for count, option in zip(counts, expected, strict=True)]
    assert scaling["stops_paying"] == cluster.stops_paying(curve)


def test_the_curve_begins_where_it_fits_and_holds_what_was_asked_for():
    def points(**values):
        return asked("recommendation", **values)["recommendation"]["scaling"]["points"]

    runs = {point["gpus"]: point["runs"] for point in points(gpus=48, strategy="FSDP")}
    assert runs[2] is False and runs[8] is True and 48 in runs
    assert max(runs) == 256  # 8 times as many, in powers of two, and no more than 512 sequences
    most = points(gpus=MOST_GPUS)
    assert most[-1]["gpus"] == MOST_GPUS and not most[-1]["runs"]


@pytest.mark.parametrize("values", [{"strategy": "HSDP"}, {"strategy": "DDP", "model": "GPT-2"}])
def test_the_drawn_spans_are_those_of_the_step_put_together(values):
    found = asked("plan", **ONCE, **values)["plan"]
    drawn, step = found["step"]["spans"], found["step"]
    assert max(span["end"] for span in drawn) == step["seconds"]
    busy = sum(span["end"] - span["start"] for span in drawn if span["lane"] == "compute")
    assert busy == pytest.approx(step["compute_seconds"], rel=1e-4)
    for lane in {span["lane"] for span in drawn}:
        row = [span for span in drawn if span["lane"] == lane]
        assert all(one["end"] <= two["start"] for one, two in itertools.pairwise(row)), lane
    assert len(drawn) < 700


# Against itself


@pytest.mark.parametrize("job", [
    {"gpus": 4, "per_node": 1, "between": "25 Gb/s", "recompute": "full"},
    {"model": "Llama-2 7B", "gpus": 8, "gpu": "H200", "strategy": "FSDP, kept", "sequence": 1024},
    {"model": "Llama-3.1 405B", "gpus": 1}])
def test_every_plan_agrees_with_itself(job):
    found = asked(**job)
    shown, recommendation = found["plan"], found["recommendation"]
    memory, step = shown["memory"], shown["step"]
    assert memory["margin"] == pytest.approx(memory["limit"] - memory["total"],
                                             abs=1e-5 * (memory["limit"] + memory["total"]))
    [row] = [row for row in recommendation["options"] if row["planned"]]
    assert (row["name"], row["recompute"], row["bytes"], row["fits"]) == (
        shown["name"], shown["recompute"], memory["total"], memory["fits"])
    points = recommendation["scaling"]["points"]
    [point] = [point for point in points if point["gpus"] == job["gpus"]]
    assert point["runs"] is shown["runs"] is (step is not None)
    assert shown["runs"] is (memory["fits"] and not shown["starved"])
    if step:
        assert [row[name] for name in ("seconds", "mfu", "bound")] == [
            step[name] for name in ("seconds", "mfu", "bound")]
        assert point["allowed"] == shown["speeds"]["allowed"] == row["tokens_per_second"]
        assert step["global_tokens"] == near(step["seconds"] * row["tokens_per_second"])


# Anything at all


def test_any_address_is_answered_in_json():
    chance, planned = random.Random("plan 0"), 0
    for _ in range(60):
        query = random_query(chance)
        found = json.loads(plan.answer(query, "plan"), parse_constant=pytest.fail)
        assert set(found) == {"fields", "query", "errors", "plan", "recommendation"}
        assert (found["plan"] is None) is bool(found["errors"])
        if found["plan"]:
            planned += 1
            again = json.loads(plan.answer(found["query"], "plan"))
            assert again == found
    assert planned > 3


@pytest.mark.parametrize("query", [
    "model=custom&layers=1&d_model=1&heads=1&d_ff=1&vocabulary=1&sequence=1&gpus=131072&strategy=DDP",
    "model=custom&layers=1000&d_model=131072&d_ff=1048576&vocabulary=10000000&gpus=131072",
    "global_batch=1e12&sequence=1048576&gpus=1", "gpus=1&strategy=HSDP",
    "inside=PCIe+4&between=1+Gb/s&nics=1&strategy=HSDP", "global_batch=8192", "tokens=1&price=0"])
def test_the_ends_of_what_may_be_asked_are_answered(query):
    found = json.loads(plan.answer(query), parse_constant=pytest.fail)
    assert not found["errors"] and found["recommendation"]


def test_errors_leave_no_plan():
    found = json.loads(plan.answer("gpus=0"))
    assert [error["field"] for error in found["errors"]] == ["gpus"]
    assert found["plan"] is found["recommendation"] is None and found["query"] == ""


def test_a_browser_can_import_it():
    """No torch, no threads, no processes: what Pyodide has not, on a system that it calls so."""
    script = ("import sys; sys.platform = 'emscripten'\n"
              "for name in ('torch', 'numpy', 'multiprocessing', 'subprocess', '_ctypes'):\n"
              "    sys.modules[name] = None\n"
              "from dplab.predict import plan\n"
              "print(len(plan.answer('model=GPT-2&gpus=8')))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 1000, done.stderr


def test_numbers_have_six_digits_so_that_every_python_gives_the_same():
    def check(text):
        assert float(f"{float(text):.6g}") == float(text)
        return float(text)

    text = plan.answer("model=Llama-3+8B&strategy=HSDP")
    assert json.loads(text)["fields"]["global_batch"] == 2**22, "what was asked stays whole"
    json.loads(text.replace("4194304.0", "4194304"), parse_float=check)
