"""Python source as its statements, each with the names that it binds and those that it uses."""

import ast
import symtable
import textwrap
from dataclasses import dataclass
from functools import cached_property

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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
    def binds(self) -> set[str]:
        """The global names that it binds."""
        table = symtable.symtable(ast.unparse(self.node), "statement", "exec")
        return {each.get_name() for each in table.get_symbols()
                if each.is_assigned() or each.is_imported()}

    @cached_property
    def uses(self) -> tuple[set[str], set[str]]:
        """The global names that it looks up when it runs (bases, decorators, defaults), and those
        that the functions which it defines look up when they are called.
        """
        table = symtable.symtable(ast.unparse(self.node), "statement", "exec")
        at_once = {each.get_name() for each in table.get_symbols() if each.is_referenced()}
        later: set[str] = set()

        def look_into(parent, is_running):
            for child in parent.get_children():
                runs = is_running and child.get_type() == "class"
                used = {each.get_name() for each in child.get_symbols() if each.is_global()}
                (at_once if runs else later).update(used)
                look_into(child, runs)

        look_into(table, True)
        return at_once, later
