"""The glossary and the index of figures: up to date, complete, readable, and every link leads."""

import json
import re
import shutil
from pathlib import Path

import index
import pytest
from terms import TERMS, Term

from dplab.exercises.cards import TITLES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / index.PAGE
NOTEBOOKS = sorted((ROOT / "chapters").glob("*.ipynb"))
LINK = re.compile(r"(?<!\\)\[(?P<text>(?:\\.|[^\]\\])+)\]"
                  r"\((?P<path>[^)#]+)(?:#cell-id=(?P<cell>[^)]+))?\)")
ROW = re.compile(r"^\| \*\*(?P<term>.+?)\*\* \| (?P<text>.+) \| (?P<link>.+) \|$", re.MULTILINE)


def cells(path):
    """As (id, kind, source, outputs), read without the tool."""
    return [(cell["id"], cell["cell_type"], "".join(cell["source"]), cell.get("outputs", []))
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def headings(path, last=None):
    """Of all Markdown cells, or of those up to the cell ``last``."""
    found = []
    for id, kind, source, _ in cells(path):
        if kind == "markdown":
            text = re.sub(r"(?ms)^```.*?^```", "", source)
            found += re.findall(r"(?m)^#{1,6} (.*)", text)
        if id == last:
            break
    return found


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == index.build(), "run python tests/tools/index.py"


def test_every_link_leads_somewhere():
    text = PAGE.read_text(encoding="utf-8")
    links = list(LINK.finditer(text))
    assert len(links) == text.count("](") > 100
    for match in links:
        target = (PAGE.parent / match["path"]).resolve()
        assert target.is_file() and target.is_relative_to(ROOT), match[0]
        if match["cell"]:
            assert match["cell"] in [id for id, *_ in cells(target)], match[0]
            section = re.sub(r"^\d\d · ", "", re.sub(r"\\(.)", r"\1", match["text"]))
            assert any(heading.endswith(section) for heading in headings(target, match["cell"]))


def test_every_term_is_there_once_and_reads_alone():
    rows = {match["term"]: match["text"] for match in ROW.finditer(PAGE.read_text("utf-8"))}
    names = [term.name for term in TERMS]
    assert sorted(rows) == sorted(names) and len(set(names)) == len(names) >= 50
    assert list(rows) == sorted(rows, key=str.casefold)
    for name, text in rows.items():
        assert 25 < len(text) < 320 and text[-1] == "." and not text[0].islower(), name
        assert not re.match("(It|This|That|These|They|So|And|But|Then|Here|There)[ ,]", text), name
        assert not re.search(r"\b(above|our|here|we|this (cell|chapter))\b", text), name
        assert text.count("*") % 2 == 0 and text.count("`") % 2 == 0 and "$" not in text, name


def test_every_picture_is_in_the_index():
    text = PAGE.read_text(encoding="utf-8").split("## Figures")[1]
    listed = [line for line in text.splitlines() if line.startswith("- ")]
    count = 1  # README's
    for path in NOTEBOOKS:
        for _, kind, source, outputs in cells(path):
            count += (len(re.findall(r"\(\.\./figures/\w+\.svg\)", source)) if kind == "markdown"
                      else sum("image/png" in output.get("data", {}) for output in outputs))
    assert len(listed) == count
    assert len({line.split("(")[0] for line in listed}) == count, "titles differ"
    for svg in (ROOT / "figures").glob("*.svg"):
        assert f"(../figures/{svg.name})" in text


@pytest.fixture
def course(tmp_path):
    """A copy that a test may spoil, and a way to replace words in a chapter."""
    for folder in ("chapters", "figures"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def replace(name, old, new):
        path = tmp_path / "chapters" / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
    return tmp_path, replace


def test_a_definition_follows_its_chapter(course):
    root, replace = course
    replace("00_start_here.ipynb", "is one process of a job", "is a process of one job")
    assert "| **rank** | A rank is a process of one job, numbered from 0. |" in index.build(root)


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"id": "three-words"', '"id": "words"', r"00_start_here.ipynb has no cell 'three-words'"),
    ("a **rank** is", "a rank is", r"rank: no sentence with '\*\*rank\*\*'"),
    ("how many there are", "their number", "world size: 'how many there are' is not once"),
])
def test_a_term_whose_cell_or_words_are_gone_is_an_error(course, old, new, message):
    root, replace = course
    replace("00_start_here.ipynb", old, new)
    with pytest.raises(ValueError, match=message):
        index.build(root)


@pytest.mark.parametrize(("source", "found"), [
    ("- a **rank** is one;\n- a **b** is\n  two;", ["a **rank** is one;", "a **b** is two;"]),
    ('One "is." Two is `x.y`. `z` ends.', ['One "is."', "Two is `x.y`.", "`z` ends."]),
    ("| a | b. C |\n|---|---|\n| **c** | d |", ["a", "b.", "C", "---", "---", "**c**", "d"]),
    ("## Head\nText 1.5 x.\n\nMore.", ["## Head", "Text 1.5 x.", "More."]),
])
def test_sentences(source, found):
    assert list(index.sentences(source)) == found


def test_a_definition_stands_under_the_heading_before_it(tmp_path):
    path = tmp_path / "04_sample.ipynb"
    draft = ("# %% [markdown] id=a\n# # 04 · T\n# One is **x**.\n# ## Sec `t`\n# Two is **y**.\n\n"
             "# %% [markdown] id=b\n# ### Exercise 4.1 · E\n# Do.\n\n"
             "# %% [markdown] id=c\n# Three is **z**.\n")
    path.write_text(index.notebooks.normalise(index.notebooks.from_percent(draft)))
    chapter = index.Chapter(path)
    links = {}
    for name, cell in (("x", "a"), ("y", "a"), ("z", "c")):
        text, position = index.definition(Term(name, 4, cell), chapter)
        links[text] = chapter.link(cell, position)
    assert links == {"One is x.": "[04 · T](04_sample.ipynb#cell-id=a)",
                     "Two is y.": "[04 · Sec `t`](04_sample.ipynb#cell-id=a)",
                     "Three is z.": "[04 · Sec `t`](04_sample.ipynb#cell-id=c)"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_titles_are_those_of_the_notebooks_and_of_the_readme(path):
    number = path.name[:2]
    title = TITLES[int(number)]
    assert headings(path)[0] == f"{number} · {title}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {number} | [{title}](chapters/{path.name}) |" in readme


def test_the_readme_leads_to_the_page():
    assert f"]({index.PAGE})" in (ROOT / "README.md").read_text(encoding="utf-8")
