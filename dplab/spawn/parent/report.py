"""What became of the ranks, in words: the text of a RankError."""

import linecache
import os
import re
import signal

from ..between.calls import PACKAGE, is_learners
from ..between.errors import RankError, advice_on
from ..between.messages import Frame, crash_file
from .matching import is_waiting
from .output import ipython
from .stages import RankStage

_LAUNCHER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_SIGNALS = {
    signal.SIGKILL: "was killed (SIGKILL): by a kill -9, or by the system when memory runs out",
    signal.SIGABRT: "aborted (SIGABRT): C++ code gave up; its last words stand in the output",
    signal.SIGSEGV: "crashed (SIGSEGV): C code touched memory that is not its own",
    signal.SIGBUS: "crashed (SIGBUS): C code touched memory that does not exist (/dev/shm full?)",
    signal.SIGFPE: "crashed (SIGFPE): an integer division by zero in C code",
    signal.SIGTERM: "was told to end (SIGTERM)",
    signal.SIGINT: "was interrupted (SIGINT)",
}
_PEER_LOST = re.compile(r"Connection (closed|reset)|Broken pipe|remote process exited", re.I)
_WHY = {
    "operation": "Each waits in a collective that the other never calls.",
    "dtype": "gloo does not check: with other sizes it aborts, with equal ones it adds raw bytes.",
    "shape": "A collective needs as many elements from every rank; gloo aborts or hangs here.",
    "reduce operation": "gloo does not check: every rank would get a different, wrong result.",
    "root": "Each waits for data from a rank that thinks another one sends it.",
}

_ALL_SEND = ("A send ends when the other rank receives. Hand over a send and a receive at once, "
             "with dist.batch_isend_irecv, and wait for both.")
_PAIRS = "Every send needs a receive on the other rank, and every receive a send."


def of_mismatch(mismatch, states) -> RankError:
    what, place = mismatch
    calls = dict(sorted(place.items()))
    number = next(iter(calls.values())).number
    odd = _odd_one_out(calls)
    head = (f"collective number {number} is not the same on every rank: "
            f"the {what}s do not agree")
    lines = [f"  rank {rank} called {call}\n         {_spot(call.file, call.line)}"
             for rank, call in calls.items()]
    others = [state for state in states if state.rank not in calls]
    return _error(head, "\n".join([*lines, "", _WHY[what]]), others, rank=odd, kind="mismatched")


def of_unpicklable(state, states) -> RankError:
    head = f"rank {state.rank} of {len(states)}: {state.answer.text}"
    body = ("Return plain values, tensors, or objects made of them."
            if "returned" in state.answer.text else "")
    return _error(head, body, _others(states, state), rank=state.rank, kind="unpicklable")


def of_failure(states, folder) -> RankError:
    """One rank raised, exited or died: the first is the headline, the rest is listed."""
    failed = sorted((state for state in states if state.failed),
                    key=lambda state: state.failed_at)
    own = [state for state in failed
           if not (state.answer and _PEER_LOST.search(state.answer.text))]
    first = (own or failed)[0]
    advice = next(filter(None, (advice_on(state.answer.text) for state in failed
                                if state.answer)), "")
    if first.stage is RankStage.UNPICKLABLE:
        return of_unpicklable(first, states)
    if first.stage is RankStage.RAISED:
        head = f"rank {first.rank} of {len(states)} raised {first.answer.text}"
        return _error(head, _excerpt(first.answer.frames), _others(states, first),
                      rank=first.rank, error=first.answer.kind, after=advice)
    if first.answer:
        head = f"rank {first.rank} of {len(states)} {first.answer.text} before it returned"
        frames = first.answer.frames
    else:
        head = f"rank {first.rank} of {len(states)} {_how_it_ended(first)}"
        frames = _crash_frames(crash_file(folder, first.rank))
    body = _excerpt(frames)
    if not body and first.last_call:
        call = first.last_call
        body = f"  Its last call was {call}\n         {_spot(call.file, call.line)}"
    return _error(head, body, _others(states, first), rank=first.rank, kind="died", after=advice)


def of_stuck(states, seconds) -> RankError:
    """Ranks that give no answer. ``seconds``: how long they had."""
    busy = [state for state in states if not state.finished]
    waiting = [state for state in busy if state.where and state.where.waiting]
    returned = [state for state in states if state.finished]
    lost = [state for state in busy if state not in waiting]
    rank, advice = None, "Every rank must call the same collectives in the same order."
    if waiting and returned:
        rank = returned[0].rank if len(returned) == 1 else None
        head = (f"{_names(returned)} returned, and {_names(waiting)} still "
                f"{_verb(waiting, 'waits', 'wait')} in {waiting[0].where.waiting[0][1]}")
    elif waiting and lost:
        rank = lost[0].rank if len(lost) == 1 else None
        head = (f"{_names(lost)} did not come to {waiting[0].where.waiting[0][1]} "
                f"within {seconds:g} s, and {_names(waiting)} {_verb(waiting, 'waits', 'wait')}")
    else:
        rank = busy[0].rank if len(busy) == 1 else None
        head = f"{_names(busy)} gave no answer within {seconds:g} s"
        advice += " A run that needs longer: timeout=SECONDS."
    return _error(head, "", states, rank=rank, kind="stuck", after=advice)


