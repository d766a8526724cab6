"""What a reader does, from the one command to the next evening: in a real JupyterLab.

With the mouse or by keyboard, on a wide screen or a narrow one, with eyes or a screen reader. One
JupyterLab serves all, on a copy that ``dplab lab`` makes. One notebook, EVERYTHING, has cells for
most; its tests follow each other as a reader's evening does.
"""

import contextlib
import shutil
from types import SimpleNamespace

import notebooks
import psutil
import pytest
from jupyter import dplab_lab, until, write_cells
from sandbox import ROOT

from dplab.checks import solution_source
from dplab.desk import course

pytestmark = pytest.mark.slow

FIRST = "chapters/00_start_here.ipynb"
STUB, CHECK = "stub-global-mean", "check-global-mean"
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

EXERCISE = "ring-seconds"
WAY = "Which way sends the fewest bytes from the busiest rank?"
SHARE = "Which share of the step is communication?"
GUESSES = {
    "way": f'way = dplab.guess("way", "{WAY}", choices=["a tree", "a star", "a ring"])',
    "share": f'share = dplab.guess("share", "{SHARE}", unit="%")\nshare',
    "again": "share",
    "results": 'way.reveal("a ring")\nshare.reveal(37)',
}
STEPPER = """\
from dplab import show

def draw(size):
    figure, axes = show.subplots(title=f"Buckets of {size} MiB")
    axes.plot([0, size])
    return figure

show.stepper(draw, (1, 3, 6), label="bucket size", unit="MiB", start=3)
"""
RESET = {
    "answer": solution_source(EXERCISE),
    "solved": f'dplab.check("{EXERCISE}", ring_seconds)',
    "spare": f'before = 1\ndplab.reset("{EXERCISE}")  # once more\nafter = before',
    "kept": f"from dplab.desk import record\nrecord.entries('exercises').get('{EXERCISE}')",
}
RANKS = """\
%%ranks 2 --timeout 600
import os, pathlib, time
rank = dist.get_rank()
pathlib.Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1 and pathlib.Path(folder, "hang").exists():
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
EVERYTHING = "chapters/everything.ipynb"  # beside the chapters, for their data


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A clone of the course; the reader's copy, in a folder whose name has a space."""
    base = tmp_path_factory.mktemp("evening")
    found = SimpleNamespace(clone=base / "clone", place=base / "my course", private=base / "kept",
                            notes=base / "notes")
    for folder in (found.private, found.notes):
        folder.mkdir()
    for name in ("chapters", "dplab", "figures"):
        shutil.copytree(ROOT / name, found.clone / name,
                        ignore=shutil.ignore_patterns("__pycache__", ".*", "node_modules"))
    shutil.copy(ROOT / "README.md", found.clone)
    return found


@pytest.fixture(scope="module")
def lab(folders):
    with dplab_lab(folders.place, folders.private, folders.clone) as lab:
        yield lab


@pytest.fixture(scope="module")
def notebook(lab, folders):
    """EVERYTHING, after Run All."""
    cells = {
        "load": "%load_ext dplab\nimport dplab, torch, torch.distributed as dist\n"
                f"folder = {str(folders.notes)!r}",
        **GUESSES, "wrong": 'dplab.check("exposed-time", lambda *case: 1.0)', **RESET,
        "stepper": STEPPER, "ranks": RANKS,
        **{f"{cell.id}-{stem[:2]}": cell.source for stem, (ids, _) in WIDGETS.items()
           for cell in notebooks.read(ROOT / f"chapters/{stem}.ipynb").cells if cell.id in ids}}
    write_cells(folders.place / EVERYTHING, cells)
    with lab.open(EVERYTHING) as opened:
        opened.run_all()
        assert opened.errors() == [] and opened.not_run() == []
        yield opened


# How a notebook reaches its reader: by keyboard, to a screen reader, in a narrow window


