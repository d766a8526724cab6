"""A real kernel, in which a bench runs the cells of a notebook and looks at the processes."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ran:
    """How a cell ended: ``error`` is "", or the last line of its traceback, or "timeout".

    ``text``: all that it printed or that its traceback shows, in order.
    """

    seconds: float
    error: str
    text: str


def missing() -> str | None:
    """Why there can be no kernel here, or None."""
    try:
        import ipykernel  # noqa: F401
        import nbclient  # noqa: F401
    except ImportError as error:
        return f"a kernel needs {error.name}: pip install ipykernel nbclient"
    return None


def private_kernel(folder: Path):
    """The manager of a kernel of this interpreter, and its environment; what it keeps is in
    ``folder``: neither the reader's progress nor an IPython profile has a part in it.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(
        # Without folders to look in, it starts this interpreter, whatever is installed.
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        # Sockets in the private folder: the loopback is left to the ranks, who count its bytes.
        transport="ipc", connection_file=str(folder / "kernel.json"))
    return manager, os.environ | {"DPLAB_HOME": str(folder / "dplab"), "DPLAB_LIVE": "0",
                                  "IPYTHONDIR": str(folder / "ipython")}


class Kernel:
    """``with Kernel() as kernel: kernel.run("1 + 1")``: this interpreter's, with nbclient.

    notebook: whose cells `execute` runs, or None. It starts in ``folder``. On leaving it, all
    processes that it started, and that it ever had when `run` or `execute` returned, are ended.
    """

    def __init__(self, notebook=None, folder: Path | None = None):
        from nbclient import NotebookClient
        from nbformat.v4 import new_notebook

        self._exits = contextlib.ExitStack()
        self.private = Path(self._exits.enter_context(
            tempfile.TemporaryDirectory(prefix="dplab-", ignore_cleanup_errors=True)))
        self._folder = folder or self.private
        manager, self._environment = private_kernel(self.private)
        self._client = NotebookClient(notebook or new_notebook(), km=manager)
        self._seen: set[psutil.Process] = set()

    def __enter__(self):
        try:
            self._exits.enter_context(self._client.setup_kernel(
                cwd=str(self._folder), env=self._environment, cleanup_kc=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))  # cells' output comes back
        except BaseException:
            self._exits.close()
            raise
        self.process = psutil.Process(self._client.km.provisioner.pid)
        return self

    def __exit__(self, *_):
        self.children()
        self._exits.close()
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._seen, timeout=10)

    def children(self) -> set[psutil.Process]:
        """The processes below the kernel, and those seen there before that are still alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(self.process.children(recursive=True))
        self._seen = {each for each in self._seen if _lives(each)}
        return set(self._seen)

    def run(self, source: str, timeout: float = 600, interrupt_after: float | None = None) -> Ran:
        """Runs a cell; ``interrupt_after``: as the ■ button does, so many seconds later."""
        from nbformat.v4 import new_code_cell

        self._client.nb.cells.append(new_code_cell(source))
        if interrupt_after is None:
            return self.execute(len(self._client.nb.cells) - 1, timeout)
        timer = threading.Timer(interrupt_after, os.killpg, (self.process.pid, signal.SIGINT))
        timer.start()
        try:
            return self.execute(len(self._client.nb.cells) - 1, timeout)
        finally:
            timer.cancel()

    def execute(self, index: int, timeout: float = 600) -> Ran:
        """Runs the notebook's cell with that index."""
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

        cell, error = self._client.nb.cells[index], ""
        self._client.timeout = round(timeout)
        start = time.perf_counter()
        try:
            self._client.execute_cell(cell, index)
        except CellExecutionError as raised:
            error = _ANSI.sub("", f"{raised.ename}: {raised.evalue}")
        except CellTimeoutError:
            error = "timeout"
        except DeadKernelError:
            error = "the kernel died"
        seconds = time.perf_counter() - start
        self.children()
        return Ran(seconds, error, _ANSI.sub("", "\n".join(map(_shown, cell.outputs))))


def _lives(process):
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _shown(output):
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return output.data.get("text/plain", "")
