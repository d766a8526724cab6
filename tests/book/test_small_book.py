"""The making of the book, in a small course: bad chapters, folders of others, missing packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import colab
import notebooks
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BOOK = "chapters/book"


@pytest.fixture
def small_course(tmp_path):
    """A repository with the book's own files and one chapter, numbered as none of the course."""
    shutil.copytree(ROOT / BOOK, tmp_path / BOOK,
                    ignore=lambda _, names: {*names} & {"_build", "node_modules", "planner",
                                                        "planner.md"})
    for path in (tmp_path / BOOK).glob("*.md"):
        if path.name != "index.md":
            path.write_text("# Set-up\n") if path.name == "setup.md" else path.unlink()
    for name in ("pyproject.toml", "README.md", "figures/one_step.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write(tmp_path)
    return tmp_path


def write(folder, text="", outputs=("42",), on_colab=False, name="42_of_another_course"):
    """A chapter with a paragraph and a cell with outputs."""
    made = new_notebook(cells=[
        new_markdown_cell(f"# 42 · Of another course\n\n**The question.** What is it?\n\n{text}",
                          id="question"),
        new_code_cell("6 * 7", id="answer", outputs=[
            new_output("execute_result", {"text/plain": each}) for each in outputs])])
    (folder / f"chapters/{name}.ipynb").write_text(
        notebooks.normalise(colab.for_colab(made, on_colab)), encoding="utf-8")


def build(folder, repository):
    """What Sphinx says, and the pages' texts by name."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", BOOK,
         "chapters", "html"], cwd=folder, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GITHUB_REPOSITORY": repository})
    return done, {path.relative_to(folder / "html").as_posix(): path.read_text(encoding="utf-8")
                  for path in (folder / "html").rglob("*.html")}


def test_another_chapter_is_a_page_and_links_go_to_the_repository_of_the_workflow(small_course):
    text = "The [answer](42_of_another_course.ipynb#cell-id=answer), and [README](../README.md)."
    write(small_course, text)
    write(small_course, on_colab=True, name="43_with_the_cell")
    done, pages = build(small_course, "someone/fork")
    assert done.returncode == 0, done.stderr
    page, having = pages["42_of_another_course.html"], pages["43_with_the_cell.html"]
    assert "https://github.com/someone/fork/blob/main/README.md" in page
    [link] = BeautifulSoup(page, "html.parser").select("a[href='#of-another-course-answer']")
    [target] = link.find_all_next(id="of-another-course-answer")
    assert target.find_next(class_="cell_input").text.strip() == "6 * 7"
    assert "stored outputs of one run" in page and "codespaces.new/someone/fork" in page
    assert "mybinder.org/v2/gh/someone/fork/main" in page and "colab." not in page
    assert "colab.research.google.com/github/someone/fork/blob/main/chapters/43_with" in having
    front = pages["book/index.html"]
    assert "42 · Of another course" in front and "What is it?" in front


def test_a_book_that_does_not_know_its_address_links_to_no_repository(small_course):
    write(small_course, "See the [README](../README.md).")
    done, pages = build(small_course, "")
    assert done.returncode == 0, done.stderr
    assert not [name for name, text in pages.items() if "OWNER" in text or "colab." in text]
    assert "does not know its repository" in pages["index.html"] + pages["book/index.html"]
    assert "See the README." in pages["42_of_another_course.html"]


def test_links_that_lead_nowhere_and_a_chapter_without_outputs_fail_by_name(small_course):
    links = ["no.md", "42_of_another_course.ipynb#cell-id=no-cell", "../figures/no.png"]
    write(small_course, " ".join(f"[there]({link})" for link in links))
    done, _ = build(small_course, "")
    assert done.returncode
    assert not [name for name in ("no.md", "no-cell", "no.png") if name not in done.stderr]
    write(small_course, outputs=())
    done, _ = build(small_course, "")
    assert done.returncode and "chapters/42_of_another_course.ipynb has no outputs" in done.stderr


def test_what_is_no_book_and_an_old_book_survive_where_no_packages_can_be_installed(small_course):
    formulas = small_course / "html/_static/mathjax/tex-chtml.js"  # as in a book
    other = small_course / "other/_static/site.css"  # as in any project with Sphinx
    for path in (formulas, other):
        path.parent.mkdir(parents=True)
        path.touch()
    for folder, said in ((small_course / "html", "npm"), (other.parents[1], "is no book"),
                         (other, "is no book")):
        done = subprocess.run(
            [sys.executable, small_course / BOOK / "build.py", folder], text=True,
            capture_output=True, timeout=120, env=os.environ | {"PATH": ""})
        assert done.returncode and said in done.stderr and "Traceback" not in done.stderr
    assert formulas.exists() and other.exists()
