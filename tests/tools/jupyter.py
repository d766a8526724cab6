"""A real JupyterLab in a real browser, for tests: settings of its own, and no process is left."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import TimeoutError as BrowserTimeout
from skips import skip_or_fail

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = {
    # Without windowing, the cells outside the viewport are in the page as well.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
CHROMIUM_FLAGS = ["--headless=new", "--disable-gpu", "--disable-quic", "--disable-sync"]
OWN_FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
               "DPLAB_HOME")
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)")
OPTIONS = ["--no-browser", "--ServerApp.ip=127.0.0.1", "--LabApp.expose_app_in_browser=True"]
WINDOW = {"width": 1200, "height": 1600}


def write_cells(path, cells):
    """A notebook with these cells: code by id, or whole cells."""
    whole = [new_code_cell(each, id=name) if isinstance(each, str) else each
             for name, each in cells.items()]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(new_notebook(cells=whole, metadata=kernel), path)


def copy_course(to):
    """Copies what the notebooks need of the repository into the folder `to`."""
    ignore = shutil.ignore_patterns(".*", "__pycache__")
    for name in ("chapters", "figures"):
        shutil.copytree(REPOSITORY / name, Path(to) / name, ignore=ignore)


def until(condition, timeout, message):
    """Polls until `condition()` is true, and returns its value; TimeoutError after `timeout` s."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(message)
        time.sleep(0.05)
    return value


