"""A chapter in a real JupyterLab, as pictures: for eyes, not for tests.

    python tests/tools/look.py chapters/04_ddp_by_hand.ipynb --out pictures [--dark] [--no-run]

Runs all cells of a copy, prints the seconds and the errors, and saves the page in pieces.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from jupyter import copy_course, jupyter_lab

STEP = 1200
"""Pixels from one picture to the next; a window's height is more, so that pictures overlap."""


def pictures(page, stem):
    """Saves the notebook from its top to its end; returns the files."""
    scroller = page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
    page.wait_for_function("() => [...document.images].every(image => image.complete)")
    files, seen = [], -1
    while (at := scroller.evaluate("(panel, top) => { panel.scrollTop = top; "
                                   "return panel.scrollTop; }", STEP * len(files))) > seen:
        files.append(stem.with_name(f"{stem.name}_{len(files) + 1:02}.png"))
        scroller.screenshot(path=files[-1])
        seen = at
    return files


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--run", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_course(folder)
        with jupyter_lab(folder) as lab, lab.open(f"chapters/{options.notebook.name}") as notebook:
            notebook.set_theme("dark" if options.dark else "light")
            if options.run:
                start = time.perf_counter()
                notebook.run_all(timeout=600)
                print(f"Run All: {time.perf_counter() - start:.1f} s")
            print(*notebook.errors(), *pictures(notebook.page, options.out / options.notebook.stem),
                  sep="\n")
            sys.exit(bool(notebook.errors()))
