"""Notebooks of a few cells, and a small course in a git repository, for tests of ``dplab lab``."""

import json
import subprocess

STUB = '''\
def total(values):
    """The sum over all ranks."""
    raise NotImplementedError("your turn")'''
ANSWER = """\
def total(values):
    # the reader's way
    return sum(values)"""


def cell(id, source, *, slug=None, kind="code", outputs=()):
    """A cell as a notebook file has it; with a slug, an exercise's."""
    metadata = {"tags": ["exercise"], "dplab": {"exercise": slug}} if slug else {}
    extra = {"outputs": list(outputs), "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "id": id, "metadata": metadata, "source": source, **extra}


def text(id, source):
    return cell(id, source, kind="markdown")


def book(*cells):
    return {"cells": [dict(each) for each in cells], "metadata": {}, "nbformat": 4,
            "nbformat_minor": 5}


def chapter(title="All-reduce", slug="total-of-ranks"):
    """A chapter with prose, a cell of the course, an exercise, a guess and a picture."""
    shown = {"output_type": "stream", "name": "stdout", "text": ["the result gives it away\n"]}
    return book(
        text("question", f"# {title}\n\n![ring](../figures/ring.svg) [all](../README.md)"),
        cell("setup", "ranks = 4", outputs=[shown]),
        cell("stub-total", STUB, slug=slug),
        cell("check-total", 'check("total-of-ranks", total)', outputs=[shown]),
        cell("guess-bytes", 'dplab.guess("bytes-moved", "How many bytes?", unit="MB")'),
        cell("last", "print(ranks)"))


def sources(notebook):
    """The text of each cell, as it stands in a file or in memory."""
    return ["".join(each["source"]) for each in notebook["cells"]]


def write(path, notebook):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook, indent=1))


def read(path):
    return json.loads(path.read_text())


def edit(path, change):
    """``change`` edits the list of a notebook file's cells in place."""
    notebook = read(path)
    change(notebook["cells"])
    write(path, notebook)


def by_id(cells, id):
    return next(each for each in cells if each["id"] == id)


def make_course(root):
    """Writes the small course and commits it; returns its folder."""
    write(root / "chapters/00_start_here.ipynb", chapter("Start here", "another-total"))
    write(root / "chapters/03_all_reduce.ipynb", chapter())
    for name, content in {"chapters/data/sweep.json": "[1, 2]\n", "figures/ring.svg": "<svg/>\n",
                          "chapters/03_launch/train.py": "print('train')\n",
                          "README.md": "# Course\n\n[first](chapters/00_start_here.ipynb)\n",
                          "figures/ring.py": "draws ring.svg\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    git(root, "init", "-q")
    commit(root)
    return root


def commit(root):
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "a version")


def git(root, *arguments):
    subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)
