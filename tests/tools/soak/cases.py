"""What goes wrong in the runs of the soak: the learner's code, what is done to it from outside, and
what must be said of it. Each case draws one run from a seeded `random.Random`.
"""

import textwrap
from dataclasses import dataclass, field

import psutil

MUCH = int(min(200e6, psutil.virtual_memory().available / 40)) // 4 * 4  # bytes of a huge value
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
    output: list[str] = field(default_factory=list)  # lines that must be shown

    @property
    def task(self) -> dict:
        cell = _WORK.format(before=self.before, after=self.after, pause=self.pause, big=self.big,
                            fault=textwrap.indent(self.fault, "    "))
        return {"cell": cell, "ranks": self.ranks, "timeout": self.timeout,
                "arguments": self.arguments}

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


def _at_some_moment(rng, least_ranks=1, **fields) -> Plan:
    """A plan whose fault comes first, in the middle, or last."""
    before, after = rng.choice(((0, 2), (rng.randint(1, 5), rng.randint(1, 2)),
                                (rng.randint(1, 5), 0)))
    return Plan(rng.randint(least_ranks, 4), before, after, rng.uniform(0, 0.15), **fields)


def _on(rank, *lines):
    return "\n".join([f"if rank == {rank}:", *(f"    {line}" for line in lines)])


def _fails(kind):
    def draw(rng):
        plan = _at_some_moment(rng)
        culprit = rng.randrange(plan.ranks)
        line, ends = sudden(rng, kind, culprit, plan.ranks)
        plan.fault, plan.ends = _on(culprit, line), [ends]
        return plan
    return draw


def _healthy(rng):
    return _at_some_moment(rng)


def _killed_from_outside(rng):
    plan = _at_some_moment(rng, outside="kill")
    plan.which, plan.moment = rng.randrange(plan.ranks), rng.uniform(0, _life(plan))
    plan.ends += [Ends("died", plan.which, ("was killed (SIGKILL)",))]
    return plan


def _life(plan):
    return 0.15 + plan.before * (plan.pause + 0.01)


# of a rank that was stopped before it had joined the others
_NOT_STARTED = [Ends("stuck", rank, ("within 120 s", "was still starting"), 120.0)
                for rank in (None, 0, 1, 2, 3)]


def _stopped(rng):
    plan = _at_some_moment(rng, timeout=rng.uniform(1.0, 2.5))
    plan.which = rng.randrange(plan.ranks)
    plan.bound += plan.timeout
    ends = Ends("stuck", plan.which, (f"rank {plan.which} ", f"within {plan.timeout:g} s"))
    if rng.random() < 0.6:
        plan.fault = _on(plan.which, "os.kill(os.getpid(), signal.SIGSTOP)")
        plan.ends = [ends]
    else:
        plan.outside, plan.moment = "stop", rng.uniform(0, _life(plan))
        plan.ends += [ends, *_NOT_STARTED]
    return plan


_NEVER = 'within {timeout:g} s'
# name: (what the culprit does in place of the others' collective, the others', outcome, says)
_DEADLOCKS = {
    "missing": ("return", "dist.all_reduce(x)", "stuck", ("returned", "in all_reduce number")),
    "endless": ("while True: pass", "dist.barrier()", "stuck",
                ("did not come to barrier number", _NEVER)),
    "asleep": ("time.sleep(1000)", "dist.all_reduce(x)", "stuck",
               ("did not come to all_reduce number", _NEVER)),
    "operation": ("dist.broadcast(x, 0)", "dist.all_reduce(x)", "mismatched",
                  ("the operations do not agree", "dist.broadcast(x, 0)")),
    "size": ("dist.all_reduce(x[1:].clone())", "dist.all_reduce(x)", "mismatched",
             ("the shapes do not agree", "dist.all_reduce(x[1:].clone())")),
    "dtype": ("dist.all_reduce(x.float())", "dist.all_reduce(x)", "mismatched",
              ("the dtypes do not agree", "dist.all_reduce(x.float())")),
    "reduce": ("dist.all_reduce(x, op=dist.ReduceOp.MAX)", "dist.all_reduce(x)", "mismatched",
               ("the reduce operations do not agree", "op=dist.ReduceOp.MAX")),
    "root": ("dist.broadcast(x, 1)", "dist.broadcast(x, 0)", "mismatched",
             ("the roots do not agree", "dist.broadcast(x, 1)")),
}


def _deadlock(rng):
    plan = _at_some_moment(rng, least_ranks=2, timeout=rng.uniform(1.5, 3.0))
    plan.after = 0
    plan.which, plan.bound = rng.randrange(plan.ranks), plan.bound + plan.timeout
    kind = rng.choice([*_DEADLOCKS, "all send", "all receive", "lone send"])
    if kind in _DEADLOCKS:
        odd, others, outcome, says = _DEADLOCKS[kind]
        plan.fault = f"{_on(plan.which, odd)}\nelse:\n    {others}"
        blamed = plan.which if outcome == "stuck" or plan.ranks > 2 else None
        plan.ends = [Ends(outcome, blamed, tuple(text.format(timeout=plan.timeout)
                                                 for text in says))]
        return plan
    plan.timeout = 60.0  # found long before
    right, left = "(rank + 1) % world_size", "(rank - 1) % world_size"
    if kind == "lone send":
        other = (plan.which + 1) % plan.ranks
        plan.fault = _on(plan.which, f"dist.send(x, {other})")
        plan.ends = [Ends("stuck", other, (f"rank {plan.which} waits for ever, and",
                                           f"dist.send(x, {other})"))]
        return plan
    lines = [f"dist.send(x, {right})", f"dist.recv(x, {left})"]
    plan.fault = "\n".join(lines if kind == "all send" else lines[::-1])
    word = "each sends" if kind == "all send" else "each wants to receive"
    plan.ends = [Ends("stuck", None, ("wait for ever", word, plan.fault.splitlines()[0]))]
    return plan


