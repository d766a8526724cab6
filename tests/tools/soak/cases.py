"""What goes wrong in the runs of the soak: the learner's code, what is done to it from outside, and
what must be said of it. Each case draws one run from a seeded `random.Random`.
"""

import textwrap
from dataclasses import dataclass, field

import psutil

MUCH = int(min(200e6, psutil.virtual_memory().available / 40))  # bytes of a huge value
_WORK = """\
def work(argument):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), rank + 1.0, dtype=torch.float64)
    for step in range({before}):
        dist.all_reduce(x)
        time.sleep({pause:.3f})
{fault}
    for step in range({after}):
        dist.all_reduce(x)
    return rank, x[0].item(), {value}
"""


@dataclass
class Ends:
    """One way in which a run may end: with "values", a kind of `RankError`, or another error."""

    outcome: str
    rank: int | None = None
    says: tuple[str, ...] = ()


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
    elements: int = 0  # of a float32 tensor that goes there and comes back, if any
    outside: str = ""  # what is done to it, and `moment` seconds after its start
    moment: float = 0.0
    which: int = 0  # the rank that fails, or to which it is done

    @property
    def life(self) -> float:
        """Seconds until about the fault."""
        return 0.15 + self.before * (self.pause + 0.01)

    @property
    def task(self) -> dict:
        cell = _WORK.format(before=self.before, after=self.after, pause=self.pause,
                            fault=textwrap.indent(self.fault, "    "),
                            value="argument + rank" if self.elements else "None")
        return {"cell": cell, "ranks": self.ranks, "timeout": self.timeout,
                "elements": self.elements}

    def values(self) -> list[tuple]:
        """What the ranks return when nothing goes wrong."""
        collectives = self.before + self.after
        total = self.ranks * (self.ranks + 1) / 2 * self.ranks ** max(collectives - 1, 0)
        return [(rank, total if collectives else rank + 1.0,
                 (self.elements, 7.0 + rank, 7.0 + rank) if self.elements else None)
                for rank in range(self.ranks)]


# kind of end: statements that end a rank at once, each with what is said of it
_SUDDEN = {
    "raise": {
        'raise KeyError("absent")': "raised KeyError: 'absent'",
        'raise ValueError(f"wrong on {rank}")': "raised ValueError: wrong on",
        "1 // (rank - rank)": "raised ZeroDivisionError",
        "raise KeyboardInterrupt": "raised KeyboardInterrupt",
    },
    "exit": {
        "sys.exit(3)": "called sys.exit(3) before it returned",
        "os._exit(0)": "left with exit code 0 before it returned",
        "os.abort()": "aborted (SIGABRT)",
        "ctypes.string_at(0)": "crashed (SIGSEGV)",
    },
    "kill": {"os.kill(os.getpid(), signal.SIGKILL)": "was killed (SIGKILL)"},
}


def _sudden(rng, kind: str, rank: int, ranks: int) -> tuple[str, Ends]:
    """A statement that ends a rank at once, and what is said of it: its line, too, if it is known.
    """
    line = rng.choice(list(_SUDDEN[kind]))
    says = f"rank {rank} of {ranks} {_SUDDEN[kind][line]}"
    is_known = not line.startswith(("os._exit", "os.kill"))
    return line, Ends("raised" if kind == "raise" else "died", rank, (says, line * is_known))


def _at_some_moment(rng, least_ranks=1, **fields) -> Plan:
    """A plan whose fault comes first, in the middle, or last."""
    before, after = rng.choice(((0, 2), (rng.randint(1, 5), rng.randint(1, 2)),
                                (rng.randint(1, 5), 0)))
    plan = Plan(rng.randint(least_ranks, 4), before, after, rng.uniform(0, 0.15), **fields)
    plan.which, plan.moment = rng.randrange(plan.ranks), rng.uniform(0, plan.life)
    return plan


def _on(rank, *lines):
    return "\n".join([f"if rank == {rank}:", *(f"    {line}" for line in lines)])


def _fails(kind):
    def draw(rng):
        plan = _at_some_moment(rng)
        line, ends = _sudden(rng, kind, plan.which, plan.ranks)
        plan.fault, plan.ends = _on(plan.which, line), [ends]
        return plan
    return draw


def _killed_from_outside(rng):
    plan = _at_some_moment(rng, outside="kill")
    plan.ends += [Ends("died", plan.which, ("was killed (SIGKILL)",))]
    return plan


