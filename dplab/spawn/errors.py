"""What a failed run raises, and how a chapter shows a failure on purpose."""

from dataclasses import dataclass, field


class RankError(RuntimeError):
    """A run on ranks failed. Its text is the diagnosis.

    ``rank``: the rank to blame, or None where no one rank is.
    ``kind``: ``"raised"``, ``"died"`` (a signal, or an exit), ``"stuck"``, ``"mismatched"``
    (collectives, shapes, dtypes or reduce operations that do not agree) or ``"unpicklable"``.
    ``error``: the name of the exception's type, where one was raised on a rank.
    ``reports``: one line for each other rank, on where it was.
    """

    def __init__(self, text, *, rank=None, kind="raised", error="", reports=()):
        super().__init__(text)
        self.rank, self.kind, self.error, self.reports = rank, kind, error, list(reports)

    def __reduce__(self):
        return _rebuild, (str(self), self.rank, self.kind, self.error, self.reports)

    def _render_traceback_(self):
        """IPython's hook: the report alone, without the launcher's own frames."""
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[31;1m{type(self).__name__}\x1b[0m: \x1b[1m{head}\x1b[0m", rest]


def _rebuild(text, rank, kind, error, reports):
    return RankError(text, rank=rank, kind=kind, error=error, reports=reports)


class Interrupted(KeyboardInterrupt):
    """The reader stopped a run; its text says where each rank was."""

    def _render_traceback_(self):
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[1m{head}\x1b[0m", rest]


@dataclass
class ExpectedFailure:
    """What `expect_failure` caught."""

    error: RankError | None = field(default=None)

    @property
    def rank(self):
        return self.error.rank

    @property
    def kind(self):
        return self.error.kind

    def __str__(self):
        return str(self.error)


class expect_failure:
    """A failure that is shown on purpose: the report is printed and kept, nothing is raised.

    ``with dplab.expect_failure() as failure: ...``; afterwards ``failure.kind``, ``failure.rank``,
    ``failure.error``. A block that does not fail raises AssertionError.
    """

    def __enter__(self):
        self._failure = ExpectedFailure()
        return self._failure

    def __exit__(self, kind, error, traceback):
        if kind is None:
            raise AssertionError("this block was meant to fail with a RankError, and it did not")
        if not isinstance(error, RankError):
            return False
        self._failure.error = error
        print(f"RankError: {error}")
        return True


class ServerEnded(RuntimeError):
    """The process that ranks are forked from has ended, and with it every rank."""

    _render_traceback_ = RankError._render_traceback_
