"""The course of a step as a list of events: played through, and lengthened by more blocks."""

from dataclasses import dataclass, field, replace

from dplab.dryrun.findings import Collective
from dplab.measure.memory_timeline import Phase, Sample


@dataclass(frozen=True)
class Resized:
    """A category holds more, or less."""

    category: str
    nbytes: int


@dataclass(frozen=True)
class Begin:
    """A part of the step begins: forward, backward or optimizer, of one block or of all."""

    phase: str
    block: int | None = None


@dataclass(frozen=True)
class Events:
    """``events``: (number of operations so far, `Resized`, `Begin` or `Collective`); ``held``:
    bytes by category before them, ``held_by_block`` the part of each block.
    """

    held: dict[str, int]
    held_by_block: dict[int, dict[str, int]]
    events: list[tuple[int, Resized | Begin | Collective]] = field(repr=False)


def blocks_to_trace(blocks: int, period: int) -> int:
    """How many of ``blocks`` alike suffice, where ``period`` of them are wrapped together.

    Two periods in the middle, which are compared; two before them and one behind, since what is
    gathered ahead reaches one further; and what does not divide.
    """
    return min(blocks, 5 * period + blocks % period)


def lengthened(trace: Events, traced: int, blocks: int, period: int) -> Events | None:
    """The trace of a model of ``blocks`` blocks, from that of one of ``traced``, as many as
    `blocks_to_trace` says.

    What the first of the two middle periods does in each phase comes again as often as it takes.
    None where the two differ, so that one cannot stand for the others.
    """
    times = (blocks - traced) // period
    middle = range(2 * period, 3 * period), range(3 * period, 4 * period)
    if any(trace.held_by_block.get(one) != trace.held_by_block.get(other)
           for one, other in zip(*middle, strict=True)):
        return None
    held = dict(trace.held)
    for block in middle[0]:
        for category, nbytes in trace.held_by_block.get(block, {}).items():
            held[category] += times * nbytes

    events, done, shift = [], 0, 0
    for phase, order in (("forward", 1), ("backward", -1), ("optimizer", 1)):
        begins = [(event.block, place) for place, (_, event) in enumerate(trace.events)
                  if isinstance(event, Begin) and event.phase == phase and event.block is not None]
        if [block for block, _ in begins] != list(range(traced))[::order]:
            return None
        starts = dict(begins)
        places = sorted(starts[block] for blocks in middle for block in blocks)
        begin, again = places[0], places[period]
        end = min(place for place in starts.values() if place > places[-1])
        if _plain(trace.events[begin:again]) != _plain(trace.events[again:end]):
            return None
        ops = trace.events[again][0] - trace.events[begin][0]
        events += _later(trace.events[done:begin], shift)
        for _ in range(times):
            events += _later(trace.events[begin:again], shift)
            shift += ops
        done = begin
    return Events(held, {}, events + _later(trace.events[done:], shift))


def _later(events, ops):
    return [(op + ops, event) for op, event in events]


def _plain(events):
    """The events with operations counted from the first of them, and blocks without numbers."""
    return [(op - events[0][0], replace(event, block=None) if isinstance(event, Begin) else event)
            for op, event in events]


def replay(trace: Events) -> tuple[list[Sample], list[Phase], tuple[Collective, ...]]:
    """What the step holds, its phases, and its collectives.

    There is a sample after each change; the last one is what remains after the step.
    """
    held = dict(trace.held)
    samples = [Sample(0, 0.0, dict(held))]
    begins: list[tuple[str, int]] = []
    collectives: list[Collective] = []
    for op, event in trace.events:
        if isinstance(event, Resized):
            held[event.category] += event.nbytes
            samples.append(Sample(op, 0.0, dict(held)))
        elif isinstance(event, Collective):
            collectives.append(replace(event, phase=begins[-1][0]))
        elif not begins or begins[-1][0] != event.phase:
            begins.append((event.phase, op))
    end = trace.events[-1][0]
    samples.append(Sample(end, 0.0, dict(held)))
    ends = [*(op for _, op in begins[1:]), end]
    phases = [Phase(name, start, stop) for (name, start), stop in zip(begins, ends, strict=True)]
    return samples, phases, tuple(collectives)
