"""Keeps the notebooks, which are the source of the course: runs them, and writes them one way.

    python tests/tools/notebooks.py refresh chapters/04_ddp_by_hand.ipynb ...
    python tests/tools/notebooks.py from-percent draft.py chapters/04_ddp_by_hand.ipynb
    python tests/tools/notebooks.py to-percent chapters/04_ddp_by_hand.ipynb draft.py

The percent format, for writing a chapter in an editor:

    # %% [markdown] id=the-question
    # Markdown, each line behind a hash.

    # %% id=four-ranks tags=exercise exercise=broadcast-weights
    #! %%ranks 4
    print("code as it is; a line that is not Python stands behind a hash, a bang and a space")
"""

import argparse
import contextlib
import copy
import os
import re
import symtable
import sys
import tempfile
import time
import warnings
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("tags", "dplab")
DIFFERS = "output-differs"  # a cell whose output is another each time by its nature: a drill
FOLDED = "hide-input"  # the web book's tag, which goes with JupyterLab's own fold
WIDGET = "application/vnd.jupyter.widget-view+json"  # refers to a state that is not kept
IN_PLACE = 'class="dplab-in-place"'  # what JupyterLab shows where it does not find a widget
DARK_PICTURE = re.compile(
    r'</?picture>|<source class="dplab-dark".*?>|<style class="dplab-dark">.*?</style>', re.DOTALL)
"""A figure's second picture, which has colours for a dark theme; a fresh run brings it back."""
CELL_TIMEOUT = 120  # seconds

HEADER = re.compile(r"# %%(?P<markdown> \[markdown\])?(?P<options>( \S+=\S+)*)\s*")
ESCAPE = "#! "


def read(path):
    with no_invented_ids():
        return nbformat.read(path, as_version=4)


@contextlib.contextmanager
def no_invented_ids():
    """Where an id is missing, or there twice, nbformat would put a random one in its place."""
    with warnings.catch_warnings():
        for category in (DuplicateCellId, MissingIDFieldWarning):
            warnings.simplefilter("error", category)
        yield


def normalise(notebook):
    """The text of the .ipynb file, free of all that differs from one run to the next."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        kept = {name: cell.metadata[name] for name in CELL_METADATA if cell.metadata.get(name)}
        cell.metadata = nbformat.from_dict(kept)
        if FOLDED in kept.get("tags", ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "code":
            cell.execution_count = None
            outputs = [] if DIFFERS in kept.get("tags", ()) else merge_streams(cell.outputs)
            cell.outputs = [output for output in outputs if lasting(output)]
    with no_invented_ids():
        nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def lasting(output):
    """Takes from the output what is of use only while its kernel runs; False if nothing is left."""
    if output.output_type == "execute_result":
        output.execution_count = None
    data = output.get("data", {})
    if IN_PLACE in data.get("text/html", ""):
        return False
    live = data.pop(WIDGET, None)
    if "text/html" in data:
        data["text/html"] = DARK_PICTURE.sub("", data["text/html"])
    return not (live and set(data) == {"text/plain"} and not data["text/plain"])


def merge_streams(outputs):
    """Joins neighbours of one stream: how the text was cut is a matter of timing."""
    merged = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def execute(notebook, folder):
    """Returns a copy that ran, in `folder`, in a fresh kernel of this interpreter.

    Raises nbclient's CellExecutionError, CellTimeoutError or DeadKernelError. Neither the reader's
    progress nor an IPython profile has a part in it.
    """
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as private:
        manager = AsyncKernelManager(
            # Without folders to look in, it starts this interpreter, whatever is installed.
            kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            # Sockets in the private folder: the loopback is left to the ranks, who count its bytes.
            transport="ipc", connection_file=f"{private}/kernel.json")
        environment = os.environ | {"DPLAB_HOME": f"{private}/dplab", "DPLAB_LIVE": "0",
                                    "IPYTHONDIR": f"{private}/ipython"}
        client = NotebookClient(notebook, km=manager, timeout=CELL_TIMEOUT)
        with client.setup_kernel(cwd=str(folder), env=environment, cleanup_kc=True):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
    return notebook


def swap(notebook, solutions):
    """A copy with `solutions(slug)` in place of each cell that is tagged `exercise`."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", []):
            cell.source = solutions(cell.metadata.dplab.exercise).strip("\n")
    return notebook


