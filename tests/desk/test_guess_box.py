"""A guess in a real JupyterLab: by keyboard alone, to a screen reader, after a restart."""

import pytest
from jupyter import chromium_or_skip, jupyter_lab, until, write_cells
from reading import controls_without_name, cut_off, focus_by_tab, window

pytestmark = pytest.mark.slow

WAY = "Which way sends the fewest bytes from the busiest rank?"
SHARE = "Which share of the step is communication?"
CELLS = {
    "setup": "import dplab",
    "way": f'way = dplab.guess("way", "{WAY}", choices=["a tree", "a star", "a ring"])',
    "share": f'share = dplab.guess("share", "{SHARE}", unit="%")\nshare',
    "results": 'way.reveal("a ring")\nshare.reveal(37)',
}
CHECK = 'dplab.check("global-mean", lambda values: values.mean())'


@pytest.fixture(scope="module")
def root_and_lab(tmp_path_factory):
    root = tmp_path_factory.mktemp("guesses")
    with chromium_or_skip(), jupyter_lab(root) as lab:
        yield root, lab


@pytest.fixture(scope="module")
def notebook(root_and_lab):
    root, lab = root_and_lab
    write_cells(root / "guesses.ipynb", CELLS)
    with lab.open("guesses.ipynb") as notebook:
        notebook.run_all()
        yield notebook


def role(notebook, cell, *named):
    """The one control of this role and name below the cell, as a screen reader finds it."""
    role, *name = named
    found = notebook.output(cell).get_by_role(role, **({"name": name[0]} if name else {}))
    found.wait_for()
    return found


def noted(notebook, cell, text):
    until(lambda: text in role(notebook, cell, "status").inner_text(), 20, f"not said: {text}")


def test_guesses_by_keyboard_alone_are_noted_revealed_and_kept(notebook):
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

    notebook.restart()
    for cell in CELLS:
        notebook.run_cell(cell)
    text = notebook.output_text("results")
    assert "Your guess: a star · Result: a ring" in text
    assert "Your guess: 25 % · Result: 37 %" in text
    assert role(notebook, "way", "radio", "a star").is_checked()
    assert role(notebook, "way", "radio", "a ring").is_disabled()
    assert role(notebook, "share", "textbox", SHARE).input_value() == "25 %"
    assert notebook.errors() == []


@pytest.mark.parametrize("save_widgets", [False, True])
def test_a_notebook_that_is_saved_after_a_restart_says_what_to_do(
        root_and_lab, save_widgets):
    root, lab = root_and_lab
    name = f"saved-{save_widgets}.ipynb"
    write_cells(root / name, {cell: source.replace('guess("', f'guess("{name}-')
                              for cell, source in CELLS.items()} | {"check": CHECK})
    lab.change_setting("@jupyter-widgets/jupyterlab-manager:plugin", saveState=save_widgets)
    with lab.open(name) as notebook:
        notebook.run_all()
        role(notebook, "way", "radio", "a star").check()
        noted(notebook, "way", "Your guess: a star")
        assert not notebook.page.locator(".dplab-in-place").locator("visible=true").count()
        notebook.restart()
        notebook.save()
    with lab.open(name) as notebook:
        for cell, says in (("way", "Your guess: a star"), ("way", "Run this cell again"),
                           ("share", SHARE), ("share", "Run this cell again to answer"),
                           ("check", "Run this cell again for a hint")):
            notebook.output(cell).get_by_text(says).locator("visible=true").wait_for()
        assert not notebook.page.get_by_text("model not found").locator("visible=true").count()
        notebook.run_cell("setup")
        notebook.run_cell("share")
        role(notebook, "share", "textbox", SHARE)
        assert not notebook.output("share").locator(".dplab-in-place").is_visible()
