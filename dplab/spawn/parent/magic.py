"""The cell magic ``%%ranks``: a cell that runs on ranks instead of in the notebook."""

import argparse
import ast
import dis
import numbers
import re

from ..between import values
from ..between.errors import expect_failure
from ..rank import shown
from ..server.start import warm_up
from . import output, report
from .run import run, validate

_USAGE = "%%ranks N [--timeout SECONDS] [--fails]"
_FOR_THE_NOTEBOOK = re.compile(r"([\w\s,.\[\]]+=\s*)?[!%]|\?|[\w.]+\?{1,2}$")  # its own syntax


class CellError(ValueError):
    """A ``%%ranks`` cell that cannot start. Its text says what is wrong, where, and what to try."""

    def _render_traceback_(self):
        """IPython's hook: the text alone, since every frame is IPython's or the launcher's."""
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[31;1m%%ranks\x1b[0m: \x1b[1m{head}\x1b[0m", *filter(None, [rest])]


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise CellError(f"{message}. The first line of the cell is {_USAGE}, for instance "
                        "%%ranks 4 --timeout 120")


def register_magic(shell) -> None:
    """Adds ``%%ranks`` to an IPython shell, and starts the fork server in the background."""
    from IPython.core.magic import register_cell_magic

    warm_up()
    shell.events.register("pre_run_cell", lambda _=None: output.seen_warnings.clear())

    def number_of_ranks(text):
        """Of a number, or of a name of the notebook that holds one. ValueError."""
        value = shell.user_ns.get(text, text)
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        return int(text)

    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("world_size", type=number_of_ranks, nargs="?", metavar="N")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--fails", action="store_true")

    def ranks(line, cell):
        """``%%ranks N [--timeout SECONDS] [--fails]``: runs the cell's body on N ranks.

        N is a number, or a name of the notebook that holds one. Names of the notebook are visible,
        none come back. The value of a last expression comes back as the list ``_``. ``--fails``:
        the failure is meant; it is shown without raising, and kept under the name ``failure``.
        """
        options = parser.parse_args(line.split())
        if options.world_size is None:
            parser.error("the number of ranks is missing")
        body = _Body(shell, line, cell)
        try:
            validate(body, options.world_size, options.timeout)
        except ValueError as error:
            raise CellError(str(error)) from None
        if options.fails:
            with expect_failure() as shell.user_ns["failure"]:
                _run(body, options)
            return None
        returned = _run(body, options)
        if all(value is None for value in returned):
            return None
        return _Figures(returned) if all(map(shown.is_figure, returned)) else returned

    register_cell_magic(ranks)


class _Figures(list):
    """What ranks return and have shown: the notebook keeps it as ``_``, and does not list it."""

    def _ipython_display_(self):
        """IPython's hook: nothing."""


def _run(body, options):
    """Runs the cell; a report on it names the option as such a cell takes it."""
    token = report.timeout_option.set("--timeout SECONDS")
    try:
        return run(body, options.world_size, timeout=options.timeout)
    finally:
        report.timeout_option.reset(token)


class _Body:
    """A cell's code with the names of the notebook that it reads, to be called on a rank."""

    def __init__(self, shell, line, cell):
        source = f"%%ranks {line}\n{cell}"
        self.file = shell.compile.cache(source, len(shell.user_ns["In"]) - 1, raw_code=source)
        try:
            self.code, self.result = _compiled(cell, self.file)
        except SyntaxError as error:
            raise CellError(_explained(error, cell)) from None
        bound = _bound_first(self.code)
        used = values.global_names(self.code)
        if self.result:
            used |= values.global_names(self.result)
        self.names = {name: shell.user_ns[name] for name in used
                      if name in shell.user_ns and not _stays(name, bound, shell)}

    def __call__(self):
        names = {"__name__": "__main__", **self.names}
        exec(self.code, names)
        value = eval(self.result, names) if self.result else None
        shown.show_figure(value)
        return value


def _stays(name, bound, shell):
    """Whether a name's value stays in the notebook: IPython's own ``exit`` and the like, and one
    that no rank can have, where the cell itself first puts another in its place."""
    value = shell.user_ns[name]
    if name in ("exit", "quit", "get_ipython", "open"):
        return value is shell.user_ns_hidden.get(name)
    return name in bound and not values.can_pickle(value)


def _bound_first(code):
    """The names that a cell's code binds before a line of it reads them."""
    first: dict[str, str] = {}  # name: what is done with it first
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "LOAD_NAME"):
            first.setdefault(step.argval, step.opname)
    return {name for name, done in first.items() if done == "STORE_NAME"}


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
    indent = len(line) - len(line.lstrip())
    column = max((error.offset or 1) - 1 - indent, 0)
    text = f"{type(error).__name__} in line {error.lineno} of this cell: {error.msg}\n\n"
    text += f"  → {error.lineno:3d} {line.strip()}\n        {' ' * column}^"
    if _FOR_THE_NOTEBOOK.match(line.strip()):
        text += ("\n\nShell commands (!), magics (%) and help (?) work in the notebook alone: put "
                 "the line into a cell without %%ranks. On ranks, use Python, for instance "
                 "subprocess.run or time.perf_counter.")
    return text
