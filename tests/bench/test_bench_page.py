"""The page of all benches, what stands at its top, and the results that came with the course."""

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys

import pytest

from dplab.bench import __main__ as command
from dplab.bench import cluster, ddp, machine, page, results, sharded
from dplab.bench.timing import spread


@pytest.mark.parametrize("name", page.BENCHES)
def test_a_bench_has_options_and_a_main_and_takes_what_the_page_gives_it(name):
    bench = importlib.import_module(f"dplab.bench.{name}")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    parser.parse_args(shlex.split(page.ON_PAGE.get(name, "")))
    assert callable(bench.main) and page.summary(name) == bench.__doc__.splitlines()[0]
    assert (name in page.ON_PAGE) != (name in page.TAKES)


def fails(*_):
    raise RuntimeError("no link today")


def leaves(*_):
    sys.exit("nothing here")


def test_a_bench_that_fails_is_said_and_the_page_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(page, "ON_PAGE", {"ddp": "", "sharded": "", "cluster": "--summary"})
    monkeypatch.setattr(ddp, "main", fails)
    monkeypatch.setattr(sharded, "main", leaves)
    assert command.main([]) == 1
    printed = capsys.readouterr().out
    first, *sections = printed.split(page.RULE)
    assert first.split() == machine.machine().split()
    assert [section.split(":")[0].strip() for section in sections[:3]] == list(page.ON_PAGE)
    assert "FAILED: RuntimeError: no link today" in sections[0]
    assert "FAILED: nothing here" in sections[1]
    assert "tokens/s/GPU" in sections[2] and "FAILED" not in sections[2]
    assert printed.splitlines()[-1].endswith("failed: ddp, sharded")


def test_a_page_of_which_nothing_fails(monkeypatch, capsys):
    monkeypatch.setattr(page, "ON_PAGE", {"cluster": "--summary"})
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("failed: none")
    assert any(line.startswith("not run: python -m dplab.bench training") for line in lines)


def test_options_that_a_bench_does_not_know_are_a_failure_of_that_bench(monkeypatch, capsys):
    monkeypatch.setattr(page, "ON_PAGE", {"cluster": "--sumary", "ddp": ""})
    monkeypatch.setattr(ddp, "main", lambda options: print("went on"))
    assert page.print_page() == 1
    assert "went on" in capsys.readouterr().out


def test_long_benches_are_run_when_all_are_asked_for_and_others_left_out(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(page, "run_bench", lambda name, arguments: ran.append((name, arguments)))
    assert command.main(["--all", "--without", "chapters", "nodes"]) == 0
    assert [name for name, _ in ran] == [name for name in page.BENCHES
                                         if name not in ("chapters", "nodes")]
    assert dict(ran)["cluster"] == ["--summary"] and dict(ran)["training"] == []
    ran.clear()
    command.main([])
    assert [name for name, _ in ran] == list(page.ON_PAGE)
    assert "not run: python -m dplab.bench soak" in capsys.readouterr().out


@pytest.mark.slow
def test_one_bench_runs_by_its_name(capsys):
    assert command.main(["cluster", "--summary"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == machine.machine() and second.startswith("nothing fitted")
    with pytest.raises(SystemExit, match="2"):
        command.main(["clusters"])


def test_a_summary_has_the_errors_of_the_runs(capsys):
    cluster.main(argparse.Namespace(summary=True, assumptions=False))
    printed = capsys.readouterr().out
    errors = sorted(row.predicted / row.published - 1 for row in cluster.rows()
                    if row.unit == "tokens/s/GPU")
    line = next(line for line in printed.splitlines() if line.startswith("  tokens/s/GPU"))
    middle = len(errors) // 2
    median = (errors[middle - 1] + errors[middle]) / 2
    assert len(errors) % 2 == 0
    assert line.split()[1:] == [str(len(errors)), f"{median:+.0%}", f"{errors[0]:+.0%}",
                                f"{errors[-1]:+.0%}"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_are_those_that_the_process_may_use():
    script = ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
              "from dplab.bench.machine import available_cores; print(available_cores())")
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE)
    assert done.stdout.strip() == b"1"


@pytest.mark.parametrize(("quota", "memory", "cores", "most"), [
    ("50000 100000", "1048576", 1, 1048576), ("150000 100000", "max", 2, None),
    ("max 100000", "max", 6, None), (None, None, 6, None)])
def test_a_container_may_allow_less(monkeypatch, tmp_path, quota, memory, cores, most):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for name, content in (("cpu.max", quota), ("memory.max", memory)):
        if content:
            (tmp_path / name).write_text(content + "\n")
    assert machine.available_cores() == cores
    assert machine.available_memory() == most or (most is None
                                                  and machine.available_memory() > 2**28)


def test_results_come_back_with_the_command_that_made_them(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["__main__.py", "nodes", "--save"])
    rows = [{"ranks": 2, "seconds": 0.5}, {"ranks": 4, "seconds": None}]
    results.save("nodes", rows=rows, rate=4e8, seeds=[0, 1])
    found = results.committed("nodes")
    assert found.pop("torch").startswith("2.")
    assert found == {"command": "python -m dplab.bench nodes --save", "rows": rows, "rate": 4e8,
                     "seeds": [0, 1]}
    lines = (tmp_path / "nodes.json").read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines if line.startswith("  {")] == rows


@pytest.mark.parametrize("path", sorted(results.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_name_their_bench(path):
    found = results.committed(path.stem)
    assert found["command"].startswith(f"python -m dplab.bench {path.stem} ")
    assert "--save" in found["command"].split()
    assert found["torch"] and path.stem in page.BENCHES


def test_a_spread_is_a_median_and_both_ends():
    assert spread([3.0, 1.0, 2.0, 10.0]) == "2.5 (1.0 to 10.0)"
    assert spread([0.1234], 2) == "0.12 (0.12 to 0.12)"
