"""Run All of chapters as they lie there, in a real kernel: seconds and peak memory.

    python tests/tools/run_chapters.py chapters/04_ddp_by_hand.ipynb ...
"""

import contextlib
import sys
import threading
import time
from pathlib import Path

import notebooks
import psutil


def held():
    """Bytes of all that this process started. A page that they share is counted once on Linux."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            found += memory.pss if sys.platform == "linux" else memory.uss
    return found


def watch(ended, most):
    """Looks, a tenth of the time at most, until ``ended``."""
    pause = 0.0
    while not ended.wait(pause):
        start = time.perf_counter()
        most.append(held())
        pause = max(0.2, 9 * (time.perf_counter() - start))


def main():
    for path in map(Path, sys.argv[1:]):
        start, ended, most = time.perf_counter(), threading.Event(), []
        thread = threading.Thread(target=watch, args=(ended, most))
        thread.start()
        try:
            notebooks.execute(notebooks.read(path), path.resolve().parent)
        finally:
            ended.set()
            thread.join()
        print(f"{path.stem:38}{time.perf_counter() - start:9.1f} s{max(most) / 1e6:9.0f} MB",
              flush=True)


if __name__ == "__main__":
    main()
