"""``dplab progress``, ``dplab hint`` and ``dplab check``: the exercises in a terminal."""

import ast
import builtins
import inspect
import json
import re
import tomllib

import pytest
from sandbox import ROOT

from dplab.__main__ import main
from dplab.checks import every_exercise, find, solution_source, terminal
from dplab.checks.exercise import WRONG
from dplab.desk import course, kept, record
from dplab.desk.definition import Statement

CHAPTERS = course.notebooks(ROOT / "chapters")
RIGHT = """\
import torch
import torch.distributed as dist

unused = 1 / 0


def global_mean(values):  # of mine
    sums = with_count(values)
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def with_count(values):
    return torch.stack([values.sum(), torch.tensor(float(len(values)))])


raise SystemExit("training starts")
"""
IN_CELLS = ["%matplotlib inline", "%%ranks 4\n1 / 0", "def half a line(", "def twice(x, x): pass",
            *re.split(r"\n\n(?=\ndef global_mean)", RIGHT),
            "global_mean = dplab.mine('global-mean')"]
AS_A_SCRIPT = (
    "from __future__ import annotations\nfrom torch.distributed import *\n"
    "if __name__ == '__main__':\n    dist = None\n    raise SystemExit('training starts')\n"
    + RIGHT.replace("dist.all_reduce", "all_reduce"))


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home"))


@pytest.fixture
def answer(tmp_path):
    """A function that writes an answer as a Python file, or its cells as a notebook."""
    def write(content):
        path = tmp_path / ("answer.py" if isinstance(content, str) else "answer.ipynb")
        path.write_text(content if isinstance(content, str) else json.dumps(
            {"cells": [{"cell_type": "code", "source": cell} for cell in content]}))
        return path
    return write


def said_by(capsys, *arguments, status=0):
    assert main([*map(str, arguments)]) == status
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("content", [RIGHT, IN_CELLS, AS_A_SCRIPT],
                         ids=["file", "notebook", "script"])
def test_an_answer_passes_and_is_kept_and_the_rest_of_its_file_does_not_run(
        content, answer, capsys):
    said = said_by(capsys, "check", "0.2", answer(content))
    assert "passed" in said and ("It is kept" in said or content == AS_A_SCRIPT)
    if content != AS_A_SCRIPT:
        assert "# of mine" in kept.read("global-mean")


def test_an_answer_that_is_wrong_leads_to_a_hint(answer, capsys):
    file = answer("def ring_seconds(nbytes, ranks, bandwidth, latency):\n    return 0.0\n")
    said = said_by(capsys, "check", "ring-seconds", file, status=1)
    assert "wrong" in said and "dplab hint ring-seconds" in said
    assert record.entries("exercises")["ring-seconds"]["outcome"] == WRONG


@pytest.mark.parametrize(("content", "said"), [
    (None, "No such file"), ("def other(): pass", "defines no `global_mean`"),
    ("def global_mean(values:", "no Python"), (["def global_mean(values:"], "no Python"),
    ([1], "answer.ipynb cannot be read"),
    ("import nothing_at_all\n\n\n@nothing_at_all.here\ndef global_mean(values): pass",
     "No module named 'nothing_at_all'")])
def test_a_file_without_an_answer_says_why(answer, capsys, tmp_path, content, said):
    file = tmp_path / "missing.py" if content is None else answer(content)
    assert said in said_by(capsys, "check", "global-mean", file, status=2)
    assert "global-mean" not in record.entries("exercises")


def test_each_answer_is_found_in_its_chapter_with_all_that_it_uses(tmp_path):
    path = tmp_path / "chapter.ipynb"
    exercises = every_exercise()
    for chapter in dict.fromkeys(each.chapter for each in exercises):
        notebook = json.loads(CHAPTERS[chapter].read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if slug := cell["metadata"].get("dplab", {}).get("exercise"):
                cell["source"] = solution_source(slug)
        path.write_text(json.dumps(notebook))
        for exercise in (each for each in exercises if each.chapter == chapter):
            attempt = terminal.attempt_in(path, exercise.name)
            [names, *_] = [
                inspect.unwrap(each).__globals__ for each in [attempt, *vars(attempt).values()]
                if inspect.isfunction(inspect.unwrap(each))]
            source = exercise.solution_source()
            used = Statement(ast.parse(source).body[0], source).uses
            assert not used - names.keys() - {*dir(builtins)}, exercise.slug
            assert not exercise.is_untouched(attempt), exercise.slug


def test_hints_progress_unknown_exercises_and_the_version(capsys):
    assert find("0.2").hints[0] in said_by(capsys, "hint", "global-mean")
    assert find("0.2").hints[1] in said_by(capsys, "hint", "0.2")
    assert "Did you mean `repair-deadlock`" in said_by(capsys, "hint", "deadlok", status=2)
    assert "exercises passed" in said_by(capsys, "progress")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert said_by(capsys, "--version").split() == ["dplab", project["version"]]
