"""README, CONTRIBUTING and the book's pages: links, commands, names and times are true."""

import importlib.util
import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import aims
import pytest
from PIL import Image

import dplab
from dplab import drills
from dplab.checks import every_exercise, find
from dplab.desk.course import label, notebooks

ROOT = Path(__file__).resolve().parents[2]
PATHS = ["README.md", ".github/CONTRIBUTING.md", "chapters/book/setup.md",
         "chapters/book/teachers.md", "chapters/book/assistants.md"]
PAGES = {path: (ROOT / path).read_text(encoding="utf-8") for path in PATHS}
README, CONTRIBUTING, SETUP, TEACHERS, ASSISTANTS = PAGES.values()
MINUTES = {label(key): aims.Chapter(path).minutes(
               {exercise.slug: exercise.minutes for exercise in every_exercise()})
           for key, path in notebooks(ROOT / "chapters").items()}
REQUIREMENTS = (ROOT / "requirements.txt").read_text(encoding="utf-8")


@pytest.fixture
def served(tmp_path):
    """The address of the server that the README's start command runs, without its browser."""
    command = shlex.split(re.search(r"&& \.venv/bin/dplab (lab)\n```", README)[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "dplab", *command, str(tmp_path / "course"), "--no-browser", "--",
         f"--port={port}", "--IdentityProvider.token=token"],
        cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR":
             str(tmp_path)})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def fetch(url):
    """The bytes behind the address, from a server that may still be starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            request = urllib.request.Request(url, headers={"Authorization": "token token"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            pytest.fail(f"{url}: {error}")
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_the_start_command_serves_the_chapters_and_their_pictures(served):
    for chapter in (ROOT / "chapters").glob("*.ipynb"):
        cells = json.loads(fetch(f"{served}/files/chapters/{chapter.name}"))["cells"]
        assert not any(cell.get("outputs") for cell in cells)
    for picture in set(re.findall(r"\]\((figures/[^)]+)\)", README)):
        assert fetch(f"{served}/files/{picture}") == (ROOT / picture).read_bytes()


@pytest.mark.parametrize("path", PATHS)
def test_links_and_pictures_exist(path):
    targets = re.findall(r"\]\(([^)#:]+)\)", PAGES[path])
    assert targets or path == ".github/CONTRIBUTING.md"
    assert not [target for target in targets if not (ROOT / path).parent.joinpath(target).exists()]


def test_the_readme_leads_to_every_other_page():
    assert set(PATHS[1:]) <= set(re.findall(r"\]\(([^)]+)\)", README))


def test_every_chapter_is_listed():
    listed = re.findall(r"\]\((chapters/[^)]+\.ipynb)\)", README)
    assert listed == [f"chapters/{path.name}" for path in notebooks(ROOT / "chapters").values()]


def test_the_picture_is_small_and_told_in_words():
    alt = re.search(r"!\[([^\]]+)\]\(figures/chapter\.png\)", README)[1]
    assert len(alt) > 100
    picture = ROOT / "figures/chapter.png"
    assert picture.stat().st_size <= 250_000
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width >= 1000


@pytest.mark.parametrize("page", [README, SETUP], ids=["README", "setup"])
def test_the_smaller_torch_is_the_one_of_the_requirements(page):
    pinned = re.search(r"^torch==\S+", REQUIREMENTS, re.MULTILINE)[0]
    assert f"pip install {pinned} --index-url https://download.pytorch.org/whl/cpu\n" in page


@pytest.mark.parametrize("path", PATHS)
def test_what_the_commands_name_is_there(path):
    page = PAGES[path]
    for module in set(re.findall(r"python -m (dplab[.\w]*)", page)):
        assert importlib.util.find_spec(module), module
    for script in set(re.findall(r"python ((?:tests|chapters)/\S+\.py)", page)):
        assert (ROOT / script).exists(), script
    for name in set(re.findall(r"\bdplab\.(\w+)(?=[(`, ])", page)):
        assert hasattr(dplab, name), name


def test_commands_of_dplab_and_their_options_are_there():
    named = {command: set() for command in re.findall(
        r"(?:`|bin/|^)dplab (\w+)", "\n".join(PAGES.values()), re.MULTILINE)}
    for command, option in re.findall(r"dplab (\w+) (--[\w-]+)", "\n".join(PAGES.values())):
        named[command].add(option)
    assert named["lab"] >= {"--update", "--import", "--copy-only"}
    for command, options in named.items():
        done = subprocess.run([sys.executable, "-m", "dplab", command, "--help"], cwd=ROOT,
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert options <= set(re.findall(r"--[\w-]+", done.stdout)), command


def test_the_map_shows_every_part_of_the_repository():
    named = re.search(r"## Where things are\n\n```\n(.*?)```", CONTRIBUTING, re.DOTALL)[1]
    for folder in re.findall(r"^(\S+)", named, re.MULTILINE):
        assert (ROOT / folder).exists(), folder
    packages = {path.name for path in (ROOT / "dplab").iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(re.findall(r"\w+", named)), "not on the map"


def minutes_in(words):
    """Of a time as the README writes it, such as 40 min or 1½ h."""
    number, half, unit = re.fullmatch(r"(\d+)(½?) (min|h)", words).groups()
    return (int(number) + bool(half) / 2) * {"min": 1, "h": 60}[unit]


def test_the_times_of_the_chapters_are_the_computed_ones():
    stated = dict(re.findall(r"^\| (\d\d|[A-Z]) \|.*\| (\S+ \w+) \|$", README, re.MULTILINE))
    assert set(stated) == set(MINUTES)
    for chapter, words in stated.items():
        assert minutes_in(words) == pytest.approx(MINUTES[chapter], rel=0.15), chapter


def test_the_plan_for_teachers_has_every_chapter_and_its_minutes():
    rows = re.findall(r"^\| (\d+) \| ([\d, ]+) \| (\d+) \|", TEACHERS, re.MULTILINE)
    assert [int(afternoon) for afternoon, *_ in rows] == list(range(1, len(rows) + 1))
    planned = [chapter for _, chapters, _ in rows for chapter in chapters.split(", ")]
    assert planned == [f"{number:02d}" for number in range(11)]
    for afternoon, chapters, stated in rows:
        computed = sum(MINUTES[chapter] for chapter in chapters.split(", "))
        assert int(stated) == computed, f"afternoon {afternoon}, by tests/tools/aims.py"
    assert all(int(stated) <= 240 for *_, stated in rows[:4])


def test_what_teachers_may_give_as_homework_runs_on_no_rank():
    named = re.search(r"only compute: (\S+) to (\S+), and (\S+)\.\n", TEACHERS)
    numbers = [exercise.number for exercise in every_exercise()]
    between = numbers[numbers.index(named[1]):numbers.index(named[2]) + 1]
    assert not any(find(number).on_ranks for number in [*between, named[3]])


def test_the_chapters_that_teachers_read_of_are_those():
    counting = re.search(r"Chapters ([\d, and]+) count what", TEACHERS)[1]
    assert re.findall(r"\d+", counting) == sorted(
        path.name[:2] for path in (ROOT / "chapters").glob("[0-9]*.ipynb")
        if "WireMeter" in path.read_text(encoding="utf-8"))
    drilled = re.findall(r"\d+", re.search(r"Chapters ([\d, and]+) have drills", TEACHERS)[1])
    assert drilled == [f"{chapter:02d}" for chapter in drills.scores()]


def test_the_paragraph_for_an_assistant_names_what_the_course_offers():
    pasted = re.search(r"```text\n(.*?)```", ASSISTANTS, re.DOTALL)[1]
    named = set(re.findall(r"\b(?:dplab|job)\.(\w+)", pasted))
    assert named == {"check", "hint", "solution", "diagnose"}
    for exercise in every_exercise():
        assert len(exercise.hints) == 3  # as the page says


def test_the_exercises_to_copy_are_short():
    section = CONTRIBUTING.partition("## An exercise")[2].partition("\n## ")[0]
    copied = [find(name) for name in re.findall(r"`(\w+)\.py`", section)]
    assert [exercise.on_ranks for exercise in copied] == [True, False]
    for exercise in copied:
        assert inspect.getsource(inspect.getmodule(type(exercise))).count("\n") <= 160


def test_contributing_is_one_page():
    assert CONTRIBUTING.count("\n") <= 115 and README.count("\n") <= 100
