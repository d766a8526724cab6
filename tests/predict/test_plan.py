"""A plan against the functions that it is made of, asked directly, and against arithmetic by hand.
"""

import itertools
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from test_fields import random_query

from dplab.predict import cluster, plan, published, settings
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import CHOICES, option_of, recommend
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.fields import MOST_GPUS, query_of

ROOT = Path(__file__).resolve().parents[2]
NODE = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
LLAMA = MODELS["Llama-3 8B"]
Ψ = 8_030_261_248  # Llama-3 8B's parameters
LIMIT = 0.9 * 81_559 * 2**20  # of the bytes that nvidia-smi shows of an H100


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
    found = asked(strategy="FSDP")["plan"]
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


def test_what_ddp_holds_and_sends_by_hand_in_each_precision():
    gpt = MODELS["GPT-2"].parameters
    for precision, states, travels in (("mixed", (4, 4, 8), 4), ("bf16", (2, 2, 4), 2)):
        found = asked(model="GPT-2", gpus=8, strategy="DDP", precision=precision,
                      sequence=1024)["plan"]
        parts = named(found["memory"]["parts"])
        assert parts["parameters"] == near(states[0] * gpt)
        assert parts["gradients"] == near(states[1] * gpt)
        assert parts["optimizer"] == near(states[2] * gpt)
        assert found["traffic"]["sent_bytes"] == near(2 * travels * gpt * 7 / 8)


def test_hybrid_sharding_sends_within_and_between_nodes():
    found = asked(strategy="HSDP")["plan"]
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
    ("mixed", "bf16"), ("as needed", "full"))])
def test_a_plan_says_what_the_predictions_say(what, strategy, precision, recompute):
    name, gpus, sequence = what
    shown = asked("plan", model=name, gpus=gpus, sequence=sequence, strategy=strategy,
                  precision=precision, recompute=recompute)["plan"]
    wish = {"sequence": sequence, "precision": precision,
            "recompute": ("none", "full") if recompute == "as needed" else recompute}
    option = (recommend(MODELS[name], NODE.of(gpus), **wish).best if strategy == "recommended"
              else option_of(strategy, MODELS[name], NODE.of(gpus), batch=1, **wish))
    assert (shown["strategy"], shown["recompute"]) == (option.strategy, option.job.recompute)
    budget, memory = option.budget, shown["memory"]
    assert named(memory["parts"]) == near(budget.parts) and memory["total"] == near(budget.total)
    assert (memory["moment"], memory["fits"]) == (budget.moment, budget.total <= LIMIT)
    assert (shown["step"] is None) is not memory["fits"]
    if memory["fits"] and option.strategy != "ZeRO-1":
        predicted, step = predict(option.job, NODE.of(gpus)), shown["step"]
        assert step["seconds"] == near(predicted.seconds) and step["mfu"] == near(predicted.mfu)
        assert (step["fast"], step["slow"]) == near(predicted.interval)
        assert named(step["savings"], "seconds") == near(predicted.savings)
        assert step["bound"] == predicted.bound
        assert step["exposed_seconds"] == near(predicted.exposed_seconds)
        assert step["tokens_per_second"] == near(predicted.tokens_per_second)
        assert shown["basis"] == predicted.basis and shown["stand_ins"] == predicted.stand_ins
    assert shown["launch"]["torch"] == settings.in_torch(
        option.strategy, gpus, 8, recompute=option.job.recompute, precision=precision)
    assert (shown["launch"]["deepspeed"] is None) is (precision == "bf16")


@pytest.mark.parametrize("values", [
    {"gpus": 8, "precision": "bf16", "recompute": "full"},
    {"model": "Llama-3.1 405B", "gpus": 1024}, {"most_tokens": 1e5}])
def test_the_recommendation_is_the_one_that_recommend_gives(values):
    found = asked("recommendation", **values)
    assert found["plan"] is None
    model = MODELS[values.get("model", "Llama-3 8B")]
    expected = recommend(
        model, NODE.of(values.get("gpus", 64)), sequence=min(8192, model.context),
        most_tokens=values.get("most_tokens", float("inf")),
        precision=values.get("precision", "mixed"),
        recompute=("full",) if "recompute" in values else ("none", "full"))
    shown = found["recommendation"]
    assert shown["advice"] == expected.advice and shown["unknown"] == list(expected.unknown)
    for row, option in zip(shown["options"], expected.options, strict=True):
        assert row["strategy"] == option.strategy and row["bytes"] == near(option.budget.total)
        assert row["best"] is (option is expected.best) and row["fits"] is option.fits
        if option.fits:
            assert row["seconds"] == near(option.seconds) and row["bound"] == option.bound
        else:
            assert row["seconds"] is row["bound"] is None


