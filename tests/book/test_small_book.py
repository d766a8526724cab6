"""The making of the book, in a small course: bad chapters, folders of others, missing packages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import colab
import notebooks
import pytest
from skips import need_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BOOK = "chapters/book"


@pytest.fixture
def small_course(tmp_path):
    """A repository with the book's own files and one chapter, numbered as none of the course."""
    files = [path.name for path in (ROOT / BOOK).glob("*.py")]
    for name in (*files, "index.md", "static", "templates", "package.json", "package-lock.json"):
        copy = shutil.copytree if (ROOT / BOOK / name).is_dir() else shutil.copy
        (tmp_path / BOOK).mkdir(parents=True, exist_ok=True)
        copy(ROOT / BOOK / name, tmp_path / BOOK / name)
    (tmp_path / BOOK / "setup.md").write_text("# Set-up\n")  # the first page leads there
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "figures").mkdir()
    shutil.copy(ROOT / "figures/one_step.svg", tmp_path / "figures")
    write(tmp_path)
    return tmp_path


def write(folder, name="42_of_another_course.ipynb", text="", outputs=("42",)):
    """A chapter with a paragraph and a cell with outputs."""
    source = f"# 42 · Of another course\n\n**The question.** What is it?\n\n{text}"
    shown = [{"output_type": "execute_result", "execution_count": None, "metadata": {},
              "data": {"text/plain": each}} for each in outputs]
    made = {"nbformat": 4, "nbformat_minor": 5, "cells": [
        {"cell_type": "markdown", "id": "question", "metadata": {}, "source": source},
        {"cell_type": "code", "id": "answer", "metadata": {}, "execution_count": None,
         "source": "6 * 7", "outputs": shown}]}
    made["metadata"] = {"language_info": {"name": "python"}, "kernelspec": {
        "name": "python3", "display_name": "Python 3", "language": "python"}}
    (folder / "chapters" / name).write_text(json.dumps(made), encoding="utf-8")


def build(folder, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-c", BOOK, "chapters", "html"],
        cwd=folder, capture_output=True, text=True, timeout=300, env=environment)


def test_a_chapter_without_outputs_fails_with_its_name(small_course):
    write(small_course, outputs=())
    done = build(small_course)
    assert done.returncode and "chapters/42_of_another_course.ipynb has no outputs" in done.stderr


def test_another_chapter_is_a_page_and_links_go_to_the_repository_of_the_workflow(small_course):
    write(small_course, text="See the [answer](42_of_another_course.ipynb"
                             "#cell-id=answer), or the [README](../README.md).")
    path = small_course / "chapters/42_of_another_course.ipynb"
    notebook = colab.for_colab(notebooks.read(path), is_known=True)
    path.with_name("43_with_the_cell.ipynb").write_text(notebooks.normalise(notebook))
    done = build(small_course, GITHUB_REPOSITORY="someone/fork")
    assert done.returncode == 0, done.stderr
    page = (small_course / "html/42_of_another_course.html").read_text(encoding="utf-8")
    assert "https://github.com/someone/fork/blob/main/README.md" in page
    assert 'href="#of-another-course-answer"' in page and 'id="of-another-course-answer"' in page
    assert "mybinder.org/v2/gh/someone/fork/main" in page and "colab." not in page
    having = (small_course / "html/43_with_the_cell.html").read_text(encoding="utf-8")
    assert "colab.research.google.com/github/someone/fork/blob/main/chapters/43_with" in having
    front = (small_course / "html/book/index.html").read_text(encoding="utf-8")
    assert "42 · Of another course" in front and "What is it?" in front


def test_links_that_lead_nowhere_fail(small_course):
    links = ["no.md", "42_of_another_course.ipynb#cell-id=no-cell", "../figures/no.png"]
    write(small_course, text=" ".join(f"[there]({link})" for link in links))
    done = build(small_course)
    assert done.returncode
    assert not [name for name in ("no.md", "no-cell", "no.png") if name not in done.stderr]


def make(course, folder, **environment):
    """The documented command."""
    return subprocess.run([sys.executable, course / BOOK / "build.py", folder], text=True,
                          capture_output=True, timeout=120, env=os.environ | environment)


@pytest.fixture
def no_network(tmp_path):
    """An environment in which npm can fetch nothing, and has fetched nothing before."""
    need_program("npm")
    return {"npm_config_offline": "true", "npm_config_cache": str(tmp_path / "npm")}


def test_what_is_no_book_is_left_alone(small_course, no_network):
    other = small_course / "other"
    for name in ("conf.py", "_static/site.css"):  # as in any project with Sphinx
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("theirs")
    for folder in (other, other / "conf.py"):
        done = make(small_course, folder, **no_network)
        assert done.returncode and f"{folder} is no book" in done.stderr
    assert {path.read_text() for path in other.rglob("*.*")} == {"theirs"}


@pytest.mark.parametrize("lacking", [{"PATH": ""}, {}], ids=["npm", "network"])
def test_an_old_book_survives_where_no_packages_can_be_installed(small_course, no_network, lacking):
    formulas = small_course / "html/_static/mathjax/tex-chtml.js"
    formulas.parent.mkdir(parents=True)
    formulas.touch()
    done = make(small_course, formulas.parents[2], **no_network | lacking)
    assert done.returncode and "npm" in done.stderr and "Traceback" not in done.stderr
    assert formulas.exists()


def test_a_book_that_does_not_know_its_address_links_to_no_repository(small_course):
    write(small_course, text="See the [README](../README.md).")
    done = build(small_course, GITHUB_REPOSITORY="")
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8")
             for path in (small_course / "html").rglob("*.html")}
    assert not [name for name, text in pages.items() if "OWNER" in text or "colab." in text]
    front = pages["index.html"] + (small_course / "html/book/index.html").read_text("utf-8")
    assert "does not know its repository" in front
    assert "See the README." in pages["42_of_another_course.html"]
