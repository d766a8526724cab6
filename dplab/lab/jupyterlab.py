"""JupyterLab on a working copy: its settings, its kernel, its address, and how it starts."""

import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import NoReturn

FIRST_CHAPTER = "chapters/00_start_here.ipynb"

# A reader's own settings, made in JupyterLab's menu, go before these.
SETTINGS = {
    # Without their state, the widgets of a saved notebook do not show when it is opened again.
    "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": True},
    # The list of chapters and the glossary open as pages whose links work, not as text.
    "@jupyterlab/docmanager-extension:plugin": {
        "defaultViewers": {"markdown": "Markdown Preview"}},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}


def missing_package() -> str | None:
    """The name of a package that JupyterLab needs and this Python lacks."""
    return next((name for name in ("jupyterlab", "ipykernel") if util.find_spec(name) is None),
                None)


def prepare(folder: Path) -> dict[str, str]:
    """Writes settings and the kernel into ``folder``; returns the environment that names them."""
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
              "display_name": "Python 3 (dplab)", "language": "python",
              "metadata": {"debugger": True}}
    files = {"labconfig/default_setting_overrides.json": SETTINGS,
             "kernels/python3/kernel.json": kernel}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1))
    return {
        "JUPYTER_CONFIG_PATH": _in_front(folder, "JUPYTER_CONFIG_PATH"),
        "JUPYTER_PATH": _in_front(folder, "JUPYTER_PATH"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        # JupyterLab's terminals find this Python as `python`.
        "PATH": _in_front(Path(sys.executable).parent, "PATH"),
    }


def command(place: Path, options: list[str], *, browser: bool) -> list[str]:
    """The command line that opens chapter 00; later, the windows as the reader left them."""
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={place}",
             "--log-level=WARN"]  # so that the address is not lost among forty lines
    if not (place / ".course/jupyter/workspaces").is_dir():
        words.append(f"--LabApp.default_url=/lab/tree/{FIRST_CHAPTER}")
    if not browser:
        words.append("--no-browser")
    if os.geteuid() == 0:
        words.append("--allow-root")
    return words + options


def running_at(place: Path) -> str | None:
    """The address of a JupyterLab that serves this folder already."""
    if missing_package():
        return None
    from jupyter_server.serverapp import list_running_servers

    return next((f"{server['url']}lab?token={server['token']}" for server in list_running_servers()
                 if Path(server["root_dir"]).resolve() == place.resolve()), None)


def start(words: list[str]) -> NoReturn:
    """JupyterLab takes the place of this process, so that Ctrl-C and signals reach it alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


def _in_front(folder, variable):
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))