def focus_by_tab(notebook, cell, name):
    """Presses Tab, from the top of the cell's output, until the control of that name has the
    focus."""
    notebook.output(cell).evaluate("node => { node.tabIndex = -1; node.focus(); }")
    focused = "() => document.activeElement.getAttribute('aria-label')"
    for _ in range(30):
        notebook.page.keyboard.press("Tab")
        if notebook.page.evaluate(focused) == name:
            return
    raise LookupError(f"Tab does not come to {name!r}")


@contextlib.contextmanager
def window(notebook, width, height):
    """A browser window of another size."""
    before = notebook.page.viewport_size
    notebook.page.set_viewport_size({"width": width, "height": height})
    notebook.page.wait_for_timeout(500)  # JupyterLab lays itself out a moment later
    yield
    notebook.page.set_viewport_size(before)


def cut_off(notebook):
    """The texts of what reaches beyond the window's right edge, of prose, pictures and cards.

    A table or a block of code may: it scrolls in itself.
    """
    return notebook.page.evaluate("""() => {
        const scroller = panel.node.querySelector('.jp-WindowedPanel-outer');
        const edge = scroller.getBoundingClientRect().left + scroller.clientWidth;
        return [...scroller.querySelectorAll('.jp-MarkdownOutput *, .jp-OutputArea-output *')]
            .filter(node => node.getClientRects().length && !node.closest('table, pre')
                && node.getBoundingClientRect().right > edge + 1)
            .map(node => `${node.tagName}: ${(node.alt ?? node.innerText ?? '').slice(0, 60)}`);
    }""")


def clipped_controls(notebook, cell):
    """The texts of labels, values and drop-downs that need more room than they have."""
    return notebook.output(cell).locator(".jupyter-widgets").first.evaluate("""node => {
        const texts = [...node.querySelectorAll('.widget-label, .widget-readout')]
            .filter(each => each.scrollWidth > each.clientWidth
                || each.getBoundingClientRect().right
                   > each.parentElement.getBoundingClientRect().right + 1);
        const choices = [...node.querySelectorAll('select')].filter(each => {
            const free = each.cloneNode(true);  // as wide as its longest choice
            free.style.cssText = 'position: absolute; width: max-content; flex: none;';
            each.parentElement.append(free);
            const needed = free.offsetWidth;
            free.remove();
            return needed > each.offsetWidth;
        });
        return [...texts, ...choices].map(each => each.textContent);
    }""")


# The first evening


def test_a_first_evening(lab):
    with lab.open(FIRST) as notebook:
        assert not any(cell.get("outputs") for cell in notebook.cells())
        sees_a_picture_and_follows_a_link(notebook)
        guesses_and_sees_the_result(notebook)
        answers_wrongly_takes_a_hint_and_passes(notebook)
        notebook.output(CHECK).get_by_role("link", name="Next").click()
        notebook.page.get_by_role("heading", name="Exercise 0.3").wait_for()
        with window(notebook, 700, 900):
            assert cut_off(notebook) == []
        assert notebook.save()["metadata"]["widgets"]
    with lab.open(FIRST) as notebook:
        finds_everything_as_it_was_left(notebook)


def sees_a_picture_and_follows_a_link(notebook):
    picture = notebook.page.locator(".jp-MarkdownOutput img").first
    until(lambda: picture.evaluate("one => one.complete && one.naturalWidth"), 20, "no picture")
    notebook.page.locator(".jp-MarkdownOutput a[href*='README']").first.click()
    opened = "() => jupyterapp.shell.currentWidget.context?.path"
    until(lambda: notebook.page.evaluate(opened) == "README.md", 20, "the link opens nothing")
    notebook.page.locator(".jp-MarkdownViewer h1").wait_for()  # a page, not its text
    notebook.page.evaluate("jupyterapp.shell.activateById(panel.id)")


def guesses_and_sees_the_result(notebook):
    for cell in ("load", "predict-the-counter"):
        notebook.run_cell(cell)
    notebook.output("predict-the-counter").get_by_role("radio", name="4").check()
    noted(notebook, "predict-the-counter", "Your guess: 4")
    for cell in ("four-ranks-count", "the-counter-afterwards"):
        notebook.run_cell(cell)
    assert notebook.errors() == []
    shown = notebook.output_text("the-counter-afterwards")
    assert "Your guess: 4" in shown and "Result: 0" in shown


