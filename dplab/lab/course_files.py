"""The course as its clone has it: which files a working copy gets, and what they hold."""

import posixpath
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dplab.lab import notebook

ROOT = Path(__file__).resolve().parents[2]
RULES = "chapters/book/assistants.md"
_LINK = re.compile(r"""\]\(([^)\s#]+)|\bsrc=["']([^"'#]+)""")


class NoCourse(Exception):
    """The chapters are not beside the package."""


@dataclass(frozen=True)
class Course:
    """``files``: the content by the path in the clone; notebooks come without outputs.

    A file of ``chapters/`` that differs from the last commit is there as committed, so that a
    reader's answers in it are not taken for the course's text.
    """

    root: Path
    files: dict[str, bytes]


def read_course(root: Path) -> Course:
    """Reads all files of ``chapters/`` and every file that they or the README link to.

    Of ``chapters/book/``, which makes the web book, only the pages that are linked to. The rules
    for AI assistants come as ``AGENTS.md`` too, where those in an editor look for rules.
    """
    if not (root / "chapters").is_dir():
        raise NoCourse(
            f"the course's chapters are not in {root}. Run this from a clone of the course in "
            "which `pip install -r requirements.txt` was run")
    names = _names_of_chapters(root)
    changed = _git(root, "diff", "--name-only", "-z", "--relative", "HEAD", "--", "chapters")
    edited = set((changed or "").split("\0"))
    waiting, files = ["README.md", *names], {}
    while waiting:
        name = waiting.pop()
        if name in files or (data := _content(root, name, committed=name in edited)) is None:
            continue
        if name.endswith(".ipynb"):
            data = notebook.dumps(notebook.cleared(notebook.read(root / name, data)))
        files[name] = data
        waiting += _linked(name, data)
    if RULES in files:
        files["AGENTS.md"] = files[RULES].replace(b"](../", b"](chapters/")
    return Course(root, dict(sorted(files.items())))


def _names_of_chapters(root):
    tracked = _git(root, "ls-files", "-z", "--", "chapters")
    if tracked:
        names = tracked.strip("\0").split("\0")
    else:
        paths = (path.relative_to(root) for path in (root / "chapters").rglob("*")
                 if path.is_file())
        names = [path.as_posix() for path in paths
                 if not any(part.startswith((".", "__")) for part in path.parts)]
    return [name for name in names if not name.startswith("chapters/book/")]


def _content(root, name, *, committed):
    data = _git(root, "show", f"HEAD:./{name}", text=False) if committed else None
    path = root / name
    return path.read_bytes() if data is None and path.is_file() else data


def _linked(name, data):
    """The paths in the clone that a page or a notebook links to."""
    if name.endswith(".ipynb"):
        cells = notebook.sources(notebook.read(Path(name), data))
        text = "\n".join(source for kind, source in cells if kind == "markdown")
    elif name.endswith(".md"):
        text = data.decode()
    else:
        return []
    targets = ("".join(groups) for groups in _LINK.findall(text))
    paths = (posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
             for target in targets if "://" not in target)
    return [path for path in paths if not path.startswith(("..", "/"))]


def _git(root, *arguments, text=True):
    """What git prints, or None where it cannot say: no git, no repository, no commit."""
    # A clone that another user made, as in a container, is read all the same.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return done.stdout.decode() if text else done.stdout
