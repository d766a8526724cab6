"""What a failed run raises, how a chapter shows a failure on purpose, and advice where the machine
lacks something that ranks need.
"""

import contextlib
import errno
import os
import re
import tempfile
import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class RankReport:
    """One rank when its run had failed, as data; as text, the line that a report has for it.

    ``state``: ``"returned"``, ``"waiting"`` (in a call), ``"called"`` (a call that does not agree
    with the others'), ``"computing"``, ``"raised"``, ``"died"``, ``"unpicklable"``,
    ``"disconnected"`` (by another's failure), ``"starting"`` or ``"silent"``.
    ``doing``: the same in words. ``place`` and ``source``: the learner's line, if one is known.
    ``operation``, ``number`` (of a collective), ``tensor`` (dtype and shape) and ``peer`` (of a
    send or receive): the call that it waits in, called, or called last before it died or fell
    silent. ``exit_code``: of one that died, or minus the signal.
    """

    rank: int
    state: str
    doing: str
    place: str = ""
    source: str = ""
    operation: str = ""
    number: int | None = None
    tensor: str = ""
    peer: int | None = None
    exit_code: int | None = None

    def __str__(self):
        return f"rank {self.rank} " + ": ".join(filter(None, [self.doing, self.at]))

    @property
    def at(self) -> str:
        """The learner's line: where it is, and its text."""
        return ": ".join(filter(None, [self.place, self.source]))


class RankError(RuntimeError):
    """A run on ranks failed. Its text is the diagnosis.

    ``rank``: the rank to blame, or None where no one rank is.
    ``kind``: ``"raised"``, ``"died"`` (a signal, or an exit), ``"stuck"``, ``"mismatched"``
    (collectives, shapes, dtypes or reduce operations that do not agree) or ``"unpicklable"``.
    ``error``: the name of the exception's type, where one was raised on a rank.
    ``ranks``: a `RankReport` for each rank, in rank order.
    ``reports``: one line for each other rank, on where it was.
    """

    def __init__(self, text, *, rank=None, kind="raised", error="", ranks=(), reports=()):
        super().__init__(text)
        self.rank, self.kind, self.error = rank, kind, error
        self.ranks, self.reports = list(ranks), list(reports)

    def _render_traceback_(self):
        """IPython's hook: the report alone, without the launcher's own frames."""
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[31;1m{type(self).__name__}\x1b[0m: \x1b[1m{head}\x1b[0m", rest]


class Interrupted(KeyboardInterrupt):
    """The reader stopped a run; its text says where each rank was."""

    _render_traceback_ = RankError._render_traceback_


class ServerEnded(RuntimeError):
    """The process that ranks are forked from has ended, and with it every rank."""

    _render_traceback_ = RankError._render_traceback_


class ExpectedFailure:
    """What `expect_failure` caught: the ``error``, whose ``rank`` and ``kind`` it has, too."""

    error: RankError

    @property
    def rank(self):
        return self.error.rank

    @property
    def kind(self):
        return self.error.kind

    def __str__(self):
        return str(self.error)


@contextlib.contextmanager
def expect_failure():
    """A failure that is shown on purpose: the report is printed and kept, nothing is raised.

    ``with dplab.expect_failure() as failure: ...``; afterwards ``failure.kind``, ``failure.rank``,
    ``failure.error``. A block that does not fail raises AssertionError.
    """
    failure = ExpectedFailure()
    try:
        yield failure
    except RankError as error:
        failure.error = error
        print(f"RankError: {error}")
    else:
        raise AssertionError("this block was meant to fail with a RankError, and it did not")


_OPERATION = re.compile(r"_distributed_c10d\.ReduceOp\b.*Invoked with: <[^>]*>, (.*)$", re.S)
_C10D_PREFIX = re.compile(r"\[rank\d+\]:\[F\d{4} [^\]]*\] ")  # a time and a place in C++


def in_plain_words(error: BaseException) -> str:
    """An exception's type and text; of torch's bindings, what a reader of Python can use."""
    text = "".join(traceback.format_exception_only(error)).strip()
    found = _OPERATION.search(text) if isinstance(error, TypeError) else None
    if found:
        text = (f"TypeError: {found[1]} is no reduce operation: the names are dist.ReduceOp.SUM, "
                "AVG, PRODUCT, MIN and MAX, as in op=dist.ReduceOp.SUM")
    return _C10D_PREFIX.sub("", text)[:2000]


SHARED_MEMORY = "/dev/shm"
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


def with_advice(error: OSError, world_size: int, nbytes: int) -> OSError:
    """The same error, with what to do about it where that is known."""
    number = error.errno or 0
    advice = {
        errno.ENOSPC: f"the call logs of {world_size} ranks take {nbytes / 1e6:.0f} MB, and "
                      f"neither {SHARED_MEMORY} nor {tempfile.gettempdir()} has them free. Make "
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
