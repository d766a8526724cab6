"""README, CONTRIBUTING and the book's pages: links, commands, names and times are true."""

import contextlib
import importlib.util
import re

import aims
import pytest
from sandbox import ROOT

import dplab
from dplab import __main__
from dplab.checks import every_exercise
from dplab.desk.course import label, notebooks

PATHS = ["README.md", ".github/CONTRIBUTING.md", "chapters/book/setup.md",
         "chapters/book/teachers.md", "chapters/book/assistants.md"]
PAGES = {path: (ROOT / path).read_text(encoding="utf-8") for path in PATHS}
README, CONTRIBUTING, SETUP, TEACHERS, _ = PAGES.values()
EXERCISES = {exercise.slug: exercise.minutes for exercise in every_exercise()}
MINUTES = {label(key): aims.Chapter(path).minutes(EXERCISES)
           for key, path in notebooks(ROOT / "chapters").items()}


@pytest.mark.parametrize("path", PATHS)
def test_links_pictures_and_what_commands_name_are_there(path):
    page = PAGES[path]
    targets = re.findall(r"\]\(([^)#:]+)\)", page)
    assert not [target for target in targets if not (ROOT / path).parent.joinpath(target).exists()]
    for module in set(re.findall(r"python -m (dplab[.\w]*)", page)):
        assert importlib.util.find_spec(module), module
    for script in set(re.findall(r"python ((?:tests|chapters)/\S+\.py)", page)):
        assert (ROOT / script).exists(), script
    for name in set(re.findall(r"\bdplab\.(\w+)(?=[(`, ])", page)):
        assert hasattr(dplab, name), name


def test_the_readme_leads_to_every_chapter_and_every_other_page():
    linked = re.findall(r"\]\(([^)]+)\)", README)
    chapters = [link for link in linked if link.endswith(".ipynb")]
    assert chapters == [f"chapters/{path.name}" for path in notebooks(ROOT / "chapters").values()]
    assert set(PATHS[1:]) <= set(linked)


@pytest.mark.parametrize("page", [README, SETUP], ids=["README", "setup"])
def test_the_smaller_torch_is_the_one_of_the_requirements(page):
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==\S+", requirements, re.MULTILINE)[0]
    assert f"pip install {pinned} --index-url https://download.pytorch.org/whl/cpu\n" in page


def test_commands_of_dplab_and_their_options_are_there(capsys):
    pages = "\n".join(PAGES.values())
    named = {command: set() for command in re.findall(
        r"(?:`|bin/|^)dplab (\w+)", pages, re.MULTILINE)}
    for command, option in re.findall(r"dplab (\w+) (--[\w-]+)", pages):
        named[command].add(option)
    for command, options in named.items():
        with contextlib.suppress(SystemExit):
            assert __main__.main([command, "--help"]) != 2
        said = capsys.readouterr()
        assert not said.err
        assert options <= set(re.findall(r"--[\w-]+", said.out)), command


def test_the_map_shows_every_part_of_the_repository():
    named = re.search(r"## Where things are\n\n```\n(.*?)```", CONTRIBUTING, re.DOTALL)[1]
    for folder in re.findall(r"^(\S+)", named, re.MULTILINE):
        assert (ROOT / folder).exists(), folder
    packages = {path.name for path in (ROOT / "dplab").iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(re.findall(r"\w+", named)), "not on the map"


def test_the_times_of_the_chapters_are_the_computed_ones():
    stated = re.findall(r"^\| (\d\d|[A-Z]) \|.*\| (\d+)(½?) (min|h) \|$", README, re.MULTILINE)
    assert {chapter for chapter, *_ in stated} == set(MINUTES)
    for chapter, number, half, unit in stated:
        minutes = (int(number) + bool(half) / 2) * {"min": 1, "h": 60}[unit]
        assert minutes == pytest.approx(MINUTES[chapter], rel=0.15), chapter


def test_the_short_ways_take_as_long_as_their_chapters():
    ways = re.findall(r"^\| [^|]+ \| (\d\d[\d, to]*) \| [^|]+ \| (\d+) h \|$", README, re.MULTILINE)
    assert len(ways) > 3
    for chapters, hours in ways:
        first, _, last = chapters.partition(" to ")
        names = ([f"{number:02d}" for number in range(int(first), int(last) + 1)] if last
                 else chapters.split(", "))
        computed = sum(MINUTES[chapter] for chapter in names)
        assert 60 * int(hours) == pytest.approx(computed, rel=0.05), chapters


def test_the_plan_for_teachers_has_every_chapter_and_its_minutes():
    rows = re.findall(r"^\| \d+ \| ([\d, ]+) \| (\d+) \|", TEACHERS, re.MULTILINE)
    planned = [chapter for chapters, _ in rows for chapter in chapters.split(", ")]
    assert planned == [f"{number:02d}" for number in range(13)]
    for chapters, stated in rows:
        computed = sum(MINUTES[chapter] for chapter in chapters.split(", "))
        assert int(stated) == computed, f"{chapters}, by tests/tools/aims.py"
