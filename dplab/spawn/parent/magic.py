"""The cell magic ``%%ranks``: a cell that runs on ranks instead of in the notebook."""

import argparse
import ast
import traceback

from ..between import values
from ..between.errors import RankError, expect_failure
from ..server.start import warm_up
from . import output
from .run import run, validate

_USAGE = "%%ranks N [--timeout SECONDS] [--fails]"


class CellError(ValueError):
    """A ``%%ranks`` cell that cannot start. Its text says what is wrong, where, and what to try."""

    _render_traceback_ = RankError._render_traceback_


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise CellError(f"{message}. The first line of the cell is {_USAGE}, for instance "
                        "%%ranks 4 --timeout 120")


def register_magic(shell) -> None:
    """Adds ``%%ranks`` to an IPython shell, and starts the fork server in the background."""
    from IPython.core.magic import register_cell_magic

    warm_up()
    shell.events.register("pre_run_cell", lambda _=None: output.seen_warnings.clear())

    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("world_size", type=int, metavar="N")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--fails", action="store_true")

    def ranks(line, cell):
        """``%%ranks N [--timeout SECONDS] [--fails]``: runs the cell's body on N ranks.

        Names of the notebook are visible, none come back. The value of a last expression comes back
        as the list ``_``. ``--fails``: the failure is meant; it is shown without raising, and kept
        under the name ``failure``.
        """
        options = parser.parse_args(line.split())
        body = _Body(shell, line, cell)
        try:
            validate(body, options.world_size, options.timeout)
        except ValueError as error:
            raise CellError(str(error)) from None
        if options.fails:
            with expect_failure() as shell.user_ns["failure"]:
                run(body, options.world_size, timeout=options.timeout)
            return None
        returned = run(body, options.world_size, timeout=options.timeout)
        return None if all(value is None for value in returned) else returned

    register_cell_magic(ranks)


class _Body:
    """A cell's code with the names of the notebook that it reads, to be called on a rank."""

    def __init__(self, shell, line, cell):
        source = f"%%ranks {line}\n{cell}"
        self.file = shell.compile.cache(source, len(shell.user_ns["In"]) - 1, raw_code=source)
        try:
            self.code, self.result = _compiled(cell, self.file)
        except SyntaxError as error:
            raise CellError(_explained(error, cell)) from None
        used = values.global_names(self.code)
        if self.result:
            used |= values.global_names(self.result)
        self.names = {name: shell.user_ns[name] for name in used
                      if name in shell.user_ns and not _is_ipythons(name, shell)}

    def __call__(self):
        names = {"__name__": "__main__", **self.names}
        exec(self.code, names)
        return eval(self.result, names) if self.result else None


def _is_ipythons(name, shell):
    """Whether a name's value is IPython's own, which no rank can have: there it is Python's."""
    return (name in ("exit", "quit", "get_ipython", "open")
            and shell.user_ns[name] is shell.user_ns_hidden.get(name))


def _compiled(cell, file):
    """A cell's statements, and its last expression or None, as code. SyntaxError."""
    tree = ast.parse("\n" + cell, file)  # the magic's own line is the cell's first
    result = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not cell.rstrip().endswith(";"):
        result = compile(ast.Expression(tree.body.pop().value), file, "eval")
    return compile(tree, file, "exec"), result


def _explained(error, cell):
    """A syntax error as a reader of the cell knows it: the line, a caret below it, what to try."""
    line = error.text or ["", "", *cell.splitlines(), ""][error.lineno]
    error.text = line
    _, *shown, last = traceback.format_exception_only(error)
    return f"{last.strip()}, in line {error.lineno} of this cell\n\n{''.join(shown)}"
