"""Reads what a file of Python or a chapter imports: by statement, by attribute and by string."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import notebooks
from IPython.core.inputtransformer2 import TransformerManager

import dplab

ROOT = Path(__file__).resolve().parents[2]
GUARDS = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
# In a string: a dotted name and nothing else, the rest of a command line, a script's statement.
DOTTED = re.compile(r"dplab\.(?:\w+\.?)*")
NAMED_IN = re.compile(r"-m (dplab(?:\.\w+)*)|^\s*(?:from|import) (dplab(?:\.\w+)*)", re.MULTILINE)


@dataclass(frozen=True)
class Import:
    where: str  # file and line, or chapter and cell
    module: str  # in full, and with the name that is taken from it
    for_typing: bool = False

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

    @property
    def public(self):
        """Whether it is dplab itself, or one of the names that it offers."""
        return self.top == "dplab" and {*self.module.split(".")[1:2]} <= {*dplab.__all__}

    @property
    def private(self):
        return self.top == "dplab" and any(
            name.startswith("_") and not name.endswith("__") for name in self.module.split("."))

    def __str__(self):
        return f"{self.where} imports {self.module}"


def of_file(path):
    """All imports of one file, those inside functions too."""
    name = path.relative_to(ROOT)
    return of_source(path.read_text(encoding="utf-8"), str(name), name.parts[:-1])


def of_chapter(path):
    """All imports of a notebook's code cells."""
    return of_cells([(f"{path.stem}, {cell.id}", cell.source)
                     for cell in notebooks.read(path).cells if cell.cell_type == "code"])


def of_cells(cells):
    """All imports of cells, as (where, source), in which a name of one is known to those after."""
    found, bound = [], {}
    for where, source in cells:
        # the body of a cell magic is Python of its own
        lines = [line for line in source.splitlines() if not line.startswith("%%")]
        code = TransformerManager().transform_cell("\n".join(lines))
        found += of_source(code, where, bound=bound)
    return found


def of_source(source, where, package=(), bound=None):
    """All imports of one source.

    ``package``: the folders that a relative import starts from; ``bound``: which names stand for
    what of dplab, where an attribute of those counts as well. This source adds its own.
    """
    nodes = list(ast.walk(ast.parse(source)))
    known = {} if bound is None else bound
    for node in nodes:
        if bound is not None and isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name for alias in node.names]
            bound.update((name, module) for name, module in
                         zip(names, modules(node, package, {}), strict=True)
                         if module.startswith("dplab."))
    for_typing = {inner for node in nodes if isinstance(node, ast.If)
                  and ast.unparse(node.test) in GUARDS
                  for statement in node.body for inner in ast.walk(statement)}
    words = docstrings(nodes) | {part for node in nodes if isinstance(node, ast.JoinedStr)
                                 for part in node.values[1:]}
    return [Import(f"{where}:{node.lineno}", module, node in for_typing)
            for node in nodes if node not in words for module in modules(node, package, known)]


def docstrings(nodes):
    """The strings that stand alone: no code has their value."""
    return {node.value for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def modules(node, package, bound):
    """The modules that one node of the syntax tree names, with the name that is taken."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = [node.module] if node.module else []
        if node.level:
            base = [*package[:len(package) + 1 - node.level], *base]
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Attribute):
        first, *rest = dotted(node).split(".")
        name = ".".join([bound.get(first, first), *rest])
        return [name] if name.startswith("dplab.") else []  # dplab loads its parts when named
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if DOTTED.fullmatch(node.value):
            return [node.value.rstrip(".")]
        return ["".join(match) for match in NAMED_IN.findall(node.value)]
    return []


def dotted(node):
    """``a.b.c`` of a chain of attributes, or nothing where it starts with no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""
