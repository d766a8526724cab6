"""The rules of the repository: its layout, who may import whom, sizes, style, public names."""

import ast
import fnmatch
import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import dplab

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"README.md", "requirements.txt", "pyproject.toml", "chapters", "dplab", "figures",
             "tests", ".ci", ".gitignore"}
FILES = sorted((ROOT / "dplab").rglob("*.py"))
PACKAGES = {path.name for path in (ROOT / "dplab").iterdir() if (path / "__init__.py").exists()}

PUBLIC_NAMES = {
    "dplab": """check device expect_failure hint load_ipython_extension progress RankError run
        solution""",
    "dplab.dryrun": "Collective ddp DryRun fully_shard UnsupportedOperator zero_1",
    "dplab.measure": """aligned available_cores available_memory CallLog describe_machine
        EmulatedLink layer_times MemoryTimeline NoiseScale
        save_chrome_trace sent_bytes state_bytes Trace WireMeter""",
    "dplab.parallel": """average_gradients broadcast_module BucketedDDP clip_grad_norm_ DiLoCo
        FullyShardedModel LocalSGD ManualDDP naive_all_reduce OverlappedDDP ParameterServer
        ring_all_gather ring_all_reduce ring_reduce_scatter ShardedGradientOptimizer
        ShardedOptimizer SynchronizedBatchNorm tree_all_reduce""",
    "dplab.show": """Bar batch_sweep Beside calculator Canvas choices CourseFigure gap_between
        given heat_maps loss_curves memory_over_step over_ranks predicted_beside_published
        rank_color RANK_COLORS ring_step save_beside stepper style subplots table time_shares
        timeline to_png to_svg""",
}
MODULES_OF_PREDICT = """activations catalogue checks choose cluster cost memory published
    reliability settings shards step traffic transformer_config"""

MACHINE_PATH = re.compile(r"(?<![\w/+.~$}])/(?:home|root|work|Users)/[\w.]")
REGISTRY = re.compile(
    r"""index[-_]url\b(?![ =]+https://download\.pytorch\.org/) | trusted[-_]host\b
    | https?://[^\s/"')]*(?:artifactory|nexus|devpi|jfrog|registry|mirror|proxy)
    | https?://(?!127\.0\.0\.1|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+""", re.VERBOSE | re.IGNORECASE)


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    for_typing: bool

    @property
    def top(self):
        return self.module.split(".")[0]

    @property
    def package(self):
        """The part of dplab that it takes from, "dplab" where that is dplab itself, or None."""
        if self.top != "dplab":
            return None
        name = self.module.split(".")[1] if "." in self.module else "dplab"
        return dplab._MODULE_OF.get(name, name)

    def __str__(self):
        return f"{self.file}:{self.line} imports {self.module}"


def owner(path):
    """The package of dplab that a file is part of; for dplab/__init__.py, "__init__"."""
    return path.relative_to(ROOT / "dplab").with_suffix("").parts[0]


def modules(node, path):
    """The modules that one node of the syntax tree names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module
        if node.level:
            parents = path.relative_to(ROOT).parts[:-node.level]
            base = ".".join([*parents, *filter(None, [node.module])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dplab":
        return [f"dplab.{node.attr}"]  # dplab loads its parts when they are named
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).split(".")[-1]
        return [node.args[0].value] if called in ("import_module", "__import__") else []
    return []


def imports_of(package):
    """All imports in one package of dplab, those inside functions too, but for its own."""
    for path in FILES:
        if owner(path) != package:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guards = [node for node in ast.walk(tree) if isinstance(node, ast.If)
                  and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")]
        for_typing = {node for guard in guards for statement in guard.body
                      for node in ast.walk(statement)}
        for node in ast.walk(tree):
            for module in modules(node, path):
                found = Import(str(path.relative_to(ROOT)), getattr(node, "lineno", 0), module,
                               node in for_typing)
                if found.package != package:
                    yield found


def listed(imports):
    return [str(found) for found in imports]


@pytest.mark.parametrize("package", ["predict", "show"])
def test_no_torch_in(package):
    assert not listed(found for found in imports_of(package) if found.top == "torch")


def test_predict_imports_nothing_of_dplab():
    assert not listed(found for found in imports_of("predict") if found.package)


def test_show_takes_plain_data():
    named = {"predict", "measure"}
    assert not listed(found for found in imports_of("show") if found.package
                      and not (found.for_typing and found.package in named))


def test_parallel_imports_torch_alone():
    allowed = {"torch", *sys.stdlib_module_names}
    assert not listed(found for found in imports_of("parallel") if found.top not in allowed)


def test_spawn_imports_neither_parallel_nor_measure():
    assert not listed(found for found in imports_of("spawn")
                      if found.package in ("parallel", "measure"))


@pytest.mark.parametrize("package", sorted(PACKAGES - {"exercises"}))
def test_nobody_imports_exercises(package):
    assert not listed(found for found in imports_of(package) if found.package == "exercises")


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


def test_mypy_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", os.devnull], cwd=ROOT,
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
