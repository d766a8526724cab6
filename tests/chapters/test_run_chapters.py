"""Run All of a notebook as the tool measures it, and the memory of processes together."""

import subprocess
import sys

import nbformat
import psutil
import pytest
import run_chapters
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from peak_memory import PeakMemory, family_bytes

MIB = 2**20
SHARES_THEN_COPIES = f"""
import os, time
def stage():
    print(flush=True)
    input()
stage()
held = bytearray(os.urandom(1024)) * {200 * 1024}
stage()
(told, tell), (heard, answer) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(told, 1)
    held[::4096] = bytes(len(held[::4096]))
    os.write(answer, b".")
    time.sleep(60)
stage()
os.write(tell, b".")
os.read(heard, 1)
stage()
"""


def test_what_processes_share_is_counted_once():
    with subprocess.Popen([sys.executable, "-c", SHARES_THEN_COPIES], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        process, found = psutil.Process(parent.pid), []
        for _ in range(4):
            parent.stdout.readline()
            held = family_bytes(process)
            found.append((sum(held) / MIB, len(held)))
            parent.stdin.write("\n")
            parent.stdin.flush()
            if len(found) == 4:
                for child in process.children():
                    child.kill()
    (base, _), (alone, one), (shared, two), (copied, _) = found
    assert (one, two) == (1, 2)
    assert alone - base == pytest.approx(200, rel=0.03)
    assert shared - base == pytest.approx(200, rel=0.1)  # and the child's own few
    assert copied - base == pytest.approx(400, rel=0.1)


@pytest.mark.slow
def test_the_peak_is_what_was_held_at_once():
    script = ("import time; a = bytearray(b'x') * (150 * 2**20); time.sleep(1); del a\n"
              "b = bytearray(b'x') * (100 * 2**20); time.sleep(1)")
    with subprocess.Popen([sys.executable, "-c", script]) as child, \
            PeakMemory(psutil.Process(child.pid)) as peak:
        child.wait()
    assert 150 * MIB < peak.bytes < 190 * MIB  # 10 for the interpreter; never both
    assert peak.processes == 1


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook of cells of code, with ids, into the folder; its path."""
    def write(*sources):
        path = tmp_path / "03_small.ipynb"
        cells = [new_markdown_cell("# Small", id="title"),
                 *(new_code_cell(source, id=f"cell-{number}")
                   for number, source in enumerate(sources))]
        nbformat.write(new_notebook(cells=cells), path)
        return path
    return write


@pytest.mark.slow
def test_a_notebook_runs_in_its_folder_and_its_peak_is_seen(notebook):
    path = notebook("held = bytearray(b'x') * (300 * 2**20)", "import time; time.sleep(1)",
                    "del held", "open('beside', 'w').write('x')")
    text = path.read_text()
    row = run_chapters.run_all(path)
    assert (row.chapter, row.cells, row.error) == ("03_small", 4, "")
    assert 300 * MIB < row.peak_bytes < 450 * MIB and row.processes == 1
    assert 1 < row.seconds < 60
    assert path.read_text() == text and (path.parent / "beside").exists()


def test_a_cell_that_fails_ends_the_run_and_is_named(notebook):
    row = run_chapters.run_all(notebook("x = 1", "x / 0", "open('beside', 'w')"))
    assert row.cells == 1 and row.error == "cell cell-1: ZeroDivisionError: division by zero"


def test_chapters_are_chosen_and_a_failure_is_the_tool_s(monkeypatch, notebook, capsys):
    path = notebook("1 / 0")
    path.with_name("04_other.ipynb").write_text(path.read_text())
    monkeypatch.setattr(run_chapters, "FOLDER", path.parent)
    with pytest.raises(SystemExit, match="no chapter 05, 06"):
        run_chapters.main(["03", "06", "05"])
    with pytest.raises(SystemExit, match="04_other failed"):
        run_chapters.main(["04"])
    printed = capsys.readouterr().out
    assert "04_other" in printed and "03_small" not in printed
    assert "cell cell-0: ZeroDivisionError: division by zero" in printed
