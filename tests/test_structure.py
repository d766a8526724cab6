"""The rules of the repository: its layout, who may import whom, style, public names."""

import fnmatch
import importlib
import re
import subprocess
import sys
from pathlib import Path

import imports
import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"README.md", "requirements.txt", "pyproject.toml", "chapters", "dplab", "figures",
             "tests", ".ci", ".gitignore", "LICENSE", "LICENSE-TEXT", "CITATION.cff",
             ".github", ".devcontainer", "Dockerfile", ".dockerignore"}
FILES = sorted((ROOT / "dplab").rglob("*.py"))

PUBLIC_NAMES = {
    "dplab": """check device drill expect_failure guess hint load_ipython_extension mine progress
        RankError reset run solution warm_up""",
    "dplab.dryrun": "Collective ddp DryRun fully_shard UnsupportedOperator zero_1",
    "dplab.measure": """after_a_step aligned available_cores available_memory CallLog
        describe_machine EmulatedLink from_last_launch layer_times MemoryTimeline NoiseScale
        saved_bytes sent_bytes split_time state_bytes torchrun_log Trace
        WireMeter""",
    "dplab.parallel": """average_gradients broadcast_module BucketedDDP clip_grad_norm_ DiLoCo
        FullyShardedModel LocalSGD ManualDDP naive_all_reduce OverlappedDDP ParameterServer
        ring_all_gather ring_all_reduce ring_reduce_scatter ShardedGradientOptimizer
        ShardedOptimizer SynchronizedBatchNorm tree_all_reduce""",
    "dplab.show": """Bar batch_sweep Beside calculator Canvas choices CourseFigure gap_between
        given heat_maps loss_curves memory_over_step over_ranks predicted_beside_published
        rank_color RANK_COLORS ring_step row_limits save_beside stepper style subplots table
        time_shares timeline to_png to_svg""",
}
MODULES_OF_PREDICT = """__main__ activations catalogue checks choose cluster cost fields kernels
    memory moments network pace plan plan_as_text published rates reliability settings shards step
    traffic transformer_config"""

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
    "chapters": "demos dryrun measure parallel predict show workloads",  # and dplab's own names
    "chapters/data": "bench dryrun measure predict spawn workloads",
    "chapters/10_launch": "",  # files that readers copy run without dplab
    "chapters/book": "checks desk predict show",  # checks: for the hints of exercises
}
MAY_NAME_FOR_TYPING = {"show": "measure predict"}  # plain data, under `if TYPE_CHECKING`
NO_TORCH = {"__init__", "__main__", "lab", "needs", "predict", "show"}
TORCH_ALONE = {"parallel"}


def files(part):
    """The files that a row of the table speaks of."""
    if part in ("figures", "chapters/data", "chapters/10_launch", "chapters/book"):
        return [path for path in course_files(ROOT / part) if path.suffix == ".py"]
    if part == "chapters":
        return sorted((ROOT / part).glob("*.ipynb"))
    return [path for path in FILES if owner(path) == part]


def owner(path):
    """The part of dplab that a file belongs to; for dplab/__init__.py, "__init__"."""
    return path.relative_to(ROOT / "dplab").with_suffix("").parts[0]


def forbidden(part, found):
    """Of the imports found in a part of the course, those that the table does not allow."""
    allowed = {part, *MAY_IMPORT[part].split()}
    for_typing = allowed | set(MAY_NAME_FOR_TYPING.get(part, "").split())
    torch_alone = {"torch", "dplab", *sys.stdlib_module_names}
    for each in found:
        if part == "chapters" and each.public:
            continue
        wrong = [each.package and each.package not in (for_typing if each.for_typing else allowed),
                 part in NO_TORCH and each.top == "torch",
                 part in TORCH_ALONE and each.top not in torch_alone,
                 part == "chapters" and each.private]
        if any(wrong):
            yield str(each)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_are_those_of_the_table(part):
    read = imports.of_chapter if part == "chapters" else imports.of_file
    assert files(part)
    assert not [line for path in files(part) for line in forbidden(part, read(path))]


def test_every_part_of_dplab_has_a_row():
    assert {owner(path) for path in FILES} <= set(MAY_IMPORT)


