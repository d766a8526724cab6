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
