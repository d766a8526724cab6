"""What a machine may lack for ranks to start: said in words, with what to do about it."""

import contextlib
import errno
import os
import shutil
import tempfile

_SHARED_MEMORY = "/dev/shm"
_MARGIN = 4 << 20  # bytes beside the call logs: the ranks' meeting place, what a crash leaves

_NO_PROCESS = ("the system starts no more processes or threads here (`ulimit -u`, or the limit "
               "of a container, --pids-limit): run on fewer ranks, close other notebooks, or "
               "raise the limit")
_NO_SHARED_MEMORY = ("/dev/shm is full or missing, and a DataLoader's workers hand their batches "
                     "over through it: start a container with --shm-size=1g, or use num_workers=0")
_OF_A_RANK = {  # words in the error of a rank: advice
    "Resource temporarily unavailable": _NO_PROCESS,
    "can't start new thread": _NO_PROCESS,
    "unable to allocate shared mem": _NO_SHARED_MEMORY,
    "insufficient shared memory": _NO_SHARED_MEMORY,
}


def folder_with_room(nbytes: int) -> str | None:
    """Where a run's files lie: in shared memory if there is room, else (None) as tempfile has it.

    Docker gives a container 64 MB of shared memory, and some sandboxes none.
    """
    with contextlib.suppress(OSError):
        if (os.access(_SHARED_MEMORY, os.W_OK)
                and shutil.disk_usage(_SHARED_MEMORY).free > nbytes + _MARGIN):
            return _SHARED_MEMORY
    return None


def explained(error: OSError, world_size: int, nbytes: int) -> OSError:
    """The same error, with what to do about it where that is known."""
    number = error.errno or 0
    advice = {
        errno.ENOSPC: f"the call logs of {world_size} ranks take {nbytes / 1e6:.0f} MB, and "
                      f"neither {_SHARED_MEMORY} nor {tempfile.gettempdir()} has them free. Make "
                      "room, set TMPDIR to a folder that has, or start the container with "
                      "--shm-size=1g",
        errno.EMFILE: f"{world_size} ranks take about {4 * world_size + 50} descriptors, and "
                      f"`ulimit -n` allows {_open_files()}. Run on fewer ranks, or raise it "
                      "before you start Jupyter: ulimit -n 4096",
        errno.EFBIG: "`ulimit -f` allows no file of a megabyte, and a rank's call log is one",
        errno.EAGAIN: _NO_PROCESS,
    }.get(number)
    return OSError(number, f"{os.strerror(number)}: {advice}") if advice else error


def advice_on(text: str) -> str:
    """What to do about an error with these words in its text; empty where that is not known."""
    return next((f"{advice[0].upper()}{advice[1:]}." for words, advice in _OF_A_RANK.items()
                 if words in text), "")


def _open_files():
    import resource  # there is none on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
