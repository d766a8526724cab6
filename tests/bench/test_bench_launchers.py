"""The launchers beside which dplab is measured, and what is said where one is missing or broken."""

import argparse
import ast

import psutil
import pytest

from dplab.bench import launchers
from dplab.bench.launchers import Launcher

OPTIONS = argparse.Namespace(ranks=2, rounds=2, peer_rounds=1)
TRIED = launchers.Tried([0.5, 0.25, 1.0], "runs", "0.1 s: rank", "0.2 s, 0 left")


@pytest.mark.parametrize("launcher", [launchers.DPLAB, *launchers.PEERS],
                         ids=lambda launcher: launcher.name)
def test_cells_are_code(launcher):
    for cell in launchers.cells(launcher, 4):
        ast.parse(cell.removeprefix("%%writefile functions.py\n"))


@pytest.mark.slow
def test_dplab_in_a_kernel():
    tried = launchers._tried(launchers.DPLAB, 2, rounds=2)
    assert len(tried.times) == 2 and min(tried.times) > 0
    assert tried.function == "runs"
    assert tried.raised.endswith("s: rank, error, line; then works")
    assert tried.interrupted.endswith("s, 0 left; then works")


def printed_with(monkeypatch, capsys, tried):
    monkeypatch.setattr(launchers, "_tried", tried)
    monkeypatch.setattr(launchers, "_more_of_dplab", lambda options: [])
    launchers.main(OPTIONS)
    return capsys.readouterr().out.splitlines()


def test_a_launcher_that_is_not_installed_is_said_to_be_so(monkeypatch, capsys):
    monkeypatch.setattr(launchers, "PEERS", [Launcher("absent", "no_such_module", ""),
                                             Launcher("there", "torch", "")])
    asked = []
    lines = printed_with(monkeypatch, capsys,
                         lambda launcher, *_: asked.append(launcher.name) or TRIED)
    assert asked == ["dplab.run", "there"]
    assert [line.split()[0] for line in lines if line.endswith("not installed")] == ["absent"]


def test_times_are_compared_with_dplab_s_own(monkeypatch, capsys):
    monkeypatch.setattr(launchers, "PEERS", [Launcher("slow", "torch", "")])
    slow = launchers.Tried([2.0, 1.0], "fails", "no report in 10 s", "no end in 10 s")
    lines = printed_with(monkeypatch, capsys,
                         lambda launcher, *_: slow if launcher.name == "slow" else TRIED)
    assert [line.split() for line in lines if "×" in line] == [
        ["dplab.run", "0.500", "(0.250", "to", "1.000)", "1.0×"],
        ["slow", "1.500", "(1.000", "to", "2.000)", "3.0×"]]
    assert lines[-1].split(maxsplit=2) == ["slow", "fails", lines[-1].split(maxsplit=2)[2]]


BROKEN = Launcher("broken", "torch", "def launch(function):\n    raise OSError('no such thing')")
WRONG = Launcher("wrong", "torch", "def launch(function):\n    return [3.0, 2.0]")
STUCK = Launcher("stuck", "torch", """
import time
def launch(function):
    while function is not all_reduce_once and function.__name__ != "of_a_cell":
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass
    return [2.0, 2.0]
""")


@pytest.mark.slow
def test_a_launcher_that_fails_or_gives_other_values_is_said_to(monkeypatch, capsys):
    monkeypatch.setattr(launchers, "PEERS", [BROKEN, WRONG])
    tried = launchers._tried
    lines = printed_with(monkeypatch, capsys, lambda launcher, *rest:
                         TRIED if launcher.name == "dplab.run" else tried(launcher, *rest))
    failed = {line.split()[0]: line for line in lines if "failed:" in line}
    assert failed["broken"].endswith("failed: OSError: no such thing")
    assert failed["wrong"].endswith("failed: AssertionError: [3.0, 2.0]")


@pytest.mark.slow
def test_a_launcher_that_never_returns_is_given_up(monkeypatch):
    monkeypatch.setattr(launchers, "PATIENCE", 2)
    tried = launchers._tried(STUCK, 2, rounds=1)
    assert (tried.raised, tried.interrupted) == ("no report in 2 s", "no end in 2 s")


def test_a_notebook_leaves_no_process():
    with launchers.Notebook() as notebook:
        ran = notebook.run("import subprocess, sys\nchild = subprocess.Popen("
                          "[sys.executable, '-c', 'import time; time.sleep(600)'], "
                          "start_new_session=True)\nchild.pid")
        child = psutil.Process(int(ran.text))
        assert child in notebook.children()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
