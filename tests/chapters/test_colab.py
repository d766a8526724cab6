"""The cell for Google Colab and Kaggle, where it sets the course up; elsewhere it does nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import colab
import IPython
import pytest
from sandbox import ROOT

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))
# Runs the cell in a shell whose class is of the module that the command line names; says which
# folder it ends in, where the course is, and what names it leaves.
SHELL = """
import importlib.util, json, os, sys
from IPython.core.interactiveshell import InteractiveShell
module, cell, report = sys.argv[1:]
shell = type("Shell", (InteractiveShell,), {"__module__": module}).instance()
before = {*shell.user_ns}
shell.run_cell(cell).raise_error()
names = sorted({*shell.user_ns} - before)
course = importlib.util.find_spec("dplab")
if course:
    import dplab.predict
    course = course.origin
json.dump([os.getcwd(), course, names], open(report, "w"))
"""


@pytest.mark.slow
def test_it_fetches_and_installs_the_course_there_and_does_nothing_elsewhere(tmp_path):
    """In a new environment that has the packages and no dplab."""
    work, repository = tmp_path / "work", tmp_path / "repository"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = tmp_path.glob("venv/lib/*/site-packages")
    (packages / "packages.pth").write_text(str(Path(IPython.__file__).parents[1]))
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHONPATH", "VIRTUAL_ENV")}  # IPython enters the latter
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0",
                    "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HOME": str(tmp_path),
                    "IPYTHONDIR": str(tmp_path / "ipython")}

    def run_cell(module, source, **variables):
        report = tmp_path / "report.json"
        subprocess.run([tmp_path / "venv/bin/python", "-c", SHELL, module, source, report],
                       cwd=work, check=True, timeout=300, env=environment | variables)
        return json.loads(report.read_text())

    assert run_cell("ipykernel.zmqshell", colab.SOURCE) == [str(work), None, []]
    make_repository(repository)
    source = colab.SOURCE.replace(colab.ADDRESS, repository.as_uri())
    for module, variables in (("google.colab._shell", {}), (
            "ipykernel.zmqshell", {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"})):
        folder, course, _ = run_cell(module, source, **variables)
        assert Path(folder) == tmp_path / "dplab/chapters"
        assert Path(course) == tmp_path / "dplab/dplab/__init__.py"
        assert (Path(folder) / PATHS[0].name).exists()
    # In the folder above it, the clone's own folder is no package.
    script = "import dplab.__main__; print(dplab.__file__)"
    found = subprocess.check_output([tmp_path / "venv/bin/python", "-c", script], cwd=tmp_path,
                                    env=environment, text=True)
    assert found.strip() == course and (tmp_path / "venv/bin/dplab").exists()


def make_repository(folder):
    """A repository with the course as it lies here, to clone."""
    shutil.copytree(ROOT / "dplab", folder / "dplab", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "chapters").mkdir()
    for file in (PATHS[0], ROOT / "pyproject.toml", ROOT / "README.md", *ROOT.glob("LICENSE*")):
        shutil.copy(file, folder / file.relative_to(ROOT))
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", folder]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
