"""What became of the ranks, in words: the text of a RankError."""

import dataclasses
import linecache
import os
import re
import signal

from ..between.calls import PACKAGE, is_learners
from ..between.errors import RankError, RankReport, advice_on
from ..between.messages import Frame, InFlight, crash_file
from .matching import is_waiting
from .places import ipython, place, place_and_source
from .stages import RankStage

_LAUNCHER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_SIGNALS = {
    signal.SIGKILL: "was killed (SIGKILL): by a kill -9, or by the system when memory runs out",
    signal.SIGABRT: "aborted (SIGABRT): C++ code gave up; its last words stand in the output",
    signal.SIGSEGV: "crashed (SIGSEGV): C code touched memory that is not its own",
    signal.SIGBUS: "crashed (SIGBUS): C code touched memory that does not exist (/dev/shm full?)",
}
_PEER_LOST = re.compile(r"Connection (closed|reset)|Broken pipe|remote process exited", re.I)
_WHY = {
    "operation": "Each waits in a collective that the other never calls.",
    "dtype": "gloo does not check: with other sizes it aborts, with equal ones it adds raw bytes.",
    "shape": "This collective needs the same number of elements on every rank; gloo aborts or "
             "hangs here.",
    "reduce operation": "gloo does not check: every rank would get a different, wrong result.",
    "root": "The ranks do not agree which of them has the data, or gets it.",
}

PAIRS = "Every send needs a receive on the other rank, and every receive a send."
_ALL_SEND = "A send ends when the other rank receives."


def of_mismatch(mismatch, states) -> RankError:
    what, place = mismatch
    calls = dict(sorted(place.items()))
    number = next(iter(calls.values())).number
    odd = _odd_one_out(calls)
    head = (f"collective number {number} is not the same on every rank: "
            f"the {what}s do not agree")
    called = [_of_call(rank, "called", f"called {call}", call) for rank, call in calls.items()]
    lines = [f"  rank {report.rank} {report.doing}\n         {report.at}" for report in called]
    return _error(head, "\n".join([*lines, "", _WHY[what]]), states, called, rank=odd,
                  kind="mismatched")


def of_unpicklable(state, states) -> RankError:
    head = f"rank {state.rank} of {len(states)}: {state.answer.text}"
    body = ("Return plain values, tensors, or objects made of them."
            if "returned" in state.answer.text else "")
    return _error(head, body, states, [_report(state)], rank=state.rank, kind="unpicklable")


def of_failure(states, folder) -> RankError:
    """One rank raised, exited or died: the first is the headline, the rest is listed."""
    failed = sorted((state for state in states if state.failed),
                    key=lambda state: state.failed_at)
    own = [state for state in failed
           if not (state.answer and _PEER_LOST.search(state.answer.text))]
    first = (own or failed)[0]
    advice = next(filter(None, (advice_on(state.answer.text) for state in failed
                                if state.answer)), "") or _advice_on_name(first)
    if first.stage is RankStage.UNPICKLABLE:
        return of_unpicklable(first, states)
    if first.stage is RankStage.RAISED:
        head = f"rank {first.rank} of {len(states)} raised {first.answer.text}"
        return _error(head, _excerpt(first.answer.frames), states, [_report(first)],
                      rank=first.rank, error=first.answer.kind, after=advice)
    if first.answer:
        head = f"rank {first.rank} of {len(states)} {first.answer.text} before it returned"
        frames = first.answer.frames
    else:
        head = f"rank {first.rank} of {len(states)} {_how_it_ended(first)}"
        frames = _crash_frames(crash_file(folder, first.rank))
    body, report = _excerpt(frames), _report(first)
    if body:
        place, source = _at(frames)
        report = dataclasses.replace(report, place=place, source=source)
    elif first.last_call:
        report = _of_call(first.rank, "died", report.doing, first.last_call, first.exit_code)
        body = f"  Its last call was {first.last_call}\n         {report.at}"
    return _error(head, body, states, [report], rank=first.rank, kind="died", after=advice)


def _advice_on_name(state):
    """In a notebook, where a rank lacks a name that the notebook lacks too: where it may be."""
    found = re.match(r"NameError: name '(\w+)' is not defined", state.answer.text) if (
        state.answer and ipython()) else None
    if not found or found[1] in ipython().user_ns:
        return ""
    return ("Each run starts fresh processes, so nothing is left of an earlier %%ranks cell. If "
            f"`{found[1]}` was made in one, make it in this cell too, or in the notebook: in a "
            "cell without %%ranks.")