def names(source):
    """The names that a cell defines in the notebook, and those of the notebook that it uses."""
    cell = symtable.symtable(TransformerManager().transform_cell(source), "cell", "exec")
    defined = {symbol.get_name() for symbol in cell.get_symbols()
               if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()}
    used = {symbol.get_name() for symbol in cell.get_symbols() if symbol.is_referenced()}
    inner = cell.get_children()
    for scope in inner:
        inner += scope.get_children()
        used |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
    return defined, used


def refresh(path):
    """Runs the notebook and stores its outputs; returns the seconds that it took."""
    start = time.perf_counter()
    notebook = execute(read(path), path.resolve().parent)
    seconds = time.perf_counter() - start
    path.write_text(normalise(notebook), encoding="utf-8")
    return seconds


def from_percent(text):
    """The notebook, without outputs, that a script in percent format describes."""
    cells = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if line.startswith("# %%"):
                cells.append(new_cell(line))
            elif cells:
                cells[-1].source += text_of(line, cells[-1].cell_type) + "\n"
            elif line.strip():
                raise ValueError("text before the first cell")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}: {line!r}") from None
    for cell in cells:
        cell.source = cell.source.strip("\n")
    with no_invented_ids():
        return new_notebook(cells=cells)


def new_cell(header):
    match = HEADER.fullmatch(header)
    options = dict(word.split("=", 1) for word in match["options"].split()) if match else {}
    if "id" not in options or options.keys() - {"id", "tags", "exercise"}:
        raise ValueError("a header has an id=, and may have tags= and exercise=")
    metadata = {}
    if "tags" in options:
        metadata["tags"] = options["tags"].split(",")
    if "exercise" in options:
        metadata["dplab"] = {"exercise": options["exercise"]}
    new = new_markdown_cell if match["markdown"] else new_code_cell
    return new(id=options["id"], metadata=metadata)


def text_of(line, cell_type):
    line = line.removeprefix(ESCAPE)
    if cell_type == "code" or not line:
        return line
    if line != "#" and not line.startswith("# "):
        raise ValueError("in a markdown cell, a line starts with a hash and a space")
    return line[2:]


def to_percent(notebook):
    """The script that `from_percent` turns into the notebook again; outputs are left out."""
    blocks = []
    for cell in notebook.cells:
        kind = " [markdown]" if cell.cell_type == "markdown" else ""
        tags = ",".join(cell.metadata.get("tags", []))
        exercise = cell.metadata.get("dplab", {}).get("exercise")
        header = f"# %%{kind} id={cell.id}"
        header += f" tags={tags}" if tags else ""
        header += f" exercise={exercise}" if exercise else ""
        lines = cell.source.splitlines()
        if kind:
            lines = [f"# {line}" if line else "#" for line in lines]
        no_python = (ESCAPE, "# %%") if kind else (ESCAPE, "# %%", "%", "!")
        lines = [ESCAPE + line if line.startswith(no_python) else line for line in lines]
        blocks.append("\n".join([header, *lines]) + "\n")
    return "\n".join(blocks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("refresh", help="run notebooks and store their outputs")
    command.add_argument("notebooks", nargs="+", type=Path)
    for name in ("from-percent", "to-percent"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    options = parser.parse_args()

    if options.command == "from-percent":
        notebook = from_percent(options.source.read_text(encoding="utf-8"))
        options.target.write_text(normalise(notebook), encoding="utf-8")
    elif options.command == "to-percent":
        options.target.write_text(to_percent(read(options.source)), encoding="utf-8")
    else:
        failed = False
        for path in options.notebooks:
            try:
                print(f"{refresh(path):6.1f} s  {path}", flush=True)
            except (CellControlSignal, DeadKernelError) as error:
                failed = True
                print(f"failed    {path}, left as it was\n{error}", file=sys.stderr, flush=True)
        sys.exit(failed)


if __name__ == "__main__":
    main()
