"""What a reader does, done in a real JupyterLab: Run All, an exercise, the ■ button, a slider.

With the mouse or by keyboard, on a wide screen or a narrow one, with eyes or a screen reader.
"""

import contextlib
import io
import itertools
import re

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

EXERCISE, NUMBER = "weighted-mean", "2.1"
WRONG = """\
def loss_for_ddp(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
RIGHT = """\
def loss_for_ddp(logits, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * loss / total
"""
CARDS = (f"Exercise {NUMBER}: not attempted", "This is the mean over this rank's tokens",
         f"Exercise {NUMBER}: passed")

RANKS = {
    "load": """\
%load_ext dplab
import os, pathlib, time
import torch
import torch.distributed as dist
""",
    "in-order": """\
%%ranks 3
rank = dist.get_rank()
time.sleep(0.4 * (2 - rank))
print("came as number", 3 - rank)
""",
    "one-raises": """\
%%ranks 3
if dist.get_rank() == 1:
    raise ValueError("a fault of rank 1")
dist.barrier()
""",
    "hang": """\
%%ranks 2 --timeout 600
rank = dist.get_rank()
pathlib.Path(folder, str(rank)).write_text(str(os.getpid()))
if rank == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(1))
""",
    "next": "1 + 1",
}

# What each kind of widget needs to be there, and its keys with what the picture then says.
STEPS = [
    ("step", "ArrowRight", "After step 4 of 6, 8 of 16 chunks are complete"),
    ("step", "ArrowLeft", "After step 3 of 6, 4 of 16 chunks are complete"),
    ("step", "Home", "Before the first step, 0 of 16 chunks are complete"),
]
CHOICES = [("ranks", "ArrowRight", "on 128 × H100"), ("GPU", "Home", "on 128 × A100")]
WALL = [("ranks", "ArrowLeft", "Llama-3 8B on 4 × H100"),
        ("model", "End", "Llama-3.1 405B on 4 × H100")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    copy_course(folder)
    return folder


@pytest.fixture(scope="module")
def lab(root):
    with chromium_or_skip(), jupyter_lab(root) as lab:
        yield lab


@pytest.fixture(scope="module")
def chapter(lab):
    """The chapter after Run All, with the seconds that it took."""
    with lab.open(CHAPTER) as notebook:
        yield notebook, notebook.run_all(timeout=RUN_ALL_SECONDS)


def test_run_all_of_an_untouched_chapter(chapter):
    notebook, seconds = chapter
    assert notebook.errors() == []
    assert notebook.not_run() == []
    assert seconds < RUN_ALL_SECONDS


def test_the_cards_of_an_exercise(chapter):
    notebook, _ = chapter
    check = f'dplab.check("{EXERCISE}"'
    stub = [cell["id"] for cell in notebook.cells()[:notebook.index(check)]
            if "exercise" in cell["metadata"].get("tags", [])][-1]
    seen = [notebook.output_text(check)]
    for answer in (WRONG, RIGHT):
        notebook.replace_source(stub, answer)
        notebook.run_cell(stub)
        notebook.run_cell(check)
        seen.append(notebook.output_text(check))
    assert notebook.errors() == []
    for index, text in enumerate(seen):
        assert [card in text for card in CARDS] == [index == number for number in range(3)]


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


def test_a_screen_reader_is_told_what_the_pictures_show(chapter):
    notebook, _ = chapter
    pictures = output_pictures(notebook)
    assert pictures
    assert [text for text in pictures if len(text or "") < 30] == []
    assert_headings_are_in_order(notebook)


def assert_headings_are_in_order(notebook):
    levels = heading_levels(notebook)
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_narrow_window_cuts_nothing_off(chapter):
    notebook, _ = chapter
    with window(notebook, 700, 900):
        assert cut_off(notebook) == []


@pytest.fixture(scope="module")
def ranks(lab, root):
    """A notebook of cells with ranks."""
    write_cells(root / "ranks.ipynb", RANKS)
    with lab.open("ranks.ipynb") as notebook:
        notebook.run_cell("load")
        yield notebook


def test_output_stands_in_the_order_of_the_ranks(ranks):
    ranks.run_cell("in-order")
    assert ranks.output_text("in-order").splitlines() == [
        f"rank {rank} came as number {3 - rank}" for rank in range(3)]


def test_an_error_of_one_rank_names_it_and_its_line(ranks):
    ranks.run_cell("one-raises")
    text = ranks.output_text("one-raises")
    assert "rank 1 of 3 raised ValueError: a fault of rank 1" in text
    assert re.search(r"→ +3 +raise ValueError", text)
    assert len(re.findall(r"rank [02] (?:waits in|lost its connection)", text)) == 2


@contextlib.contextmanager
def hanging(notebook, folder):
    """Two ranks that hang in the notebook, as processes; at the end none of them may be left."""
    notebook.replace_source("next", f"folder = {str(folder)!r}; 1 + 1")
    notebook.run_cell("next")
    notebook.run_cell("hang", wait=False)
    files = [folder / "0", folder / "1"]
    until(lambda: all(f.exists() and f.read_text() for f in files), 60, "no ranks started")
    processes = [psutil.Process(int(file.read_text())) for file in files]
    yield processes
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    notebook.run_cell("next")
    assert notebook.output_text("next") == "2"


def test_the_stop_button_ends_hung_ranks(ranks, tmp_path):
    with hanging(ranks, tmp_path):
        ranks.interrupt()
        ranks.wait(timeout=10)
        text = ranks.output_text("hang")
        assert "stopped by you; where the ranks were:" in text
        assert "time.sleep(600)" in text and "waits in all_reduce" in text


def test_a_restart_of_the_kernel_ends_hung_ranks(ranks, tmp_path):
    with hanging(ranks, tmp_path) as processes:
        server = processes[0].parent()
        ranks.restart()
        assert psutil.wait_procs([server], timeout=5)[1] == []
        ranks.run_cell("load")


@pytest.mark.parametrize(("path", "cells", "keys"), [
    ("03_all_reduce", ["setup", "your-numbers", "record-the-ring", "step-through"], STEPS),
    ("08_zero_by_hand", ["setup", "setup-of-the-course", "guess-stage", "budget-of-a-stage", "bars",
                         "draw-the-wall", "calculator"], WALL),
    ("10_choosing_and_scaling", ["setup", "setup-of-the-course", "a-node", "draw-a-choice",
                                 "calculator"], CHOICES),
], ids=["stepper", "calculator of memory", "calculator of choices"])
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