def of_stuck(states, seconds) -> RankError:
    """Ranks that give no answer. ``seconds``: how long they had."""
    busy = [state for state in states if not state.finished]
    waiting = [state for state in busy if state.where and state.where.waiting]
    returned = [state for state in states if state.finished]
    lost = [state for state in busy if state not in waiting]
    computing = all(state.where and not is_waiting(state) for state in lost)
    rank, advice = None, "Every rank must call the same collectives in the same order."
    if waiting and returned:
        rank = returned[0].rank if len(returned) == 1 else None
        head = (f"{_names(returned)} returned, and {_names(waiting)} still "
                f"{_verb(waiting, 'waits', 'wait')} in {_awaited(waiting[0])}")
    elif waiting and lost:
        rank = lost[0].rank if len(lost) == 1 else None
        head = (f"{_names(lost)} did not come to {_awaited(waiting[0])} "
                f"within {seconds:g} s, and {_names(waiting)} {_verb(waiting, 'waits', 'wait')}")
        if computing:
            advice = (f"{_names(lost).capitalize()} {_verb(lost, 'is', 'are')} busy in code of "
                      f"{_verb(lost, 'its', 'their')} own: a loop that does not end, or work that "
                      "takes longer (then give the run more time, with timeout=SECONDS).")
    else:
        rank = busy[0].rank if len(busy) == 1 else None
        head = f"{_names(busy)} gave no answer within {seconds:g} s"
        if computing:
            advice = "Do they run a loop that does not end?"
        elif all(state.last_call and state.last_call.is_point_to_point for state in busy):
            advice = PAIRS
        advice += " A run that needs longer: timeout=SECONDS."
    return _error(head, "", states, [], rank=rank, kind="stuck", after=advice)


def of_slow_start(states, seconds) -> RankError:
    """Ranks that have not all joined the process group; those who do not answer hold it up."""
    late = [state for state in states if state.stage is RankStage.STARTING]
    late = [state for state in late if state.where is None] or late
    return _error(f"{_names(late)} did not start within {seconds:g} s", "", states, [],
                  rank=late[0].rank if len(late) == 1 else None, kind="stuck")


def of_deadlock(states, waits) -> RankError:
    """Ranks that wait in sends and receives for ever; ``waits`` has for each those it waits for."""
    stuck = [states[rank] for rank in sorted(waits)]
    gone = [state for state in states if state.finished
            and any(state.rank in peers for peers in waits.values())]
    operations = [{call.operation for call in state.unmet} for state in stuck]
    head, advice = f"{_names(stuck)} {_verb(stuck, 'waits', 'wait')} for ever", PAIRS
    if gone:
        head += f", and {_names(gone)} {_verb(gone, 'has', 'have')} returned"
    elif all(each == {"send"} for each in operations):
        head, advice = f"{head}: each sends, and nobody comes to receive", _ALL_SEND
    elif all(each == {"recv"} for each in operations):
        head += ": each wants to receive, and nobody comes to send"
    else:
        head += " for each other"
    rank = gone[0].rank if len(gone) == 1 else None
    return _error(head, "", states, [], rank=rank, kind="stuck", after=advice)


def of_interrupt(states) -> str:
    return "\n  ".join(["stopped by you; where the ranks were:", *whereabouts(states)])


def whereabouts(states) -> list[str]:
    """Where the ranks of a running run are."""
    return [str(_report(state)) for state in states]


def _error(head, body, states, blamed, *, rank, kind="raised", error="", after=""):
    """``blamed``: the reports on ranks that head and body are about; of the others it has a line
    each."""
    ranks = [_report(state) for state in states]
    for report in blamed:
        ranks[report.rank] = report
    lines = [f"  {report}" for report in ranks if report not in blamed]
    parts = [head]
    if body:
        parts += ["", body]
    if lines:
        title = "The ranks:" if kind == "stuck" else "The other ranks:"
        parts += ["", title, *lines]
    if after:
        parts += ["", after]
    return RankError("\n".join(parts), rank=rank, kind=kind, error=error, ranks=ranks,
                     reports=lines)


