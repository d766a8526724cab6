"""A learner's first evening in a real browser, from the one command to an update of the course."""

import os
import shutil
import subprocess
import sys

import notebooks
import pytest
from jupyter import OWN_FOLDERS, dplab_lab, until
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
OPEN = "() => jupyterapp.shell.currentWidget.context?.path"


def test_a_first_evening(tmp_path):
    """The copy lies in a folder whose name has a space."""
    course, private = tmp_path / "clone", tmp_path / "private"
    place = tmp_path / "evening" / "my course"
    private.mkdir()
    for name in ("chapters", "dplab", "figures"):
        shutil.copytree(ROOT / name, course / name,
                        ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "README.md", course)

    with dplab_lab(place, private, course) as lab:
        with lab.open(FIRST) as notebook:
            assert not any(cell.get("outputs") for cell in notebook.cells())
            sees_a_picture_and_follows_a_link(notebook)
            guesses_and_sees_the_result(notebook)
            answers_wrongly_takes_a_hint_and_passes(notebook)
            goes_on_to_the_next_chapter(notebook)
            assert notebook.save()["metadata"]["widgets"]
        with lab.open(FIRST) as notebook:
            finds_everything_as_it_was_left(notebook)

    updates_the_course(course, place, private)
    texts = [cell.source for cell in notebooks.read(place / FIRST).cells]
    assert "News of the course" in texts and any(RIGHT.strip() in text for text in texts)


def sees_a_picture_and_follows_a_link(notebook):
    picture = notebook.page.locator(".jp-MarkdownOutput img").first
    until(lambda: picture.evaluate("one => one.complete && one.naturalWidth"), 20, "no picture")
    notebook.page.locator(".jp-MarkdownOutput a[href*='README']").first.click()
    until(lambda: notebook.page.evaluate(OPEN) == "README.md", 20, "the link opens nothing")
    notebook.page.locator(".jp-MarkdownViewer h1").wait_for()  # a page, not its text
    notebook.page.evaluate("jupyterapp.shell.activateById(panel.id)")


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
    assert "passed" in answers(notebook, solution_source(LAST), f"stub-{LAST}", f"check-{LAST}")
    notebook.output(f"check-{LAST}").get_by_role("link", name="Next").click()
    until(lambda: notebook.page.evaluate(OPEN) == "chapters/01_split_the_batch.ipynb", 20,
          "the link to the next exercise opens nothing")
    notebook.page.get_by_role("heading", name="Exercise 1.1").wait_for()
    notebook.page.evaluate("jupyterapp.shell.activateById(panel.id)")


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
