"""``dplab plan`` in a terminal: what it prints, what it refuses, and that it needs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dplab.__main__ import main
from dplab.predict import plan, plan_as_text
from dplab.predict.fields import FIELDS

ROOT = Path(__file__).resolve().parents[2]
GPT = ["--model", "GPT-2", "--gpus", "8"]


def printed(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def refused(capsys, *arguments):
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    return out, err.splitlines()


@pytest.mark.parametrize("arguments", [
    GPT, ["--model", "Llama-3.1 405B", "--gpus", "1024"], ["--gpus", "1", "--strategy", "DDP"],
    ["--gpus", "131072", "--global-batch", "4e9", "--gpu", "A100", "--price", "2"]])
def test_the_page_shows_the_plan_and_is_at_most_100_columns_wide(capsys, arguments):
    out, found = printed(capsys, *arguments), json.loads(printed(capsys, *arguments, "--json"))
    *body, _, link = out.splitlines()
    assert max(map(len, body)) <= 100 and link == f"?{found['query']}"
    for title in ("Strategies", "Memory of a GPU", "Sent by a GPU", "Time of a step",
                  "The same global batch", "Published nearby", "Advice", "Start it",
                  "Settings for torch"):
        assert any(line.startswith(title) for line in body), title
    shown, words = found["plan"], " ".join(out.replace("\n- ", "\n").split())
    assert shown["title"] in out and f"{shown['model']['parameters']:,} parameters" in out
    for text in (*found["recommendation"]["advice"], shown["launch"]["torchrun"]):
        assert " ".join(text.split()) in words
    assert shown["launch"]["torch"].splitlines()[-1] in out
    step, rent = shown["step"], shown["rent"]
    if step:
        assert plan_as_text.duration(step["seconds"]) in out and f"{step['mfu']:.1%}" in out
        assert plan_as_text.few(rent["allowed"]["days"]) in out


def test_a_model_that_is_no_transformer_has_a_page_too(capsys):
    out = printed(capsys, "--model", "no transformer", "--parameters", "1000000")
    found = json.loads(plan.answer("model=no transformer&parameters=1000000"))["alone"]
    assert found["title"] in out and max(map(len, out.splitlines())) <= 100
    assert all(row["name"] in out for row in found["rows"]) and found["published"][0][:30] in out
    assert refused(capsys, "--gpu", "V100")[1][0].startswith("dplab plan: --gpu: V100 computes")


def test_a_link_leads_to_the_same_plan(capsys):
    link = printed(capsys, *GPT, "--strategy", "FSDP, kept", "--link").strip()
    assert link == "?model=GPT-2&gpus=8&strategy=FSDP%2C+kept"
    whole = f"https://example.org/planner.html{link}#top"
    assert printed(capsys, link, "--json") == printed(capsys, whole, "--json") == printed(
        capsys, *GPT, "--strategy", "FSDP, kept", "--json")
    for address in ("https://example.org/planner.html", "planner.html", "?", "#plan"):
        assert printed(capsys, address, "--link").strip() == "?"
    assert printed(capsys, "--gpus", "8", "http://x/planner.html", "--link").strip() == "?gpus=8"
    assert json.loads(printed(capsys, *GPT, "--json")) == json.loads(
        plan.answer("model=GPT-2&gpus=8"))


@pytest.mark.parametrize(("arguments", "options"), [
    (["--model", "custom", "--layers", "0", "--heads", "30"], {"--layers", "--heads"}),
    (["gpus=8&nodes=2"], {"there"}), (["gpus=8", "--gpus", "16"], {"--gpus"}),
    (["--model", "\udcff"], {"--model"}), (["--gpu", ""], {"--gpu"}),
    (["--layers", "3"], {"--layers"})])
def test_what_cannot_be_is_refused_by_its_option_on_stderr(capsys, arguments, options):
    out, lines = refused(capsys, *arguments)
    assert not out and all(line.startswith("dplab plan: ") for line in lines)
    assert {line.split()[2].rstrip(":") for line in lines} == options
    out, again = refused(capsys, *arguments, "--json")
    assert again == lines and len(json.loads(out)["errors"]) == len(lines)
    if "--layers" in arguments and "custom" not in arguments:
        assert lines == ["dplab plan: --layers needs --model custom"]


def test_help_names_every_field_and_no_other_option_is_taken(capsys):
    with pytest.raises(SystemExit) as left:
        main(["plan", "--help"])
    assert left.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for field in FIELDS:
        assert f"--{field.name.replace('_', '-')} " in out and " ".join(field.help.split()) in out
    with pytest.raises(SystemExit) as left:
        main(["plan", "--nodes", "8"])
    assert left.value.code == 2


@pytest.mark.parametrize("module", ["dplab", "dplab.predict"])
def test_it_runs_where_there_is_nothing_but_python(module):
    """Isolated from every installed package; the folder is the clone's."""
    arguments = [*(["plan"] if module == "dplab" else []), *GPT, "--json"]
    script = (f"import runpy, sys; sys.path[0:0] = [{str(ROOT)!r}]; "
              f"sys.argv = ['x', *{arguments!r}]; "
              f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")
    done = subprocess.run([sys.executable, "-S", "-I", "-c", script], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["model"]["name"] == "GPT-2"


@pytest.mark.parametrize(("seconds", "text"), [
    (0.9187, "919 ms"), (0.99999, "1.00 s"), (0.0306, "30.6 ms"), (1234.5, "1,234 s"),
    (0, "0.00 µs"), (9.9996, "10.0 s")])
def test_a_duration_has_three_digits(seconds, text):
    assert plan_as_text.duration(seconds) == text


def test_a_closed_pipe_and_a_plain_terminal_bring_no_traceback():
    command = [sys.executable, "-m", "dplab", "plan"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert done.returncode == 0 and not done.stderr
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and not done.stderr and done.stdout.startswith("Llama-3 8B on 64")
