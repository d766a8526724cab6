"""A function or class of the reader's as source that stands on its own.

The notebook's names say what a definition uses, and the syntax trees of its cells give the text.
(On Python 3.11, `inspect.getsource` does not find a class that a notebook defines.)
"""

import __future__

import ast
import builtins
import functools
import linecache
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dplab.spawn.parent.output import ipython

LONGEST = 10_000  # characters of a constant

_MISSING = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_UNEVALUATED = __future__.annotations.compiler_flag  # of code after the next line
_FUTURE_ANNOTATIONS = "from __future__ import annotations"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class CannotWrite(Exception):
    """Something that no source can say. The text names it, and says what to do."""


def written_down(value, name: str, from_mine: Callable[[object], str | None]) -> str:
    """The source that defines ``name`` as ``value``: imports, constants, definitions.

    ``from_mine(value)`` is the slug of what `dplab.mine` returned, and None for all else.
    Raises `CannotWrite`.
    """
    home = _home(value)
    public = [each for each in home if not each.startswith("_")]  # `_12` is an output
    own = next((each for each in (name, getattr(value, "__name__", ""), *public)
                if home.get(each, _MISSING) is value), None)
    if own is None:
        raise CannotWrite(f"`{name}` has no name of its own in the notebook. Define it with `def` "
                          "or `class` at the top level of a cell, and check that name.")
    source = _Source(from_mine)
    source.add(own, value, home, user=None)
    if own != name:
        source.pieces[name] = _Piece(f"{name} = {own}", at_once={own})
    return source.text()


@dataclass
class _Piece:
    """A statement, and the global names that it looks up."""

    text: str
    at_once: set[str] = field(default_factory=set)  # when it is run: bases, decorators, defaults
    later: set[str] = field(default_factory=set)  # when what it defines is called


class _Source:
    """What has been collected so far."""

    def __init__(self, from_mine):
        self.from_mine = from_mine
        self.imports: dict[str, None] = {}
        self.constants: dict[str, str] = {}
        self.pieces: dict[str, _Piece] = {}  # users come after what they use, but for cycles
        self._values: dict[str, object] = {}

    def add(self, name: str, value, home: dict, user: str | None) -> None:
        """Adds what defines ``name`` in ``home``, the names of a module, and all that it uses."""
        if self._values.setdefault(name, value) is not value:
            raise CannotWrite(f"`{name}` is two different things in what you wrote. "
                              "Give one of them another name.")
        if name in self.pieces or name in self.constants:
            return
        slug = self.from_mine(value) if user else None
        if imports := _import_of(name, value, home):
            self.imports.update(dict.fromkeys(imports))
        elif slug is not None:
            self.imports["import dplab"] = None
            self.constants[name] = f'{name} = dplab.mine("{slug}")'
        elif _is_plain(value):
            self.constants[name] = f"{name} = {_literal(name, value)}"
        elif _is_readers(value, home) and (found := _definition(name, value)):
            self._add_definition(name, *found)
        elif alias := _alias_of(name, value, home):
            self.pieces[name] = piece = _Piece(*alias)
            self._add_names(name, piece.at_once, home)
        elif importable := _import_by_name(name, value):
            self.imports[importable] = None
        else:
            raise CannotWrite(_refusal(name, value, user))

    def _add_definition(self, name, text, home, future):
        if future:
            self.imports[_FUTURE_ANNOTATIONS] = None
        piece = _piece(text, future)
        self.pieces[name] = piece
        self._add_names(name, piece.at_once | piece.later, home)
        self.pieces[name] = self.pieces.pop(name)  # behind what it uses
        self.imports.update(dict.fromkeys(_imports_by_dots(text, home)))

    def _add_names(self, user, names, home):
        for each in sorted(names - {user}):
            value = home.get(each, _MISSING)
            if value is _MISSING and _is_ipythons(each):
                value = getattr(builtins, each)
            if value is not _MISSING:  # else a builtin, or a name that no run has looked up
                self.add(each, value, home, user)

    def text(self) -> str:
        ordered: dict[str, str] = {}

        def put(name):
            if name in self.pieces and name not in ordered:
                ordered[name] = ""
                for each in sorted(self.pieces[name].at_once):
                    put(each)
                del ordered[name]
                ordered[name] = self.pieces[name].text

        for name in self.pieces:
            put(name)
        imports = sorted(self.imports, key=lambda line: (
            line != _FUTURE_ANNOTATIONS, line.startswith("from"), line))
        parts = ["\n".join(imports), "\n".join(self.constants.values()), *ordered.values()]
        return "\n\n\n".join(filter(None, parts)) + "\n"


