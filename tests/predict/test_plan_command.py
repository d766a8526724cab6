"""``dplab plan`` in a terminal: what it prints, what it refuses, and that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dplab.__main__ import main
from dplab.predict import plan
from dplab.predict.fields import FIELDS

ROOT = Path(__file__).resolve().parents[2]


def printed(capsys, *arguments, status=0):
    assert main(["plan", *arguments]) == status
    return capsys.readouterr()


@pytest.mark.parametrize("given", [
    ["model=GPT-2", "gpus=8", "price=2"], ["model=Llama-3.1 405B", "gpus=1024"],
    ["gpus=1", "strategy=FSDP, kept"]])
def test_the_page_shows_the_plan_and_the_recommendation(capsys, given):
    out, _ = printed(capsys, *given)
    found = json.loads(printed(capsys, *given, "--json").out)
    assert out.splitlines()[-1].endswith(f"?{found['query']}") and found["query"]
    shown, told = found["plan"], found["recommendation"]
    for text in (shown["title"], shown["launch"]["torch"], shown["launch"]["torchrun"],
                 *shown["warnings"], *told["advice"], *(row["name"] for row in told["options"])):
        assert text in out
    if shown["runs"]:
        assert f"{shown['rent']['allowed']['days']:,.1f} days" in out
        assert f"cost {shown['rent']['allowed']['money']:,.0f}" in out


def test_an_address_gives_its_plan(capsys):
    query = "model=GPT-2&gpus=8&strategy=FSDP%2C+kept"
    expected = json.loads(plan.answer(query))
    for given in ([query], [f"?{query}"], [f"https://example.org/planner.html?{query}#top"],
                  ["planner.html?model=GPT-2#top", "gpus=8", "strategy=FSDP, kept"]):
        assert json.loads(printed(capsys, *given, "--json").out) == expected
    assert json.loads(printed(capsys, "planner.html", "--json").out)["query"] == ""


def test_what_cannot_be_is_refused_by_its_name_on_stderr(capsys):
    out, err = printed(capsys, "model=custom", "layers=0", "heads=30", status=2)
    assert not out
    assert [line.split(": ")[:2] for line in err.splitlines()] == [
        ["dplab plan", "layers"], ["dplab plan", "heads"]]
    out, again = printed(capsys, "model=custom&layers=0&heads=30", "--json", status=2)
    assert again == err and len(json.loads(out)["errors"]) == 2


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as left:
        main(["plan", "--help"])
    assert left.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{field.name}: {field.help}" in out for field in FIELDS)


@pytest.mark.parametrize("module", ["dplab", "dplab.predict"])
def test_it_runs_where_there_is_nothing_but_python(module):
    """Isolated from every installed package; the folder is the clone's."""
    arguments = [*(["plan"] if module == "dplab" else []), "model=GPT-2", "--json"]
    script = (f"import runpy, sys; sys.path[0:0] = [{str(ROOT)!r}]; "
              f"sys.argv = ['x', *{arguments!r}]; "
              f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")
    done = subprocess.run([sys.executable, "-S", "-I", "-c", script], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["title"].startswith("GPT-2 on 64")
