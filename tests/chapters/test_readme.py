"""README, CONTRIBUTING and the pages beside the chapters: links, commands and times are true."""

import contextlib
import importlib.util
import re

import aims
import index
import one_step
import pytest
from sandbox import ROOT

import dplab
from dplab import __main__
from dplab.checks import every_exercise
from dplab.desk.course import APPENDICES, TITLES, heading, key_of, label, notebooks

PATHS = ["README.md", ".github/CONTRIBUTING.md", "chapters/book/setup.md",
         "chapters/book/teachers.md", "chapters/book/assistants.md"]
PAGES = {path: (ROOT / path).read_text(encoding="utf-8") for path in PATHS}
README, _, SETUP, TEACHERS, _ = PAGES.values()
EXERCISES = {exercise.slug: exercise.minutes for exercise in every_exercise()}
NOTEBOOKS = notebooks(ROOT / "chapters")
MINUTES = {label(key): aims.Chapter(path).minutes(EXERCISES) for key, path in NOTEBOOKS.items()}


def test_links_lead_to_what_is_there_and_to_every_page():
    for path, page in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+)\)", page):
            assert (ROOT / path).parent.joinpath(target).exists(), f"{path}: {target}"
    linked = re.findall(r"\]\(([^)]+)\)", README)
    chapters = [link for link in linked if link.endswith(".ipynb")]
    assert chapters == [f"chapters/{path.name}" for path in NOTEBOOKS.values()]
    assert set(PATHS[1:]) <= set(linked)


def test_what_commands_name_is_there(capsys):
    pages = "\n".join(PAGES.values())
    for module in set(re.findall(r"python -m (dplab[.\w]*)", pages)):
        assert importlib.util.find_spec(module), module
    for script in set(re.findall(r"python ((?:tests|chapters)/\S+\.py)", pages)):
        assert (ROOT / script).exists(), script
    for name in set(re.findall(r"\bdplab\.(\w+)(?=[(`, ])", pages)):
        assert hasattr(dplab, name), name
    for command in set(re.findall(r"(?:`|bin/|^)dplab (\w+)", pages, re.MULTILINE)):
        with contextlib.suppress(SystemExit):
            assert __main__.main([command, "--help"]) != 2
        said = capsys.readouterr()
        options = set(re.findall(rf"dplab {command} (--[\w-]+)", pages))
        assert not said.err and options <= set(re.findall(r"--[\w-]+", said.out)), command


def test_the_smaller_torch_is_the_one_of_the_requirements():
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==\S+", requirements, re.MULTILINE)[0]
    for page in (README, SETUP):
        assert f"pip install {pinned} --index-url https://download.pytorch.org/whl/cpu\n" in page


# Times, by tests/tools/aims.py


def test_the_times_in_the_readme_are_the_computed_ones():
    stated = re.findall(r"^\| (\d\d|[A-Z]) \|.*\| (\d+)(½?) (min|h) \|$", README, re.MULTILINE)
    assert {chapter for chapter, *_ in stated} == set(MINUTES)
    for chapter, number, half, unit in stated:
        minutes = (int(number) + bool(half) / 2) * {"min": 1, "h": 60}[unit]
        assert minutes == pytest.approx(MINUTES[chapter], rel=0.15), chapter
    ways = re.findall(r"^\| [^|]+ \| (\d\d[\d, to]*) \| [^|]+ \| (\d+) h \|$", README, re.MULTILINE)
    assert len(ways) > 3
    for chapters, hours in ways:
        first, _, last = chapters.partition(" to ")
        names = ([f"{number:02d}" for number in range(int(first), int(last) + 1)] if last
                 else chapters.split(", "))
        assert 60 * int(hours) == pytest.approx(sum(map(MINUTES.get, names)), rel=0.05), chapters


def test_the_plan_for_teachers_has_every_chapter_and_its_minutes():
    rows = re.findall(r"^\| \d+ \| ([\d, ]+) \| (\d+) \|", TEACHERS, re.MULTILINE)
    planned = [chapter for chapters, _ in rows for chapter in chapters.split(", ")]
    assert planned == [f"{number:02d}" for number in range(13)]
    for chapters, stated in rows:
        assert int(stated) == sum(map(MINUTES.get, chapters.split(", "))), chapters


# Pages that scripts write, and what they are written from


def test_the_written_pages_are_those_of_today():
    """Each term is then in bold, in a heading or as code where its chapter introduces it."""
    for name, text, script in ((index.PAGE, index.build(), "index"),
                               (index.CONTENTS, index.contents(), "index"),
                               (one_step.PAGE, one_step.page(), "one_step")):
        assert (ROOT / name).read_text(encoding="utf-8") == text, (
            f"run python tests/tools/{script}.py")


def test_each_notebook_has_its_title_and_leads_to_the_list_the_glossary_and_the_next():
    """An appendix leads back to a chapter, and the last chapter to the list."""
    assert sorted(NOTEBOOKS.values()) == sorted((ROOT / "chapters").glob("*.ipynb"))
    assert [key_of(path.stem) for path in NOTEBOOKS.values()] == list(TITLES)
    read = {key: index.Chapter(key) for key in NOTEBOOKS}
    chapters = [chapter for chapter in read.values() if chapter.path.stem not in
                APPENDICES.values()]
    for key, chapter in read.items():
        assert chapter.title == heading(key)
        assert f"| {label(key)} | [{TITLES[key]}](chapters/{chapter.path.name}) |" in README
        first, *_, last = chapter.cells
        assert "](contents.md)" in first.source and "](glossary.md)" in first.source
        word = "Next" if chapter in chapters else "Back"
        [link] = re.findall(rf"^\*\*{word}:\*\* \[(.*)\]\((.*)\)$", last.source, re.MULTILINE)
        following = (chapters[chapters.index(chapter) + 1:][:1] if chapter in chapters
                     else chapters)
        leads = [(each.title, each.path.name) for each in following]
        assert link in leads or (not leads and link[1] == "contents.md"), chapter.path