def _stopped(rng):
    plan = _at_some_moment(rng, timeout=rng.uniform(1.0, 2.5))
    plan.bound += plan.timeout
    plan.fault = _on(plan.which, "os.kill(os.getpid(), signal.SIGSTOP)")
    plan.ends = [Ends("stuck", plan.which, (f"rank {plan.which} ", f"within {plan.timeout:g} s"))]
    return plan


# what the culprit does in place of the others' collective, the others', outcome, what is said
_DEADLOCKS = [
    ("return", "dist.all_reduce(x)", "stuck", "returned, and"),
    ("while True: pass", "dist.barrier()", "stuck", "did not come to barrier number"),
    ("dist.broadcast(x, 0)", "dist.all_reduce(x)", "mismatched", "the operations do not agree"),
    ("dist.all_reduce(x[1:].clone())", "dist.all_reduce(x)", "mismatched", "the shapes do not"),
    ("dist.all_reduce(x.float())", "dist.all_reduce(x)", "mismatched", "the dtypes do not agree"),
    ("dist.broadcast(x, 1)", "dist.broadcast(x, 0)", "mismatched", "the roots do not agree"),
]
_ALL_SEND = "dist.send(x, (rank + 1) % world_size)\ndist.recv(x, (rank - 1) % world_size)"


def _deadlock(rng):
    plan = _at_some_moment(rng, least_ranks=2, timeout=rng.uniform(1.5, 3.0))
    plan.after = 0
    plan.bound += plan.timeout
    odd, others, outcome, says = rng.choice(_DEADLOCKS)
    plan.fault = f"{_on(plan.which, odd)}\nelse:\n    {others}"
    blamed = plan.which if outcome == "stuck" or plan.ranks > 2 else None
    plan.ends = [Ends(outcome, blamed, (says, odd if outcome == "mismatched" else others))]
    if rng.random() < 0.3:
        plan.timeout, plan.fault = 60.0, _ALL_SEND  # found long before
        plan.ends = [Ends("stuck", None, ("wait for ever: each sends", "dist.send(x, (rank"))]
    return plan


def _huge(rng):
    plan = _at_some_moment(rng, bound=30.0, outside=rng.choice(("", "interrupt", "kill")))
    plan.elements, plan.moment = MUCH // 4, rng.uniform(0, plan.life + 0.4 * plan.ranks)
    plan.ends += [Ends("Interrupted")] if plan.outside == "interrupt" else [
        Ends("died", plan.which, ("was killed (SIGKILL)",))]
    return plan


def _interrupt(rng):
    plan = _at_some_moment(rng, outside=rng.choice(("interrupt", "interrupt", "interrupt twice")))
    hangs = rng.choice(("", "", "while True: pass", "time.sleep(1000)",
                        "os.kill(os.getpid(), signal.SIGSTOP)", 'print("x" * 5_000_000)'))
    plan.fault, plan.moment = _on(0, hangs or "pass"), 1.3 * plan.moment
    plan.ends = [Ends("Interrupted")] + [Ends("values")] * (not hangs or "print" in hangs)
    if rng.random() < 0.3:
        plan.outside = plan.outside.replace("interrupt", "interrupt first run", 1)
        plan.moment = rng.uniform(0, 5.0)
    return plan


def _two_faults(rng):
    plan = _at_some_moment(rng, least_ranks=2)
    first, second = rng.sample(range(plan.ranks), 2)
    line, ends = _sudden(rng, rng.choice(("raise", "exit", "kill")), first, plan.ranks)
    later, then = _sudden(rng, rng.choice(("raise", "exit", "kill")), second, plan.ranks)
    line, wait, plan.ends = rng.choice((
        (line, "pass", [ends, then]), (line, "time.sleep(1.5)", [ends]),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(0.3)", [then])))
    plan.fault = _on(first, line) + "\n" + _on(second, wait, later)
    return plan


def _dead_server(rng):
    plan = _at_some_moment(rng, outside="kill server", bound=10.0)
    plan.ends += [Ends("ServerEnded", None, ("process that ranks are forked from has ended",))]
    return plan


# name: (share of the runs, what draws one)
CASES = {
    "healthy": (6, _at_some_moment), "raise": (5, _fails("raise")), "exit": (5, _fails("exit")),
    "SIGKILL itself": (2, _fails("kill")), "SIGKILL": (3, _killed_from_outside),
    "SIGSTOP": (4, _stopped), "deadlock": (8, _deadlock), "huge": (5, _huge),
    "interrupt": (10, _interrupt), "two faults": (5, _two_faults),
    "fork server killed": (2, _dead_server),
    "notebook killed": (2, lambda rng: _at_some_moment(rng, outside="kill notebook")),
}
