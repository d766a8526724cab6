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
    assert "Traceback" not in err
    return out, err.splitlines()


@pytest.mark.parametrize("arguments", [
    [], GPT, ["--model", "Llama-3.1 405B", "--gpus", "1024"], ["--gpus", "1", "--strategy", "DDP"],
    ["--gpu", "B200", "--strategy", "HSDP", "--between", "1 Gb/s", "--inside", "PCIe 5"],
    [*GPT, "--precision", "bf16", "--recompute", "full", "--strategy", "ZeRO-1"],
    ["--gpus", "131072", "--most-tokens", "4e6", "--gpu", "A100", "--batch", "4"]])
def test_the_page_has_every_part_and_is_at_most_100_columns_wide(capsys, arguments):
    out = printed(capsys, *arguments)
    *body, _, link = out.splitlines()
    assert max(map(len, body)) <= 100 and link.startswith("?")
    for title in ("Strategies", "Memory of a GPU", "Sent by a GPU", "Time of a step", "Scaling",
                  "Advice", "Start it", "Settings for torch"):
        assert any(line.startswith(title) for line in body), title
    start = out.index("Settings for torch") + len("Settings for torch\n")
    lines = []
    for line in out[start:].splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line.removeprefix("    "))
    settings = json.loads(printed(capsys, *arguments, "--json"))["plan"]["launch"]["torch"]
    assert "\n".join(lines).strip() == settings.strip()


def test_the_page_shows_the_numbers_of_the_plan(capsys):
    out, found = printed(capsys, *GPT), json.loads(plan.answer("model=GPT-2&gpus=8"))
    shown = found["plan"]
    assert shown["title"] in out and f"{shown['model']['parameters']:,} parameters" in out
    assert plan_as_text.duration(shown["step"]["seconds"]) in out
    assert f"{shown['step']['mfu']:.1%}" in out
    assert " ".join(found["recommendation"]["advice"]) in " ".join(
        out.replace("\n- ", "\n").split())
    assert shown["launch"]["torchrun"] in out


def test_the_page_says_what_it_scales_and_compares_only_what_it_predicts(capsys):
    note = plan.SCALING_NOTE.split(":")[0]
    for arguments, what, fits in (
            (["--gpus", "8", "--sequence", "9216"], "FSDP, blocks recomputed", True),
            (["--strategy", "DDP"], "DDP, blocks recomputed", False),
            (["--model", "GPT-2", "--gpus", "1"], "DDP", True)):
        out = printed(capsys, *arguments)
        assert f"Scaling of {what}, with the same batch on each GPU" in out
        assert (note in " ".join(out.split())) is fits


def test_json_is_what_the_page_in_a_browser_gets(capsys):
    assert json.loads(printed(capsys, *GPT, "--json")) == json.loads(
        plan.answer("model=GPT-2&gpus=8"))


def test_a_link_leads_to_the_same_plan(capsys):
    link = printed(capsys, *GPT, "--strategy", "FSDP, kept", "--link").strip()
    assert link == "?model=GPT-2&gpus=8&strategy=FSDP%2C+kept"
    whole = f"https://example.org/planner.html{link}#top"
    assert printed(capsys, link) == printed(capsys, whole) == printed(
        capsys, *GPT, "--strategy", "FSDP, kept")
    assert printed(capsys, "--link").strip() == "?"
    default = printed(capsys)
    for address in ("https://example.org/planner.html", "planner.html",
                    "http://127.0.0.1:8000/book/planner.html#furo-main-content", "?", "#plan"):
        assert printed(capsys, address) == default
    assert printed(capsys, "--gpus", "8", "http://x/planner.html") == printed(capsys, "--gpus", "8")


@pytest.mark.parametrize(("arguments", "options"), [
    (["--model", "custom", "--layers", "0", "--heads", "30"], {"--layers", "--heads"}),
    (["--gpus", "1000000000"], {"--gpus"}), (["--per-node", "x"], {"--per-node"}),
    (["--batch", "nan", "--sequence", "-4"], {"--batch", "--sequence"}),
    (["gpus=8&nodes=2"], {"there"}), (["gpus=8", "--gpus", "16"], {"--gpus"}),
    (["--model", "\udcff"], {"--model"}), (["--gpu", ""], {"--gpu"})])
def test_what_cannot_be_is_refused_by_its_option_on_stderr(capsys, arguments, options):
    out, lines = refused(capsys, *arguments)
    assert not out
    assert {line.split()[2].rstrip(":") for line in lines} == options
    assert all(line.startswith("dplab plan: ") for line in lines)
    out, again = refused(capsys, *arguments, "--json")
    assert again == lines and len(json.loads(out)["errors"]) == len(lines)


def test_an_option_that_another_one_asks_for_is_refused_with_that_one(capsys):
    _, lines = refused(capsys, "--layers", "3", "--context", "9")
    assert lines == ["dplab plan: --layers needs --model custom",
                     "dplab plan: --context needs --model custom --family gpt"]


@pytest.mark.parametrize("arguments", [["--nodes", "8"], ["--gpus"], ["a=b", "c=d"],
                                       ["--json", "--link"]])
def test_an_option_that_there_is_not_is_refused(capsys, arguments):
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    assert left.value.code == 2 and "dplab plan" in capsys.readouterr().err


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as left:
        main(["plan", "--help"])
    assert left.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for field in FIELDS:
        assert f"--{field.name.replace('_', '-')} " in out and " ".join(field.help.split()) in out
    for name, other in (("between", "gpu"), ("gated", "family"), ("sequence", "model")):
        text = out.rpartition(f" --{name} ")[2].partition("(default: ")[2]
        assert text.startswith(f"follows --{other})")


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
    (0.9187, "919 ms"), (1.0, "1.00 s"), (0.99999, "1.00 s"), (0.0306, "30.6 ms"),
    (12.345, "12.3 s"), (1234.5, "1,234 s"), (6.81e-4, "681 µs"), (1e-9, "0.00 µs"), (0, "0.00 µs"),
    (9.9996, "10.0 s"), (99.96, "100 s")])
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
