"""Run All of every chapter, as it lies there, in a real kernel: seconds and peak memory.

    python tests/tools/run_chapters.py [NN or letter ...]
"""

import argparse
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from peak_memory import INTERVAL, KIND, PeakMemory
from private_kernel import private_kernel

from dplab.desk import course
from dplab.measure import describe_machine

FOLDER = Path(__file__).resolve().parents[2] / "chapters"
BAR = 60  # seconds that a chapter may take on 2 cores
CELL_TIMEOUT = 300
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Row:
    """How Run All of a chapter went; ``error`` names the cell that failed, or is empty."""

    chapter: str
    cells: int
    seconds: float
    peak_bytes: int
    processes: int
    error: str


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="NN",
                        help="two digits, or an appendix's letter (default: all)")
    wanted = parser.parse_args(arguments).chapters
    found = {course.label(key): path for key, path in course.notebooks(FOLDER).items()}
    if unknown := set(wanted) - set(found):
        sys.exit(f"run_chapters: no chapter {', '.join(sorted(unknown))}")
    print(f"{describe_machine()}\n"
          f"seconds with the kernel's start; memory of all processes together, {KIND}, looked at "
          f"every {INTERVAL:g} s\n{'':38}{'cells':>6}{'seconds':>9}{'peak MB':>9}{'processes':>11}")
    rows = []
    for label, path in found.items():
        if not wanted or label in wanted:
            rows.append(row := run_all(path))
            late = f"more than {BAR} s" if row.seconds > BAR else ""
            print(f"{row.chapter:38}{row.cells:6}{row.seconds:9.1f}{row.peak_bytes / 1e6:9.0f}"
                  f"{row.processes:11}  {row.error or late}", flush=True)
    print(f"{'all':38}{sum(row.cells for row in rows):6}{sum(row.seconds for row in rows):9.1f}"
          f"{max(row.peak_bytes for row in rows) / 1e6:9.0f}"
          f"{max(row.processes for row in rows):11}")
    if failed := [row.chapter for row in rows if row.error]:
        sys.exit(f"run_chapters: {', '.join(failed)} failed")


def run_all(path: Path) -> Row:
    """Runs a notebook's code cells in its own folder until one fails; the file is left alone."""
    notebook = nbformat.read(path, as_version=4)
    start, done, error = time.perf_counter(), 0, ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as private:
        manager, environment = private_kernel(Path(private))
        client = NotebookClient(notebook, km=manager, timeout=CELL_TIMEOUT)
        with (client.setup_kernel(cwd=str(path.parent), env=environment, cleanup_kc=True),
              PeakMemory(psutil.Process(manager.provisioner.pid)) as peak):
            for index, cell in enumerate(notebook.cells):
                if cell.cell_type != "code":
                    continue
                if reason := _failure(client, cell, index):
                    error = f"cell {cell.id}: {reason}"
                    break
                done += 1
            seconds = time.perf_counter() - start
    return Row(path.stem, done, seconds, peak.bytes, peak.processes, error)


def _failure(client, cell, index):
    """Runs a cell. The first line of its error, or None."""
    try:
        client.execute_cell(cell, index)
    except CellExecutionError as raised:
        return _ANSI.sub("", f"{raised.ename}: {raised.evalue}").splitlines()[0]
    except CellTimeoutError:
        return f"more than {CELL_TIMEOUT} s"
    except DeadKernelError:
        return "the kernel died"
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