def _flood(rng):
    plan = _at_some_moment(rng, bound=30.0)
    culprit, lines = rng.randrange(plan.ranks), rng.randint(130, 500) * 1000
    prints = f'for n in range({lines}): print(f"{{n:7d}} " + "x" * 71)'
    plan.output = [f"[rank {culprit}] {n:7d} " + "x" * 71 for n in (0, lines - 1)]
    plan.output.append(" MB not shown …")
    plan.fault = _on(culprit, prints)
    if rng.random() < 0.4:
        line, ends = sudden(rng, "raise", culprit, plan.ranks)
        plan.fault, plan.ends = _on(culprit, prints, line), [ends]
    return plan


def _huge(rng):
    plan = _at_some_moment(rng, bound=30.0)
    plan.ranks, size = min(plan.ranks, 3), MUCH // 4
    if rng.random() < 0.5:
        plan.arguments = [size]
        plan.big = "(arguments[0].numel(), arguments[0][-1].item())"
        plan.big_comes_back = ((size, 7.0),) * plan.ranks
    else:
        plan.big = f"torch.full(({size},), rank + 1.0)"
        plan.big_comes_back = tuple((size, rank + 1.0, rank + 1.0) for rank in range(plan.ranks))
    what = rng.choice(("", "", "interrupt", "kill", "stop"))
    plan.which, plan.outside = rng.randrange(plan.ranks), what
    plan.moment = rng.uniform(0, _life(plan) + 0.4 * plan.ranks)
    if what == "interrupt":
        plan.ends += [Ends("interrupted")]
    elif what == "kill":
        plan.ends += [Ends("died", plan.which, ("was killed (SIGKILL)",))]
    elif what == "stop":
        plan.timeout, plan.bound = 8.0, plan.bound + 8.0
        plan.ends += [Ends("stuck", plan.which, ("within 8 s",)), *_NOT_STARTED]
    return plan


def _interrupt(rng):
    plan = _at_some_moment(rng, outside=rng.choice(("interrupt", "interrupt", "interrupt twice")))
    hangs = rng.choice(("", "", "while True: pass", "time.sleep(1000)", "dist.barrier()",
                        "os.kill(os.getpid(), signal.SIGSTOP)", 'print("x" * 5_000_000)'))
    plan.ends += [Ends("interrupted")]
    if hangs and not (hangs == "dist.barrier()" and plan.ranks == 1):
        plan.fault = _on(0, hangs)
        if "print" not in hangs:
            plan.ends = [Ends("interrupted")]
        if hangs == "dist.barrier()":
            plan.after = 0
            plan.fault += "\nelse:\n    time.sleep(1000)"
    if rng.random() < 0.3:
        plan.outside = plan.outside.replace("interrupt", "interrupt first run", 1)
        plan.moment = rng.uniform(0, 5.0)
    else:
        plan.moment = rng.uniform(0, 1.3 * _life(plan) + 0.1)
    return plan


def _two_faults(rng):
    plan = _at_some_moment(rng, least_ranks=2)
    first, second = rng.sample(range(plan.ranks), 2)
    kinds = [rng.choice(("raise", "exit", "kill")) for _ in range(2)]
    lines, ends = zip(*(sudden(rng, kind, rank, plan.ranks)
                        for kind, rank in zip(kinds, (first, second), strict=True)), strict=True)
    how = rng.choice(("at once", "later", "after a stop"))
    wait = {"at once": "pass", "later": "time.sleep(1.5)", "after a stop": "time.sleep(0.3)"}[how]
    if how == "after a stop":
        lines = ("os.kill(os.getpid(), signal.SIGSTOP)", lines[1])
    plan.fault = _on(first, lines[0]) + "\n" + _on(second, wait, lines[1])
    plan.ends = {"at once": list(ends), "later": [ends[0]], "after a stop": [ends[1]]}[how]
    return plan


def _dead_server(rng):
    plan = _at_some_moment(rng, outside="kill server")
    plan.moment = rng.uniform(0, _life(plan))
    plan.bound = 10.0
    plan.ends += [Ends("ServerEnded", None, ("process that ranks are forked from has ended",))]
    return plan


def _dead_notebook(rng):
    plan = _at_some_moment(rng, outside="kill notebook")
    plan.moment = rng.uniform(0, _life(plan))
    return plan


def _stray_child(rng):
    plan = _fails("raise")(rng) if rng.random() < 0.5 else _healthy(rng)
    session = rng.choice((True, False))
    plan.fault = (f'subprocess.Popen(["sleep", "1000"], start_new_session={session})\n'
                  + plan.fault)
    return plan


# name: (share of the runs, what draws one)
CASES = {
    "healthy": (6, _healthy), "raise": (5, _fails("raise")), "exit": (5, _fails("exit")),
    "SIGKILL itself": (2, _fails("kill")), "SIGKILL": (3, _killed_from_outside),
    "SIGSTOP": (4, _stopped), "deadlock": (8, _deadlock), "flood": (3, _flood), "huge": (4, _huge),
    "interrupt": (9, _interrupt),
    "two faults": (5, _two_faults), "fork server killed": (2, _dead_server),
    "notebook killed": (2, _dead_notebook), "child of a rank": (2, _stray_child),
}