def _report(state) -> RankReport:
    """What one rank was doing, in a line or two."""
    rank, call = state.rank, state.last_call
    if state.finished:
        return RankReport(rank, "returned", "had returned")
    if state.died:
        return RankReport(rank, "died", _how_it_ended(state), exit_code=state.exit_code)
    if state.failed:
        text = state.answer.text
        kind, verb = {RankStage.RAISED: ("raised", "raised "), RankStage.EXITED: ("died", ""),
                      RankStage.UNPICKLABLE: ("unpicklable", "gave no value: ")}[state.stage]
        if _PEER_LOST.search(text):
            kind, verb, text = "disconnected", "", "lost its connection"
        return RankReport(rank, kind, verb + (text.splitlines() or [""])[0][:160],
                          *_at(state.answer.frames))
    if state.stage is RankStage.RETURNING:
        return RankReport(rank, "returned", "had returned, and its value was on its way")
    if state.is_starting:
        return RankReport(rank, "starting", "was still starting")
    if state.where is None:
        doing = "does not answer: it is stopped, or inside C code"
        return _of_call(rank, "silent", f"{doing}; its last call was {call}", call) if call else (
            RankReport(rank, "silent", doing))
    at = _at(state.where.frames)
    if state.where.waiting:
        awaited = _awaited(state)
        return RankReport(rank, "waiting", f"waits in {awaited}", *at, operation=awaited.operation,
                          number=awaited.number, tensor=awaited.tensor)
    if is_waiting(state) and call:
        waits = state.unmet[:2] or [call]
        report = _of_call(rank, "waiting", f"waits in {' and '.join(map(str, waits))}", waits[0])
        return dataclasses.replace(report, place=at[0], source=at[1])
    return RankReport(rank, "computing", "was running", *at)


def _of_call(rank, state, doing, call, exit_code=None):
    """The report on a rank of which a call in its log tells most."""
    place, source = place_and_source(call.file, call.line)
    number, peer = (None, call.peer) if call.is_point_to_point else (call.number, None)
    return RankReport(rank, state, doing, place, source, operation=call.operation, number=number,
                      tensor=call.tensor, peer=peer, exit_code=exit_code)


def _awaited(state):
    """The collective in which a rank waits. gloo makes a reduce-scatter from all-reduces, which are
    what the rank's answer names."""
    waits, call = state.where.waiting[0], state.last_call
    if call and call.operation == "reduce_scatter" and waits.operation == "all_reduce":
        return InFlight(call.operation, call.number, call.tensor, waits.is_collective_of_all)
    return waits


def _how_it_ended(state):
    if state.exit_code is None:
        return "ended"
    if state.exit_code >= 0:
        return f"left with exit code {state.exit_code} before it returned"
    number = -state.exit_code
    return _SIGNALS.get(number, f"was ended by signal {number} ({signal.strsignal(number)})")


def _crash_frames(path) -> list[Frame]:
    """The stack that Python wrote when a signal struck, outermost first."""
    try:
        with open(path) as file:
            text = file.read()
    except OSError:
        return []
    found = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
    return [Frame(name, int(line), function, int(line)) for name, line, function in reversed(found)]


def _excerpt(frames) -> str:
    """The learner's frames with their lines; the innermost with the lines before it."""
    kept = _learners(frames)
    if len(kept) > 6:
        kept = kept[:2] + kept[-4:]
    blocks = []
    for frame in kept:
        first = max(frame.first, frame.line - 2) if frame is kept[-1] else frame.line
        shown = [f"  {'→' if number == frame.line else ' '} {number:3d} "
                 + linecache.getline(frame.file, number).rstrip("\n")
                 for number in range(first, frame.line + 1)]
        blocks.append("\n".join([f"  {place(frame.file)}, in {frame.function}", *shown]))
    return "\n".join(blocks)


def _at(frames) -> tuple[str, str]:
    kept = _learners(frames)
    return place_and_source(kept[-1].file, kept[-1].line) if kept else ("", "")


def _odd_one_out(calls):
    """The one rank whose call differs from all the others', which agree; else None."""
    for rank, call in calls.items():
        rest = [other for key, other in calls.items() if key != rank]
        if (len(rest) > 1 and all(call.disagrees_with(other) for other in rest)
                and not any(rest[0].disagrees_with(other) for other in rest)):
            return rank
    return None


def _names(states):
    ranks = [str(state.rank) for state in states]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(ranks[:-1]) + " and " + ranks[-1]


def _verb(states, one, many):
    return one if len(states) == 1 else many


def _learners(frames):
    """The learner's frames; where there are none, those of the package around this launcher."""
    mine = [frame for frame in frames if is_learners(frame.file)]
    return mine or [frame for frame in frames
                    if frame.file.startswith(os.path.join(PACKAGE, ""))
                    and not frame.file.startswith(_LAUNCHER)]
