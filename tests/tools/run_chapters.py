"""Run All of every chapter, as it lies there, in a real kernel: seconds and peak memory.

    python tests/tools/run_chapters.py [NN or letter ...]
"""

import argparse
import contextlib
import sys
import threading
import time
from pathlib import Path

import notebooks
import psutil
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from dplab.desk import course
from dplab.measure import describe_machine

FOLDER = Path(__file__).resolve().parents[2] / "chapters"
BAR = 60  # seconds that a chapter may take on 2 cores
CELL_TIMEOUT = 300
INTERVAL = 0.2  # seconds from one look at the memory to the next, at least
# Each page that processes share is counted once, divided among them, where the system tells that.
KIND = "PSS" if sys.platform == "linux" else "USS (shared pages left out)"


class PeakMemory:
    """The most ``bytes`` and ``processes`` seen at once, of a process and all that it starts."""

    bytes = processes = 0

    @contextlib.contextmanager
    def watch(self, pid: int):
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(psutil.Process(pid), ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _look(self, process, ended):
        pause = 0.0
        while not ended.wait(pause):
            start, held = time.perf_counter(), []
            with contextlib.suppress(psutil.NoSuchProcess):
                for member in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        memory = member.memory_full_info()
                        held.append(memory.pss if sys.platform == "linux" else memory.uss)
            self.bytes = max(self.bytes, sum(held))
            self.processes = max(self.processes, len(held))
            # Looking takes time from the processes themselves: a tenth of a core at most.
            pause = max(INTERVAL, 9 * (time.perf_counter() - start))


def run_all(path: Path) -> tuple[float, PeakMemory, str]:
    """Runs a notebook in its folder until a cell fails: seconds, memory, and the error or ""."""
    start, peak, error = time.perf_counter(), PeakMemory(), ""
    try:
        notebooks.execute(notebooks.read(path), path.resolve().parent, CELL_TIMEOUT, peak.watch)
    except CellExecutionError as raised:
        error = f"{raised.ename}: {raised.evalue}"
    except (CellTimeoutError, DeadKernelError) as raised:
        error = str(raised).splitlines()[0]
    return time.perf_counter() - start, peak, error


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
          f"every {INTERVAL:g} s\n{'':38}{'seconds':>9}{'peak MB':>9}{'processes':>11}")
    failed = []
    for label in wanted or found:
        seconds, peak, error = run_all(found[label])
        late = f"more than {BAR} s" if seconds > BAR else ""
        print(f"{found[label].stem:38}{seconds:9.1f}{peak.bytes / 1e6:9.0f}{peak.processes:11}"
              f"  {error or late}", flush=True)
        failed += [label] if error else []
    if failed:
        sys.exit(f"run_chapters: {', '.join(failed)} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
