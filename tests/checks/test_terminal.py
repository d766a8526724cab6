"""``dplab progress``, ``dplab hint`` and ``dplab check``: the exercises in a terminal."""

import builtins
import inspect
import json
import re
import tomllib

import notebooks
import pytest
from sandbox import ROOT

from dplab.__main__ import main
from dplab.checks import every_exercise, find, solution_source, terminal
from dplab.checks.exercise import PASSED, WRONG
from dplab.desk import course, kept, record

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


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home"))


@pytest.fixture
def answer(tmp_path):
    """A function that writes an answer as a Python file, or as a notebook with these cells."""
    def write(*cells, notebook=False):
        path = tmp_path / ("answer.ipynb" if notebook else "answer.py")
        path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell}
                                              for cell in cells]}) if notebook else cells[0])
        return path
    return write


def said_by(capsys, *arguments, status=0):
    assert main([*map(str, arguments)]) == status
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [False, True])
def test_an_answer_passes_and_is_kept_and_the_rest_of_its_file_does_not_run(
        answer, capsys, notebook):
    cells = [*RIGHT.split("\n\n\ndef global_mean"), "global_mean = dplab.mine('global-mean')"]
    cells = ["%matplotlib inline", cells[0], "%%ranks 4\n1 / 0", "def half a line(",
             f"def global_mean{cells[1]}", cells[2]]
    file = answer(*cells, notebook=True) if notebook else answer(RIGHT)
    said = said_by(capsys, "check", "0.2", file)
    assert "passed" in said and "It is kept" in said
    assert "# of mine" in kept.read("global-mean")


def test_an_answer_that_is_wrong_leads_to_a_hint(answer, capsys):
    file = answer("def ring_seconds(nbytes, ranks, bandwidth, latency):\n    return 0.0\n")
    said = said_by(capsys, "check", "ring-seconds", file, status=1)
    assert "wrong" in said and "dplab hint ring-seconds" in said
    assert record.entries("exercises")["ring-seconds"]["outcome"] == WRONG


@pytest.mark.parametrize(("text", "said"), [
    (None, "No such file"), ("def other(): pass", "defines no `global_mean`"),
    ("def global_mean(values:", "no Python"), ("import nothing_at_all\n\n\n@nothing_at_all.here\n"
     "def global_mean(values): pass", "No module named 'nothing_at_all'")])
def test_a_file_without_an_answer_says_why(answer, capsys, tmp_path, text, said):
    file = tmp_path / "missing.py" if text is None else answer(text)
    assert said in said_by(capsys, "check", "global-mean", file, status=2)
    assert "global-mean" not in record.entries("exercises")


def test_a_broken_notebook_is_named(tmp_path, capsys):
    (tmp_path / "broken.ipynb").write_text('{"cells": [{"cell_')
    assert "broken.ipynb cannot be read" in said_by(
        capsys, "check", "global-mean", tmp_path / "broken.ipynb", status=2)


@pytest.mark.parametrize("exercise", every_exercise(), ids=lambda exercise: exercise.slug)
def test_an_answer_is_found_in_its_chapter_with_all_that_it_uses(exercise, tmp_path):
    path = tmp_path / "chapter.ipynb"
    chapter = notebooks.swap(notebooks.read(CHAPTERS[exercise.chapter]), solution_source)
    path.write_text(notebooks.normalise(chapter))
    attempt = terminal.attempt_in(path, exercise.name)
    [names, *_] = [inspect.unwrap(each).__globals__ for each in [attempt, *vars(attempt).values()]
                   if inspect.isfunction(inspect.unwrap(each))]
    _, used = notebooks.names(exercise.solution_source())
    assert not used - names.keys() - {*dir(builtins)}
    assert not exercise.is_untouched(attempt)


def test_hints_and_unknown_exercises(capsys):
    assert find("0.2").hints[0] in said_by(capsys, "hint", "global-mean")
    assert find("0.2").hints[1] in said_by(capsys, "hint", "0.2")
    assert "Did you mean `repair-deadlock`" in said_by(capsys, "hint", "deadlok", status=2)


@pytest.mark.parametrize(("outcomes", "following"), [
    ({}, "0.1"), ({"0.1": PASSED, "0.2": WRONG}, "0.2"), ({"4.1": PASSED}, "4.2"),
    ({"0.1": PASSED, "0.2": PASSED, "0.3": PASSED}, "1.1"),
    ({each.number: PASSED for each in every_exercise()}, None)])
def test_progress_names_the_next_exercise(capsys, outcomes, following):
    for number, outcome in outcomes.items():
        record.update("exercises", find(number).slug, lambda entry, outcome=outcome: entry.update(
            outcome=outcome))
    found = re.search(r"^Next: (\S+) .*\((\S+)\)$", said_by(capsys, "progress"), re.MULTILINE)
    assert (found and found.groups()) == (following and (following, find(following).slug))


def test_the_version_is_that_of_the_project(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert said_by(capsys, "--version").split() == ["dplab", project["version"]]


@pytest.mark.parametrize("more", [
    "from torch.distributed import *\n", "from __future__ import annotations\n",
    "if __name__ == '__main__':\n    dist = None\n    raise SystemExit('training starts')\n"])
def test_what_serves_the_whole_file_is_kept_and_a_script_does_not_start(more, tmp_path, capsys):
    file = tmp_path / "mine.py"
    text = RIGHT.replace("dist.all_reduce", "all_reduce") if "*" in more else RIGHT
    file.write_text(more + text, encoding="utf-8")
    assert main(["check", "global-mean", str(file)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("cell", ["    dedented = 1\n  again = 2", "def twice(x, x): pass"])
def test_a_cell_that_is_no_python_does_not_matter_elsewhere(cell, tmp_path, capsys):
    file = tmp_path / "mine.ipynb"
    right = RIGHT.split("raise SystemExit")[0].replace("unused = 1 / 0", "")
    file.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "id": name,
         "source": source} for name, source in (("a", cell), ("b", right))]}), encoding="utf-8")
    assert main(["check", "global-mean", str(file)]) == 0, capsys.readouterr().out