def imports_in(part, source):
    """What a file of this part would import, or a chapter with this cell."""
    if part == "chapters":
        return imports.of_cells([("planted", source)])
    return imports.of_source(source, "planted", ("dplab", part))


@pytest.mark.parametrize(("part", "source"), [
    ("spawn", "from dplab.measure import CallLog"),
    ("spawn", "from dplab import show"),
    ("spawn", "def f():\n    import dplab.predict.memory as memory"),
    ("spawn", "from ..measure import CallLog"),
    ("spawn", "from .. import measure"),
    ("spawn", "import dplab"),
    ("spawn", "print(dplab.measure.CallLog)"),
    ("spawn", "importlib.import_module('dplab.measure')"),
    ("spawn", "importlib.import_module(f'dplab.exercises.{name}')"),
    ("spawn", "importlib.import_module(f'dplab.{name}')"),
    ("spawn", "PRELOAD = ('torch', 'dplab.parallel')"),
    ("spawn", "Popen([sys.executable, '-m', 'dplab.exercises'])"),
    ("spawn", "Popen('exec python -m dplab.exercises', shell=True)"),
    ("spawn", "SCRIPT = 'import sys\\nfrom dplab.measure import CallLog\\n'"),
    ("predict", "import torch.nn"),
    ("predict", "from dplab.spawn import run"),
    ("show", "from dplab.measure import Trace"),
    ("show", "if TYPE_CHECKING:\n    from dplab.parallel import ManualDDP"),
    ("parallel", "import numpy as np"),
    ("parallel", "from dplab.measure import CallLog"),
    ("demos", "dplab.check('4.1', f)"),
    ("bench", "from dplab.exercises import find"),
    ("figures", "import dplab.parallel"),
    ("chapters", "from dplab.bench import training"),
    ("chapters", "dplab.bench.training.main()"),
    ("chapters", "from dplab.exercises import check"),
    ("chapters", "from dplab.spawn import run"),
    ("chapters", "from dplab.show.theme import _size"),
    ("chapters", "from dplab.show import _frames"),
    ("chapters", "dplab.show._frames.draw()"),
    ("chapters", "from dplab.predict import cost\ncost._steps(4)"),
    ("chapters", "%%ranks 4\nfrom dplab.bench import training"),
    ("chapters/10_launch", "import dplab"),
    ("chapters/book", "from dplab.lab import notebook"),
])
def test_an_import_that_the_table_forbids_is_found(part, source):
    assert list(forbidden(part, imports_in(part, source)))


@pytest.mark.parametrize(("part", "source"), [
    ("spawn", '"""As dplab.measure says."""'),
    ("spawn", "from dplab.spawn import errors"),
    ("spawn", "from . import errors"),
    ("spawn", "raise TypeError('dplab.measure is not for ranks')"),
    ("show", "if TYPE_CHECKING:\n    from dplab.measure import Trace"),
    ("parallel", "import math, torch.nn"),
    ("chapters", "import dplab\nfrom dplab import RankError\nRankError.kind\ndplab.check('4.1')"),
    ("chapters", "from dplab.measure import WireMeter"),
])
def test_an_import_that_the_table_allows_is_not_reported(part, source):
    assert not list(forbidden(part, imports_in(part, source)))


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


@pytest.mark.slow
def test_the_quick_tier_has_tests_of_every_part():
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "-m",
                           "quick"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    tests = [line.split("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) >= 300, done.stdout + done.stderr
    folders = {path.name for path in (ROOT / "tests").iterdir() if list(path.glob("test_*.py"))}
    assert {path.split("/")[1] for path in tests if path.count("/") > 1} == folders
    assert "chapters/00_start_here.ipynb" in tests


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_nothing(pytestconfig):
    cache = pytestconfig.cache.mkdir("mypy")  # what it knows of torch, until torch changes
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", cache], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PUBLIC_NAMES)
def test_public_names_are_these_and_all_are_there(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC_NAMES[package].split())
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_predict_has_these_modules():
    files = {path.stem for path in (ROOT / "dplab" / "predict").glob("*.py")} - {"__init__"}
    assert files == set(MODULES_OF_PREDICT.split())
