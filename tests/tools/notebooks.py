"""Keeps the notebooks, which are the source of the course: runs them, and writes them one way.

    python tests/tools/notebooks.py refresh chapters/04_ddp_by_hand.ipynb ...
"""

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
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
DIFFERS = "output-differs"  # a cell whose output is another each time by its nature: a drill
FOLDED = "hide-input"  # the web book's tag, which goes with JupyterLab's own fold
WIDGET = "application/vnd.jupyter.widget-view+json"  # refers to a state that is not kept
IN_PLACE = 'class="dplab-in-place"'  # what JupyterLab shows where it does not find a widget
DARK_PICTURE = re.compile(
    r'</?picture>|<source class="dplab-dark".*?>|<style class="dplab-dark">.*?</style>', re.DOTALL)
"""A figure's second picture, which has colours for a dark theme; a fresh run brings it back."""
CELL_TIMEOUT = 120  # seconds


@contextlib.contextmanager
def no_invented_ids():
    """Where an id is missing, or there twice, nbformat would put a random one in its place."""
    with warnings.catch_warnings():
        for category in (DuplicateCellId, MissingIDFieldWarning):
            warnings.simplefilter("error", category)
        yield


def read(path):
    with no_invented_ids():
        return nbformat.read(path, as_version=4)


def normalise(notebook):
    """The text of the .ipynb file, free of all that differs from one run to the next."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        kept = {name: cell.metadata[name] for name in ("tags", "dplab") if cell.metadata.get(name)}
        if FOLDED in kept.get("tags", ()):
            kept["jupyter"] = {"source_hidden": True}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [] if DIFFERS in kept.get("tags", ()) else lasting(cell.outputs)
    with no_invented_ids():
        nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def lasting(outputs):
    """The outputs without what is of use only while their kernel runs, or differs by the run."""
    kept = []
    for output in outputs:
        data = output.get("data", {})
        live = data.pop(WIDGET, None)
        if IN_PLACE in data.get("text/html", "") or (live and data == {"text/plain": ""}):
            continue
        if "text/html" in data:
            data["text/html"] = DARK_PICTURE.sub("", data["text/html"])
        if "execution_count" in output:
            output.execution_count = None
        if output.get("name") and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text  # how a stream was cut is a matter of timing
        else:
            kept.append(output)
    return kept


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


def main(paths):
    """Runs these notebooks one after another; returns whether one failed."""
    failed = False
    for path in paths:
        try:
            print(f"{refresh(path):6.1f} s  {path}", flush=True)
        except (CellControlSignal, DeadKernelError) as error:
            failed = True
            print(f"failed    {path}, left as it was\n{error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] != ["refresh"]:
        sys.exit(__doc__)
    sys.exit(main(map(Path, sys.argv[2:])))
