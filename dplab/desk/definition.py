"""A function or class of the reader's as source that stands on its own.

All that has run is a list of statements: the notebook's cells in the order in which they ran, or a
script. Of a name, the last statement that bound it to the value which it has now is what defines
it. The names which that statement uses are looked up in the same way: those of a base, a decorator
or a default among the statements before it, those of a function's body among all. The chosen
statements, in their order, are the source. A constant is written as its value.
"""

import ast
import builtins
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator

from dplab.desk.statements import Definition, Statement
from dplab.spawn.parent.output import ipython

LONGEST = 10_000  # characters of a constant

_MISSING = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, set, dict)


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
    source = _Source(home, list(_run_so_far(value, home)), from_mine)
    source.add(own)
    return source.text() + (f"\n\n{name} = {own}\n" if own != name else "")


class _Source:
    """The statements that have been chosen so far."""

    def __init__(self, home, statements, from_mine):
        self.home = home
        self.statements = statements
        self.from_mine = from_mine
        self.imports: set[str] = set()
        self.chosen: dict[tuple[int, str], str] = {}  # by place, and name of a constant

    def add(self, name: str, before: int | None = None, user: str | None = None) -> None:
        """Chooses what defines ``name``, and all that it uses in turn.

        ``before``: how many statements had run when ``user`` looked it up; by default, all.
        """
        before = len(self.statements) if before is None else before
        is_current = not any(name in each.binds for each in self.statements[before:])
        value = self.home.get(name, _MISSING)
        if value is _MISSING:  # a builtin, or a name that no run has looked up
            return
        places = [place for place in reversed(range(before))
                  if name in self.statements[place].binds]
        latest = places[0] if places else -1
        place = self._place_of(name, places, value if is_current else _MISSING)
        if user and (slug := self.from_mine(value)) is not None:
            self.imports.add("import dplab")
            self.chosen[latest, name] = f'{name} = dplab.mine("{slug}")'
        elif imports := self._imports_of(name, value):
            self.imports |= imports
        elif (is_current or place is None) and (text := _literal(value)):
            if len(text) > LONGEST:
                raise CannotWrite(f"`{name}` has {len(text):,} characters when written down, and "
                                  f"{LONGEST:,} is the limit. Make it inside the function.")
            self.chosen[latest, name] = f"{name} = {text}"
        elif place is not None:
            self._choose(place, name)
        elif importable := _import_by_name(name, value):
            self.imports.add(importable)
        else:
            raise CannotWrite(_refusal(name, value, user))

    def _place_of(self, name, places, value):
        """Where ``name`` got this value; None if no statement says so, or one that is not clear."""
        for place in places:
            if (answer := _defines(self.statements[place], name, value, self.home)) is not False:
                return place if answer else None
        return None

    def _choose(self, place, user):
        if (place, "") in self.chosen:
            return
        self.chosen[place, ""] = self.statements[place].text
        at_once, later = self.statements[place].uses
        for name in sorted(at_once):
            self.add(name, place, user)
        for name in sorted(later):
            self.add(name, None, user)

    def _imports_of(self, name, value) -> set[str]:
        """The reader's own import statements that bind ``name`` to ``value``.

        Of ``import concurrent.futures`` all with the same first word: each may have loaded a part.
        """
        found = set()
        for each in self.statements:
            if isinstance(each.node, ast.Import) and isinstance(value, types.ModuleType):
                for part in each.node.names:
                    whole = part.asname or part.name.split(".")[0]
                    if whole == name and value.__name__ == (part.name if part.asname else whole):
                        found.add(f"import {ast.unparse(part)}")
            elif isinstance(each.node, ast.ImportFrom) and each.node.module:
                module = sys.modules.get(each.node.module)
                for part in each.node.names:
                    written = name if part.name == "*" else part.name
                    if ((part.asname or written) == name
                            and getattr(module, written, _MISSING) is value):
                        return {f"from {each.node.module} import {_renamed(written, name)}"}
        return found

    def text(self) -> str:
        imports = sorted(self.imports, key=lambda line: (line.startswith("from"), line))
        text, was_short = "\n".join(imports), False
        for _, part in sorted(self.chosen.items()):
            is_short = not part.startswith(("def ", "class ", "@", "async "))
            text += ("\n" if was_short and is_short else "\n\n\n") + part
            was_short = is_short
        return text.lstrip("\n") + "\n"


# Where a value is at home, and what has run there


