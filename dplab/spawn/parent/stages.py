"""What the parent knows of a rank, and the stages that it goes through."""

import enum
from dataclasses import dataclass, field

from ..between.calls import Call
from ..between.messages import Answer


class RankStage(enum.Enum):
    """Of a rank, as the parent knows it. Its last words may arrive after the news of its death.

    Once it has returned or failed it stays alive, so that its peers keep their connections; how it
    then ends is no matter.
    """

    STARTING = "it was forked, and joins the process group"
    JOINED = "it waits until all others have joined"
    RUNNING = "its function runs"
    RETURNING = "its function has returned, and the value is on its way"
    RETURNED = "its value is here"
    RAISED = "it raised an exception"
    EXITED = "it called sys.exit"
    UNPICKLABLE = "what was sent to it, or what it returned, cannot travel"
    DIED = "its process has ended without a last word"


_AT_WORK = {RankStage.STARTING, RankStage.JOINED, RankStage.RUNNING, RankStage.RETURNING}
_FAILURES = {RankStage.RAISED, RankStage.EXITED, RankStage.UNPICKLABLE}


@dataclass
class RankState:
    """One rank, as far as its words, its calls and its end tell."""

    rank: int
    stage: RankStage = RankStage.STARTING
    has_run: bool = False  # its function has begun
    answer: Answer | None = None  # its last word: done, raised, exited, unpicklable
    coming: Answer | None = None  # "done", while the value is on its way
    value: object = field(default=None, repr=False)
    where: Answer | None = None
    exit_code: int | None = None
    ended_at: float = 0.0  # `time.monotonic`, of the exit
    last_call: Call | None = None
    unmet: list[Call] = field(default_factory=list)  # sends, receives without counterpart

    @property
    def at_work(self) -> bool:
        """Whether more is to come from it."""
        return self.stage in _AT_WORK

    @property
    def is_starting(self) -> bool:
        return self.stage in (RankStage.STARTING, RankStage.JOINED)

    @property
    def finished(self) -> bool:
        return self.stage is RankStage.RETURNED

    @property
    def died(self) -> bool:
        return self.stage is RankStage.DIED

    @property
    def failed(self) -> bool:
        return self.died or self.stage in _FAILURES

    @property
    def failed_at(self) -> float:
        return self.answer.time if self.answer else self.ended_at
