"""What the parent knows of a rank."""

from dataclasses import dataclass, field

from dplab.spawn.calls import Call
from dplab.spawn.rank import Answer


@dataclass
class RankState:
    """One rank, as far as its words, its calls and its end tell."""

    rank: int
    joined: bool = False  # the process group
    ready: bool = False  # and so have all others: its function runs
    answer: Answer | None = None  # its last word: done, raised, exited, unpicklable
    coming: Answer | None = None  # "done", while the value is on its way
    value: object = field(default=None, repr=False)
    where: Answer | None = None
    exit_code: int | None = None
    ended_at: float = 0.0  # `time.monotonic`, of the exit
    out_of_memory: bool = False
    last_call: Call | None = None
    unmet: list[Call] = field(default_factory=list)  # sends, receives without counterpart

    @property
    def finished(self):
        return self.answer is not None and self.answer.state == "done"

    @property
    def died(self):
        return self.answer is None and self.exit_code is not None

    @property
    def failed(self):
        return self.died or (self.answer is not None and not self.finished)

    @property
    def failed_at(self):
        return self.ended_at if self.died else self.answer.time
