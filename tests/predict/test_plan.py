"""The planner: what an address may say, its plan against the predictions, and the command."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest

from dplab.__main__ import main
from dplab.predict import cluster, plan, reached, settings
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import BLOCK_RECOMPUTE, CHOICES, PRECISION_CHOICES, recommend
from dplab.predict.cluster import Cluster, predict
from dplab.predict.fields import BY_NAME, FIELDS, MOST_GPUS, cluster_of, model_of, query_of, read

ROOT = Path(__file__).resolve().parents[2]
NODE = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
ONCE = {"global_batch": 64.0 * 8192}  # one sequence for each of 64 GPUs
Ψ = 8_030_261_248  # Llama-3 8B's parameters


# An address


def test_every_default_is_a_value_that_stands_in_no_address():
    assert {*BY_NAME["inside"].choices, *BY_NAME["between"].choices} == set(LINKS)
    for each in FIELDS:
        default = each.default_for({})
        assert default is None or each.value_of(each.text_of(default)) == default
    values, _ = read("")
    assert query_of(values) == ""
    assert model_of(values) == MODELS["Llama-3 8B"] and cluster_of(values).ranks == 64
    ours = model_of(read("model=custom&kv_heads=8")[0])
    assert ours.block == MODELS["Llama-3 8B"].block and ours.parameters == Ψ


@pytest.mark.parametrize(("query", "expected"), [
    ("gpu=A100", {"inside": "NVLink 3", "between": "200 Gb/s"}),
    ("gpu=B200", {"inside": "NVLink 5", "between": "400 Gb/s"}),
    ("gpu=A100&inside=NVLink+4", {"inside": "NVLink 4"}),
    ("model=GPT-2", {"sequence": 1024}), ("model=Llama-3.1+405B", {"sequence": 8192}),
    ("sequence=12&tokens=4000000", {"tokens": 4e6}), ("price=0", {"price": 0.0}),
    ("compile=yes&batch=3", {"batch": 3, "compile": True})])
def test_defaults_follow_the_fields_before_and_a_query_comes_back(query, expected):
    values, errors = read(query)
    assert not errors and {name: values[name] for name in expected} == expected
    assert query_of(values) == query


@pytest.mark.parametrize(("query", "name", "words"), [
    *((f"model=custom&{name}={text}", name, "")
      for text in ("x", "nan", "1e400", "1,2", "0x10", "٣", "9" * 5000, "0", "-1")
      for name in ("layers", "global_batch")),
    ("model=custom&heads=30", "heads", "30 heads do not divide d_model = 4096"),
    ("model=custom&kv_heads=5", "kv_heads", "5 kv_heads do not divide heads = 32"),
    ("gpus=12", "gpus", "12 GPUs do not fill nodes of 8: take 8"),
    (f"gpus={MOST_GPUS + 8}", "gpus", "at most 131,072"), ("gpus=", "gpus", "such as 64"),
    ("batch=1.5", "batch", "not a whole number"),
    ("model=GPT-2&sequence=2048", "sequence", "1,024"),
    ("strategy=x", "strategy", "'FSDP', 'FSDP, kept', 'HSDP'"),
    ("gpu_count=8", "gpu_count", "no field"), ("gpus=8&gpus=16", "gpus", "twice"),
    ("global_batch=8000", "global_batch", "less than a sequence of 8,192"),
    ("compile=perhaps", "compile", "'yes', 'no'"),
    ("model=GPT-2&layers=12", "layers", "only for a model of your own"),
    # no second error about what follows from the first
    ("model=custm&layers=3", "model", "none of the choices"),
    ("model=custom&heads=0", "heads", "at least 1"), ("gpus=x&per_node=3", "gpus", "'x'")])
def test_an_error_names_its_field_says_why_and_leaves_no_plan(query, name, words):
    found = json.loads(plan.answer(query))
    [error] = found["errors"]
    assert error["field"] == name and words in error["why"] and len(error["why"]) < 250
    assert found["plan"] is found["recommendation"] is None and found["query"] == ""


def test_independent_errors_come_together_and_what_was_written_stands():
    query = "model=custom&layers=0&heads=30&kv_heads=x&gpus=12&bach=2&gpu=H10"
    assert {error.name for error in read(query)[1]} == {
        "layers", "heads", "kv_heads", "gpus", "bach", "gpu"}
    assert read("gpus=many&batch=2")[0] == {**read("batch=2")[0], "gpus": "many"}
    for gpus, per_node, nodes in ((3, 8, 1), (8, 8, 1), (12, 4, 3)):
        on = cluster_of(read(f"?gpus={gpus}&per_node={per_node}&nics=2#top")[0])
        assert (on.nodes, on.ranks, on.nics) == (nodes, gpus, 2)


EXTREME = [
    "model=custom&layers=1&d_model=1&heads=1&d_ff=1&vocabulary=1&sequence=1&gpus=131072&strategy=DDP",
    "model=custom&layers=1000&d_model=131072&d_ff=1048576&vocabulary=10000000&gpus=131072",
    "global_batch=1e12&sequence=1048576&gpus=1", "gpus=1&strategy=HSDP", "tokens=1&price=0",
    "inside=PCIe+4&between=1+Gb/s&nics=1&strategy=HSDP", "global_batch=8192"]
STRANGE = ["=", "?&;#", "%", "%00=%FF", "<b>=1", "gpus=%00", "\ud800", "price=é%", "a" * 300]


def test_each_choice_and_what_is_extreme_is_planned_and_what_is_strange_is_refused_by_name():
    choices = [urlencode({each.name: choice}) for each in FIELDS for choice in each.choices]
    for query in [*EXTREME, *choices, "", *STRANGE]:
        values, errors = read(query)
        assert all(error.why.isprintable() for error in errors)
        found = json.loads(plan.answer(query, "plan"), parse_constant=pytest.fail)
        assert (found["plan"] is None) is bool(errors) is (query in STRANGE), query
        assert errors or read(found["query"]) == (values, [])


# A plan


def near(value):
    """What an answer says, in six digits, where the prediction is ``value``."""
    return pytest.approx(value, rel=1e-5)


def asked(part="all", **values):
    found = json.loads(plan.answer(query_of(values), part))
    assert not found["errors"], found["errors"]
    return found


def named(parts, key="bytes"):
    return {part.get("name", part.get("resource")): part[key] for part in parts}


def test_what_is_sent_by_hand():
    found, root = asked("plan", strategy="FSDP", **ONCE)["plan"], 2 * 128_256 * 4096 + 4096
    sent = named(found["traffic"]["parts"])
    # All but the root are gathered twice; each of 64 ranks sends 63 of 64 parts.
    assert sent == near({"all-gather of parameters": 63 / 64 * 2 * (2 * (Ψ - root) + root),
                         "reduce-scatter of gradients": 63 / 64 * 4 * Ψ})
    assert found["traffic"]["sent_bytes"] == near(sum(sent.values()))
    four = asked("plan", strategy="FSDP", batch=2)["plan"]
    assert four["batch"]["accumulation"] == 4
    assert four["traffic"]["sent_bytes"] == near(4 * found["traffic"]["sent_bytes"])
    assert four["memory"]["margin"] == near(four["memory"]["limit"] - four["memory"]["total"])
    gpt = MODELS["GPT-2"].parameters
    found = asked("plan", model="GPT-2", gpus=8, strategy="DDP", batch=1)["plan"]
    assert found["batch"]["accumulation"] > 1
    assert found["traffic"]["sent_bytes"] == near(2 * 4 * gpt * 7 / 8), "the sum goes once"
    parts = asked("plan", strategy="HSDP", **ONCE)["plan"]["traffic"]["parts"]
    assert named(parts)["all-reduce of shards of gradients"] == near(2 * 7 / 8 * 4 * Ψ / 8)
    assert set(named(parts, "ranks").values()) == {8}
    assert named(parts, "where") == {
        "all-gather of parameters": "inside a node", "reduce-scatter of gradients": "inside a node",
        "all-reduce of shards of gradients": plan.BETWEEN}


@pytest.mark.parametrize(("what", "strategy", "precision", "recompute"), [*itertools.product(
    (("GPT-2", 8, 1024), ("Llama-3 8B", 64, 8192), ("Llama-3.1 405B", 256, 8192)),
    ("recommended", *CHOICES), PRECISION_CHOICES, ("as needed", "full"))][::7])
def test_a_plan_says_what_the_predictions_say(what, strategy, precision, recompute):
    name, gpus, sequence = what
    answered = asked(model=name, gpus=gpus, sequence=sequence, strategy=strategy,
                     precision=precision, recompute=recompute, price=3.0, tokens=2e12)
    shown, advised = answered["plan"], answered["recommendation"]
    found = recommend(MODELS[name], NODE.of(gpus), global_batch=4_194_304 // sequence,
                      sequence=sequence, precision=precision,
                      recompute=BLOCK_RECOMPUTE if recompute == "as needed" else (recompute,))
    option = (found.option(strategy) if strategy != "recommended" else
              found.best or found.option("FSDP"))
    memory, step = shown["memory"], shown["step"]
    assert (shown["strategy"], shown["recompute"]) == (option.strategy, option.job.recompute)
    assert named(memory["parts"]) == near(option.budget.parts)
    assert (memory["moment"], memory["total"], memory["limit"]) == (
        option.budget.moment, near(option.budget.total), near(0.9 * GPUS["H100"].memory_bytes))
    assert shown["runs"] is memory["fits"] is option.fits is (step is not None)
    assert shown["batch"] == {"micro": option.job.batch, "accumulation": option.job.accumulation}
    for row, each in zip(advised["options"], found.options, strict=False):
        assert (row["strategy"], row["bytes"], row["fits"], row["best"], row["planned"]) == (
            each.strategy, near(each.budget.total), each.fits, each is found.best,
            each.strategy == option.strategy)
        assert row["seconds"] == (near(each.seconds) if each.fits else None)
    assert advised["advice"][-len(found.advice):] == found.advice
    assert len(advised["advice"]) - len(found.advice) == (
        found.best is not None and found.best.strategy != option.strategy)
    [point] = [each for each in advised["scaling"]["points"] if each["gpus"] == gpus]
    assert point["runs"] is option.fits
    if step:
        simulated = option if option.strategy == "ZeRO-1" else predict(option.job, NODE.of(gpus))
        assert [step[each] for each in ("seconds", "mfu", "exposed_seconds")] == near(
            [simulated.seconds, simulated.mfu, simulated.exposed_seconds])
        assert named(step["savings"], "seconds") == near(simulated.savings)
        assert step["bound"] == simulated.bound and shown["basis"] == [*simulated.basis]
        assert shown["stand_ins"] == [line for line in simulated.basis
                                      if not simulated.basis[line]]
        allowed = simulated.tokens_per_second
        assert shown["speeds"]["allowed"] == near(allowed) == point["allowed"]
        like, rent = reached.reached("H100", gpus), shown["rent"]
        if like is not None and shown["speeds"]["middle"]:
            assert [shown["speeds"][end] for end in ("low", "middle", "high")] == near(
                [allowed * like.low, allowed * like.middle, allowed * like.high])
        days = 2e12 / allowed / 86_400 / rent["goodput"]
        assert (rent["allowed"]["days"], rent["allowed"]["money"]) == near(
            (days, 3 * 24 * gpus * days))
        assert rent["checkpoint_bytes"] == near(12 * option.job.model.parameters)
    assert shown["launch"]["torch"] == settings.in_torch(
        option.strategy, gpus, 8, recompute=option.job.recompute, precision=precision,
        accumulation=option.job.accumulation)


def test_the_global_batch_is_shared_or_that_is_said():
    """512 sequences on 64 GPUs are 8 each; on 48 about 11; on 1,024 there are too few."""
    for gpus, sequences in ((64, 512), (48, 528)):
        found = asked("plan", gpus=gpus, strategy="FSDP")["plan"]
        assert found["batch"]["micro"] * found["batch"]["accumulation"] * gpus == sequences
        assert found["step"]["global_tokens"] == 8192 * sequences
        assert any("evenly" in line for line in found["warnings"]) is (sequences != 512)
    found = asked(gpus=1024)
    assert found["plan"]["starved"] and found["plan"]["rent"] is found["plan"]["step"] is None
    assert not found["plan"]["runs"] and "512 sequences" in found["recommendation"]["advice"][0]


def test_what_others_reached_and_who_wastes_the_gpus():
    shown, found = asked("plan")["plan"], reached.reached("H100", 64)
    assert str(found.runs) in shown["range"] and f"{found.held_out:.0%}" in shown["range"]
    assert len(shown["nearest"]) == 3 and shown["speeds"]["middle"]
    for values, said in (({"gpu": "B200"}, "No runs like yours"),
                         ({"gpus": 4096, "global_batch": 1e9}, "Outside what was compared")):
        none = asked("plan", **values)["plan"]
        assert none["speeds"]["middle"] is None and none["rent"]["allowed"]["days"] > 0
        assert none["range"].startswith(said)
    least, most = plan._compared()[2]  # of what was published, tokens in a sequence
    for sequence, beyond in ((least // 2, False), (least // 2 - 1, True), (2 * most, False),
                             (2 * most + 1, True)):
        said = asked("plan", sequence=sequence)["plan"]["range"]
        assert said.startswith("Outside") is beyond
    wasted = asked(gpus=1024, global_batch=16e6, between="1 Gb/s", nics=1)
    assert "wastes the GPUs" in wasted["plan"]["warnings"][0]
    marks = [row["mark"] for row in wasted["recommendation"]["options"]]
    assert "fastest, and a waste" in marks and "recommended" not in marks


def test_one_gpu_has_no_wrapper_and_nothing_to_send():
    found, two = asked(gpus=1, model="GPT-2"), asked("recommendation", gpus=2, model="GPT-2")
    assert [[row["strategy"] for row in each["recommendation"]["options"]]
            for each in (found, two)] == [["DDP", "FSDP"], ["DDP", "ZeRO-1", "FSDP", "FSDP, kept"]]
    shown = found["plan"]
    assert (shown["strategy"], shown["name"]) == ("DDP", "no wrapper")
    assert not shown["traffic"]["parts"] and not shown["traffic"]["sent_bytes"]
    launch = shown["launch"]
    assert "distributed" not in launch["torch"] and launch["torchrun"] == "python train.py"
    assert launch["deepspeed"] is None


def test_the_curve_keeps_the_global_batch_and_says_where_it_stops_paying():
    def scaling(**values):
        return asked("recommendation", **values)["recommendation"]["scaling"]

    found = scaling(model="GPT-2", gpus=8, strategy="FSDP", global_batch=65536.0)
    counts = [point["gpus"] for point in found["points"]]
    assert counts == [1, 2, 4, 8, 16, 32, 64]
    curve = [(count, recommend(MODELS["GPT-2"], NODE.of(count), global_batch=64, sequence=1024
                               ).option("FSDP").tokens_per_second) for count in counts]
    assert [point["allowed"] for point in found["points"]] == near([speed for _, speed in curve])
    assert found["stops_paying"] == cluster.stops_paying(curve)
    runs = {each["gpus"]: each["runs"] for each in scaling(gpus=48, strategy="FSDP")["points"]}
    assert runs[2] is False and runs[8] is True and 48 in runs
    assert max(runs) == 256  # 8 times as many, in powers of two, and no more than 512 sequences
    assert not scaling(gpus=MOST_GPUS)["points"][-1]["runs"]


@pytest.mark.parametrize("values", [{"strategy": "HSDP"}, {"strategy": "DDP", "model": "GPT-2"}])
def test_the_drawn_spans_are_those_of_the_step_put_together(values):
    step = asked("plan", **ONCE, **values)["plan"]["step"]
    drawn = step["spans"]
    assert max(span["end"] for span in drawn) == step["seconds"] and len(drawn) < 700
    lanes = {lane: [span for span in drawn if span["lane"] == lane]
             for lane in ("compute", "communication", plan.BETWEEN)}
    assert bool(lanes[plan.BETWEEN]) is (values["strategy"] == "HSDP")
    assert sum(span["end"] - span["start"] for span in lanes["compute"]) == pytest.approx(
        step["compute_seconds"], rel=1e-4)
    for row in lanes.values():
        assert all(one["end"] <= two["start"] for one, two in itertools.pairwise(row))


# The command


def printed(capsys, *arguments, status=0):
    assert main(["plan", *arguments]) == status
    return capsys.readouterr()


def test_it_shows_the_plan_and_the_recommendation_of_an_address_and_errors_on_stderr(capsys):
    query = "model=GPT-2&gpus=8&strategy=FSDP%2C+kept&price=2"
    found = json.loads(plan.answer(query))
    for given in ([query], [f"https://example.org/planner.html?{query}#top"],
                  ["planner.html?model=GPT-2#top", "gpus=8", "strategy=FSDP, kept", "price=2"]):
        assert json.loads(printed(capsys, *given, "--json").out) == found
    shown, told, middle = found["plan"], found["recommendation"], found["plan"]["rent"]["middle"]
    out, _ = printed(capsys, query)
    for text in (shown["title"], shown["launch"]["torch"], shown["launch"]["torchrun"],
                 *told["advice"], *(row["name"] for row in told["options"]),
                 f"{middle['days']:,.1f} days", f"cost {middle['money']:,.0f}"):
        assert text in out
    assert out.splitlines()[-1].endswith(f"?{query}")
    out, _ = printed(capsys, "model=Llama-3.1 405B", "gpus=1024")
    assert json.loads(plan.answer("model=Llama-3.1+405B&gpus=1024"))["plan"]["title"] in out
    out, err = printed(capsys, "model=custom", "layers=0", "heads=30", status=2)
    assert not out and [line.split(": ")[:2] for line in err.splitlines()] == [
        ["dplab plan", "layers"], ["dplab plan", "heads"]]
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{field.name}: {field.help}" in out for field in FIELDS)


@pytest.mark.parametrize("module", ["dplab", "dplab.predict"])
def test_it_runs_where_there_is_nothing_but_python(module):
    """Isolated from every installed package, and without what Pyodide has not."""
    arguments = [*(["plan"] if module == "dplab" else []), "model=GPT-2", "--json"]
    script = (f"import runpy, sys; sys.path[0:0] = [{str(ROOT)!r}]; sys.platform = 'emscripten'; "
              "sys.modules.update(dict.fromkeys(('multiprocessing', 'subprocess', '_ctypes'))); "
              f"sys.argv = ['x', *{arguments!r}]; "
              f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")
    done = subprocess.run([sys.executable, "-S", "-I", "-c", script], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["title"].startswith("GPT-2 on 64")
