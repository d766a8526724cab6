"""``dplab plan`` in a terminal: what it prints, what it refuses, and that it needs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dplab.__main__ import main
from dplab.predict import plan
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
def test_the_page_shows_the_plan_and_the_recommendation(capsys, arguments):
    out, found = printed(capsys, *arguments), json.loads(printed(capsys, *arguments, "--json"))
    assert out.splitlines()[-1] == f"?{found['query']}"
    shown, words = found["plan"], " ".join(out.replace("\n- ", "\n").split())
    assert shown["title"] in out and shown["launch"]["torch"] in out
    for text in (*found["plan"]["warnings"], shown["launch"]["torchrun"]):
        assert " ".join(text.split()) in words
    assert all(option["name"] in out for option in found["recommendation"]["options"])
    if shown["runs"]:
        assert f"{shown['rent']['allowed']['days']:,.1f}" in out


def test_a_gpu_that_was_left_out_is_refused_with_the_reason(capsys):
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
        assert lines == ["dplab plan: --layers: only for a model of your own"]


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
