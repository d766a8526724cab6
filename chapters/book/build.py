"""Builds the web book from the chapters' stored outputs; runs no notebook.

    python chapters/book/build.py [FOLDER]

It needs npm, and the packages of chapters/book/requirements.txt. A warning of Sphinx is an error.
"""

import argparse
import fcntl
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BOOK = Path(__file__).resolve().parent
CHAPTERS, ROOT = BOOK.parent, BOOK.parents[1]
NODE_MODULES = BOOK / "node_modules"
# Of MathJax: what a page with formulas may load, with the extensions that it fetches by itself.
MATHJAX = ["tex-chtml.js", "a11y", "input", "sre", "ui"]
NEEDS = {"sphinx": "sphinx", "myst_nb": "myst-nb", "furo": "furo"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=BOOK / "_build",
                        help="where the book goes, in place of an older one")
    folder = parser.parse_args().folder.resolve()
    if missing := [name for module, name in NEEDS.items() if not importlib.util.find_spec(module)]:
        sys.exit(f"Not installed: {', '.join(missing)}. "
                 "Run: python -m pip install -r chapters/book/requirements.txt")
    if not may_be_deleted(folder):
        sys.exit(f"{folder} is no book of this course. Name a folder that is empty or not there.")
    sys.path.insert(0, str(ROOT))  # this course's dplab, before an installed one
    install_packages()
    shutil.rmtree(folder, ignore_errors=True)
    copy_mathjax(folder)
    bundle_planner(folder)
    sys.exit(build(folder))


def may_be_deleted(folder):
    """Whether the folder is not there, empty, or a book: only a book has its formulas' MathJax."""
    if (folder / "_static" / "mathjax").is_dir():
        return True
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def install_packages():
    """Installs what package-lock.json names, unless that was done; a second caller waits."""
    if shutil.which("npm") is None:
        sys.exit("npm is not installed. It comes with Node.js: on Debian, apt-get install npm.")
    with open(BOOK / "package-lock.json", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted, installed = lock.read(), NODE_MODULES / "installed.json"
        if not installed.exists() or installed.read_bytes() != wanted:
            done = subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund",
                                   "--loglevel=error"], cwd=BOOK)
            if done.returncode:
                sys.exit("`npm ci` failed in chapters/book. Its own words stand above. It fetches "
                         "MathJax and Pyodide, so it needs a network.")
            installed.write_bytes(wanted)


def copy_mathjax(folder):
    """Puts MathJax and its font beside the book."""
    target = folder / "_static" / "mathjax"
    for name in MATHJAX:
        copy(NODE_MODULES / "mathjax" / name, target / name)
    font = "mathjax-newcm-font"
    for name in ("chtml.js", "chtml"):
        copy(NODE_MODULES / "@mathjax" / font / name, target / font / name)


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def bundle_planner(folder):
    """Puts what the planner's page loads beside that page."""
    spec = importlib.util.spec_from_file_location("bundle", BOOK / "planner" / "bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.bundle(folder / "book" / "planner", NODE_MODULES)


def build(folder):
    """Runs Sphinx; returns its exit status."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as read:
        return build_main(["-q", "-W", "--keep-going", "-j", "auto", "-b", "html", "-c", str(BOOK),
                           "-d", read, str(CHAPTERS), str(folder)])


if __name__ == "__main__":
    main()
