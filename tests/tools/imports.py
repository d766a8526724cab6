"""Reads what a file of Python or a chapter imports: by statement, by attribute and by string."""

import ast
import re
from pathlib import Path

import notebooks
from IPython.core.inputtransformer2 import TransformerManager

import dplab

ROOT = Path(__file__).resolve().parents[2]
# In a string: a dotted name and nothing else, the rest of a command line, a script's statement.
DOTTED = re.compile(r"dplab\.(?:\w+(?:\.\w+)*\.?)?")
NAMED_IN = re.compile(r"-m (dplab(?:\.\w+)*)|^\s*(?:from|import) (dplab(?:\.\w+)*)", re.MULTILINE)


def of_file(path):
    """All imports of one file, those inside functions too: (module with the name taken, where)."""
    name = path.relative_to(ROOT)
    return _of_source(path.read_text(encoding="utf-8"), name, name.parts[:-1])


def of_chapter(path):
    """All imports of a notebook's code cells."""
    # The body of a cell magic is Python of its own.
    cells = [re.sub(r"\A%%.*", "", cell.source) for cell in notebooks.read(path).cells
             if cell.cell_type == "code"]
    return _of_source("\n".join(map(TransformerManager().transform_cell, cells)), path.stem)


def package_of(module):
    """The part of dplab that it belongs to, "dplab" where that is dplab itself, or None."""
    top, *rest = module.split(".")
    name = rest[0] if rest else "dplab"
    return dplab._MODULE_OF.get(name, name) if top == "dplab" else None


def _of_source(source, where, package=()):
    reader = _Reader(package)
    reader.visit(ast.parse(source))
    return [(module, f"{where}:{line}") for module, line in reader.found]


class _Reader(ast.NodeVisitor):
    """``found``: (module, line), but for what stands under `if TYPE_CHECKING` or in a docstring."""

    def __init__(self, package):
        self.package = package  # the folders that a relative import starts from
        self.found = []
        self._bound = {}  # which names stand for what of dplab

    def visit_If(self, node):
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_JoinedStr(self, node):
        for part in node.values:
            if part is node.values[0] or not isinstance(part, ast.Constant):
                self.visit(part)

    def visit_Import(self, node):
        self._take(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node):
        base = [node.module] if node.module else []
        if node.level:
            base = [*self.package[:len(self.package) + 1 - node.level], *base]
        self._take(node, [".".join([*base, alias.name]) for alias in node.names])

    def _take(self, node, modules):
        self.found += [(module, node.lineno) for module in modules]
        self._bound |= {alias.asname or alias.name: module
                        for alias, module in zip(node.names, modules, strict=True)
                        if module.startswith("dplab.")}

    def visit_Attribute(self, node):
        """dplab loads its parts when they are named."""
        names, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            names, base = [base.attr, *names], base.value
        if isinstance(base, ast.Name):
            name = ".".join([self._bound.get(base.id, base.id), *names])
            self.found += [(name, node.lineno)] if name.startswith("dplab.") else []
        else:
            self.visit(base)

    def visit_Constant(self, node):
        if not isinstance(node.value, str):
            return
        names = [node.value] if DOTTED.fullmatch(node.value) else [
            "".join(match) for match in NAMED_IN.findall(node.value)]
        self.found += [(name.rstrip("."), node.lineno) for name in names]
