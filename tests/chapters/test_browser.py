"""What a reader does, done in a real JupyterLab: Run All, an exercise, the ■ button, a slider.

With the mouse or by keyboard, on a wide screen or a narrow one, with eyes or a screen reader.
"""

import io
import itertools

import numpy as np
import psutil
import pytest
from jupyter import chromium_or_skip, copy_course, jupyter_lab, until, write_cells
from matplotlib import image
from nbformat.v4 import new_markdown_cell
from reading import (
    clipped_controls,
    controls_without_name,
    cut_off,
    focus_by_tab,
    heading_levels,
    output_pictures,
    window,
)

from dplab.desk import course

pytestmark = pytest.mark.slow

CHAPTER = "chapters/02_why_averaging_is_right.ipynb"
RUN_ALL_SECONDS = 180  # generous: a slow machine may take three times the minute that we aim for

EXERCISE = "weighted-mean"
RIGHT = """\
def loss_for_ddp(logits, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * loss / total
"""
HANG = """\
import os, pathlib, time
rank = dist.get_rank()
pathlib.Path(folder, str(rank)).write_text(str(os.getpid()))
if rank == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(1))
"""

# What each kind of widget needs to be there, and its keys with what the picture then says.
STEPS = [
    ("step", "ArrowRight", "After step 4 of 6, 8 of 16 chunks are complete"),
    ("step", "ArrowLeft", "After step 3 of 6, 4 of 16 chunks are complete"),
    ("step", "Home", "Before the first step, 0 of 16 chunks are complete"),
]
CHOICES = [("ranks", "ArrowRight", "on 16 × H100"), ("GPU", "Home", "on 16 × A100")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    copy_course(folder)
    return folder


@pytest.fixture(scope="module")
def lab(root):
    with chromium_or_skip(), jupyter_lab(root) as lab:
        yield lab


def test_run_all_of_an_untouched_chapter_and_how_it_reaches_its_reader(lab):
    with lab.open(CHAPTER) as notebook:
        assert notebook.run_all(timeout=RUN_ALL_SECONDS) < RUN_ALL_SECONDS
        assert notebook.errors() == []
        assert notebook.not_run() == []
        pictures = output_pictures(notebook)
        assert pictures and [text for text in pictures if len(text or "") < 30] == []
        assert_headings_are_in_order(notebook)
        with window(notebook, 700, 900):
            assert cut_off(notebook) == []


def assert_headings_are_in_order(notebook):
    levels = heading_levels(notebook)
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_reset_is_done_once_and_stays_done_when_all_runs_again(lab, root):
    cells = {
        "load": "import dplab, torch.nn.functional as F, torch.distributed as dist",
        "answer": RIGHT,
        "check": f'dplab.check("{EXERCISE}", loss_for_ddp)',
        "spare": f'before = 1\ndplab.reset("{EXERCISE}")  # once more\nafter = before',
        "kept": f"from dplab.desk import record\nrecord.entries('exercises').get('{EXERCISE}')"}
    write_cells(root / "reset.ipynb", cells)
    with lab.open("reset.ipynb") as notebook:
        notebook.run_all()
        assert "passed" in notebook.output_text("check")
        assert "is kept as" in notebook.output_text("spare")
        assert notebook.output_text("kept") == ""
        after = notebook.cells()
        assert [cell["id"] for cell in after] == list(cells)
        first, *stub, last = after[3]["source"].split("\n")
        assert (first, "\n".join(stub), last) == (
            "before = 1", course.stub_of(2, EXERCISE), "after = before")
        notebook.run_all()
        assert "'passed'" in notebook.output_text("kept")
        assert notebook.cells()[3]["source"] == after[3]["source"]


def test_the_stop_button_and_a_restart_end_hung_ranks(lab, root, tmp_path):
    write_cells(root / "ranks.ipynb", {
        "load": f"%load_ext dplab\nimport torch, torch.distributed as dist\n"
                f"folder = {str(tmp_path)!r}",
        "hang": f"%%ranks 2 --timeout 600\n{HANG}", "next": "1 + 1"})
    with lab.open("ranks.ipynb") as notebook:
        processes = hang(notebook, tmp_path)
        notebook.interrupt()
        notebook.wait(timeout=10)
        text = notebook.output_text("hang")
        assert "stopped by you; where the ranks were:" in text
        assert "time.sleep(600)" in text and "waits in all_reduce" in text
        assert psutil.wait_procs(processes, timeout=5)[1] == []

        processes = hang(notebook, tmp_path)
        processes.append(processes[0].parent())  # the server
        notebook.restart()
        assert psutil.wait_procs(processes, timeout=5)[1] == []
        notebook.run_cell("next")
        assert notebook.output_text("next") == "2"


def hang(notebook, folder):
    """Two ranks that hang in the notebook, as processes."""
    files = [folder / "0", folder / "1"]
    for file in files:
        file.unlink(missing_ok=True)
    notebook.run_cell("load")
    notebook.run_cell("hang", wait=False)
    until(lambda: all(f.exists() and f.read_text() for f in files), 60, "no ranks started")
    return [psutil.Process(int(file.read_text())) for file in files]


@pytest.mark.parametrize(("path", "cells", "keys"), [
    ("03_all_reduce", ["setup", "two-halves", "your-numbers", "step-through"], STEPS),
    ("08_zero_by_hand", ["setup", "imports", "mixed", "calculator-parts", "calculator"], CHOICES),
], ids=["stepper", "calculator"])
def test_a_widget_by_keyboard_alone(lab, path, cells, keys):
    with lab.open(f"chapters/{path}.ipynb") as notebook:
        for cell in cells:
            notebook.run_cell(cell)
        assert notebook.errors() == []
        output = notebook.output(cells[-1])
        picture = output.locator("img:visible")
        assert controls_without_name(notebook, cells[-1]) == []
        for label, key, says in keys:
            focus_by_tab(notebook, cells[-1], label)
            source = picture.get_attribute("src")
            notebook.page.keyboard.press(key)
            until(lambda source=source: picture.get_attribute("src") != source, 20,
                  f"{key} left the picture as it was")
            assert says in picture.get_attribute("alt")
        if output.locator(".widget-play").count():
            focus_by_tab(notebook, cells[-1], "play or pause")
            notebook.page.keyboard.press("Enter")
            until(lambda: "After step" in picture.get_attribute("alt"), 20, "nothing plays")
        assert_headings_are_in_order(notebook)
        for width in (700, 760):
            with window(notebook, width, 900):
                assert cut_off(notebook) == []
                assert clipped_controls(notebook, cells[-1]) == []


STEPPER = """\
from dplab import show

def draw(size):
    figure, axes = show.subplots(title=f"Buckets of {size} MiB")
    axes.plot([0, size])
    return figure

show.stepper(draw, (1, 3, 6), label="bucket size", unit="MiB", start=3)
"""


@pytest.fixture(scope="module")
def stepper(lab, root):
    """The path of a notebook with a slider and one of the course's drawings."""
    drawing = new_markdown_cell("![A drawing](figures/one_step.svg)", id="drawing")
    write_cells(root / "stepper.ipynb", {"stepper": STEPPER, "drawing": drawing})
    return "stepper.ipynb"


@pytest.mark.parametrize("save_widgets", [False, True])
def test_a_notebook_that_is_opened_again_shows_the_picture_as_it_was_left(
        lab, stepper, save_widgets):
    lab.change_setting("@jupyter-widgets/jupyterlab-manager:plugin", saveState=save_widgets)
    with lab.open(stepper) as notebook:
        notebook.run_cell("stepper")
        output = notebook.output("stepper")
        note = output.get_by_text("Run this cell")
        assert not note.is_visible()
        focus_by_tab(notebook, "stepper", "bucket size")
        handle = output.locator("[role=slider]")
        assert handle.get_attribute("aria-valuetext") == "3 MiB"
        notebook.page.keyboard.press("ArrowRight")
        output.get_by_alt_text("Buckets of 6 MiB").wait_for()
        assert handle.get_attribute("aria-valuetext") == "6 MiB"
        saved = notebook.save()
    state = saved["metadata"].get("widgets", {})
    assert bool(state) == save_widgets and len(str(state)) < 20_000
    with lab.open(stepper) as notebook:
        output = notebook.output("stepper")
        restored = output.locator(".dplab-sliders" if save_widgets else ".jupyter-widgets")
        restored.wait_for(state="visible" if save_widgets else "attached")
        assert output.get_by_alt_text("Buckets of 6 MiB").is_visible()
        assert output.get_by_text("Run this cell").is_visible()
        assert not output.get_by_text("model not found").is_visible()
        notebook.run_cell("stepper")
        assert not output.get_by_text("Run this cell").is_visible()
        assert output.get_by_alt_text("Buckets of 3 MiB").is_visible()


def test_figures_and_drawings_are_dark_in_the_dark_theme(lab, stepper):
    with lab.open(stepper) as notebook:
        notebook.run_cell("stepper")
        for theme, light in (("dark", False), ("light", True), ("dark", False)):
            notebook.set_theme(theme)
            for cell in ("stepper", "drawing"):
                notebook._until("() => [...document.images].every(image => image.complete)", 30)
                page = notebook.page.locator(f".jp-Cell >> nth={notebook.index(cell)}")
                picture = page.locator("img:visible")
                pixels = image.imread(io.BytesIO(picture.screenshot()))[8:-8, 8:-8, :3]
                ground = np.median(pixels.reshape(-1, 3), axis=0)
                assert (ground.min() > 0.95) if light else (ground.max() < 0.15), (theme, cell)
