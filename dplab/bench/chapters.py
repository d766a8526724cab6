"""Run All of every chapter, as it lies there, in a real kernel: seconds and peak memory."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dplab.bench import kernel
from dplab.bench.peak import INTERVAL, KIND, PeakMemory

FOLDER = Path(__file__).parents[2] / "chapters"
BAR = 60  # seconds that a chapter may take on 2 cores
CELL_TIMEOUT = 300


@dataclass(frozen=True)
class Row:
    """How Run All of a chapter went; ``error`` names the cell that failed, or is empty."""

    chapter: str
    cells: int
    seconds: float
    peak_bytes: int
    processes: int
    error: str


def add_arguments(parser):
    parser.add_argument("chapters", nargs="*", metavar="NN", help="two digits (default: all)")


def main(options):
    found = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        print("no chapters here: they lie in the course's repository, beside dplab")
        return
    if unknown := set(options.chapters) - {path.name[:2] for path in found}:
        sys.exit(f"dplab.bench chapters: no chapter {', '.join(sorted(unknown))}")
    if kernel.missing():
        sys.exit(f"dplab.bench chapters: {kernel.missing()}")
    print(f"seconds with the kernel's start; memory of all processes together, {KIND}, looked at "
          f"every {INTERVAL:g} s\n{'':38}{'cells':>6}{'seconds':>9}{'peak MB':>9}{'processes':>11}")
    rows = []
    for path in found:
        if not options.chapters or path.name[:2] in options.chapters:
            rows.append(row := run_all(path))
            late = f"more than {BAR} s" if row.seconds > BAR else ""
            print(f"{row.chapter:38}{row.cells:6}{row.seconds:9.1f}{row.peak_bytes / 1e6:9.0f}"
                  f"{row.processes:11}  {row.error or late}", flush=True)
    print(f"{'all':38}{sum(row.cells for row in rows):6}{sum(row.seconds for row in rows):9.1f}"
          f"{max(row.peak_bytes for row in rows) / 1e6:9.0f}"
          f"{max(row.processes for row in rows):11}")
    if failed := [row.chapter for row in rows if row.error]:
        sys.exit(f"dplab.bench chapters: {', '.join(failed)} failed")


def run_all(path: Path) -> Row:
    """Runs a notebook's code cells in its own folder until one fails; the file is left alone."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    start, done, error = time.perf_counter(), 0, ""
    with kernel.Kernel(notebook, path.parent) as session, PeakMemory(session.process) as peak:
        for index in code:
            ran = session.execute(index, CELL_TIMEOUT)
            if ran.error:
                error = f"cell {notebook.cells[index].id}: {ran.error.splitlines()[0]}"
                break
            done += 1
        seconds = time.perf_counter() - start
    return Row(path.stem, done, seconds, peak.bytes, peak.processes, error)