def of_slow_start(states, seconds) -> RankError:
    """Ranks that have not all joined the process group; those who do not answer hold it up."""
    late = [state for state in states if state.stage is RankStage.STARTING]
    late = [state for state in late if state.where is None] or late
    return _error(f"{_names(late)} did not start within {seconds:g} s", "", states,
                  rank=late[0].rank if len(late) == 1 else None, kind="stuck")


def of_lost_store(states, folder) -> RankError:
    """The file by which ranks find one another is gone before they have."""
    return _error(f"{folder}, where the ranks meet, was removed while they started", "", states,
                  rank=None, kind="stuck", after="Does something here clean up temporary folders?")


def of_deadlock(states, waits) -> RankError:
    """Ranks that wait in sends and receives for ever; ``waits`` has for each those it waits for."""
    stuck = [states[rank] for rank in sorted(waits)]
    gone = [state for state in states if state.finished
            and any(state.rank in peers for peers in waits.values())]
    operations = [{call.operation for call in state.unmet} for state in stuck]
    head, advice = f"{_names(stuck)} {_verb(stuck, 'waits', 'wait')} for ever", _PAIRS
    if gone:
        head += f", and {_names(gone)} {_verb(gone, 'has', 'have')} returned"
    elif all(each == {"send"} for each in operations):
        head, advice = f"{head}: each sends, and nobody comes to receive", _ALL_SEND
    elif all(each == {"recv"} for each in operations):
        head += ": each wants to receive, and nobody comes to send"
    else:
        head += " for each other"
    rank = gone[0].rank if len(gone) == 1 else None
    return _error(head, "", states, rank=rank, kind="stuck", after=advice)


def of_interrupt(states) -> str:
    return "\n".join(["stopped by you; where the ranks were:", *map(_line, states)])


def _error(head, body, others, *, rank, kind="raised", error="", after=""):
    lines = [_line(state) for state in others]
    parts = [head]
    if body:
        parts += ["", body]
    if lines:
        title = "The ranks:" if kind == "stuck" else "The other ranks:"
        parts += ["", title, *lines]
    if after:
        parts += ["", after]
    return RankError("\n".join(parts), rank=rank, kind=kind, error=error, reports=lines)


def _others(states, first):
    return [state for state in states if state is not first]


def _line(state) -> str:
    """One rank's whereabouts in a line or two."""
    label = f"  rank {state.rank} "
    if state.finished:
        return label + "had returned"
    if state.died:
        return label + _how_it_ended(state)
    if state.failed:
        text, frames = state.answer.text, state.answer.frames
        if _PEER_LOST.search(text):
            return label + "lost its connection" + _at(frames)
        verb = {RankStage.RAISED: "raised ", RankStage.UNPICKLABLE: "gave no value: "}
        return (label + verb.get(state.stage, "") + (text.splitlines() or [""])[0][:160]
                + _at(frames))
    if state.stage is RankStage.RETURNING:
        return label + "had returned, and its value was on its way"
    if state.is_starting:
        return label + "was still starting"
    if state.where is None:
        call = state.last_call
        return label + "does not answer: it is stopped, or inside C code" + (
            f"; its last call was {call}: {_spot(call.file, call.line)}" if call else "")
    if state.where.waiting:
        return label + f"waits in {state.where.waiting[0][1]}" + _at(state.where.frames)
    if is_waiting(state) and state.last_call:
        calls = " and ".join(map(str, state.unmet[:2])) or state.last_call
        return label + f"waits in {calls}" + _at(state.where.frames)
    return label + "was running" + _at(state.where.frames)


def _how_it_ended(state):
    if state.exit_code is None:
        return "ended"
    if state.exit_code >= 0:
        return f"left with exit code {state.exit_code} before it returned"
    number = -state.exit_code
    if number == signal.SIGKILL and state.out_of_memory:
        return "was killed by the system (SIGKILL) because memory ran out"
    if number in _SIGNALS:
        return _SIGNALS[number]
    return f"was ended by signal {number} ({signal.strsignal(number)})"


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
        blocks.append("\n".join([f"  {_place(frame.file)}, in {frame.function}", *shown]))
    return "\n".join(blocks)


def _at(frames):
    kept = _learners(frames)
    return f": {_spot(kept[-1].file, kept[-1].line)}" if kept else ""


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


def _spot(file: str, line: int) -> str:
    """A line as the reader knows it, with its text where that is to be had."""
    text = linecache.getline(_whole_name(file), line).strip()
    return f"{_place(file)}, line {line}" + (f": {text}" if text else "")


def _whole_name(file):
    """The file's full name, where a call log kept only its end."""
    if file in linecache.cache or os.path.exists(file):
        return file
    return next((name for name in linecache.cache if name.endswith(file)), file)


def _place(file: str) -> str:
    """A source file as the reader knows it: the cell's number, or the file's name."""
    cells = getattr(getattr(ipython(), "compile", None), "_filename_map", {})
    for name, number in cells.items():
        if name == file or (len(file) >= 40 and name.endswith(file)):
            return f"cell In[{number}]"
    return os.path.basename(file)


def sources_of_cells() -> dict[str, str]:
    """The sources of the notebook's cells, which exist in no file."""
    return {name: "".join(entry[2]) for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)}