def test_one_gpu_has_no_wrapper_no_traffic_and_no_advice_to_share():
    found = asked(gpus=1, model="GPT-2", batch=8)
    shown, advice = found["plan"], " ".join(found["recommendation"]["advice"])
    assert (shown["strategy"], shown["name"]) == ("DDP", "no wrapper")
    assert not shown["traffic"]["parts"] and not shown["traffic"]["sent_bytes"]
    assert "distributed" not in shown["launch"]["torch"]
    assert shown["launch"]["torchrun"] == "python train.py"
    assert "among the ranks" not in advice and "One GPU has nothing to share" in advice


@pytest.mark.slow
def test_what_is_said_of_published_runs_is_what_they_say():
    every = published.published_runs()
    runs = published.summary([run for run in every if run.unit != "efficiency"])
    said = {"runs": runs.count, "inside": round(runs.inside, 2),
            "within_30_percent": round(runs.within_30_percent, 2)}
    assert said == plan.COMPARED
    pairs = published.scaling(every)
    said = {
        "pairs": len(pairs), "too_high": sum(run.predicted > run.published for run in pairs),
        "lost": round(statistics.median(1 - run.published for run in pairs), 3),
        "predicted": round(statistics.median(1 - run.predicted for run in pairs), 3),
        "most_gpus": max(run.ranks for run in pairs)}
    assert said == plan.SCALED


def test_the_curve_is_weak_scaling_and_stops_where_cluster_says():
    values = {"model": "GPT-2", "gpus": 8, "strategy": "FSDP"}
    scaling = asked("plan", **values)["plan"]["scaling"]
    counts = [point["gpus"] for point in scaling["points"]]
    assert counts == [2**power for power in range(11)]
    job = Job(MODELS["GPT-2"], 1, 1024, strategy="FSDP", gradient_bytes=4)
    expected = cluster.weak_scaling(job, NODE, counts)
    assert [point["seconds"] for point in scaling["points"]] == near(
        [each.seconds for each in expected])
    curve = [(each.cluster.ranks, each.tokens_per_second) for each in expected]
    assert [point["efficiency"] for point in scaling["points"]] == near(cluster.efficiency(curve))
    assert scaling["stops_paying"] == cluster.stops_paying(curve) is not None


def test_the_curve_begins_where_it_fits_and_holds_what_was_asked_for():
    scaling = asked("plan", gpus=48)["plan"]["scaling"]
    fits = {point["gpus"]: point["fits"] for point in scaling["points"]}
    assert fits[4] is False and fits[8] is True and 48 in fits
    [first] = [point for point in scaling["points"] if point["efficiency"] == 1.0]
    assert first["gpus"] == 8
    assert all(point["seconds"] is None for point in scaling["points"] if not point["fits"])
    assert asked("plan", most_tokens=1e6)["plan"]["scaling"]["most_gpus"] == 1e6 // 8192
    most = asked("plan", gpus=MOST_GPUS)["plan"]["scaling"]["points"]
    assert most[-1]["gpus"] == MOST_GPUS


@pytest.mark.parametrize("values", [{"strategy": "HSDP"}, {"strategy": "DDP", "model": "GPT-2"}])
def test_the_drawn_spans_are_those_of_the_step_put_together(values):
    found = asked("plan", **values)["plan"]
    drawn, step = found["step"]["spans"], found["step"]
    assert max(span["end"] for span in drawn) == step["seconds"]
    busy = sum(span["end"] - span["start"] for span in drawn if span["lane"] == "compute")
    assert busy == pytest.approx(step["compute_seconds"], rel=1e-4)
    for lane in {span["lane"] for span in drawn}:
        row = [span for span in drawn if span["lane"] == lane]
        assert all(one["end"] <= two["start"] for one, two in itertools.pairwise(row)), lane
    assert len(drawn) < 700


# Against itself


MODELS_ASKED = ({"model": "GPT-2 XL"}, {"model": "Llama-2 7B"}, {"model": "Llama-3 8B"},
                {"model": "Llama-3 70B", "batch": 2}, {"model": "Llama-3.1 405B"})
CLUSTERS = ({"gpus": 1}, {"gpus": 2, "gpu": "A100"}, {"gpus": 8, "gpu": "H200"}, {"gpus": 64},
            {"gpus": 4, "per_node": 1, "between": "25 Gb/s"}, {"gpus": 1024, "gpu": "A100"})
WISHES = ({}, {"recompute": "full"}, {"recompute": "none", "strategy": "FSDP"}, {"sequence": 1024},
          {"strategy": "DDP", "most_tokens": 1e6}, {"precision": "bf16", "nics": 1},
          {"strategy": "FSDP, kept"})
