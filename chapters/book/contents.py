"""The front page's contents and the book's navigation, made from the files that are there."""

import re
from pathlib import Path

from links import CHAPTERS, read

from dplab.desk import course

MARK = "<!-- contents -->"
DRAFT = "**This is a draft.**"
QUESTION = re.compile(r"\*\*The question\.\*\*\s+(.+?)(?:\n\n|\Z)", re.DOTALL)
# Beside the notebooks; those that are not there are left out.
TOOLS = {"Plan and look up": ["book/planner", "contents", "glossary", "one_step_by_hand"],
         "Use the course": ["book/setup", "book/teachers", "book/assistants", "book/contributing"]}


def setup(app):
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def fill_in(app, docname, source):
    """Puts the contents in place of their mark."""
    if MARK not in source[0]:
        return
    groups = {"Chapters": [], "Drafts": [], "Appendices": []}
    for key, path in course.notebooks(CHAPTERS).items():
        chapter = Chapter(path)
        kind = ("Drafts" if chapter.draft else
                "Appendices" if isinstance(key, str) else "Chapters")
        groups[kind].append(chapter)
    parts = [section(kind, chapters) for kind, chapters in groups.items() if chapters]
    for kind, names in TOOLS.items():
        there = [f"/{name}" for name in names if name in app.project.docnames]
        parts += [toctree(kind, there)] if there else []
    source[0] = source[0].replace(MARK, "\n\n".join(parts))


class Chapter:
    """What the contents say of a notebook: all of it stands in the first cell."""

    def __init__(self, path: Path):
        first = read(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        self.path = path
        self.draft = DRAFT in first
        heading = re.search(r"^# (.+)$", first, re.MULTILINE)
        self.title = (heading[1] if heading else path.stem) + " (draft)" * self.draft
        question = QUESTION.search(first)
        self.question = " ".join(question[1].split()) if question else ""


def section(kind, chapters):
    """A list of chapters, and their place in the navigation."""
    rows = [f"- [{each.title}](/{each.path.name})  \n  {each.question}" for each in chapters]
    entries = [f"{each.title} </{each.path.stem}>" for each in chapters]
    return "\n".join([f"## {kind}", "", *rows, "", toctree(kind, entries)])


def toctree(kind, entries):
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {kind}", "", *entries, "```"])
