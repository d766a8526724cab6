"""The rules of the repository: its layout, who may import whom, style."""

import contextlib
import fnmatch
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import imports

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


# Part of the course: the parts of dplab that it may import. `dplab` is what dplab/__init__ offers.
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


def course_files(folder=ROOT):
    """The entries of the repository that git would not ignore."""
    ignored = [".git", *(ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    for path in sorted(folder.iterdir()):
        if not any(fnmatch.fnmatch(path.name, pattern.rstrip("/")) for pattern in ignored):
            yield path
            if path.is_dir():
                yield from course_files(path)


def owner(path):
    """The part of dplab that a file belongs to; for dplab/__init__.py, "__init__"."""
    return path.relative_to(ROOT / "dplab").with_suffix("").parts[0]


def imports_of(part):
    """The imports of all files that a row of the table speaks of."""
    if part == "chapters":
        paths = sorted((ROOT / part).glob("*.ipynb"))
    elif part == "figures" or "/" in part:
        paths = [path for path in course_files(ROOT / part) if path.suffix == ".py"]
    else:
        paths = [path for path in FILES if owner(path) == part]
    assert paths
    read = imports.of_chapter if part == "chapters" else imports.of_file
    return [found for path in paths for found in read(path)]


def is_allowed(part, module):
    """Whether the table lets a part of the course import this."""
    top, *names = module.split(".")
    if part == "chapters" and top == "dplab":
        if any(name.startswith("_") and not name.endswith("__") for name in names):
            return False
        if {*names[:1]} <= {*dplab.__all__}:
            return True
    return (imports.package_of(module) in {part, *MAY_IMPORT[part].split(), None}
            and not (part in NO_TORCH and top == "torch")
            and (part not in TORCH_ALONE or top in {"torch", "dplab", *sys.stdlib_module_names}))


def test_who_imports_whom_is_in_the_table():
    wrong = [f"{where} imports {module}" for part in MAY_IMPORT
             for module, where in imports_of(part) if not is_allowed(part, module)]
    assert not wrong
    assert {owner(path) for path in FILES} <= set(MAY_IMPORT)


def test_no_imports_go_in_a_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    imported = {name: {part for module, _ in imports.of_file(path)
                       for part in (module, module.rpartition(".")[0]) if part in files}
                for name, path in files.items()}
    graphlib.TopologicalSorter(imported).prepare()


def test_no_two_files_of_dplab_share_a_name():
    names = [path.stem for path in FILES if path.stem not in ("__init__", "__main__")
             and owner(path) != "exercises"]  # those have the names of their slugs
    assert not {name for name in names if names.count(name) > 1}


def test_the_top_level_holds_nothing_else_and_no_file_names_a_machine():
    found, paths = [], list(course_files())
    assert not {path.name for path in paths if path.parent == ROOT} - TOP_LEVEL
    for path in filter(Path.is_file, paths):
        with contextlib.suppress(UnicodeDecodeError):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}"
                          for pattern in (MACHINE_PATH, REGISTRY)
                          for match in pattern.finditer(line)]
    assert not found


def test_ruff_and_mypy_find_nothing(pytestconfig):
    cache = pytestconfig.cache.mkdir("mypy")  # what it knows of torch, until torch changes
    for words in (["ruff", "check", "--no-cache"], ["mypy", "--cache-dir", cache]):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stdout + done.stderr
