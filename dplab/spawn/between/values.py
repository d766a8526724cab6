"""Functions, arguments and results as bytes.

Functions and classes of the notebook travel by value (cloudpickle), tensors as raw memory on the
CPU: a result that lay on a GPU comes back usable in a kernel without one.
"""

import dis
import importlib
import io
import pickle
import sys
import types

import cloudpickle

_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")  # the last: Python 3.12


class Unpicklable(TypeError):
    """A value that cannot be sent; its text names the culprit."""


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value):
        if (isinstance(value, types.ModuleType) and type(value) is not types.ModuleType
                and sys.modules.get(value.__name__) is value):
            # torch.ops, torch.distributed.config: cloudpickle knows plain modules only
            return importlib.import_module, (value.__name__,)
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return super().reducer_override(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return value.cpu().__reduce_ex__(4) if value.device.type != "cpu" else NotImplemented
        if value.device.type == "meta" or value.is_quantized:
            return NotImplemented
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))  # one element may have another stride
        raw = flat.view(torch.uint8).numpy() if dense.numel() else b""
        is_parameter = isinstance(value, torch.nn.Parameter)
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape),
                         value.requires_grad, is_parameter)


def _tensor(raw, dtype, shape, requires_grad, is_parameter):
    import torch

    raw = bytearray(raw)
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def dumps(value) -> memoryview:
    """``value`` as bytes. Raises `Unpicklable` with a text that names what cannot be sent."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unpicklable(f"{find_culprit(value)} cannot be pickled ({why})") from error
    return buffer.getbuffer()


def loads(data):
    return pickle.loads(data)


def classes_by_value() -> list[type]:
    """The classes that came here by value: those of the notebook, also where only an argument
    brought them along."""
    return list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values())


def find_culprit(value, path="the value", depth=4) -> str:
    """The smallest part of ``value`` that fails to pickle, as words: where it is, and its type."""
    for name, part in _parts(value, path) if depth else ():
        if not can_pickle(part):
            return find_culprit(part, name, depth - 1)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{path}, a {kind},"


def _parts(value, path):
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set):
        return [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used = {name: value.__globals__[name] for name in sorted(global_names(value.__code__))
                if name in value.__globals__}
        where = f"used by {value.__name__}()"
        return [(f"`{name}`, {where}", part) for name, part in used.items()] + [
            (f"`{name}`, {where}", cell.cell_contents) for name, cell in cells]
    if hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        return [(f"{path}.{name}", part) for name, part in vars(value).items()]
    return []


def global_names(code) -> set[str]:
    """Every global name that a code object, or a function defined in it, may read.

    ``co_names`` would not do: it holds the names of attributes, too.
    """
    names = {step.argval for step in dis.get_instructions(code) if step.opname in _READS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


def can_pickle(value) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=5).dump(value)
    except Exception:
        return False
    return True
