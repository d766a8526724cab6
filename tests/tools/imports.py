"""Reads what a file of Python or a chapter imports, by statement and by attribute."""

import ast
import functools
import re
from pathlib import Path

import notebooks
from IPython.core.inputtransformer2 import TransformerManager

import dplab

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
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
    """``package``: the folders that a relative import starts from."""
    nodes = [*ast.walk(ast.parse(source))]
    found, bound = [], {}  # bound: which names stand for what of dplab
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            level = getattr(node, "level", 0)
            base = [*package[:len(package) + 1 - level]] if level else []
            base += filter(None, [getattr(node, "module", None)])
            for alias in node.names:
                module = ".".join([*base, alias.name])
                found.append((module, node))
                if "dplab." in module:
                    bound[alias.asname or alias.name] = module
    for node in nodes:
        if isinstance(node, ast.Attribute):  # dplab loads its parts when they are named
            top, _, rest = ast.unparse(node).partition(".")
            name = f"{bound.get(top, top)}.{rest}"
            found += [(name, node)] if re.fullmatch(r"dplab(\.\w+)+", name) else []
    return [(module, f"{where}:{node.lineno}") for module, node in found]
