"""The course as its clone has it: which files a working copy gets, and what they hold."""

import io
import posixpath
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from dplab.lab import notebook

ROOT = Path(__file__).resolve().parents[2]
RULES = "chapters/book/assistants.md"
_CHAPTERS = re.compile(r"chapters/(?!book/)(?!(?:.*/)?(?:\.|__))")  # and nothing hidden
_LINK = re.compile(r"""\]\(([^)\s#]+)|\bsrc=["']([^"'#]+)""")


@dataclass(frozen=True)
class Course:
    """``files``: the content by the path in the clone; notebooks come without outputs."""

    root: Path
    files: dict[str, bytes]


def read_course(root: Path) -> Course:
    """Reads all files of ``chapters/`` and every file that they or the README link to.

    They are as last committed, so that answers in the clone's own chapters are not taken for the
    course's text; without git, as they lie there. Of ``chapters/book/``, which makes the web book,
    only the pages that are linked to. The rules for AI assistants come as ``AGENTS.md`` too, where
    those in an editor look for rules. Raises `notebook.Refused`.
    """
    if not (root / "chapters").is_dir():
        raise notebook.Refused(
            f"the course's chapters are not in {root}. Run this from a clone of the course in "
            "which `pip install -r requirements.txt` was run")
    committed = _committed(root)
    names = committed if committed is not None else [
        path.relative_to(root).as_posix() for path in (root / "chapters").rglob("*")]
    waiting = ["README.md", *(name for name in names if _CHAPTERS.match(name))]
    files: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        path = root / name
        data = committed.get(name) if committed is not None else (
            path.read_bytes() if path.is_file() else None)
        if data is None or name in files:
            continue
        if name.endswith(".ipynb"):
            data = notebook.dumps(notebook.cleared(notebook.read(path, data)))
        files[name] = data
        waiting += _linked(name, data)
    if RULES in files:
        files["AGENTS.md"] = files[RULES].replace(b"](../", b"](chapters/")
    return Course(root, dict(sorted(files.items())))


def _committed(root):
    """What each file holds in the last commit; None where git cannot say."""
    # A clone that another user made, as in a container, is read all the same.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "archive", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar if each.isfile()}


def _linked(name, data):
    """The paths in the clone that a page or a notebook links to."""
    if name.endswith(".ipynb"):
        cells = notebook.sources(notebook.read(Path(name), data))
        text = "\n".join(source for kind, source in cells if kind == "markdown")
    else:
        text = data.decode() if name.endswith(".md") else ""
    targets = ("".join(groups) for groups in _LINK.findall(text))
    paths = (posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
             for target in targets if "://" not in target)
    return [path for path in paths if not path.startswith(("..", "/"))]