@contextlib.contextmanager
def server(command, folder, private, course=REPOSITORY, **environment):
    """Runs what starts JupyterLab, in ``folder``; yields the address that it prints.

    ``private``: a folder for settings and all else that Jupyter keeps.
    """
    (private / "labconfig").mkdir()
    (private / "labconfig/default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    log = private / "log"
    with open(log, "w") as file:
        process = psutil.Popen(
            [sys.executable, "-m", *map(str, command)], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
            env=os.environ | dict.fromkeys(OWN_FOLDERS, str(private)) | {
                "PYTHONPATH": str(course)} | environment)
    try:
        yield until(lambda: ADDRESS.search(log.read_text()), 60, "no address")[0]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = process.children(recursive=True)
            process.terminate()  # Jupyter ends its kernels, too
            for one in psutil.wait_procs([process, *below], timeout=20)[1]:
                one.kill()
        process.wait()


class Lab:
    """A browser in front of the JupyterLab whose ``address`` was printed."""

    def __init__(self, browser: Browser, address: str):
        self.browser = browser
        server, token = ADDRESS.match(address).groups()
        self.url = f"{server}/lab/tree/{{path}}?token={token}&reset"

    def open(self, path):
        """Opens a notebook, given relative to the server's folder, and waits for its kernel."""
        page = self.browser.new_page(viewport=WINDOW)
        page.goto(self.url.format(path=path))
        return Notebook(page, path)


@contextlib.contextmanager
def jupyter_lab(root):
    """Starts a JupyterLab on the folder `root` and a browser; yields a `Lab`."""
    command = ["jupyterlab", *OPTIONS, *(["--allow-root"] if os.geteuid() == 0 else [])]
    with (chromium() as browser,
          tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as private,
          server(command, root, Path(private), DPLAB_LIVE="1") as address):
        yield Lab(browser, address)


@contextlib.contextmanager
def dplab_lab(place, private, course=REPOSITORY):
    """The same by the course's own start command, on the reader's copy in ``place``."""
    command = ["dplab", "lab", place, "--", *OPTIONS]
    with chromium() as browser, server(command, private, private, course) as address:
        yield Lab(browser, address)


@contextlib.contextmanager
def chromium():
    """A browser: playwright's own, or the system's. Where none is, the test is skipped."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        paths = [path for path in (own, *map(shutil.which, names)) if path and Path(path).exists()]
        if not paths:
            skip_or_fail(f"no Chromium: run {sys.executable} -m playwright install --with-deps "
                         "chromium")
        with playwright.chromium.launch(executable_path=paths[0], args=CHROMIUM_FLAGS) as browser:
            yield browser


class Notebook:
    """A notebook open in JupyterLab. A `cell` is named by its id or by a text in its source."""

    def __init__(self, page, path):
        self.page = page
        self._until(
            """path => {
                window.panel = window.jupyterapp?.shell.currentWidget;
                return panel?.context?.path === path && panel.context.isReady
                    && panel.sessionContext.session?.kernel?.status === 'idle'
                    && !document.querySelector('#jupyterlab-splash');
            }""", 60, path)
        self._command("application:toggle-left-area")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.page.evaluate("panel.sessionContext.shutdown()")
        self.page.close()

    def _command(self, name, **arguments):
        """Starts a command of JupyterLab; `wait` waits for its end."""
        self.page.evaluate(
            """([name, arguments]) => {
                window.commands = (window.commands ?? 0) + 1;
                jupyterapp.commands.execute(name, arguments).finally(() => { commands -= 1; });
            }""", [name, arguments])

    def _until(self, condition, timeout, argument=None):
        """Waits for a condition in the page; a dialog of JupyterLab is an error, at once."""
        function = f"""argument => {{
            const dialog = document.querySelector('.jp-Dialog');
            if (dialog) throw new Error(dialog.innerText);
            return ({condition})(argument);
        }}"""
        try:
            self.page.wait_for_function(function, arg=argument, timeout=timeout * 1000)
        except BrowserTimeout as error:
            error.add_note(f"prompts: {self.page.locator('.jp-InputPrompt').all_inner_texts()}")
            raise

    def wait(self, timeout=60):
        """Waits until every command has ended, the kernel is idle and no prompt reads [*]."""
        self._until(
            """() => commands === 0 && panel.sessionContext.session.kernel.status === 'idle'
                && ![...panel.node.querySelectorAll('.jp-InputPrompt')]
                    .some(prompt => prompt.textContent.includes('*'))""", timeout)

    def set_theme(self, theme):
        """`theme`: "light" or "dark"."""
        name = f"JupyterLab {theme.title()}"
        self._command("apputils:change-theme", theme=name)
        self._until("name => document.body.dataset.jpThemeName === name"
                    " && !document.querySelector('#jupyterlab-splash')", 30, name)

    def cells(self):
        """The cells as the notebook format has them, with the outputs of now."""
        return self.page.evaluate("panel.content.widgets.map(cell => cell.model.toJSON())")

    def index(self, cell):
        """The position of the one cell whose id is `cell`, or whose source contains it."""
        cells = self.cells()
        found = [i for i, c in enumerate(cells) if c["id"] == cell]
        found = found or [i for i, c in enumerate(cells) if cell in c["source"]]
        if len(found) != 1:
            raise LookupError(f"{len(found)} cells match {cell!r}")
        return found[0]

    def replace_source(self, cell, text):
        self.page.evaluate("([i, text]) => panel.content.widgets[i].model.sharedModel"
                           ".setSource(text)", [self.index(cell), text])

    def run_all(self, timeout=180):
        self._command("notebook:clear-all-cell-outputs")
        self._command("notebook:run-all-cells")
        self.wait(timeout)

    def run_cell(self, cell, timeout=60, wait=True):
        self.page.evaluate("i => { panel.content.activeCellIndex = i; }", self.index(cell))
        self._command("notebook:run-cell")
        if wait:
            self.wait(timeout)

    def save(self):
        """Saves the notebook; returns what its file then holds."""
        self._command("docmanager:save")
        self.wait()
        return self.page.evaluate(
            "() => jupyterapp.serviceManager.contents.get(panel.context.path)"
            ".then(file => file.content)")

    def interrupt(self):
        """Presses the ■ of the toolbar."""
        self.page.locator("[data-command='notebook:interrupt-kernel']:visible").first.click()

    def restart(self):
        """Restarts the kernel by the menu's command, and says yes to its question."""
        self._command("kernelmenu:restart")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.wait()

    def output(self, cell):
        """The part of the page below the cell, as Playwright's locator."""
        cell = self.page.locator(".jp-NotebookPanel .jp-Cell").nth(self.index(cell))
        return cell.locator(".jp-Cell-outputWrapper")

    def output_text(self, cell):
        """What a reader sees below the cell, as text."""
        return "\n".join(self.output(cell).locator(".jp-OutputArea-output").all_inner_texts())

    def errors(self):
        """(cell id, message) of each error output."""
        return [(cell["id"], f"{output['ename']}: {output['evalue']}") for cell in self.cells()
                for output in cell.get("outputs", []) if output["output_type"] == "error"]

    def not_run(self):
        """The ids of the code cells that have no number."""
        return [cell["id"] for cell in self.cells() if cell["cell_type"] == "code"
                and cell["source"].strip() and not cell["execution_count"]]
