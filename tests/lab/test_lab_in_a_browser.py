"""What ``dplab lab`` opens, in a real browser: pictures, links, the kernel, what a save keeps."""

import contextlib
import json
import os
import re
import subprocess
import sys

import psutil
import pytest
from jupyter import Lab, NoChromium, chromium, stop_server, until

pytestmark = pytest.mark.slow

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)")
FIRST = "chapters/00_start_here.ipynb"
SLIDER = "import ipywidgets; ipywidgets.IntSlider(value=3, description='of the reader')"


@contextlib.contextmanager
def dplab_lab(place, private):
    """Runs the command without a browser; yields the address that it prints."""
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
               "DPLAB_HOME")
    log = private / "log"
    with open(log, "w") as file:
        process = psutil.Popen(
            [sys.executable, "-m", "dplab", "lab", str(place), "--no-browser", "--",
             "--ServerApp.ip=127.0.0.1", "--LabApp.expose_app_in_browser=True"],
            env=os.environ | dict.fromkeys(folders, str(private)), cwd=private,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        yield until(lambda: ADDRESS.search(log.read_text()), 60, "no address")[0]
    finally:
        found = ADDRESS.search(log.read_text())
        server, token = found.groups() if found else ("http://127.0.0.1", "")
        stop_server(process, f"{server}/api/shutdown", token)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A new copy, in a folder whose name has a space, and its first chapter in a browser."""
    place = tmp_path_factory.mktemp("lab") / "my course"
    with contextlib.ExitStack() as stack:
        try:
            browser = stack.enter_context(chromium())
        except NoChromium as missing:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
        address = stack.enter_context(dplab_lab(place, tmp_path_factory.mktemp("private")))
        assert f"/lab/tree/{FIRST}?token=" in address
        yield place, stack.enter_context(Lab(browser, address).open(FIRST))


def test_pictures_show_and_links_lead_to_files_of_the_copy(opened):
    _, notebook = opened
    picture = notebook.page.locator(".jp-MarkdownOutput img").first
    notebook.page.evaluate("i => panel.content.scrollToItem(i)", notebook.index("figures/"))
    picture.wait_for()
    until(lambda: picture.evaluate("one => one.complete"), 20, "the picture does not load")
    assert picture.evaluate("one => one.naturalWidth") > 0
    notebook.page.evaluate("panel.content.scrollToItem(0)")
    notebook.page.locator(".jp-MarkdownOutput a[href*='README']").first.click()
    until(lambda: notebook.page.evaluate("jupyterapp.shell.currentWidget.context?.path")
          == "README.md", 20, "the link to the README opens nothing")


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