# What a value is called, and where


def _home(value) -> dict:
    """The names of the notebook or module that ``value`` belongs to."""
    main = vars(sys.modules["__main__"])
    if any(each is value for each in list(main.values())):
        return main
    for function in _functions(value):
        return function.__globals__
    return vars(sys.modules.get(getattr(value, "__module__", None) or "__main__", types))


def _functions(value, depth=3) -> Iterator[types.FunctionType]:
    """The functions that ``value`` is, has as methods, or was made from by decorators."""
    if isinstance(value, types.FunctionType):
        yield value
    if isinstance(value, type):
        inner = [each for each in vars(value).values() if not isinstance(each, type)]
    else:
        inner = [getattr(value, part, None) for part in ("__wrapped__", "__func__", "fget")]
        inner += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()
                  if _is_filled(cell) and isinstance(cell.cell_contents, types.FunctionType)]
    for each in inner if depth else ():
        yield from _functions(each, depth - 1)


def _is_readers(value, home) -> bool:
    """Whether ``value`` was defined in the notebook or file, not in a library."""
    names = [function.__globals__ for function in _functions(value)]
    return (any(each is home or each.get("__name__") == "__main__" for each in names)
            or (isinstance(value, type) and value.__module__ == home.get("__name__")))


def _is_filled(cell):
    try:
        cell.cell_contents  # noqa: B018
        return True
    except ValueError:
        return False


def _is_ipythons(name):
    """Whether IPython has put this name among the builtins, as it does with `display`."""
    module = getattr(getattr(builtins, name, None), "__module__", None) or ""
    return module.split(".")[0] == "IPython"


# Imports


def _import_of(name, value, home) -> list[str]:
    """The notebook's own import statements that bind ``name`` to ``value``, or one for a module."""
    for tree in _trees_of(home):
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                module = sys.modules.get(node.module)
                for each in node.names:
                    written = name if each.name == "*" else each.name
                    if ((each.asname or written) == name
                            and getattr(module, written, _MISSING) is value):
                        return [f"from {node.module} import {_renamed(written, name)}"]
    if isinstance(value, types.ModuleType) and value.__name__ != "__main__":
        return [f"import {_renamed(value.__name__, name)}"]
    return []


def _import_by_name(name, value) -> str | None:
    """An import that finds ``value`` by the module and the name that it carries."""
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module and own and module != "__main__" and (
            getattr(sys.modules.get(module), own, _MISSING) is value):
        return f"from {module} import {_renamed(own, name)}"
    return None


def _renamed(written, name):
    return written if written == name else f"{written} as {name}"


