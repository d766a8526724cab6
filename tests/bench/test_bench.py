"""The benches by their names, what they say of predictions, and the results that chapters show."""

import argparse
import importlib
import json
import shlex
import statistics
import subprocess
from types import SimpleNamespace

import pytest

from dplab.bench import __main__ as command
from dplab.bench import results
from dplab.measure import describe_machine
from dplab.predict import published


@pytest.mark.parametrize("name", command.BENCHES)
def test_a_bench_takes_the_options_that_it_has_in_turn(name):
    bench = importlib.import_module(command.module_of(name))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    parser.parse_args(shlex.split(command.BENCHES[name] or ""))
    assert callable(bench.main) and command.summary(name) == bench.__doc__.splitlines()[0]


def test_a_bench_that_fails_is_said_and_the_others_go_on(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda words: ran.append(words[3]) or SimpleNamespace(
        returncode=1 if words[3] == "sharded" else 0))
    assert command.main([]) == 1
    assert ran == [name for name, options in command.BENCHES.items() if options is not None]
    assert capsys.readouterr().out.endswith("failed: sharded\n")


def test_a_name_that_is_no_bench_is_answered_with_all_the_names(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["nosuch", "--steps", "3"])
    said = capsys.readouterr().err
    assert "'nosuch'" in said and all(f"  {name} " in said for name in command.BENCHES)


@pytest.mark.slow
def test_the_cluster_bench_has_the_errors_of_the_runs(capsys):
    assert command.main(["cluster", "--runs"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == describe_machine()
    runs = [run for run in published.published_runs() if run.predicted is not None]
    assert all(any(run.what in line for line in printed) for run in runs)
    for start, group in (("all", [run for run in runs if run.unit != "efficiency"]),
                         ("MFU", [run for run in runs if run.unit == "MFU"])):
        errors = [run.predicted / run.published - 1 if run.unit != "s/step"
                  else run.published / run.predicted - 1 for run in group]
        line = next(line for line in printed if line.startswith(f"  {start} "))
        near = sum(abs(error) <= 0.3 for error in errors) / len(errors)
        inside = sum(run.low <= run.published <= run.high for run in group) / len(group)
        assert line.removeprefix(f"  {start} ").split()[:5] == [
            str(len(group)), f"{statistics.median(errors):+.0%}",
            f"{statistics.median(map(abs, errors)):.0%}", f"{near:.0%}", f"{inside:.0%}"]


def test_results_come_back_with_the_command_that_made_them(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    rows = [{"ranks": 2, "seconds": 0.5}, {"ranks": 4, "seconds": None}]
    results.save("training", rows=rows, seeds=[0, 1])
    text = (tmp_path / "training.json").read_text()
    found = json.loads(text)
    assert found.pop("torch").startswith("2.")
    assert found == {"command": "python chapters/data/training.py", "rows": rows, "seeds": [0, 1]}
    assert [json.loads(line.rstrip(",")) for line in text.splitlines()
            if line.startswith("  {")] == rows


@pytest.mark.parametrize("path", sorted(results.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_name_what_made_them(path):
    found = json.loads(path.read_text())
    python, *arguments = found["command"].split()
    assert python == "python" and found["torch"]
    [program] = {f"chapters/data/{path.stem}.py", f"tests/tools/{path.stem}",
                 "dplab.bench"} & set(arguments)
    assert program == "dplab.bench" or (results.FOLDER.parents[1] / program).exists()


def test_a_spread_is_a_median_and_both_ends():
    assert results.spread([3.0, 1.0, 2.0, 10.0]) == "2.5 (1.0 to 10.0)"


def test_scripts_of_data_can_be_run():
    for script in results.FOLDER.glob("*.py"):
        module = importlib.import_module(script.stem)
        assert callable(module.main) and script.with_suffix(".json").exists()
