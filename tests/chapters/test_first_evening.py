"""A learner's first evening in a real browser, from the one command to an update of the course."""

import contextlib
import os
import shutil
import subprocess
import sys

import notebooks
import pytest
from jupyter import ADDRESS, OWN_FOLDERS, Lab, chromium, chromium_or_skip, dplab_lab, until
from nbformat.v4 import new_markdown_cell
from sandbox import ROOT

from dplab.checks import solution_source

pytestmark = pytest.mark.slow

FIRST = "chapters/00_start_here.ipynb"
STUB, CHECK, LAST = "stub-global-mean", "check-global-mean", "repair-deadlock"
WRONG = """\
def global_mean(values):
    total = values.mean()
    dist.all_reduce(total)
    return total / dist.get_world_size()
"""
RIGHT = """\
def global_mean(values):  # written in the evening
    sums = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(sums)
    return sums[0] / sums[1]
"""
A_JOB = {"first-drill": 'job = dplab.drill("04")', "first-reading": "job.samples()",
         "first-diagnosis": "for suspect in job.suspects:\n    job.diagnose(suspect)"}


@contextlib.contextmanager
def evening(place, private, course):
    """The lab on the reader's copy of the course, in a browser."""
    with chromium() as browser, dplab_lab(place, private, course) as address:
        server, token = ADDRESS.match(address).groups()
        lab = Lab(browser, f"{server}/lab/tree/{{path}}?token={token}&reset")
        lab.change_setting("@jupyterlab/notebook-extension:tracker", windowingMode="none")
        yield lab


def test_a_first_evening(tmp_path):
    course, private = tmp_path / "clone", tmp_path / "private"
    place = tmp_path / "evening" / "my course"
    private.mkdir()
    for name in ("chapters", "dplab", "figures"):
        shutil.copytree(ROOT / name, course / name,
                        ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "README.md", course)

    with chromium_or_skip(), evening(place, private, course) as lab:
        with lab.open(FIRST) as notebook:
            assert not any(cell.get("outputs") for cell in notebook.cells())
            guesses_and_sees_the_result(notebook)
            answers_wrongly_takes_a_hint_and_passes(notebook)
            goes_on_to_the_next_chapter(notebook)
            finds_what_is_wrong_with_a_job(notebook)
            notebook.save()
        with lab.open(FIRST) as notebook:
            finds_everything_as_it_was_left(notebook)

    updates_the_course(course, place, private)
    with evening(place, private, course) as lab, lab.open(FIRST) as notebook:
        assert "News of the course" in [cell["source"] for cell in notebook.cells()]
        passes_with_the_answer_of_the_evening(notebook)


def guesses_and_sees_the_result(notebook):
    for cell in ("load", "predict-the-counter"):
        notebook.run_cell(cell)
    notebook.output("predict-the-counter").get_by_role("radio", name="4").check()
    notebook.output("predict-the-counter").get_by_role("status").get_by_text(
        "Your guess: 4").wait_for()
    for cell in ("four-ranks-count", "the-counter-afterwards"):
        notebook.run_cell(cell)
    assert notebook.errors() == []
    shown = notebook.output_text("the-counter-afterwards")
    assert "Your guess: 4" in shown and "Result: 0" in shown


def answers(notebook, answer, stub=STUB, check=CHECK):
    notebook.replace_source(stub, answer)
    for cell in (stub, check):
        notebook.run_cell(cell)
    return notebook.output_text(check)


def answers_wrongly_takes_a_hint_and_passes(notebook):
    assert "You averaged the ranks' means" in answers(notebook, WRONG)
    notebook.output(CHECK).get_by_role("button", name="Hint").click()
    notebook.output(CHECK).get_by_text("hint 1 of 3").wait_for()
    shown = answers(notebook, RIGHT)
    assert "passed" in shown and "It is kept" in shown
    notebook.run_cell("use-mine")
    assert "yours" in notebook.output_text("use-mine")
    assert "[2.0, 2.0, 2.0, 2.0]" in notebook.output_text("use-mine")


def goes_on_to_the_next_chapter(notebook):
    notebook.output(CHECK).get_by_role("link", name="Next").click()
    notebook.page.get_by_role("heading", name="Exercise 0.3").wait_for()
    for cell in (f"stub-{LAST}", f"check-{LAST}"):
        notebook.run_cell(cell)
    assert "not attempted" in notebook.output_text(f"check-{LAST}")
    assert "passed" in answers(notebook, solution_source(LAST), f"stub-{LAST}", f"check-{LAST}")
    notebook.output(f"check-{LAST}").get_by_role("link", name="Next").click()
    at = "jupyterapp.shell.currentWidget.context?.path"
    until(lambda: notebook.page.evaluate(at) == "chapters/01_split_the_batch.ipynb", 20,
          "the link to the next exercise opens nothing")
    notebook.page.get_by_role("heading", name="Exercise 1.1").wait_for()
    notebook.page.evaluate("jupyterapp.shell.activateById(panel.id)")


def finds_what_is_wrong_with_a_job(notebook):
    for cell, source in A_JOB.items():
        notebook.replace_source(cell, source)
        notebook.run_cell(cell)
    assert notebook.errors() == []
    assert "Suspects" in notebook.output_text("first-drill")
    verdicts = notebook.output("first-diagnosis").get_by_text(" it is").all_inner_texts()
    assert len(verdicts) == 1, notebook.output_text("first-diagnosis")


def finds_everything_as_it_was_left(notebook):
    """After save and close; no kernel runs the cells again."""
    output = notebook.output("predict-the-counter")
    output.get_by_text("What is counter").locator("visible=true").first.wait_for()
    assert notebook.output(CHECK).get_by_text("passed").first.is_visible()
    assert not any(each.is_visible() for each in notebook.output(CHECK).get_by_role("button").all())
    assert not any(each.is_visible() for each in
                   notebook.page.get_by_text("Error displaying widget").all())
    assert RIGHT.strip() in notebook.cells()[notebook.index(STUB)]["source"]


def updates_the_course(course, place, private):
    path = course / FIRST
    notebook = notebooks.read(path)
    notebook.cells.insert(3, new_markdown_cell("News of the course", id="news"))
    path.write_text(notebooks.normalise(notebook), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "dplab", "lab", str(place), "--update", "00", "--copy-only"],
        env=os.environ | dict.fromkeys(OWN_FOLDERS, str(private)) | {"PYTHONPATH": str(course)},
        cwd=private, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "brought over" in done.stdout, done.stdout + done.stderr


def passes_with_the_answer_of_the_evening(notebook):
    for cell in ("load", STUB, CHECK):
        notebook.run_cell(cell)
    assert "passed" in notebook.output_text(CHECK)