def _imports_by_dots(text, home) -> list[str]:
    """The notebook's imports of modules that the text reaches by dots: ``concurrent.futures``."""
    chains = {_chain(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    return [f"import {each.name}" for tree in _trees_of(home) for node in _statements(tree.body)
            if isinstance(node, ast.Import) for each in node.names
            if each.asname is None and each.name in chains]


def _chain(node) -> str | None:
    """``a.b.c`` as text, and None for any other expression."""
    if isinstance(node, ast.Attribute):
        front = _chain(node.value)
        return front and f"{front}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


# Constants


def _is_plain(value, depth=20) -> bool:
    """Whether ``value`` is of types whose `repr` is a literal."""
    if type(value) in (tuple, list, set):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(_is_plain(each, depth - 1)
                                 for pair in value.items() for each in pair)
    return type(value) in _PLAIN


def _literal(name, value) -> str:
    text = repr(value)
    if isinstance(value, float) and text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    try:
        ast.literal_eval(text)
    except ValueError:
        raise CannotWrite(f"`{name}` has an inf or nan inside, which no literal says. "
                          "Make it inside the function.") from None
    if len(text) > LONGEST:
        raise CannotWrite(f"`{name}` has {len(text):,} characters when written down, and "
                          f"{LONGEST:,} is the limit. Make it inside the function.")
    return text


def _alias_of(name, value, home) -> tuple[str, set[str]] | None:
    """The assignment of another name, or of a module's attribute: ``relu = F.relu``."""
    own = getattr(value, "__name__", name)
    if own != name and home.get(own, _MISSING) is value:
        return f"{name} = {own}", {own}
    for tree in _trees_of(home):
        for node in _statements(tree.body):
            if isinstance(node, ast.Assign) and [_chain(each) for each in node.targets] == [name]:
                chain = _chain(node.value)
                if chain and chain != name and _reached(chain, home) is value:
                    return f"{name} = {chain}", {chain.split(".")[0]}
    return None


def _reached(chain, home):
    """The value of ``a.b.c``, where ``a`` is a module; of ``a`` alone, whatever it is."""
    first, *rest = chain.split(".")
    value = home.get(first, _MISSING)
    if rest and not isinstance(value, types.ModuleType):
        return _MISSING
    for each in rest:
        value = getattr(value, each, _MISSING)
    return value


# Definitions


def _definition(name, value) -> tuple[str, dict, bool] | None:
    """The text that defines ``name`` as ``value``, the names that it sees, and whether its
    annotations stay unevaluated. None where there is no such text.
    """
    for function in _functions(value):
        for text, tree, line in _places(function.__code__):
            node = _defining(name, tree, line)
            decorated = isinstance(node, _Definition) and bool(node.decorator_list)
            if node and (isinstance(value, type) or function is value or decorated):
                future = bool(function.__code__.co_flags & _UNEVALUATED)
                return _with_earlier(name, value, _text(text, node)), function.__globals__, future
    return _by_names(name, value) if isinstance(value, type) else None


def _with_earlier(name, value, text):
    """A class may extend an earlier one of its own name: ``class Model(Model)``."""
    for base in value.__bases__ if isinstance(value, type) else ():
        if base.__name__ == name and (found := _definition(name, base)):
            return f"{found[0]}\n\n\n{text}"
    return text


def _by_names(name, value):
    """The latest class of this name with all that ``value`` holds, whose own methods are none, or
    were made by a decorator."""
    home = _home(value)
    held = {each for each in vars(value) if not each.startswith("__")}
    for text, tree in _texts_of(home):
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name and held <= _bound_in(node):
                return _with_earlier(name, value, _text(text, node)), home, False
    return None


def _bound_in(node):
    return {each.name if isinstance(each, _Definition) else each.id for each in ast.walk(node)
            if isinstance(each, _Definition)
            or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))}


def _defining(name, tree, line) -> ast.stmt | None:
    """The statement at this line of the tree that defines ``name`` by def, class or lambda."""
    for node in _statements(tree.body):
        is_lambda = (isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
                     and [_chain(each) for each in node.targets] == [name])
        is_named = isinstance(node, _Definition) and node.name == name
        if (is_lambda or is_named) and first_line(node) <= line <= (node.end_lineno or 0):
            inside = isinstance(node, ast.ClassDef) or is_lambda
            if inside or first_line(node) == line:
                return node
    return None


