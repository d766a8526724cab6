"""Writes the pages beside the chapters: glossary.md and contents.md.

The terms stand in chapters/book/glossary.toml, and the chapters have the places where they are
introduced; the list of chapters is README's.

    python tests/tools/index.py
"""

import re
import sys
import tomllib
from pathlib import Path

import notebooks

from dplab.desk import course

ROOT = Path(__file__).resolve().parents[2]
PAGE, CONTENTS = "chapters/glossary.md", "chapters/contents.md"
TERMS = ROOT / "chapters/book/glossary.toml"
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# README's table of chapters with its head, and what follows up to the next heading.
CHAPTERS = re.compile(r"(?:^\|.*\n){2}(?:^\| [\w ]+ \| \[.*?\]\(chapters/\w+\.ipynb\).*\n)+",
                      re.MULTILINE)
SHORT_WAYS = re.compile(r"<!-- short ways -->\n(.*?)\n## ", re.DOTALL)

HEAD = """\
# Glossary

The terms of the course, each with the chapter that introduces it. A link names a section and opens
its chapter.

<!-- not in the book -->
JupyterLab then goes to the very cell; where the chapter was not open before, that may take a second
click. (`python tests/tools/index.py` makes this page.)

| term | what it is | chapter |
|:--|:--|:--|
"""
END_OF_CONTENTS = """
To look something up: the [glossary](glossary.md). How the time of a step is
predicted, part by part: [one step by hand](one_step_by_hand.md). How to set up, and what to do when
something is in the way: [set-up](book/setup.md). For [teachers](book/teachers.md), and for learners
with an [AI assistant](book/assistants.md).

<!-- not in the book -->
`python tests/tools/index.py` makes this page from the table of the [README](../README.md).
"""


class Chapter:
    """The notebook of a key of the course, such as 3."""

    def __init__(self, key):
        self.key, self.path = key, course.notebooks(ROOT / "chapters")[key]
        self.cells = notebooks.read(self.path).cells
        self.title = HEADING.search(self.cells[0].source)[1]

    def row(self, term):
        """A term's line of the glossary, with a link to where the chapter introduces it.

        That is in bold, in a heading, or as code; ValueError if it is nowhere in the term's cell.
        The link has the name of the section that this place belongs to, which goes on behind an
        exercise, and the cell's id: JupyterLab finds a heading only in a notebook that is open.
        """
        words, id = term.get("as", term["name"]), term["cell"]
        place = next((at for at, cell in enumerate(self.cells) if cell.id == id), None)
        if place is None:
            raise ValueError(f"{self.path.name} has no cell {id!r}")
        name, source = re.escape(words), self.cells[place].source
        marked = re.search(rf"(?im:\*\*{name}\*\*|^#+ .*\b{name}\b.*$)|`{name}[`(]", source)
        if marked is None:
            raise ValueError(f"{term['name']}: {words!r} stands neither in bold nor in a heading "
                             f"nor as code in {self.path.name}, cell {id}")
        before = [cell.source for cell in self.cells[:place] if cell.cell_type == "markdown"]
        text = FENCE.sub("", "\n\n".join([*before, source[:marked.end()]]))
        section = [heading for heading in HEADING.findall(text)
                   if not heading.startswith("Exercise ")][-1]
        if section != self.title:
            section = f"{course.label(self.key)} · {section}"
        return (f"| **{term['name']}** | {escaped(term['text'])} | [{escaped(section)}]"
                f"({self.path.name}#cell-id={id}) |")


def escaped(text):
    return re.sub(r"[|\[\]]", lambda match: "\\" + match[0], text)


def build():
    """The glossary's text, in the order of the alphabet."""
    chapters = {key: Chapter(key) for key in course.notebooks(ROOT / "chapters")}
    terms = tomllib.loads(TERMS.read_text(encoding="utf-8"))["term"]
    terms.sort(key=lambda term: (term["name"].casefold(), term["name"]))
    return HEAD + "".join(chapters[term["chapter"]].row(term) + "\n" for term in terms)


def contents():
    """The text of the list of chapters: README's table, as seen from the chapters' folder."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = CHAPTERS.search(readme)[0].replace("](chapters/", "](")
    return f"# Chapters\n\n{table}\n{SHORT_WAYS.search(readme)[1]}{END_OF_CONTENTS}"


if __name__ == "__main__":
    (ROOT / CONTENTS).write_text(contents(), encoding="utf-8")
    try:
        (ROOT / PAGE).write_text(build(), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"{PAGE} is left as it was: {error}")
