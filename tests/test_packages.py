"""The course as a package: its requirements, and what it uses of torch."""

import ast
import contextlib
import importlib
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEPENDENCIES = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]


def by_name(requirements):
    """The packages that are asked for; the course's own extras are not among them."""
    found = {canonicalize_name(each.name): each for each in map(Requirement, requirements)}
    return {name: each for name, each in found.items() if name != PROJECT["project"]["name"]}


def pins(file):
    """The lines of a requirements file that name a package, by package."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return by_name(line for line in lines if line and not line.startswith(("#", "-")))


def test_what_the_project_names_is_pinned_for_pip_and_for_uv():
    for file, declared in (("requirements.txt", DEPENDENCIES + EXTRAS["lab"]),
                           ("tests/requirements.txt", EXTRAS["test"] + EXTRAS["deepspeed"]),
                           ("chapters/book/requirements.txt", EXTRAS["book"])):
        assert pins(file).keys() == by_name(declared).keys()
        assert all(re.fullmatch(r"==[\d.]+", str(pin.specifier)) for pin in pins(file).values())
    pinned = pins("requirements.txt")
    assert by_name(PROJECT["tool"]["uv"]["constraint-dependencies"]) == pinned
    [torch] = pinned["torch"].specifier
    assert by_name(DEPENDENCIES)["torch"].specifier.contains(torch.version)


# What the course uses of torch although its name says that it is torch's own. Where a test of it
# fails on a newer torch, that use has to be replaced.
PRIVATE_IN_TORCH = """
    torch.Tensor._version torch.UntypedStorage._cdata torch._C._current_graph_task_id
    torch._C._distributed_c10d._dump_fr_trace_json torch._fused_sdp_choice
    torch._subclasses.fake_tensor.FakeTensorMode
    torch.autograd.Variable._execution_engine.queue_callback
    torch.distributed.ProcessGroup._allgather_base
    torch.distributed.ProcessGroup._reduce_scatter_base
    torch.distributed.ProcessGroup._register_backend
    torch.distributed.ProcessGroup._set_default_backend
    torch.distributed.ProcessGroup._set_group_name
    torch.distributed.ProcessGroup._set_sequence_number_for_group
    torch.distributed.Reducer._rebuild_buckets torch.distributed._functional_collectives.all_reduce
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper
    torch.distributed.distributed_c10d._get_default_store
    torch.distributed.distributed_c10d._resolve_process_group
    torch.distributed.distributed_c10d._world torch.distributed.fsdp.FSDPModule._get_fsdp_state
    torch.distributed.fsdp._fully_shard._fsdp_api.AllGather
    torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init
    torch.distributed.tensor.DTensor._local_tensor torch.nn.Module._buffers torch.nn.Module._modules
    torch.nn.parallel.DistributedDataParallel._get_active_ddp_module torch.ops.aten._to_copy
    torch.testing._internal.distributed.fake_pg.FakeStore
    torch.utils._python_dispatch.TorchDispatchMode torch.utils._pytree.tree_leaves
    torch.utils._pytree.tree_map_only
"""
PRIVATE_ELSEWHERE = {"_exit", "_getframe", "_current_frames", "_DYNAMIC_CLASS_TRACKER_BY_ID"}


def test_what_is_private_in_torch_is_there():
    import torch

    for name in PRIVATE_IN_TORCH.split():
        value, parts = torch, name.split(".")
        for count, part in enumerate(parts[1:], 2):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts[:count]))
            if value is torch.nn.Module:
                value = value()  # which gives itself the attribute
            assert hasattr(value, part), name
            value = getattr(value, part)


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