def first_line(node: ast.stmt) -> int:
    """The line where a definition begins, its decorators with it."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _text(text, node):
    lines = text.split("\n")[first_line(node) - 1:node.end_lineno]
    return textwrap.dedent("\n".join(lines)).rstrip()


def _piece(text, future) -> _Piece:
    """The text as a piece, with the global names that it looks up."""
    table = symtable.symtable(f"{_FUTURE_ANNOTATIONS}\n{text}" if future else text, "cell", "exec")
    piece = _Piece(text, {each.get_name() for each in table.get_symbols() if each.is_referenced()})

    def look_into(parent, at_once):
        for child in parent.get_children():
            runs = at_once and child.get_type() == "class"
            used = {each.get_name() for each in child.get_symbols() if each.is_global()}
            (piece.at_once if runs else piece.later).update(used)
            look_into(child, runs)

    look_into(table, True)
    return piece


# Texts: the notebook's cells, or a script's file


def _places(code) -> Iterator[tuple[str, ast.Module, int]]:
    """Texts that may define this code, each with its tree and the code's first line in it."""
    text = "".join(linecache.getlines(code.co_filename))
    if tree := _parsed(text):
        yield text, tree, code.co_firstlineno
    for text, tree in _cells():  # code of `%%time` carries no file
        for each in _codes(_compiled(tree, code.co_flags)):
            if _is_same(each, code):
                yield text, tree, each.co_firstlineno


def _texts_of(home) -> Iterator[tuple[str, ast.Module]]:
    """The texts of the module with these names: its cells, the latest first, or its file."""
    shell = ipython()
    if shell is not None and shell.user_ns is home:
        yield from _cells()
    text = "".join(linecache.getlines(home.get("__file__") or ""))
    if tree := _parsed(text):
        yield text, tree


def _trees_of(home) -> Iterator[ast.Module]:
    return (tree for _, tree in _texts_of(home))


def _cells() -> Iterator[tuple[str, ast.Module]]:
    """The cells that were run, the latest first; of ``%%time`` and the like, their bodies too."""
    shell = ipython()
    for cell in reversed(shell.history_manager.input_hist_parsed if shell else ()):
        yield from _bodies(shell, cell)


def _bodies(shell, cell):
    if tree := _parsed(cell):
        yield cell, tree
        for node in tree.body:
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == (
                    "get_ipython().run_cell_magic") and isinstance(call.args[-1], ast.Constant):
                yield from _bodies(shell, shell.transform_cell(call.args[-1].value))


@functools.lru_cache(maxsize=512)
def _parsed(text) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError):
        return None


def _statements(body) -> Iterator[ast.stmt]:
    """The statements that run with the cell, those inside ``if``, ``with`` and ``try`` too."""
    for node in body:
        yield node
        if not isinstance(node, _Definition):
            blocks = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            for block in [*blocks, *(each.body for each in getattr(node, "handlers", []))]:
                yield from _statements(block)


def _compiled(tree, flags):
    flags = (flags & _UNEVALUATED) | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return compile(tree, "cell", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return compile("", "cell", "exec")


def _codes(code) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _is_same(one, other) -> bool:
    """Whether two code objects say the same, wherever they stand."""
    def facts(code):
        plain = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        return (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars,
                repr(plain))

    inner = list(_codes(one)), list(_codes(other))
    return facts(one) == facts(other) and [facts(each) for each in inner[0]] == [
        facts(each) for each in inner[1]]


def _refusal(name, value, user):
    kind = type(value).__name__
    if isinstance(value, types.FunctionType):
        return (f"`{name}` is a function that was made by other code, or whose source cannot be "
                "found. Define it with `def` at the top level of a cell.")
    if isinstance(value, type):
        return (f"`{name}` is a class whose source cannot be found. Define it with `class` at the "
                "top level of a cell.")
    if user is None:
        return (f"`{name}` is a {kind}, which cannot be written down. Define a function with "
                "`def` or a class with `class`.")
    return (f"`{name}`, a {kind} that `{user}` uses, cannot be written down. Make it inside "
            f"`{user}`.")
