"""A real JupyterLab in a real browser: for tests, and for looking at a chapter.

    python tests/tools/jupyter.py look chapters/04_ddp_by_hand.ipynb --out pictures [--dark]
        [--no-run]

Works on a copy of the notebooks, with settings of its own, and leaves no process behind.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import TimeoutError as BrowserTimeout

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
PIECE = {"width": 1200, "height": 1600}
PIECE_OVERLAP = 100  # so that no line of text is cut in both of two pieces


class NoChromium(RuntimeError):
    """Neither playwright nor the system has a Chromium."""


@contextlib.contextmanager
def chromium_or_skip():
    """In a test: where no Chromium is, a reader's machine skips it and CI fails."""
    from skips import skip_or_fail

    try:
        yield
    except NoChromium as missing:
        skip_or_fail(str(missing))


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
def jupyter_server(root):
    """Runs JupyterLab on the loopback with `root` as its folder; yields the URL of a {path}."""
    with contextlib.ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (private / "labconfig").mkdir()
        (private / "labconfig/default_setting_overrides.json").write_text(json.dumps(SETTINGS))
        token = secrets.token_hex(16)
        environment = os.environ | dict.fromkeys(OWN_FOLDERS, str(private)) | {
            "JUPYTER_TOKEN": token, "PYTHONPATH": str(REPOSITORY), "DPLAB_LIVE": "1"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}",
                   "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1",
                   "--LabApp.expose_app_in_browser=True",
                   *(["--allow-root"] if os.geteuid() == 0 else [])]
        log = stack.enter_context(open(private / "log", "w"))
        process = psutil.Popen(command, cwd=root, env=environment, stdin=subprocess.DEVNULL,
                               stdout=log, stderr=log, start_new_session=True)
        stack.callback(stop_server, process, f"http://127.0.0.1:{port}/api/shutdown", token)
        info = private / f"jpserver-{process.pid}.json"  # written once it listens
        until(lambda: info.exists() or process.poll() is not None, 60, "JupyterLab: no start")
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended:\n{Path(log.name).read_text()[-3000:]}")
        yield f"http://127.0.0.1:{port}/lab/tree/{{path}}?token={token}&reset"


@contextlib.contextmanager
def dplab_lab(place, private, course=REPOSITORY):
    """Runs the course's own start command without a browser; yields the address that it prints."""
    log = private / "log"
    with open(log, "w") as file:
        process = psutil.Popen(
            [sys.executable, "-m", "dplab", "lab", str(place), "--no-browser", "--",
             "--ServerApp.ip=127.0.0.1", "--LabApp.expose_app_in_browser=True"],
            env=os.environ | dict.fromkeys(OWN_FOLDERS, str(private)) | {
                "PYTHONPATH": str(course)},
            cwd=private, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True)
    try:
        yield until(lambda: ADDRESS.search(log.read_text()), 60, "no address")[0]
    finally:
        found = ADDRESS.search(log.read_text())
        server, token = found.groups() if found else ("http://127.0.0.1", "")
        stop_server(process, f"{server}/api/shutdown", token)


def stop_server(process, url, token):
    """Asks the server to end its kernels and itself; then ends what is left, by id."""
    if process.poll() is not None:
        return
    left = [*process.children(recursive=True), process]
    with contextlib.suppress(OSError):
        ask = urllib.request.Request(url, b"", {"Authorization": f"token {token}"})
        urllib.request.urlopen(ask, timeout=20).close()
        left = psutil.wait_procs(left, timeout=20)[1]
    for one in left:  # psutil compares start times: never a stranger with the same id
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=10)


@dataclass
class Lab:
    """A browser in front of a JupyterLab."""

    browser: Browser
    url: str

    def change_setting(self, plugin, **settings):
        """Changes settings of a plugin for all pages that are opened from now on."""
        page = self.browser.new_page()
        page.goto(self.url.format(path=""))
        page.wait_for_function("() => window.jupyterapp?.serviceManager.isReady")
        page.evaluate("([plugin, raw]) => jupyterapp.serviceManager.settings.save(plugin, raw)",
                      [plugin, json.dumps(settings)])
        page.close()

    def open(self, path, theme="light"):
        """Opens a notebook, given relative to the server's folder, and waits for its kernel."""
        page = self.browser.new_page(viewport=PIECE)
        page.goto(self.url.format(path=path))
        return Notebook(page, path, theme)


@contextlib.contextmanager
def jupyter_lab(root):
    """Starts a JupyterLab on the folder `root` and a browser; yields a `Lab`."""
    with chromium() as browser, jupyter_server(root) as url:
        yield Lab(browser, url)


@contextlib.contextmanager
def chromium():
    """A browser: playwright's own, or the system's."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        paths = [path for path in (own, *map(shutil.which, names)) if path and Path(path).exists()]
        if not paths:
            raise NoChromium(
                f"no Chromium: run {sys.executable} -m playwright install --with-deps chromium")
        with playwright.chromium.launch(executable_path=paths[0], args=CHROMIUM_FLAGS) as browser:
            yield browser


class Notebook:
    """A notebook open in JupyterLab. A `cell` is named by its id or by a text in its source."""

    def __init__(self, page, path, theme):
        self.page = page
        self._until(
            """path => {
                window.panel = window.jupyterapp?.shell.currentWidget;
                return panel?.context?.path === path && panel.context.isReady
                    && panel.sessionContext.session?.kernel?.status === 'idle';
            }""", 60, path)
        self._command("application:toggle-left-area")
        self.set_theme(theme)

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
        """Runs all cells; returns the seconds that it took."""
        self._command("notebook:clear-all-cell-outputs")
        start = time.perf_counter()
        self._command("notebook:run-all-cells")
        self.wait(timeout)
        return time.perf_counter() - start

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

    def screenshot(self, path):
        """Saves the whole notebook in pieces; returns the files."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        scroller = self.page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
        box, size = scroller.bounding_box(), self.page.viewport_size
        self.page.set_viewport_size({k: round(size[k] + PIECE[k] - box[k]) for k in PIECE})
        self._until("() => [...document.images].every(image => image.complete)", 30)
        files, top, seen = [], 0, -1
        scroll = "(scroller, top) => { scroller.scrollTop = top; return scroller.scrollTop; }"
        while (at := scroller.evaluate(scroll, top)) > seen:
            files.append(path.with_stem(f"{path.stem}_{len(files) + 1:02}"))
            scroller.screenshot(path=files[-1])
            top, seen = at + PIECE["height"] - PIECE_OVERLAP, at
        return files


def look(notebook, out, theme, run):
    """Runs a notebook if `run`, prints what happened, saves pictures; returns the errors."""
    with tempfile.TemporaryDirectory() as folder:
        copy_course(folder)
        shutil.copy(notebook, Path(folder, "chapters"))
        with jupyter_lab(folder) as lab, lab.open(f"chapters/{notebook.name}", theme) as page:
            if run:
                print(f"Run All: {page.run_all(timeout=600):.1f} s")
            pictures = page.screenshot(out / f"{notebook.stem}_{theme}.png")
            print(*(f"error in {cell}: {message}" for cell, message in page.errors()), *pictures,
                  sep="\n")
            return page.errors()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["look"])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--run", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    theme = "dark" if options.dark else "light"
    sys.exit(bool(look(options.notebook, options.out, theme, options.run)))
