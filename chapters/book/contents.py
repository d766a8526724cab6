"""The front page's contents and the book's navigation, made from the files that are there."""

import functools
import html
import re
from pathlib import Path

import nbformat
from links import CHAPTERS, ROOT
from pages import unknown

from dplab.desk import course

MARK = "<!-- contents -->"
README = ROOT / "README.md"
NO_ADDRESS = ("*This build does not know its repository's address: what leads there is left out.*")
QUESTION = re.compile(r"\*\*The question\.\*\*\s+(.+?)(?:\n\n|\Z)", re.DOTALL)
# Beside the notebooks; those that are not there are left out.
TOOLS = {"Plan and look up": ["book/planner", "contents", "glossary", "one_step_by_hand"],
         "Use the course": ["book/setup", "book/teachers", "book/assistants", "book/contributing"]}


def setup(app):
    app.connect("source-read", fill_in)
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def fill_in(app, docname, source):
    """Puts the contents in place of their mark."""
    if MARK not in source[0]:
        return
    groups = {"Chapters": [], "Appendices": []}
    for key, path in course.notebooks(CHAPTERS).items():
        groups["Appendices" if isinstance(key, str) else "Chapters"].append(Chapter(path))
    parts = [section(kind, [each.row for each in chapters], [each.entry for each in chapters])
             for kind, chapters in groups.items() if chapters]
    for kind, names in TOOLS.items():
        there = [name for name in names if name in app.project.docnames]
        if there:
            parts.append(section(kind, [f"- [](/{name}.md)" for name in there],
                                 [f"/{name}" for name in there]))
    if unknown(app):
        parts.insert(0, NO_ADDRESS)
    source[0] = source[0].replace(MARK, "\n\n".join(parts))


def describe(app, pagename, templatename, context, doctree):
    """For search engines: a chapter's page has its question."""
    path = CHAPTERS / f"{pagename}.ipynb"
    if path.exists() and (question := re.sub(r"[*`]", "", Chapter(path).question)):
        context["metatags"] += f'<meta name="description" content="{html.escape(question)}">'


@functools.cache
def readme():
    return README.read_text(encoding="utf-8")


@functools.cache  # for the contents, and for the description of its own page
class Chapter:
    """What the contents say of a notebook: all of it stands in the first cell."""

    def __init__(self, path: Path):
        first = nbformat.read(path, as_version=4).cells[0].source
        heading = re.search(r"^# (.+)$", first, re.MULTILINE)
        self.title = heading[1] if heading else path.stem
        question = QUESTION.search(first)
        self.question = " ".join(question[1].split()) if question else ""
        time = re.search(rf"\]\(chapters/{path.name}\).*\| ([^|]+) \|$", readme(), re.MULTILINE)
        self.row = f"- [{self.title}](/{path.name})" + (f", {time[1]}" if time else "")
        if question:
            self.row += "  \n  " + self.question
        self.entry = f"{self.title} </{path.stem}>"


def section(kind, rows, entries):
    """A list of pages on the front page, and their place in the navigation."""
    toctree = ["```{toctree}", ":hidden:", f":caption: {kind}", "", *entries, "```"]
    return "\n".join([f"## {kind}", "", *rows, "", *toctree])
