"""A function or class of the reader's as source that stands on its own.

All that has run is a list of statements: the notebook's cells in the order in which they ran, or a
script. The last definition of a name is taken as it was written, below all that it uses. What
belongs to a module is imported, and a constant is written as its value.

That may be another value than the one that a definition met, where a name was bound again since.
So the source counts only once it has passed by itself: see `dplab.checks.own`.
"""

import ast
import copy
import inspect
import linecache
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from dplab.spawn.parent.output import ipython

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MISSING = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, set, dict)


@dataclass(frozen=True)
class Statement:
    """A statement of ``source``."""

    node: ast.stmt
    source: str

    @property
    def lines(self) -> range:
        """The numbers of its lines, its decorators with it."""
        decorators = getattr(self.node, "decorator_list", ())
        first = min(each.lineno for each in (self.node, *decorators))
        return range(first, (self.node.end_lineno or first) + 1)

    @property
    def text(self) -> str:
        """Its lines, with comments, as they would stand outside of a block."""
        lines = self.source.split("\n")[self.lines.start - 1:self.lines.stop - 1]
        return textwrap.dedent("\n".join(lines)).rstrip()

    @cached_property
    def _table(self):
        return symtable.symtable(ast.unparse(self.node), "statement", "exec")

    @cached_property
    def binds(self) -> set[str]:
        """The global names that it binds."""
        return {each.get_name() for each in self._table.get_symbols()
                if each.is_assigned() or each.is_imported()}

    @cached_property
    def uses(self) -> set[str]:
        """The global names that it looks up: when it runs, or when what it defines is called."""
        def names(table):
            own = {each.get_name() for each in table.get_symbols() if each.is_global()}
            return own.union(*map(names, table.get_children()))

        return names(self._table)


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
    source = _Source(home, from_mine)
    source.add(own)
    return source.text() + (f"\n\n{name} = {own}\n" if own != name else "")


class _Source:
    """What has been chosen so far."""

    def __init__(self, home, from_mine):
        self.home = home
        self.from_mine = from_mine
        self.last = {name: each for each in _run_so_far(home) for name in each.binds}
        self.names: set[str] = set()  # which are defined, or about to be
        self.imports: set[str] = set()
        self.constants: list[str] = []
        self.definitions: list[str] = []  # each below what it uses

    def add(self, name: str, user: str | None = None) -> None:
        """Chooses what defines ``name``, which ``user`` uses, and all that it uses in turn."""
        if name in self.names or name not in self.home:  # or a builtin, or never looked up
            return
        self.names.add(name)
        value, statement = self.home[name], self.last.get(name)
        if user and (slug := self.from_mine(value)) is not None:
            self.imports.add("import dplab")
            self.constants.append(f'{name} = dplab.mine("{slug}")')
        elif imported := _import_in(statement, name) or self._import_by_name(name, value):
            self.imports.add(imported)
        elif text := _literal(value):
            self.constants.append(f"{name} = {text}")
        elif statement and _is_definition(statement.node):
            for used in sorted(statement.uses):
                self.add(used, name)
            self.definitions.append(statement.text)
        else:
            raise CannotWrite(_refusal(name, value, user))

    def _import_by_name(self, name, value) -> str | None:
        """An import that finds ``value`` by the module and the name that it carries."""
        if isinstance(value, types.ModuleType):
            return f"import {value.__name__} as {name}"
        module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
        found = vars(sys.modules[module]) if module in sys.modules else {}
        if own and found is not self.home and found.get(own, _MISSING) is value:
            return f"from {module} import {own}" + (f" as {name}" if own != name else "")
        return None

    def text(self) -> str:
        imports = sorted(self.imports, key=lambda line: (line.startswith("from"), line))
        parts = ["\n".join(imports), "\n".join(self.constants), *self.definitions]
        return "\n\n\n".join(filter(None, parts)) + "\n"


def _home(value) -> dict:
    """The names of the notebook or module that ``value`` belongs to."""
    main = vars(sys.modules["__main__"])
    if any(each is value for each in list(main.values())):
        return main
    for each in [value, *(vars(value).values() if isinstance(value, type) else ())]:
        function = inspect.unwrap(each) if callable(each) else getattr(each, "__func__", None)
        if isinstance(function, types.FunctionType):
            return function.__globals__
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return vars(module) if module else {}


def _run_so_far(home) -> Iterator[Statement]:
    shell = ipython()
    if shell is not None and shell.user_ns is home:
        texts = [text for cell in shell.history_manager.input_hist_parsed
                 for text in _with_timed(shell, cell)]
    else:
        texts = ["".join(linecache.getlines(home.get("__file__", "")))]
    for text in texts:
        yield from (Statement(node, text) for node in _statements(_parsed(text).body))


def _with_timed(shell, cell) -> Iterator[str]:
    """A cell; of ``%%time`` and the like, its body too."""
    yield cell
    for node in _parsed(cell).body:
        match node:
            case ast.Expr(ast.Call(ast.Attribute(attr="run_cell_magic"), [*_, ast.Constant(body)])):
                yield from _with_timed(shell, shell.transform_cell(body))


def _parsed(text) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.parse("")


def _statements(body) -> Iterator[ast.stmt]:
    """The statements that run with the cell, those inside ``if``, ``with`` and ``try`` too."""
    for node in body:
        if isinstance(node, Definition):
            yield node
            continue
        blocks = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        blocks += [each.body for each in getattr(node, "handlers", [])]
        if not any(blocks):
            yield node
        for block in blocks:
            yield from _statements(block)


def _is_definition(node):
    """Whether its text can stand for what it binds: that of a call, say, could give anything."""
    return isinstance(node, Definition) or (isinstance(node, ast.Assign) and (
        isinstance(node.value, ast.Lambda) or _is_dotted(node.value)))


def _is_dotted(node):
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and _is_dotted(node.value))


def _import_in(statement, name) -> str | None:
    """What binds the name, of a statement that is an import."""
    if not statement or not isinstance(statement.node, ast.Import | ast.ImportFrom):
        return None
    node = copy.copy(statement.node)
    node.names = [each for each in node.names
                  if name == (each.asname or each.name.split(".")[0])]
    return ast.unparse(node)


def _literal(value) -> str | None:
    """The text of a constant that stands for itself; None for any other value."""
    text = repr(value) if type(value) in _PLAIN else ""
    if text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _refusal(name, value, user):
    kind = "class" if isinstance(value, type) else type(value).__name__
    if user is None or isinstance(value, type | types.FunctionType):
        return (f"`{name}` is a {kind} whose definition cannot be found. Define it with `def` or "
                "`class` at the top level of a cell.")
    return (f"`{name}`, a {kind} that `{user}` uses, cannot be written down. Make it inside "
            f"`{user}`.")
