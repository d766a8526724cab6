"""How long until four ranks have done one all-reduce, and what of faults: dplab beside others.

Each launcher runs in a kernel of its own, as in a notebook, from the cells that `launchers` has.
What it does when something goes wrong is tried there, too: rank 1 raises while the others wait for
it; the ■ button is pressed while all wait; and after either, the next call.
"""

import contextlib
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from dplab.bench import kernel, launchers
from dplab.bench.timing import spread

PATIENCE = 30  # seconds, beyond what a launch takes, after which a call counts as stuck
_CALL = "launch(all_reduce_once)"
_TOLD = {"rank": r"(?i)\b(rank|process|engine)\b\W{0,9}1\b|\[1:",
         "error": "sample 7 is bad", "line": r"raise ValueError\(reason\)"}
_TIMED = """
import json, time
times = []
for _ in range({rounds}):
    start = time.perf_counter()
    values = launch({function})
    times.append(time.perf_counter() - start)
    assert values == {values}, values
print("seconds", json.dumps(times))
"""
_DDP_STEP = """
def ddp_step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
_FRESH = """
import time
import torch, torch.distributed as dist
from dplab import run
def all_reduce_once():
    dist.all_reduce(torch.ones(1))
time.sleep({pause})
start = time.perf_counter()
run(all_reduce_once, {ranks})
print(time.perf_counter() - start)
"""


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--rounds", type=int, default=15, help="warm runs of dplab (default 15)")
    parser.add_argument("--peer-rounds", type=int, default=3, help="runs of each peer (default 3)")


def main(options):
    if kernel.missing():
        sys.exit(f"dplab.bench launch: {kernel.missing()}")
    print(f"from a notebook: {options.ranks} ranks start, join, all-reduce once, return the "
          f"result, end; median, least and most\n{'':54}{'seconds':>26}{'÷ dplab':>9}")
    ours = _tried(launchers.DPLAB, options.ranks, options.rounds)
    base = statistics.median(ours.times)
    _print_times("dplab.run", ours.times, base)
    for name, times in _more_of_dplab(options):
        _print_times(f"dplab.run, {name}", times, base)
    rows = {"dplab.run": ours}
    for peer in launchers.PEERS:
        if importlib.util.find_spec(peer.module) is None:
            print(f"{peer.name:54}not installed")
            continue
        try:
            rows[peer.name] = tried = _tried(peer, options.ranks, options.peer_rounds)
        except Failed as error:
            print(f"{peer.name:54}failed: {error}")
            continue
        _print_times(peer.name, tried.times, base)
    print(f"\n{'':34}{'function of a cell':20}{'rank 1 raises, others wait':42}■ while all wait")
    for name, tried in rows.items():
        print(f"{name:34}{tried.function:20}{tried.raised:42}{tried.interrupted}")


@dataclass(frozen=True)
class Tried:
    """Seconds of each launch, and in words what else was tried with a launcher."""

    times: list[float]
    function: str
    raised: str
    interrupted: str


class Failed(Exception):
    """A launcher does not do what it should; the text is the first line of its error."""


def _tried(launcher, ranks, rounds):
    with _started(launcher, ranks) as session:
        times = _seconds(session, rounds, "all_reduce_once", [float(ranks)] * ranks)
        usual = max(times)
        session.run("def of_a_cell():\n    return float(dist.get_rank())")
        own = session.run("launch(of_a_cell)", timeout=usual + PATIENCE).error
        function = "fails" if own else "runs"
        raised, works = _raises(session, usual)
        if works:
            return Tried(times, function, raised, _interrupted(session, usual))
    with _started(launcher, ranks) as session:
        return Tried(times, function, raised, _interrupted(session, usual))


@contextlib.contextmanager
def _started(launcher, ranks):
    """A kernel in which ``launch`` was called once."""
    with kernel.Kernel() as session:
        for cell in (*launchers.cells(launcher, ranks), _CALL):
            ran = session.run(cell, timeout=120)
            if ran.error:
                raise Failed(ran.error.splitlines()[0])
        yield session


def _seconds(session, rounds, function, values):
    ran = session.run(_TIMED.format(rounds=rounds, function=function, values=values))
    if ran.error:
        raise Failed(ran.error.splitlines()[0])
    return json.loads(ran.text.rpartition("seconds ")[2])


def _more_of_dplab(options):
    """(what, seconds of each): more ranks, a DDP step, and the first calls after a start."""
    ranks = options.ranks
    with _started(launchers.DPLAB, 2 * ranks) as session:
        yield f"{2 * ranks} ranks", _seconds(session, options.rounds, "all_reduce_once",
                                             [2.0 * ranks] * 2 * ranks)
    with _started(launchers.DPLAB, ranks) as session:
        session.run(_DDP_STEP)
        yield "a DDP step", _seconds(session, options.rounds, "ddp_step", [None] * ranks)
    for pause, when in ((0, "right"), (6, "six seconds")):
        script = _FRESH.format(pause=pause, ranks=ranks)
        yield f"first call, {when} after the imports", [
            float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True,
                                 text=True).stdout.split()[-1])
            for _ in range(options.peer_rounds)]


def _raises(session, usual):
    """In words what happened, and whether the kernel is good for more."""
    ran = session.run("launch(raises_on_rank_1)", timeout=usual + PATIENCE)
    if ran.error == "timeout":
        return f"no report in {PATIENCE} s", False
    told = [what for what, pattern in _TOLD.items() if re.search(pattern, ran.text)]
    then = _next(session, usual)
    return f"{ran.seconds:.1f} s: {', '.join(told) or 'nothing'}; {then}", then == "then works"


def _interrupted(session, usual):
    before, after = session.children(), usual + 2
    ran = session.run("launch(never_ends)", timeout=after + PATIENCE, interrupt_after=after)
    if ran.error == "timeout":
        return f"no end in {PATIENCE} s"
    time.sleep(2)
    left = len(session.children() - before)
    return f"{ran.seconds - after:.1f} s, {left} left; {_next(session, usual)}"


def _next(session, usual):
    ran = session.run(_CALL, timeout=usual + PATIENCE)
    if ran.error == "timeout":
        return "then stuck"
    return "then fails" if ran.error else "then works"


def _print_times(name, times, base):
    print(f"{name:54}{spread(times, 3):>26}{statistics.median(times) / base:8.1f}×", flush=True)
