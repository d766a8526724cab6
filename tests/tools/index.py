"""Writes the pages beside the chapters: glossary.md and contents.md.

The terms stand in chapters/book/glossary.toml, and the chapters have the places where they are
introduced; the list of chapters is README's.

    python tests/tools/index.py
"""

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import notebooks

from dplab.desk import course

ROOT = Path(__file__).resolve().parents[2]
PAGE, CONTENTS = "chapters/glossary.md", "chapters/contents.md"
TERMS = ROOT / "chapters/book/glossary.toml"
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CHAPTER_ROW = re.compile(r"\| [\w ]+ \| \[.*?\]\(chapters/\w+\.ipynb\)")
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
HEAD_OF_CONTENTS = """\
# Chapters

"""
END_OF_CONTENTS = """
To look something up: the [glossary](glossary.md). How the time of a step is
predicted, part by part: [one step by hand](one_step_by_hand.md). How to set up, and what to do when
something is in the way: [set-up](book/setup.md). For [teachers](book/teachers.md), and for learners
with an [AI assistant](book/assistants.md).

<!-- not in the book -->
`python tests/tools/index.py` makes this page from the table of the [README](../README.md).
"""


@dataclass
class Chapter:
    path: Path

    def __post_init__(self):
        self.cells = notebooks.read(self.path).cells

    @property
    def key(self):
        return course.key_of(self.path.stem)

    @property
    def title(self):
        return next(heading[1] for heading in HEADING.finditer(self.cells[0].source))

    def cell(self, id):
        found = [cell for cell in self.cells if cell.id == id]
        if not found:
            raise ValueError(f"{self.path.name} has no cell {id!r}")
        return found[0]

    def link(self, id, position=None):
        """To a cell, by the name of the section that this place in it belongs to.

        The section goes on behind an exercise. JupyterLab finds a cell by its id, and a heading
        only in a notebook that is open already.
        """
        headings = [self.title]
        for cell in self.cells[:self.cells.index(self.cell(id)) + 1]:
            if cell.cell_type == "markdown":
                text = FENCE.sub(lambda match: " " * len(match[0]), cell.source)
                end = position if cell.id == id and position is not None else len(text)
                headings += [heading for heading in HEADING.findall(text, 0, end)
                             if not heading.startswith("Exercise ")]
        label = "" if headings[-1] == self.title else f"{course.label(self.key)} · "
        return link(label + headings[-1], f"{self.path.name}#cell-id={id}")


def link(text, address):
    return f"[{escaped(text)}]({address})"


def escaped(text):
    return re.sub(r"[|\[\]]", lambda match: "\\" + match[0], text)


def introduced(term, chapter):
    """Where in its cell the chapter introduces the term: in bold, in a heading, or as code."""
    words = term.get("as", term["name"])
    name = re.escape(words)
    marked = re.compile(rf"(?i:\*\*{name}\*\*|^#+ .*\b{name}\b.*$)|`{name}[`(]", re.MULTILINE)
    found = marked.search(chapter.cell(term["cell"]).source)
    if found is None:
        raise ValueError(f"{term['name']}: {words!r} stands neither in bold nor in a heading nor "
                         f"as code in {chapter.path.name}, cell {term['cell']}")
    return found.end()


def rows(terms, chapters):
    """The table's lines, in the order of the alphabet."""
    for term in sorted(terms, key=lambda term: (term["name"].casefold(), term["name"])):
        chapter = chapters[term["chapter"]]
        place = chapter.link(term["cell"], introduced(term, chapter))
        yield f"| **{term['name']}** | {escaped(term['text'])} | {place} |"


def build(root=ROOT):
    """The page's text."""
    chapters = {key: Chapter(path) for key, path in course.notebooks(root / "chapters").items()}
    terms = tomllib.loads(TERMS.read_text(encoding="utf-8"))["term"]
    return HEAD + "\n".join(rows(terms, chapters)) + "\n"


def contents(root=ROOT):
    """The text of the list of chapters: README's table, as seen from the chapters' folder."""
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if CHAPTER_ROW.match(line)]
    head = lines.index(rows[0]) - 2
    table = [line.replace("](chapters/", "](") for line in [*lines[head:head + 2], *rows]]
    ways = SHORT_WAYS.search((root / "README.md").read_text(encoding="utf-8"))[1]
    return HEAD_OF_CONTENTS + "\n".join(table) + "\n\n" + ways + END_OF_CONTENTS


if __name__ == "__main__":
    (ROOT / CONTENTS).write_text(contents(), encoding="utf-8")
    try:
        (ROOT / PAGE).write_text(build(), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"{PAGE} is left as it was: {error}")