JOBS = [model | on | wish for model, on, wish in itertools.product(
    MODELS_ASKED, CLUSTERS, WISHES)][::11]  # each model on each cluster, with other wishes
NAMES = r"(no wrapper|DDP|ZeRO-1|FSDP, kept|FSDP|HSDP)\b"


def number(text):
    """What a number stands for, with a comma for thousands, or with its unit of bytes."""
    size, _, unit = text.replace(",", "").partition(" ")
    return float(size) * {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def test_every_plan_agrees_with_itself():
    for job in JOBS:
        found = asked(**job)
        agrees_in_numbers(found["fields"], found["plan"], found["recommendation"])
        agrees_in_advice(found["plan"], found["recommendation"])


def agrees_in_numbers(values, shown, recommendation):
    memory, step, traffic = shown["memory"], shown["step"], shown["traffic"]
    assert memory["total"] == near(sum(part["bytes"] for part in memory["parts"]))
    assert memory["margin"] == pytest.approx(memory["limit"] - memory["total"],
                                             abs=1e-5 * (memory["limit"] + memory["total"]))
    assert traffic["sent_bytes"] == near(sum(part["bytes"] for part in traffic["parts"]))
    [row] = [row for row in recommendation["options"] if row["planned"]]
    assert (row["name"], row["recompute"]) == (shown["name"], shown["recompute"])
    assert (row["bytes"], row["margin"], row["fits"]) == (
        memory["total"], memory["margin"], memory["fits"])
    [point] = [point for point in shown["scaling"]["points"] if point["gpus"] == values["gpus"]]
    assert point["fits"] is memory["fits"] is (memory["margin"] >= 0) is (step is not None)
    if step:
        for name in ("seconds", "fast", "slow", "mfu", "bound"):
            assert row[name] == step[name]
        for name in ("seconds", "tokens_per_second"):
            assert point[name] == step[name]
        assert step["fast"] <= step["seconds"] <= step["slow"]
        assert step["seconds"] == pytest.approx(step["compute_seconds"] + step["exposed_seconds"],
                                                rel=1e-4)
        savings = named(step["savings"], "seconds")
        assert savings[step["bound"]] == max(savings.values()) < step["seconds"]
        assert step["global_tokens"] == near(step["seconds"] * step["tokens_per_second"])


def agrees_in_advice(shown, recommendation):
    rows = {row["name"]: row for row in recommendation["options"]}
    best = next((name for name, row in rows.items() if row["best"]), None)
    fitting = [point for point in shown["scaling"]["points"] if point["fits"]]
    for line in recommendation["advice"]:
        if said := re.search(r"needs at least ([\d,]+)", line):
            assert "FSDP" in line and best is None
            if (shown["strategy"], shown["recompute"]) == ("FSDP", "full"):
                assert fitting[0]["gpus"] == number(said[1])
        if said := re.search(rf"{NAMES}.* is (\S+ \S+) (below|over) the limit", line):
            assert abs(rows[said[1]]["margin"]) == pytest.approx(number(said[2]), rel=1e-3)
            assert rows[said[1]]["fits"] is (said[3] == "below")
        if said := re.search(r"Use fewer GPUs. With (.*), (\S+) GPUs? reach\w* (\S+) tokens", line):
            assert said[1] == shown["strategy"]
            assert (said[2], said[3]) in {
                (f"{point['gpus']:,}", f"{point['tokens_per_second']:,.0f}") for point in fitting}
    about = [said[1] for line in recommendation["advice"] if (said := re.match(NAMES, line))]
    assert about == sorted(about, key=lambda name: name != best), "what is of others comes last"


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
    "batch=65536&sequence=1048576&gpus=1", "per_node=1&gpus=131072", "gpus=1&strategy=HSDP",
    "inside=PCIe+4&between=1+Gb/s&nics=1&strategy=HSDP", "most_tokens=1"])
def test_the_ends_of_what_may_be_asked_are_answered(query):
    found = json.loads(plan.answer(query), parse_constant=pytest.fail)
    assert not found["errors"] and found["plan"] and found["recommendation"]


def test_errors_leave_no_plan_and_another_part_is_refused():
    found = json.loads(plan.answer("gpus=0"))
    assert [error["field"] for error in found["errors"]] == ["gpus"]
    assert found["plan"] is found["recommendation"] is None and found["query"] == ""
    with pytest.raises(ValueError, match="no part"):
        plan.answer("", "half")


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

    json.loads(plan.answer("model=Llama-3+8B&strategy=HSDP"), parse_float=check)