def _home(value) -> dict:
    """The names of the notebook or module that ``value`` belongs to."""
    main = vars(sys.modules["__main__"])
    if any(each is value for each in list(main.values())):
        return main
    if function := _function_of(value):
        return function.__globals__
    return vars(sys.modules.get(getattr(value, "__module__", None) or "__main__", types))


def _function_of(value) -> types.FunctionType | None:
    """The function that ``value`` is or wraps; of a class, a method that its text defines."""
    if isinstance(value, type):
        methods = [_function_of(getattr(each, "__func__", getattr(each, "fget", each)))
                   for each in vars(value).values() if not isinstance(each, type)]
        return next((each for each in methods if each is not None
                     and each.__qualname__.startswith(f"{value.__qualname__}.")
                     and each.__code__.co_filename != "<string>"), None)  # as of a dataclass
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _run_so_far(value, home) -> Iterator[Statement]:
    shell = ipython()
    if shell is not None and shell.user_ns is home:
        texts = [text for cell in shell.history_manager.input_hist_parsed
                 for text in _with_timed(shell, cell)]
    else:
        function = _function_of(value)
        file = function.__code__.co_filename if function else home.get("__file__", "")
        texts = ["".join(linecache.getlines(file))]
    for text in texts:
        yield from (Statement(node, text) for node in _statements(_parsed(text).body))


def _with_timed(shell, cell) -> Iterator[str]:
    """A cell; of ``%%time`` and the like, its body too."""
    yield cell
    for node in _parsed(cell).body:
        match node:
            case ast.Expr(ast.Call(ast.Attribute(attr="run_cell_magic"), [*_, ast.Constant(body)])):
                yield from _with_timed(shell, shell.transform_cell(body))


@functools.lru_cache(maxsize=512)
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


# Whether a statement defines a value


def _defines(statement, name, value, home) -> bool | None:
    """Whether the statement gave ``name`` this value, or any if it is ``_MISSING``; None where the
    statement alone cannot say.
    """
    node = statement.node
    if isinstance(node, ast.Import | ast.ImportFrom):
        return False  # `_imports_of` has asked for them
    if isinstance(node, Definition):
        function = _function_of(value)
        is_class = isinstance(node, ast.ClassDef)
        if value is _MISSING or (is_class and isinstance(value, type) and not function):
            return True
        if function is None or not (is_class or function is value or node.decorator_list):
            return bool(node.decorator_list)
        if not is_class and function.__code__.co_name != name:  # made by the decorator
            return bool(node.decorator_list)
        return _stands_in(function, statement)
    if not isinstance(node, ast.Assign) or [ast.unparse(each) for each in node.targets] != [name]:
        return None
    if isinstance(node.value, ast.Lambda):
        return value is _MISSING or (
            isinstance(value, types.FunctionType) and _stands_in(value, statement))
    if isinstance(node.value, ast.Constant):
        return value is _MISSING
    if not _is_dotted(node.value):
        return None
    return value is _MISSING or _reached(ast.unparse(node.value), home) is value


def _stands_in(function, statement):
    """Whether the function's code was compiled from this statement."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename)).rstrip("\n")
    is_of_cell = text == statement.source.rstrip("\n") or code.co_filename == "<timed exec>"
    return is_of_cell and code.co_firstlineno in statement.lines


def _is_dotted(node):
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and _is_dotted(node.value))


def _reached(dotted, home):
    """The value of ``a.b.c``, where ``a`` is a module; of ``a`` alone, whatever it is."""
    first, *rest = dotted.split(".")
    value = home.get(first, getattr(builtins, first, _MISSING))
    if rest and not isinstance(value, types.ModuleType):
        return _MISSING
    return functools.reduce(lambda value, part: getattr(value, part, _MISSING), rest, value)


def _import_by_name(name, value) -> str | None:
    """An import that finds ``value`` by the module and the name that it carries."""
    if isinstance(value, types.ModuleType):
        return f"import {_renamed(value.__name__, name)}"
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module and own and module != "__main__" and (
            getattr(sys.modules.get(module), own, _MISSING) is value):
        return f"from {module} import {_renamed(own, name)}"
    return None


def _renamed(written, name):
    return written if written == name else f"{written} as {name}"


def _literal(value) -> str | None:
    """The text of a constant that stands for itself; None for any other value."""
    text = repr(value) if type(value) in _PLAIN else ""
    if text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    try:
        again = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return text if type(again) is type(value) and again == value else None


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
