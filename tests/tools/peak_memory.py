"""The peak memory of a process and all that it starts, taken together."""

import contextlib
import sys
import threading
import time

import psutil

INTERVAL = 0.2  # seconds from one look to the next, at least
# Each page that processes share is counted once, divided among them, where the system tells that.
KIND = "PSS" if sys.platform == "linux" else "USS (shared pages left out)"


class PeakMemory:
    """``with PeakMemory(process) as peak``: afterwards ``peak.bytes`` and ``peak.processes``.

    The bytes are the largest sum over the process and its descendants that was seen, about five
    times a second; ``processes`` is the largest number of them seen at once.
    """

    def __init__(self, process: psutil.Process):
        self.bytes, self.processes = 0, 0
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        pause = 0.0
        while not self._ended.wait(pause):
            start = time.perf_counter()
            held = family_bytes(self._process)
            self.bytes = max(self.bytes, sum(held))
            self.processes = max(self.processes, len(held))
            # Looking takes time from the processes themselves: a tenth of a core at most.
            pause = max(INTERVAL, 9 * (time.perf_counter() - start))


def family_bytes(process: psutil.Process) -> list[int]:
    """The bytes of the process and of each of its descendants; those that just end are left out."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
    held = []
    for member in family:
        with contextlib.suppress(psutil.Error):
            memory = member.memory_full_info()
            held.append(memory.pss if sys.platform == "linux" else memory.uss)
    return held
