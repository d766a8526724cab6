"""What a reader does, done in a real JupyterLab: Run All, an exercise, ■, widgets, guesses.

With the mouse or by keyboard, on a wide screen or a narrow one, with eyes or a screen reader.
"""

import io
import shutil

import numpy as np
import psutil
import pytest
from jupyter import copy_course, jupyter_lab, until, write_cells
from matplotlib import image
from nbformat.v4 import new_markdown_cell
from notebooks import read
from reading import clipped_controls, controls_without_name, cut_off, focus_by_tab, window

from dplab.checks import solution_source
from dplab.desk import course

pytestmark = pytest.mark.slow

EXERCISE = "ring-seconds"
HANG = """\
import os, pathlib, time
rank = dist.get_rank()
pathlib.Path(folder, str(rank)).write_text(str(os.getpid()))
if rank == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(1))
"""

# By chapter: the cells that make a widget, and its keys with what the picture then says.
WIDGETS = {
    "03_all_reduce": (["setup", "two-halves", "your-numbers", "step-through"], [
        ("step", "ArrowRight", "After step 4 of 6, 8 of 16 chunks are complete"),
        ("step", "ArrowLeft", "After step 3 of 6, 4 of 16 chunks are complete"),
        ("step", "Home", "Before the first step, 0 of 16 chunks are complete")]),
    "08_zero_by_hand": (["setup", "imports", "mixed", "calculator-parts", "calculator"], [
        ("ranks", "ArrowRight", "on 16 × H100"), ("GPU", "Home", "on 16 × A100")]),
}