def answers_wrongly_takes_a_hint_and_passes(notebook):
    assert "You averaged the ranks' means" in answers(notebook, WRONG)
    notebook.output(CHECK).get_by_role("button", name="Hint").click()
    notebook.output(CHECK).get_by_text("hint 1 of 3").wait_for()
    shown = answers(notebook, RIGHT)
    assert "passed" in shown and "It is kept" in shown
    notebook.run_cell("use-mine")
    assert "yours" in notebook.output_text("use-mine")
    assert "[2.0, 2.0, 2.0, 2.0]" in notebook.output_text("use-mine")


def answers(notebook, answer):
    notebook.replace_source(STUB, answer)
    for cell in (STUB, CHECK):
        notebook.run_cell(cell)
    return notebook.output_text(CHECK)


def finds_everything_as_it_was_left(notebook):
    """After save and close; no kernel runs the cells again."""
    output = notebook.output("predict-the-counter")
    output.get_by_text("What is counter").locator("visible=true").first.wait_for()
    assert notebook.output(CHECK).get_by_text("passed").first.is_visible()
    assert not any(each.is_visible() for each in notebook.output(CHECK).get_by_role("button").all())
    assert not any(each.is_visible() for each in
                   notebook.page.get_by_text("Error displaying widget").all())


# EVERYTHING, once


def test_a_reset_is_done_once_and_stays_done_when_its_cells_run_again(notebook):
    assert "passed" in notebook.output_text("solved")
    assert "is kept as" in notebook.output_text("spare")
    assert notebook.output_text("kept") == ""
    spare = notebook.index("spare")
    source = notebook.cells()[spare]["source"]
    assert source == f"before = 1\n{course.stub_of(3, EXERCISE)}\nafter = before"
    for cell in RESET:
        notebook.run_cell(cell)
    assert "'passed'" in notebook.output_text("kept")
    assert notebook.cells()[spare]["source"] == source


def role(notebook, cell, *named):
    """The one control of this role and name below the cell, as a screen reader finds it."""
    role, *name = named
    found = notebook.output(cell).get_by_role(role, **({"name": name[0]} if name else {}))
    found.wait_for()
    return found


def noted(notebook, cell, text):
    until(lambda: text in role(notebook, cell, "status").inner_text(), 20, f"not said: {text}")


def test_guesses_by_keyboard_alone_are_noted_and_revealed(notebook):
    press = notebook.page.keyboard.press
    page = notebook.cells()[notebook.index("way")]["outputs"][0]["data"]  # without widgets
    for kind in ("text/html", "text/plain"):
        assert "answer=" in page[kind] and "a star" in page[kind]
    assert notebook.output_text("results").splitlines() == ["● Result: a ring", "● Result: 37 %"]
    for cell in ("share", "again"):
        assert notebook.output(cell).locator(".dplab-guess").count() == 1

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
        assert role(notebook, cell, "button", "Show the result").is_enabled()
        assert f"Result: {result}" not in role(notebook, cell, "status").inner_text()
    role(notebook, "share", "button", "Show the result").press("Enter")
    noted(notebook, "share", "Result: 37 %")
    assert role(notebook, "share", "textbox", SHARE).is_disabled()
    assert notebook.output("share").get_by_role("button", name="Show the result").count() == 0


