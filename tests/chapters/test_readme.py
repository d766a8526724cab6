"""The README's commands: what they open is there, pictures included."""

import importlib.util
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

import pytest
from PIL import Image

from dplab.desk.course import notebooks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
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


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert "figures/one_step.svg" in targets
    assert not [target for target in targets if not (ROOT / target).exists()]


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


def test_the_smaller_torch_is_the_one_of_the_requirements():
    pinned = re.search(r"^torch==\S+", REQUIREMENTS, re.MULTILINE)[0]
    assert f"pip install {pinned} --index-url https://download.pytorch.org/whl/cpu\n" in README


def test_commands_of_python_are_there():
    for module in set(re.findall(r"python -m (dplab\.\S+)", README)):
        assert importlib.util.find_spec(module), module
    for script in set(re.findall(r"python (tests/\S+\.py)", README)):
        assert (ROOT / script).exists(), script
    named = re.search(r"## To change something\n\n```\n(.*?)```", README, re.DOTALL)[1]
    for folder in re.findall(r"^(\S+)", named, re.MULTILINE):
        assert (ROOT / folder).exists(), folder
    packages = {path.name for path in (ROOT / "dplab").iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(re.findall(r"\w+", named)), "not on the map"
