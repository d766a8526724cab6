"""The stages of a run and of each of its ranks, and what may follow what."""

import enum
from dataclasses import dataclass, field

from ..between.calls import Call
from ..between.messages import Answer


class RunStage(enum.Enum):
    """Of a run. Each may be followed by the next, or by ENDED."""

    STARTING = "ranks are forked, and join the process group"
    RUNNING = "all have joined, and their functions run"
    ENDED = "every rank has returned, or the run has failed"


class RankStage(enum.Enum):
    """Of a rank, as the parent knows it."""

    STARTING = "it was forked, and joins the process group"
    JOINED = "it waits until all others have joined"
    RUNNING = "its function runs"
    RETURNING = "its function has returned, and the value is on its way"
    RETURNED = "its value is here"
    RAISED = "it raised an exception"
    EXITED = "it called sys.exit"
    UNPICKLABLE = "what was sent to it, or what it returned, cannot travel"
    DIED = "its process has ended without a last word"


_FAILURES = {RankStage.RAISED, RankStage.EXITED, RankStage.UNPICKLABLE}
FOLLOWS: dict[RankStage, set[RankStage]] = {
    RankStage.STARTING: {RankStage.JOINED, RankStage.DIED, *_FAILURES},
    RankStage.JOINED: {RankStage.RUNNING, RankStage.DIED, *_FAILURES},
    RankStage.RUNNING: {RankStage.RETURNING, RankStage.DIED, *_FAILURES},
    RankStage.RETURNING: {RankStage.RETURNED, RankStage.DIED},
    # its last words may arrive after the news of its death
    RankStage.DIED: {RankStage.RETURNED, *_FAILURES},
    # it stays alive, so that its peers keep their connections; how it then ends is no matter
    **{last: set() for last in (RankStage.RETURNED, *_FAILURES)},
}


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
    out_of_memory: bool = False
    last_call: Call | None = None
    unmet: list[Call] = field(default_factory=list)  # sends, receives without counterpart

    def advance(self, stage: RankStage) -> None:
        assert stage in FOLLOWS[self.stage], f"{stage.name} after {self.stage.name}"
        self.stage = stage
        self.has_run |= stage is RankStage.RUNNING

    @property
    def at_work(self) -> bool:
        """Whether more is to come from it."""
        return RankStage.DIED in FOLLOWS[self.stage]

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
