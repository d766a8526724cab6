"""The ring all-reduce, one step at a time: what each rank's chunks hold, and which one moves."""

import math
import re
from collections.abc import Sequence

from dplab.show.diagram import POINTS_PER_PIXEL, Canvas
from dplab.show.labels import text_width
from dplab.show.palette import FAINT, INK, MUTED, rank_color
from dplab.show.theme import CourseFigure, style

CARD_WIDTH, LEFT, TOP, CELL, GAP = 720, 92, 146, 30, 24
ARRIVED = "#DDE3E9"


@style()
def ring_step(states: Sequence[Sequence[Sequence[float]]], step: int) -> CourseFigure:
    """Draws the ring all-reduce of 1 to 8 ranks after ``step`` of its 2(N−1) steps.

    ``states[step][rank][chunk]`` is the number that this rank's chunk holds after so many steps,
    0 being before the first; the last steps may be missing. Arrows show what was sent last. A
    chunk is drawn as complete if it equals the sum over the ranks at step 0, up to rounding.
    """
    own, now = states[0], states[step]
    size = len(own)
    last = 2 * (size - 1)
    done = [[_is_sum(number, [chunks[chunk] for chunks in own])
             for chunk, number in enumerate(chunks)] for chunks in now]
    sent = [sent_chunk(rank, step, size) for rank in range(size)] if step else []
    when = f"After step {step} of {last}" if step else "Before the first step"
    title = f"{when}, {sum(map(sum, done))} of {size**2} chunks are complete"
    phase = ("each rank has its own numbers" if step == 0 else
             f"reduce-scatter, step {step} of {size - 1}" if step < size else
             f"all-gather, step {step - size + 1} of {size - 1}")
    moved = f"each rank has sent {step} of {last} chunks"

    canvas = Canvas(CARD_WIDTH, TOP + size * (CELL + GAP) + 36, title, "")
    canvas.figure.alt = f"{title}. Ring of {size}: {phase}; {moved}. " + " ".join(
        _in_words(rank, now[rank], done[rank], sent) for rank in range(size))
    canvas.text(24, 72, phase, weight="bold")
    canvas.text(CARD_WIDTH - 24, 72, moved, color=MUTED, ha="right")
    canvas.text(24, canvas.height - 26, "coloured: the rank's own    no colour: a partial sum    "
                "filled: the sum of all ranks", size=13, color=MUTED)
    pitch = (CARD_WIDTH - LEFT - 24) / size
    for chunk in range(size):
        canvas.text(LEFT + (chunk + 0.5) * pitch, TOP - GAP - 12, f"chunk {chunk}", size=13,
                    color=MUTED, ha="center")
    for rank in range(size):
        y = TOP + rank * (CELL + GAP)
        canvas.text(24, y + CELL / 2, f"rank {rank}", weight="bold", color=rank_color(rank))
        for chunk, number in enumerate(now[rank]):
            x = LEFT + chunk * pitch + 5
            if sent and chunk == sent[rank - 1]:
                canvas.box(x - 4, y - 4, pitch - 2, CELL + 8, ARRIVED, radius=6)
            canvas.box(x, y, pitch - 10, CELL, INK if done[rank][chunk] else "white", edge=FAINT)
            canvas.text(x + pitch / 2 - 5, y + CELL / 2, _compact(number, pitch - 18),
                        weight="bold", ha="center", color="white" if done[rank][chunk]
                        else rank_color(rank) if number == own[rank][chunk] else INK)
    for rank, chunk in enumerate(sent):
        draw_hop(canvas, LEFT + (chunk + 0.5) * pitch, TOP, CELL, GAP, rank, size)
    return canvas.figure


def ring_states(own: Sequence[Sequence[float]],
                sent: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """What `ring_step` draws, from what a ring to the right has sent.

    ``own[rank][chunk]``: what each rank starts with. ``sent[rank]``: the numbers that it sends, one
    in each step.
    """
    states = [[list(chunks) for chunks in own]]
    for step in range(1, 2 * len(own) - 1):
        now = [list(chunks) for chunks in states[-1]]
        for rank, numbers in enumerate(sent):
            to, chunk = (rank + 1) % len(own), sent_chunk(rank, step, len(own))
            part = own[to][chunk] if step < len(own) else 0  # the second half adds nothing
            now[to][chunk] = numbers[step - 1] + part
        states.append(now)
    return states


def sent_chunk(rank: int, step: int, size: int) -> int:
    """The chunk that a rank sends to its right neighbour in a step; the first step is 1."""
    # Chunk c starts at rank c+1, is complete at rank c after N−1 steps, and goes round again.
    return (rank - step) % size


def draw_hop(canvas: Canvas, x: float, top: float, cell: float, gap: float, rank: int,
             size: int) -> None:
    """The arrow from a chunk of ``rank`` to the row below, or from the last row to the first."""
    start, color = top + rank * (cell + gap) + cell, rank_color(rank)
    if rank == size - 1:
        canvas.line(x, start, x, start + 0.55 * gap, color, 2.4)
        start = top - gap
    canvas.arrow(x, start, x, start + gap - 1, color, 2.4)


def _is_sum(number: float, parts: list[float]) -> bool:
    return math.isclose(number, math.fsum(parts), rel_tol=1e-6,
                        abs_tol=1e-6 * math.fsum(map(abs, parts)))


def _compact(number: float, width: float) -> str:
    """With as many digits, up to six, as fit in ``width`` pixels."""
    texts = [re.sub(r"e\+?(-?)0?", r"e\1", text) for digits in range(6, 0, -1)
             for text in (f"{number:.{digits}g}", f"{number:.{digits - 1}e}")]
    room, size = width * POINTS_PER_PIXEL, 14 * POINTS_PER_PIXEL
    return next((text for text in texts if text_width(text, size, "bold") <= room), texts[-1])


def _in_words(rank: int, numbers: Sequence[float], done: list[bool], sent: list[int]) -> str:
    held = ", ".join(f"{number:.6g}{' (complete)' * full}"
                     for number, full in zip(numbers, done, strict=True))
    hop = f", after sending chunk {sent[rank]} to rank {(rank + 1) % len(sent)}" if sent else ""
    return f"Rank {rank} holds {held}{hop}."
