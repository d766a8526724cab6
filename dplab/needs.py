"""What dplab needs: a sentence says what is missing before something fails for lack of it.

This file keeps to the syntax of old Pythons, so that they can read it and print the sentence.
"""

import re
import sys

PYTHON = (3, 11)
TORCH = (2, 13)


def check_system():
    """Raises ImportError on Windows, and for an old Python."""
    if sys.version_info < PYTHON:
        raise ImportError(
            "dplab needs Python {}.{} or newer, and this is {}.{}: make the environment with a "
            "newer one, python{}.{} -m venv --clear .venv".format(
                *PYTHON, *sys.version_info[:2], *PYTHON))
    if sys.platform == "win32":
        raise ImportError(
            "dplab needs Linux or macOS, since it forks its ranks. On Windows, install WSL 2 "
            "(wsl --install) and set the course up inside it, as its README says")


def check_torch():
    """Raises ImportError where torch is missing or old; does not load it."""
    from importlib import metadata

    needed = "dplab needs torch {}.{} or newer".format(*TORCH)
    remedy = set_up()
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{needed}, and this Python has none. Choose the environment that the course was set "
            f"up in (in JupyterLab: Kernel, Change Kernel), or, in the course's folder: {remedy}"
        ) from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < TORCH:
        raise ImportError(f"{needed}, and this Python has {version}. In the course's folder: "
                          f"{remedy}")


def set_up():
    """What to type in the course's folder so that this Python has what the course needs."""
    import shlex
    from importlib import util

    if util.find_spec("pip") is None:  # uv made the environment
        return "uv sync --extra cpu (with a GPU: --extra gpu)"
    return f"{shlex.quote(sys.executable)} -m pip install -r requirements.txt"
