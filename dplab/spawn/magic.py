"""``%%ranks N``: a cell whose body runs on N ranks."""

import argparse
import ast

from IPython.core.magic import register_cell_magic

from dplab.spawn.errors import expect_failure
from dplab.spawn.launch import run
from dplab.spawn.start import warm_up
from dplab.spawn.transport import global_names


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"%%ranks N [--timeout S] [--fails]: {message}")


def register(shell) -> None:
    """Adds ``%%ranks`` to an IPython shell, and starts the fork server in the background."""
    warm_up()
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("world_size", type=int, metavar="N")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--fails", action="store_true")

    def ranks(line, cell):
        """``%%ranks N [--timeout S] [--fails]``: runs the cell's body on N ranks.

        Names of the notebook are visible, none come back. The value of a last expression comes
        back as the list ``_``. ``--fails``: the failure is meant; it is shown without raising, and
        kept under the name ``failure``.
        """
        options = parser.parse_args(line.split())
        body = _Body(shell, line, cell)
        if options.fails:
            with expect_failure() as shell.user_ns["failure"]:
                run(body, options.world_size, timeout=options.timeout)
            return None
        values = run(body, options.world_size, timeout=options.timeout)
        return None if all(value is None for value in values) else values

    register_cell_magic(ranks)


class _Body:
    """A cell's code with the names of the notebook that it uses, to be called on a rank."""

    def __init__(self, shell, line, cell):
        source = f"%%ranks {line}\n{cell}"
        self.file = shell.compile.cache(source, len(shell.user_ns["In"]) - 1, raw_code=source)
        tree = ast.parse("\n" + cell, self.file)  # the magic's own line is the cell's first
        last = tree.body[-1] if tree.body else None
        hidden = cell.rstrip().endswith(";")
        self.result = None
        if isinstance(last, ast.Expr) and not hidden:
            tree.body.pop()
            self.result = compile(ast.Expression(last.value), self.file, "eval")
        self.code = compile(tree, self.file, "exec")
        used = global_names(self.code) | (global_names(self.result) if self.result else set())
        self.names = {name: shell.user_ns[name] for name in used if name in shell.user_ns}

    def __call__(self):
        names = {"__name__": "__main__", **self.names}
        exec(self.code, names)
        return eval(self.result, names) if self.result else None