def test_widgets_by_keyboard_alone(notebook):
    for stem, (ids, keys) in WIDGETS.items():
        cell = f"{ids[-1]}-{stem[:2]}"
        picture = notebook.output(cell).locator("img:visible")
        for label, key, says in keys:
            focus_by_tab(notebook, cell, label)
            notebook.page.keyboard.press(key)
            until(lambda says=says, picture=picture: says in picture.get_attribute("alt"), 20,
                  f"{key}: not {says}")
    focus_by_tab(notebook, "step-through-03", "play or pause")
    notebook.page.keyboard.press("Enter")
    notebook.output("step-through-03").get_by_alt_text("After step").first.wait_for()
    handle = notebook.output("stepper").locator("[role=slider]")
    assert handle.get_attribute("aria-valuetext") == "3 MiB"
    focus_by_tab(notebook, "stepper", "bucket size")
    notebook.page.keyboard.press("ArrowRight")
    notebook.output("stepper").get_by_alt_text("Buckets of 6 MiB").wait_for()
    assert handle.get_attribute("aria-valuetext") == "6 MiB"
    for width in (700, 760):
        with window(notebook, width, 900):
            assert cut_off(notebook) == []
            for cell in ("step-through-03", "calculator-08"):
                assert clipped_controls(notebook, cell) == []


def test_the_stop_button_and_a_restart_end_hung_ranks_and_guesses_stay(notebook, folders):
    processes = hang(notebook, folders.notes)
    notebook.interrupt()
    notebook.wait(timeout=10)
    text = notebook.output_text("ranks")
    assert "stopped by you; where the ranks were:" in text
    assert "time.sleep(600)" in text and "waits in all_reduce" in text
    assert psutil.wait_procs(processes, timeout=5)[1] == []

    assert not notebook.page.locator(".dplab-in-place").locator("visible=true").count()
    assert len(str(notebook.save()["metadata"]["widgets"])) < 400_000
    shutil.copy(folders.place / EVERYTHING, folders.place / "chapters/early.ipynb")
    processes = hang(notebook, folders.notes)
    processes.append(processes[0].parent())  # the server
    notebook.restart()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    notebook.save()
    shutil.copy(folders.place / EVERYTHING, folders.place / "chapters/late.ipynb")

    for cell in ("load", *GUESSES):
        notebook.run_cell(cell)
    text = notebook.output_text("results")
    assert "Your guess: a star · Result: a ring" in text
    assert "Your guess: 25 % · Result: 37 %" in text
    assert role(notebook, "way", "radio", "a star").is_checked()
    assert role(notebook, "way", "radio", "a ring").is_disabled()
    assert role(notebook, "share", "textbox", SHARE).input_value() == "25 %"


def hang(notebook, folder):
    """Two ranks that hang in the notebook, as processes."""
    files = [folder / "pid-0", folder / "pid-1"]
    for file in files:
        file.unlink()
    (folder / "hang").touch()
    notebook.run_cell("ranks", wait=False)
    until(lambda: all(f.exists() and f.read_text() for f in files), 60, "no ranks started")
    return [psutil.Process(int(file.read_text())) for file in files]


def test_a_notebook_that_is_opened_again_is_as_it_was_left_or_says_what_to_do(notebook, lab):
    """First with the state of its widgets, then as saved after a restart, without."""
    for saved, restored, state in (("early", ".dplab-sliders", "visible"),
                                   ("late", ".jupyter-widgets", "attached")):
        with lab.open(f"chapters/{saved}.ipynb") as again:
            output = again.output("stepper")
            output.locator(restored).wait_for(state=state)
            assert output.get_by_alt_text("Buckets of 6 MiB").is_visible()
            assert output.get_by_text("Run this cell").is_visible()
            assert not again.page.get_by_text("model not found").locator("visible=true").count()
            if saved == "early":
                continue
            for cell, says in (("way", "Your guess: a star"), ("way", "Run this cell again"),
                               ("share", SHARE), ("wrong", "Run this cell again for a hint")):
                again.output(cell).get_by_text(says).locator("visible=true").wait_for()
            for cell in ("load", "stepper", "share"):
                again.run_cell(cell)
            assert not output.get_by_text("Run this cell").is_visible()
            assert output.get_by_alt_text("Buckets of 3 MiB").is_visible()
            role(again, "share", "textbox", SHARE)
            assert not again.output("share").locator(".dplab-in-place").is_visible()
