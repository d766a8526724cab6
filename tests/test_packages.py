"""The course as a package: its requirements, uv's settings, the wheel, and other Pythons."""

import ast
import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import imports
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from skips import skip_or_fail

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME = PROJECT["project"]["name"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
PINNED = {"requirements.txt": ("lab",), "tests/requirements.txt": ("test", "deepspeed"),
          "chapters/book/requirements.txt": ("book",)}
NEWEST_PYTHON = "3.13"  # the tests run on 3.11, and on GitHub on all three


def names(requirements):
    """Of the packages that are asked for; the course's own extras are not among them."""
    found = {canonicalize_name(Requirement(each).name) for each in requirements}
    return found - {NAME}


def pins(file):
    """The lines of a requirements file that name a package, by package."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(each.name): each for each in found}


@pytest.mark.parametrize("file", PINNED)
def test_what_the_project_names_is_pinned(file):
    declared = names(line for extra in PINNED[file] for line in EXTRAS[extra])
    if file == "requirements.txt":
        declared |= names(PROJECT["project"]["dependencies"])
    assert set(pins(file)) == declared
    assert all(re.fullmatch(r"==[\d.]+", str(pin.specifier)) for pin in pins(file).values())


def test_the_pinned_torch_is_one_that_the_project_takes():
    [declared] = [Requirement(line) for line in PROJECT["project"]["dependencies"]
                  if Requirement(line).name == "torch"]
    [pinned] = pins("requirements.txt")["torch"].specifier
    assert declared.specifier.contains(pinned.version)


def test_uv_takes_the_versions_that_pip_takes():
    constraints = map(Requirement, PROJECT["tool"]["uv"]["constraint-dependencies"])
    assert {canonicalize_name(each.name): each for each in constraints} == pins("requirements.txt")


@pytest.fixture
def registry(tmp_path):
    """A function that puts an empty package into a folder that stands for a registry."""
    def put(folder, name, version):
        place = tmp_path / folder / canonicalize_name(name)
        place.mkdir(parents=True, exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(place / f"{stem}-py3-none-any.whl", "w") as wheel:
            for file, text in {
                    "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                    "RECORD": ""}.items():
                wheel.writestr(f"{stem}.dist-info/{file}", text)
        (place / "index.html").write_text("".join(
            f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>'
            for path in place.glob("*.whl")))
        return (tmp_path / folder).as_uri()
    return put


@pytest.mark.parametrize(("extras", "expected"), [
    (["cpu", "test"], "2.13.0+cpu"), (["gpu"], "2.13.0"), (["cpu", "gpu"], None)])
def test_uv_takes_the_torch_of_the_extra(tmp_path, registry, extras, expected):
    """The two registries are folders here, with empty packages in them, pinned ones and newer."""
    asked = names(PROJECT["project"]["dependencies"]).union(*map(names, EXTRAS.values()))
    pinned = {name: str(pin.specifier).removeprefix("==")
              for name, pin in pins("requirements.txt").items()}
    for torch in (pinned["torch"], "1000"):
        cpu = registry("cpu", "torch", f"{torch}+cpu")
    for name in asked:
        for version in {"1000", pinned.get(name, "1000")}:
            pypi = registry("pypi", name, version)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "https://download.pytorch.org/whl/cpu" in text
    (tmp_path / "pyproject.toml").write_text(
        text.replace("https://download.pytorch.org/whl/cpu", cpu))
    (tmp_path / "README.md").touch()
    done = uv("sync", "--dry-run", "--no-install-project", "--no-cache", "--default-index", pypi,
              "--python", sys.executable, *(f"--extra={extra}" for extra in extras), cwd=tmp_path)
    if expected is None:
        assert done.returncode and "incompatible" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    taken = dict(re.findall(r"^ \+ (\S+)==(\S+)", done.stderr, re.MULTILINE))
    assert taken["torch"] == expected
    assert {name for name in taken if taken[name] == "1000"} == set(taken) - set(pinned)
    assert ("pytest" in taken) == ("test" in extras)


def uv(*words, cwd=ROOT, path=None):
    """uv, as installed beside this Python, with no settings of this machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    return subprocess.run([Path(sys.executable).with_name("uv"), *words], cwd=cwd, text=True,
                          capture_output=True, timeout=300,
                          env=environment | {"PATH": path or os.environ["PATH"]})


@pytest.mark.slow
def test_a_wheel_works_by_itself(tmp_path):
    """Its distribution has another name than its package, and its data are inside."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "dplab", source / "dplab",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", *(path.name for path in ROOT.glob("LICENSE*"))):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path,
                    source], check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith(NAME.replace("-", "_"))
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel],
                   check=True, timeout=300)
    script = ("import dplab.predict.published\nfrom importlib import metadata, resources\n"
              f"print(dplab.__file__, metadata.version({NAME!r}))\n"
              "print(*[each.name for each in resources.files('dplab.predict').iterdir()])")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True,
                          text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(target)})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{target}/dplab/__init__.py {PROJECT['project']['version']}"
    data = {path.name for path in (ROOT / "dplab/predict").glob("*.json")}
    assert data and data <= set(second.split())


def pure_pytest(folder):
    """Links to pytest and what it needs: all of it is Python alone, so that any Python runs it."""
    for name in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        path = Path(find_spec(name).origin)
        path = path.parent if path.name == "__init__.py" else path
        (folder / path.name).symlink_to(path)
    return folder


def interpreter(version):
    """The path of this Python; None where there is none. In CI, uv fetches it."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    path = os.pathsep.join([*map(str, pyenv.glob("versions/*/bin")), os.environ["PATH"]])
    find = ["python", "find", "--no-project", "--no-python-downloads", version]
    found = uv(*find, path=path)
    if found.returncode and os.environ.get("CI"):
        uv("python", "install", version)
        found = uv(*find, path=path)
    return None if found.returncode else found.stdout.strip()


def files_without_packages():
    """The test files of `predict` that import nothing but this and pytest."""
    for path in sorted((ROOT / "tests/predict").glob("test_*.py")):
        found = imports.of_file(path)
        if ({name.split(".")[0] for name, _ in found} <= {"dplab", "pytest",
                                                          *sys.stdlib_module_names}
                and {imports.package_of(name) for name, _ in found} <= {None, "dplab", "predict"}):
            yield str(path.relative_to(ROOT))


@pytest.mark.slow
def test_what_needs_no_torch_runs_on_the_newest_python(tmp_path):
    python = interpreter(NEWEST_PYTHON)
    if python is None:
        skip_or_fail(f"no Python {NEWEST_PYTHON} was found on the PATH, by pyenv or by uv: "
                     f"`uv python install {NEWEST_PYTHON}` brings one")
    files = list(files_without_packages())
    assert files
    done = subprocess.run(
        [python, "-B", "-m", "pytest", "-c", os.devnull, "--rootdir", ROOT, "-q", "-p",
         "no:cacheprovider", *files], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (pure_pytest(tmp_path), ROOT)))})
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([python, "-B", "-m", "dplab"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: dplab"), done.stderr


# What the course uses of torch although its name says that it is torch's own. Where a test of it
# fails on a newer torch, that use has to be replaced.
PRIVATE_IN_TORCH = """
    torch.Tensor._version
    torch.UntypedStorage._cdata
    torch._C._current_graph_task_id
    torch._C._distributed_c10d._create_work_from_future
    torch._C._distributed_c10d._dump_fr_trace_json
    torch._fused_sdp_choice
    torch._subclasses.fake_tensor.FakeTensorMode
    torch.autograd.Variable._execution_engine.queue_callback
    torch.distributed.ProcessGroup._allgather_base
    torch.distributed.ProcessGroup._reduce_scatter_base
    torch.distributed.ProcessGroup._register_backend
    torch.distributed.ProcessGroup._set_default_backend
    torch.distributed.ProcessGroup._set_group_name
    torch.distributed.ProcessGroup._set_sequence_number_for_group
    torch.distributed.Reducer._rebuild_buckets
    torch.distributed._functional_collectives.all_reduce
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper
    torch.distributed.distributed_c10d._get_default_store
    torch.distributed.distributed_c10d._resolve_process_group
    torch.distributed.distributed_c10d._world
    torch.distributed.fsdp.FSDPModule._get_fsdp_state
    torch.distributed.fsdp._fully_shard._fsdp_api.AllGather
    torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init
    torch.distributed.tensor.DTensor._local_tensor
    torch.nn.Module._buffers
    torch.nn.Module._modules
    torch.nn.parallel.DistributedDataParallel._get_active_ddp_module
    torch.ops.aten._to_copy
    torch.testing._internal.distributed.fake_pg.FakeStore
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._pytree.tree_leaves
    torch.utils._pytree.tree_map_only
"""
PRIVATE_ELSEWHERE = {"_exit", "_getframe", "_current_frames", "_DYNAMIC_CLASS_TRACKER_BY_ID"}


@pytest.mark.parametrize("name", PRIVATE_IN_TORCH.split())
def test_what_is_private_in_torch_is_there(name):
    import torch

    value, attributes = torch, name.split(".")[1:]
    for count, attribute in enumerate(attributes, 1):
        with contextlib.suppress(ImportError):
            importlib.import_module(".".join(["torch", *attributes[:count]]))
        if value is torch.nn.Module:
            value = value()  # which gives itself the attribute
        value = getattr(value, attribute)


def private(name):
    return name.startswith("_") and not name.endswith("__")


def test_all_that_is_private_in_torch_is_in_the_list():
    nodes = [node for path in (ROOT / "dplab").rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imported = {f"{node.module}.{name.name}" for node in nodes if isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("torch") for name in node.names}
    used = {part for name in imported for part in name.split(".") if private(part)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and private(node.attr)}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {getattr(node, "attr", None) or node.id for node in nodes
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)}
    listed = set(filter(private, PRIVATE_IN_TORCH.replace(".", " ").split()))
    assert used - own - PRIVATE_ELSEWHERE <= listed
    assert listed <= used | {"_allgather_base", "_reduce_scatter_base",  # strings in between/calls
                             "_fully_shard", "_fsdp_state"}