WAY = "Which way sends the fewest bytes from the busiest rank?"
SHARE = "Which share of the step is communication?"
GUESSES = {
    "setup": "import dplab",
    "way": f'way = dplab.guess("way", "{WAY}", choices=["a tree", "a star", "a ring"])',
    "share": f'share = dplab.guess("share", "{SHARE}", unit="%")\nshare',
    "results": 'way.reveal("a ring")\nshare.reveal(37)',
}
CHECK = f'dplab.check("{EXERCISE}", lambda *case: 1.0)'
STEPPER = """\
from dplab import show

def draw(size):
    figure, axes = show.subplots(title=f"Buckets of {size} MiB")
    axes.plot([0, size])
    return figure

show.stepper(draw, (1, 3, 6), label="bucket size", unit="MiB", start=3)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    copy_course(folder)
    return folder


@pytest.fixture(scope="module")
def lab(root):
    with jupyter_lab(root) as lab:
        yield lab


def test_run_all_of_an_untouched_chapter_and_how_it_reaches_its_reader(lab):
    with lab.open("chapters/appendix_rounding.ipynb") as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        assert notebook.not_run() == []
        texts = notebook.page.evaluate("() => [...panel.node.querySelectorAll('.jp-Cell img')]"
                                       ".map(image => image.getAttribute('alt'))")
        assert len(texts) == 2 and not [text for text in texts if len(text or "") < 30]
        with window(notebook, 700, 900):
            assert cut_off(notebook) == []


def test_a_reset_is_done_once_and_stays_done_when_all_runs_again(lab, root):
    cells = {
        "load": "import dplab",
        "answer": solution_source(EXERCISE),
        "check": f'dplab.check("{EXERCISE}", ring_seconds)',
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
            "before = 1", course.stub_of(3, EXERCISE), "after = before")
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


def test_a_widget_by_keyboard_alone(lab, root):
    """The cells of two chapters in one notebook; beside the chapters, for their data."""
    cells = {f"{cell.id}-{stem[:2]}": cell.source for stem, (ids, _) in WIDGETS.items()
             for cell in read(root / f"chapters/{stem}.ipynb").cells if cell.id in ids}
    write_cells(root / "chapters/widgets.ipynb", cells)
    with lab.open("chapters/widgets.ipynb") as notebook:
        for stem, (ids, keys) in WIDGETS.items():
            for cell in ids:
                notebook.run_cell(f"{cell}-{stem[:2]}")
            assert notebook.errors() == []
            press_and_look(notebook, f"{cell}-{stem[:2]}", keys)
        focus_by_tab(notebook, "step-through-03", "play or pause")
        notebook.page.keyboard.press("Enter")
        notebook.output("step-through-03").get_by_alt_text("After step").first.wait_for()
        for width in (700, 760):
            with window(notebook, width, 900):
                assert cut_off(notebook) == []
                for cell in ("step-through-03", "calculator-08"):
                    assert clipped_controls(notebook, cell) == []


def press_and_look(notebook, cell, keys):
    picture = notebook.output(cell).locator("img:visible")
    assert controls_without_name(notebook, cell) == []
    for label, key, says in keys:
        focus_by_tab(notebook, cell, label)
        source = picture.get_attribute("src")
        notebook.page.keyboard.press(key)
        until(lambda source=source: picture.get_attribute("src") != source, 20,
              f"{key} left the picture as it was")
        assert says in picture.get_attribute("alt")


def role(notebook, cell, *named):
    """The one control of this role and name below the cell, as a screen reader finds it."""
    role, *name = named
    found = notebook.output(cell).get_by_role(role, **({"name": name[0]} if name else {}))
    found.wait_for()
    return found


def noted(notebook, cell, text):
    until(lambda: text in role(notebook, cell, "status").inner_text(), 20, f"not said: {text}")


def test_guesses_by_keyboard_alone_are_noted_revealed_and_kept(lab, root):
    write_cells(root / "guesses.ipynb", GUESSES)
    with lab.open("guesses.ipynb") as notebook:
        notebook.run_all()
        guess_by_keyboard(notebook)
        notebook.restart()
        for cell in GUESSES:
            notebook.run_cell(cell)
        text = notebook.output_text("results")
        assert "Your guess: a star · Result: a ring" in text
        assert "Your guess: 25 % · Result: 37 %" in text
        assert role(notebook, "way", "radio", "a star").is_checked()
        assert role(notebook, "way", "radio", "a ring").is_disabled()
        assert role(notebook, "share", "textbox", SHARE).input_value() == "25 %"
        assert notebook.errors() == []


def guess_by_keyboard(notebook):
    press = notebook.page.keyboard.press
    assert notebook.errors() == []
    assert notebook.output_text("results").splitlines() == ["● Result: a ring", "● Result: 37 %"]
    assert notebook.output("share").locator(".dplab-guess").count() == 1

    group = role(notebook, "way", "radiogroup", WAY)
    choices = [group.get_by_role("radio", name=name) for name in ("a tree", "a star", "a ring")]
    assert not any(choice.is_checked() for choice in choices)
    notebook.output("way").evaluate("node => { node.tabIndex = -1; node.focus(); }")
    for key, expected in (("Tab", None), ("Space", 0), ("ArrowDown", 1), ("ArrowDown", 2),
                          ("ArrowUp", 1)):
        press(key)
        assert [choice.is_checked() for choice in choices] == [at == expected for at in range(3)]
    noted(notebook, "way", "Your guess: a star")

    field = role(notebook, "share", "textbox", SHARE)
    focus_by_tab(notebook, "share", field.get_attribute("aria-label"))
    notebook.page.keyboard.type("0.1")
    press("Enter")
    noted(notebook, "share", "0.1 % or 10 %?")
    press("Control+A")
    notebook.page.keyboard.type("25 %")
    press("Enter")
    noted(notebook, "share", "Your guess: 25 %")
    for cell, result in (("way", "a ring"), ("share", "37 %")):  # was measured before the guess
        assert controls_without_name(notebook, cell) == []
        assert role(notebook, cell, "button", "Show the result").is_enabled()
        assert f"Result: {result}" not in role(notebook, cell, "status").inner_text()
    role(notebook, "share", "button", "Show the result").press("Enter")
    noted(notebook, "share", "Result: 37 %")
    assert role(notebook, "share", "textbox", SHARE).is_disabled()
    assert notebook.output("share").get_by_role("button", name="Show the result").count() == 0
    with window(notebook, 700, 900):
        assert cut_off(notebook) == []


@pytest.mark.parametrize("save_widgets", [False, True])
def test_a_notebook_that_is_opened_again_is_as_it_was_left_or_says_what_to_do(
        lab, root, save_widgets):
    """Saved once while its kernel is there, once after a restart; read in a light and a dark theme.
    """
    early, late = (f"{when}-{save_widgets}.ipynb" for when in ("early", "late"))
    write_cells(root / late, {cell: source.replace('guess("', f'guess("{save_widgets}-')
                              for cell, source in GUESSES.items()} | {
        "check": CHECK, "stepper": STEPPER,
        "drawing": new_markdown_cell("![A drawing](figures/one_step.svg)", id="drawing")})
    lab.change_setting("@jupyter-widgets/jupyterlab-manager:plugin", saveState=save_widgets)
    with lab.open(late) as notebook:
        notebook.run_all()
        role(notebook, "way", "radio", "a star").check()
        noted(notebook, "way", "Your guess: a star")
        moves_the_stepper(notebook)
        if save_widgets:
            reads_it_in_the_dark(notebook)
        assert not notebook.page.locator(".dplab-in-place").locator("visible=true").count()
        state = notebook.save()["metadata"].get("widgets", {})
        assert bool(state) == save_widgets and len(str(state)) < 40_000
        shutil.copy(root / late, root / early)
        notebook.restart()
        notebook.save()
    with lab.open(early if save_widgets else late) as notebook:
        finds_the_stepper(notebook, save_widgets)
        if not save_widgets:
            finds_the_guesses(notebook)
    if save_widgets:
        with lab.open(late) as notebook:
            finds_the_guesses(notebook)


def finds_the_stepper(notebook, save_widgets):
    output = notebook.output("stepper")
    restored = output.locator(".dplab-sliders" if save_widgets else ".jupyter-widgets")
    restored.wait_for(state="visible" if save_widgets else "attached")
    assert output.get_by_alt_text("Buckets of 6 MiB").is_visible()
    assert output.get_by_text("Run this cell").is_visible()
    assert not output.get_by_text("model not found").is_visible()
    notebook.run_cell("stepper")
    assert not output.get_by_text("Run this cell").is_visible()
    assert output.get_by_alt_text("Buckets of 3 MiB").is_visible()


def finds_the_guesses(notebook):
    for cell, says in (("way", "Your guess: a star"), ("way", "Run this cell again"),
                       ("share", SHARE), ("share", "Run this cell again to answer"),
                       ("check", "Run this cell again for a hint")):
        notebook.output(cell).get_by_text(says).locator("visible=true").wait_for()
    assert not notebook.page.get_by_text("model not found").locator("visible=true").count()
    for cell in ("setup", "share"):
        notebook.run_cell(cell)
    role(notebook, "share", "textbox", SHARE)
    assert not notebook.output("share").locator(".dplab-in-place").is_visible()


def moves_the_stepper(notebook):
    output = notebook.output("stepper")
    assert not output.get_by_text("Run this cell").is_visible()
    focus_by_tab(notebook, "stepper", "bucket size")
    handle = output.locator("[role=slider]")
    assert handle.get_attribute("aria-valuetext") == "3 MiB"
    notebook.page.keyboard.press("ArrowRight")
    output.get_by_alt_text("Buckets of 6 MiB").wait_for()
    assert handle.get_attribute("aria-valuetext") == "6 MiB"


def reads_it_in_the_dark(notebook):
    """The figure and the drawing are dark in the dark theme, and light again in the light one."""
    for theme in ("dark", "light"):
        notebook.set_theme(theme)
        for cell in ("stepper", "drawing"):
            notebook._until("() => [...document.images].every(image => image.complete)", 30)
            page = notebook.page.locator(f".jp-Cell >> nth={notebook.index(cell)}")
            pixels = image.imread(io.BytesIO(page.locator("img:visible").screenshot()))
            ground = np.median(pixels[8:-8, 8:-8, :3].reshape(-1, 3), axis=0)
            assert ground.max() < 0.15 if theme == "dark" else ground.min() > 0.95, (theme, cell)
