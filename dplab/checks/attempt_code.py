"""What the code of an attempt says, whatever it did when it ran."""

import ast
import dis
import inspect
import textwrap
import types

# Of calls that return at once, whatever the operation.
ASYNCHRONOUS = {"async_op", "isend", "irecv", "batch_isend_irecv"}
# Calls that return None, and leave their result in a tensor that they get.
RETURN_NOTHING = {
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter"}


def names_in(attempt) -> set[str]:
    """The names that code uses, those of keyword arguments too."""
    names = set()
    for code in _codes(attempt):
        names.update(code.co_names)
        for constant in code.co_consts:
            names.update(constant if isinstance(constant, tuple) else ())
    return names


def unwaited(attempt) -> str:
    """What starts a call of ASYNCHRONOUS for which nobody can wait, or ever waits; "" if nothing.

    Nobody can where the handle is given no name, or one that is not used again.
    """
    started = sorted(names_in(attempt) & ASYNCHRONOUS)
    if started and "wait" not in names_in(attempt):
        return started[0]
    nodes = _nodes(attempt)
    used = {node.id for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in nodes:
        is_dropped = isinstance(node, ast.Expr) or (isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id not in used for target in node.targets))
        if is_dropped and isinstance(call := node.value, ast.Call):
            words = {getattr(call.func, "attr", getattr(call.func, "id", "")),
                     *(str(each.arg) for each in call.keywords
                       if isinstance(each.value, ast.Constant) and each.value.value is True)}
            if words & ASYNCHRONOUS:
                return min(words & ASYNCHRONOUS)
    return ""


def used_result(attempt) -> str:
    """The name of a call in RETURN_NOTHING whose result the code uses; empty if there is none."""
    nodes = _nodes(attempt)
    lines = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if (isinstance(node, ast.Call) and id(node) not in lines
                and isinstance(node.func, ast.Attribute) and node.func.attr in RETURN_NOTHING
                and ast.unparse(node.func.value) in ("dist", "torch.distributed")
                and not any(keyword.arg == "async_op" for keyword in node.keywords)):
            return node.func.attr
    return ""


def words_of(attempt):
    """The names and constants in the order of use: what code says, whoever compiled it."""
    return [item.argval for code in _codes(attempt) for item in dis.get_instructions(code)
            if item.opname.startswith(("LOAD_", "STORE_"))
            and not isinstance(item.argval, types.CodeType)]


def _nodes(attempt):
    """Of its source; none where there is no source, or a part of a line."""
    try:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(attempt)))))
    except (OSError, SyntaxError, TypeError):
        return []


def _codes(attempt):
    """The code objects of a function, or of every method of a class."""
    functions = [attempt]
    if isinstance(attempt, type):
        functions = [getattr(value, "__func__", value) for value in vars(attempt).values()
                     if isinstance(value, types.FunctionType | staticmethod | classmethod)]
    found = [function.__code__ for function in functions if hasattr(function, "__code__")]
    for code in found:
        found.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
    return found
