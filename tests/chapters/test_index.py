"""The glossary, the index of figures and the list of chapters are those of today's chapters."""

import re
import tomllib

import index
import pytest
from sandbox import ROOT

from dplab.desk.course import APPENDICES, TITLES, heading, key_of, label, notebooks

NOTEBOOKS = list(notebooks(ROOT / "chapters").values())
CHAPTERS = [path for path in NOTEBOOKS if path.stem not in APPENDICES.values()]


def title_of(path):
    return index.Chapter(path).title


def test_the_pages_are_up_to_date():
    """Each term is then in bold, in a heading or as code where its chapter introduces it."""
    glossary, contents = (ROOT / name for name in (index.PAGE, index.CONTENTS))
    assert glossary.read_text(encoding="utf-8") == index.build(), "run python tests/tools/index.py"
    assert contents.read_text(encoding="utf-8") == index.contents()


def test_every_term_is_there_once():
    terms = tomllib.loads(index.TERMS.read_text(encoding="utf-8"))["term"]
    names = [term["name"].casefold() for term in terms]
    assert len(names) == len(set(names)) >= 50


def test_every_notebook_is_a_chapter_or_an_appendix_with_a_title():
    assert sorted(NOTEBOOKS) == sorted((ROOT / "chapters").glob("*.ipynb"))
    assert [key_of(path.stem) for path in NOTEBOOKS] == list(TITLES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_titles_are_those_of_the_notebooks_and_of_the_readme(path):
    key = key_of(path.stem)
    assert title_of(path) == heading(key)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {label(key)} | [{TITLES[key]}](chapters/{path.name}) |" in readme


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_leads_to_the_list_the_glossary_and_the_next(path):
    """An appendix leads back to a chapter, and the last chapter to the list."""
    first, *_, last = index.notebooks.read(path).cells
    assert "](contents.md)" in first.source and "](glossary.md)" in first.source
    word = "Next" if path in CHAPTERS else "Back"
    [link] = re.findall(rf"^\*\*{word}:\*\* \[(.*)\]\((.*)\)$", last.source, re.MULTILINE)
    following = CHAPTERS[CHAPTERS.index(path) + 1:][:1] if path in CHAPTERS else CHAPTERS
    if following:
        assert link in [(title_of(each), each.name) for each in following]
    else:
        assert link[1] == "contents.md"
