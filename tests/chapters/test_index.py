"""The glossary and the index of figures: up to date, complete, readable, and every link leads."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import index
import pytest

from dplab.desk.course import APPENDICES, TITLES, heading, key_of, label, notebooks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / index.PAGE
TERMS = tomllib.loads(index.TERMS.read_text(encoding="utf-8"))["term"]
NOTEBOOKS = list(notebooks(ROOT / "chapters").values())
CHAPTERS = [path for path in NOTEBOOKS if path.stem not in APPENDICES.values()]
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
            section = re.sub(r"^(\d\d|[A-Z]) · ", "", re.sub(r"\\(.)", r"\1", match["text"]))
            assert any(heading.endswith(section) for heading in headings(target, match["cell"]))


def test_every_term_is_there_once_and_reads_alone():
    rows = {match["term"]: match["text"] for match in ROW.finditer(PAGE.read_text("utf-8"))}
    texts = {term["name"]: index.escaped(term["text"]) for term in TERMS}
    assert rows == texts and len(TERMS) == len(texts) >= 50
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


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"id": "three-words"', '"id": "words"', r"00_start_here.ipynb has no cell 'three-words'"),
    ("a **rank** is", "a rank is", "rank: 'rank' stands neither in bold nor in a heading nor as"),
    ("is the **root**", "is the root", r"root \(of a collective\): 'root' stands neither in bold"),
])
def test_a_term_that_its_chapter_does_not_introduce_is_an_error(course, old, new, message):
    root, replace = course
    replace("00_start_here.ipynb", old, new)
    with pytest.raises(ValueError, match=message):
        index.build(root)


@pytest.mark.parametrize(("name", "label"), [("04_sample", "04"), ("appendix_rounding", "A")])
def test_each_term_stands_under_the_heading_before_it(tmp_path, name, label):
    path = tmp_path / f"{name}.ipynb"
    draft = ("# %% [markdown] id=a\n# # 04 · T\n# One is **x**.\n# ## Sec `t`\n# Two is **y**.\n\n"
             "# %% [markdown] id=b\n# ### Exercise 4.1 · E\n# Do.\n\n"
             "# %% [markdown] id=c\n# Three is `z()`.\n\n"
             "# %% [markdown] id=d\n# ## Of w\n# Plain v.\n")
    path.write_text(index.notebooks.normalise(index.notebooks.from_percent(draft)))
    chapter = index.Chapter(path)
    links = [chapter.link(cell, index.introduced({"name": term, "cell": cell}, chapter))
             for term, cell in (("x", "a"), ("y", "a"), ("z", "c"), ("w", "d"))]
    assert links == [f"[04 · T]({name}.ipynb#cell-id=a)",
                     f"[{label} · Sec `t`]({name}.ipynb#cell-id=a)",
                     f"[{label} · Sec `t`]({name}.ipynb#cell-id=c)",
                     f"[{label} · Of w]({name}.ipynb#cell-id=d)"]
    with pytest.raises(ValueError, match="neither in bold"):
        index.introduced({"name": "v", "cell": "d"}, chapter)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_titles_are_those_of_the_notebooks_and_of_the_readme(path):
    key = key_of(path.stem)
    assert headings(path)[0] == heading(key)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {label(key)} | [{TITLES[key]}](chapters/{path.name}) |" in readme


def test_every_notebook_is_a_chapter_or_an_appendix_with_a_title():
    assert sorted(NOTEBOOKS) == sorted((ROOT / "chapters").glob("*.ipynb"))
    assert [key_of(path.stem) for path in NOTEBOOKS] == list(TITLES)


def test_the_list_of_chapters_is_up_to_date():
    text = (ROOT / index.CONTENTS).read_text(encoding="utf-8")
    assert text == index.contents(), "run python tests/tools/index.py"
    assert re.findall(r"\]\((\w+\.ipynb)\)", text) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_leads_to_the_list_the_glossary_and_the_next(path):
    """An appendix leads back to a chapter, and the last chapter to the list."""
    first, *_, last = index.notebooks.read(path).cells
    assert "](contents.md)" in first.source and "](glossary.md)" in first.source
    word = "Next" if path in CHAPTERS else "Back"
    [(title, target)] = re.findall(rf"^\*\*{word}:\*\* \[(.*)\]\((.*)\)$", last.source,
                                   re.MULTILINE)
    assert last.source.endswith(f"[{title}]({target})")
    following = CHAPTERS[CHAPTERS.index(path) + 1:][:1] if path in CHAPTERS else CHAPTERS
    if following:
        assert (target, title) in [(each.name, headings(each)[0]) for each in following]
    else:
        assert target == "contents.md"


def test_the_readme_leads_to_the_page():
    assert f"]({index.PAGE})" in (ROOT / "README.md").read_text(encoding="utf-8")
