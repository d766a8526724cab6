"""The cell for Google Colab and Kaggle, where it sets the course up; elsewhere it does nothing."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import colab
import IPython
import nbformat
import notebooks
import pytest
from sandbox import ROOT

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))


def test_every_notebook_is_as_the_script_writes_it():
    """With the cell where the course has an address, and without it where nobody could fetch it."""
    for path in PATHS:
        script = colab.for_colab(notebooks.read(path))
        assert [*map(dict, notebooks.read(path).cells)] == [*map(dict, script.cells)], (
            f"{path.name}: python tests/tools/colab.py writes it anew")


def test_a_course_with_an_address_has_the_cell_once_behind_the_title():
    before = colab.for_colab(notebooks.read(PATHS[0]), is_known=False)
    after = colab.for_colab(colab.for_colab(copy.deepcopy(before), is_known=True), is_known=True)
    title, cell, *others = nbformat.reads(notebooks.normalise(after), as_version=4).cells
    assert [title.id, *(each.id for each in others)] == [each.id for each in before.cells]
    assert (cell.source, cell.outputs) == (colab.SOURCE, [])
    assert cell.metadata == {"tags": colab.TAGS, "jupyter": {"source_hidden": True}}


# Runs the cell in a shell whose class is of the module that the command line names.
SHELL = """
import importlib.util, json, os, sys
from IPython.core.interactiveshell import InteractiveShell
module, cell = sys.argv[1:]
Shell = type("Shell", (InteractiveShell,), {"__module__": module})
shell = Shell.instance()
before = {*shell.user_ns}
result = shell.run_cell(cell)
result.raise_error()
known = sorted({*shell.user_ns} - before)
course = importlib.util.find_spec("dplab")
if course:
    import dplab.predict
    course = course.origin
json.dump([os.getcwd(), course, known], open(os.environ["REPORT"], "w"))
"""


def environment(tmp_path):
    """The Python of a new environment that has the packages and no dplab."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "packages.pth").write_text(str(Path(IPython.__file__).parents[1]))
    return folder / "bin/python"


def run_cell(python, tmp_path, module, source, **others):
    """What the cell says, the folder that it ends in, the course, and the names that it leaves."""
    (tmp_path / "work").mkdir(exist_ok=True)
    report = tmp_path / "report.json"
    variables = {name: value for name, value in os.environ.items()
                 if name not in ("PYTHONPATH", "VIRTUAL_ENV")}  # IPython enters the latter
    done = subprocess.run(
        [python, "-c", SHELL, module, source], cwd=tmp_path / "work", text=True,
        capture_output=True, timeout=300, env=variables | {
            "REPORT": str(report), "IPYTHONDIR": str(tmp_path / "ipython"),
            "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HOME": str(tmp_path)} | others)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, *json.loads(report.read_text())


def make_repository(folder):
    """A repository with the course as it lies here, to clone."""
    shutil.copytree(ROOT / "dplab", folder / "dplab", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "chapters").mkdir()
    shutil.copy(PATHS[0], folder / "chapters")
    for file in ("pyproject.toml", "README.md", *(path.name for path in ROOT.glob("LICENSE*"))):
        shutil.copy(ROOT / file, folder)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", folder]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)


@pytest.mark.slow
def test_on_colab_it_fetches_and_installs_the_course_on_kaggle_too_and_elsewhere_nothing(tmp_path):
    python, repository = environment(tmp_path), tmp_path / "repository"
    assert run_cell(python, tmp_path, "ipykernel.zmqshell", colab.SOURCE) == (
        "", str(tmp_path / "work"), None, [])
    make_repository(repository)
    source = colab.SOURCE.replace(colab.ADDRESS, repository.as_uri())
    for module, variables in (("google.colab._shell", {}), (
            "ipykernel.zmqshell", {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"})):
        _, folder, course, _ = run_cell(python, tmp_path, module, source, **variables)
        assert Path(folder) == tmp_path / "dplab/chapters"
        assert Path(course) == tmp_path / "dplab/dplab/__init__.py"
        assert (Path(folder) / PATHS[0].name).exists()
