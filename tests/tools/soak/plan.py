"""One run of the soak: the learner's code, what is done to it, and how it may end."""

import textwrap
from dataclasses import dataclass, field

_WORK = """\
def work(*arguments):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), rank + 1.0, dtype=torch.float64)
    for step in range({before}):
        dist.all_reduce(x)
        time.sleep({pause:.3f})
{fault}
    for step in range({after}):
        dist.all_reduce(x)
    return rank, x[0].item(), {big}
"""


ANY = "any"  # rank


@dataclass
class Ends:
    """One way in which a run may end: with "values", a kind of `RankError`, or another outcome."""

    outcome: str
    rank: int | str | None = None
    says: tuple[str, ...] = ()
    seconds: float = 0.0  # beyond the run's bound


@dataclass
class Plan:
    """One run. ``bound``: seconds that it may take on a quiet machine, from its start or from the
    moment at which something is done to it.
    """

    ranks: int
    before: int = 2  # collectives before the fault
    after: int = 1
    pause: float = 0.05
    fault: str = "pass"
    ends: list[Ends] = field(default_factory=lambda: [Ends("values")])
    bound: float = 5.0
    timeout: float = 60.0
    big: str = "None"  # the expression of a value that is returned too
    big_comes_back: tuple = ()  # for each rank
    arguments: list[int] = field(default_factory=list)  # elements of each float32 argument
    outside: str = ""  # what is done to it, and `moment` seconds after its start
    moment: float = 0.0
    which: int = 0  # the rank to which it is done
    cramped: bool = False
    leave: dict = field(default_factory=dict)  # bytes left free in a temporary folder
    stdout: str = ""
    output: list[str] = field(default_factory=list)  # lines that must be shown
    beside: "Plan | None" = None  # in another notebook, at the same time

    @property
    def task(self) -> dict:
        cell = _WORK.format(before=self.before, after=self.after, pause=self.pause, big=self.big,
                            fault=textwrap.indent(self.fault, "    "))
        task = {"cell": cell, "ranks": self.ranks, "timeout": self.timeout,
                "arguments": self.arguments, "leave": self.leave}
        return task | ({"stdout": self.stdout} if self.stdout else {})

    def values(self) -> list[tuple]:
        """What the ranks return when nothing goes wrong."""
        collectives = self.before + self.after
        total = self.ranks * (self.ranks + 1) / 2 * self.ranks ** max(collectives - 1, 0)
        return [(rank, total if collectives else rank + 1.0,
                 self.big_comes_back[rank] if self.big_comes_back else None)
                for rank in range(self.ranks)]


_RAISES = {
    'raise KeyError("absent")': ("KeyError", "'absent'"),
    'raise ValueError(f"wrong on {rank}")': ("ValueError", "wrong on"),
    "1 // (rank - rank)": ("ZeroDivisionError", ""),
    "assert x is None, x": ("AssertionError", ""),
    "torch.ones(2) @ torch.ones(3)": ("RuntimeError", ""),
    "raise KeyboardInterrupt": ("KeyboardInterrupt", ""),
}
_EXITS = {
    "sys.exit(3)": ("called sys.exit(3) before it returned", "sys.exit(3)"),
    "sys.exit('over')": ("called sys.exit('over') before it returned", "sys.exit('over')"),
    "os._exit(4)": ("left with exit code 4 before it returned", ""),
    "os._exit(0)": ("left with exit code 0 before it returned", ""),
    "os.abort()": ("aborted (SIGABRT)", "os.abort()"),
    "ctypes.string_at(0)": ("crashed (SIGSEGV)", "ctypes.string_at(0)"),
}


def sudden(rng, kind: str, rank: int, ranks: int) -> tuple[str, Ends]:
    """A statement that ends a rank at once, and what is said of it."""
    head = f"rank {rank} of {ranks} "
    if kind == "raise":
        line = rng.choice(list(_RAISES))
        error, text = _RAISES[line]
        return line, Ends("raised", rank, (f"{head}raised {error}", text, line))
    if kind == "exit":
        line = rng.choice(list(_EXITS))
        return line, Ends("died", rank, tuple(head + text if index == 0 else text
                                              for index, text in enumerate(_EXITS[line])))
    return "os.kill(os.getpid(), signal.SIGKILL)", Ends("died", rank,
                                                        (f"{head}was killed (SIGKILL)",))
