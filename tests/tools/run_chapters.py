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


def watch(ended, held):
    """Notes the bytes of all that this process started. On Linux, a shared page counts once."""
    while not ended.wait(1):
        held.append(0)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                held[-1] += memory.pss if sys.platform == "linux" else memory.uss


for path in map(Path, sys.argv[1:]):
    start, ended, held = time.perf_counter(), threading.Event(), [0]
    thread = threading.Thread(target=watch, args=(ended, held))
    thread.start()
    try:
        notebooks.execute(notebooks.read(path), path.resolve().parent)
    finally:
        ended.set()
        thread.join()
    seconds = time.perf_counter() - start
    print(f"{path.stem:38}{seconds:9.1f} s{max(held) / 1e6:9.0f} MB", flush=True)
