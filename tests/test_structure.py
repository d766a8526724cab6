"""The rules of the repository: its layout, who may import whom, style, public names."""

import fnmatch
import importlib
import re
import subprocess
import sys
from pathlib import Path

import imports
import pytest

import dplab

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"README.md", "requirements.txt", "pyproject.toml", "chapters", "dplab", "figures",
             "tests", ".ci", ".gitignore", "LICENSE", "LICENSE-TEXT", "CITATION.cff",
             ".github", ".devcontainer", "Dockerfile", ".dockerignore"}
FILES = sorted((ROOT / "dplab").rglob("*.py"))

MACHINE_PATH = re.compile(r"(?<![\w/+.~$}])/(?:home|root|work|Users)/[\w.]")
REGISTRY = re.compile(
    r"""index[-_]url\b(?![ =]+https://download\.pytorch\.org/) | trusted[-_]host\b
    | https?://[^\s/"')]*(?:artifactory|nexus|devpi|jfrog|registry|mirror|proxy)
    | https?://(?!127\.0\.0\.1|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+""", re.VERBOSE | re.IGNORECASE)


# Part of the course: the parts of dplab that it may import, `if TYPE_CHECKING` aside. `dplab` is
# what dplab/__init__ offers.
MAY_IMPORT = {
    "__init__": """bench checks demos desk dplab drills dryrun exercises measure needs parallel
        predict show spawn workloads""",
    "__main__": "checks lab needs predict",
    "needs": "",
    "spawn": "",  # a library that stands alone
    "parallel": "",
    "predict": "",
    "workloads": "dryrun measure parallel predict spawn",
    "show": "",
    "measure": "dplab predict spawn",
    "dryrun": "measure predict spawn workloads",
    "desk": "dplab spawn",  # dplab: in the source that it writes for the reader
    "drills": "desk dplab measure parallel predict show spawn workloads",
    "checks": "desk dplab drills exercises measure spawn",
    "exercises": "checks desk dplab dryrun measure parallel predict spawn workloads",
    "lab": "desk needs",
    "demos": "dplab measure parallel show spawn workloads",
    "bench": "dplab dryrun measure parallel predict spawn workloads",
    "figures": "predict show",
    # and dplab's own names; of exercises, an answer that is shown after its check
    "chapters": "demos dryrun exercises measure parallel predict show workloads",
    "chapters/data": "bench dryrun measure predict spawn workloads",
    "chapters/launch": "",  # files that readers copy run without dplab
    "chapters/book": "checks desk predict show",  # checks: for the hints of exercises
}
NO_TORCH = {"__init__", "__main__", "lab", "needs", "predict", "show"}
TORCH_ALONE = {"parallel"}


def files(part):
    """The files that a row of the table speaks of."""
    if part in ("figures", "chapters/data", "chapters/launch", "chapters/book"):
        return [path for path in course_files(ROOT / part) if path.suffix == ".py"]
    if part == "chapters":
        return sorted((ROOT / part).glob("*.ipynb"))
    return [path for path in FILES if owner(path) == part]


def owner(path):
    """The part of dplab that a file belongs to; for dplab/__init__.py, "__init__"."""
    return path.relative_to(ROOT / "dplab").with_suffix("").parts[0]


def forbidden(part, found):
    """Of the imports found in a part of the course, those that the table does not allow."""
    allowed = {part, *MAY_IMPORT[part].split(), None}
    for module, where in found:
        top, *names = module.split(".")
        if part == "chapters" and top == "dplab" and set(names[:1]) <= {*dplab.__all__}:
            continue
        wrong = [imports.package_of(module) not in allowed,
                 part in NO_TORCH and top == "torch",
                 part in TORCH_ALONE and top not in {"torch", "dplab", *sys.stdlib_module_names},
                 part == "chapters" and top == "dplab" and any(
                     name.startswith("_") and not name.endswith("__") for name in names)]
        if any(wrong):
            yield f"{where} imports {module}"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_are_those_of_the_table(part):
    read = imports.of_chapter if part == "chapters" else imports.of_file
    assert files(part)
    assert not [line for path in files(part) for line in forbidden(part, read(path))]


def test_every_part_of_dplab_has_a_row():
    assert {owner(path) for path in FILES} <= set(MAY_IMPORT)


def test_no_two_files_of_dplab_share_a_name():
    names = [path.stem for path in FILES if path.stem not in ("__init__", "__main__")
             and owner(path) != "exercises"]  # those have the names of their slugs
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(("package", "whole"), [
    ("dplab", False), ("dplab.predict", True), ("dplab.show", True)])
def test_a_fresh_interpreter_loads_no_torch_for(package, whole):
    script = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
if {whole}:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
sys.exit("torch" in sys.modules and "torch was loaded")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def course_files(folder=ROOT):
    """The entries of the repository that git would not ignore."""
    ignored = [".git", *(ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    for path in sorted(folder.iterdir()):
        if not any(fnmatch.fnmatch(path.name, pattern.rstrip("/")) for pattern in ignored):
            yield path
            if path.is_dir():
                yield from course_files(path)


def test_top_level_holds_nothing_else():
    assert not {path.name for path in course_files() if path.parent == ROOT} - TOP_LEVEL


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["path", "registry"])
def test_files_name_no_machine(pattern):
    found = []
    for path in filter(Path.is_file, course_files()):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}"
                  for number, line in enumerate(text.splitlines(), start=1)
                  for match in pattern.finditer(line)]
    assert not found


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_nothing(pytestconfig):
    cache = pytestconfig.cache.mkdir("mypy")  # what it knows of torch, until torch changes
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", cache], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", ["dplab", "dplab.dryrun", "dplab.measure", "dplab.parallel",
                                     "dplab.show"])
def test_public_names_are_there(package):
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
