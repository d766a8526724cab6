"""What ``dplab lab`` opens, in a real browser: pictures, links, the kernel, what a save keeps."""

import contextlib
import json
import sys

import pytest
from jupyter import Lab, chromium, chromium_or_skip, dplab_lab, until

pytestmark = pytest.mark.slow

FIRST = "chapters/00_start_here.ipynb"
SLIDER = "import ipywidgets; ipywidgets.IntSlider(value=3, description='of the reader')"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A new copy, in a folder whose name has a space, and its first chapter in a browser."""
    place = tmp_path_factory.mktemp("lab") / "my course"
    with contextlib.ExitStack() as stack:
        stack.enter_context(chromium_or_skip())
        browser = stack.enter_context(chromium())
        address = stack.enter_context(dplab_lab(place, tmp_path_factory.mktemp("private")))
        assert f"/lab/tree/{FIRST}?token=" in address
        yield place, stack.enter_context(Lab(browser, address).open(FIRST))


def test_pictures_show_and_links_lead_to_files_of_the_copy(opened):
    _, notebook = opened
    picture = notebook.page.locator(".jp-MarkdownOutput img").first
    notebook.page.evaluate("i => panel.content.scrollToItem(i)",
                           notebook.index("figures/collectives.svg"))
    picture.wait_for()
    until(lambda: picture.evaluate("one => one.complete"), 20, "the picture does not load")
    assert picture.evaluate("one => one.naturalWidth") > 0
    notebook.page.evaluate("panel.content.scrollToItem(0)")
    notebook.page.locator(".jp-MarkdownOutput a[href*='README']").first.click()
    until(lambda: notebook.page.evaluate("jupyterapp.shell.currentWidget.context?.path")
          == "README.md", 20, "the link to the README opens nothing")
    notebook.page.locator(".jp-MarkdownViewer h1").wait_for()  # a page, not its text


def test_the_kernel_is_this_python_and_a_save_keeps_the_state_of_widgets(opened):
    place, notebook = opened
    notebook.page.evaluate("jupyterapp.shell.activateById(panel.id)")
    notebook.replace_source("load", f"import sys, dplab; print(sys.executable)\n{SLIDER}")
    notebook.run_cell("load")
    assert notebook.errors() == []
    assert sys.executable in notebook.output_text("load")
    notebook.page.evaluate("panel.context.save()")
    states = json.loads((place / FIRST).read_text())["metadata"]["widgets"]
    assert "of the reader" in json.dumps(states)
