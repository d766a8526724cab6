"""Draws ring_steps.svg: all steps of a ring all-reduce on four ranks, chunk by chunk."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, INK, MUTED
from dplab.show.ring import draw_hop, sent_chunk

RANKS = 4


def states_of_ring(size: int) -> list[list[list[frozenset]]]:
    """``[step][rank][chunk]``: whose parts this rank's chunk is the sum of after so many steps."""
    states = [[[frozenset({rank}) for _ in range(size)] for rank in range(size)]]
    for step in range(1, 2 * size - 1):
        after = [list(chunks) for chunks in states[-1]]
        for rank in range(size):
            chunk = sent_chunk(rank, step, size)
            sent, there = states[-1][rank][chunk], states[-1][(rank + 1) % size][chunk]
            after[(rank + 1) % size][chunk] = sent | there if step < size else sent
        states.append(after)
    return states


STATES = states_of_ring(RANKS)
HEADS = (("start", "each rank has its own"),
         *((f"step {step}", "send on and add") for step in (1, 2, 3)),
         *((f"step {step}", "send on") for step in (4, 5, 6)))

TITLE = "Three steps add up every chunk somewhere, three more bring it everywhere"
ALT = (
    "A ring all-reduce on four ranks, each with four chunks, in seven small pictures. At the start "
    "each rank has its own four chunks. Reduce-scatter, steps 1 to 3: each rank sends one chunk to "
    "the next rank, which adds it to its own, and rank 3 sends to rank 0. Chunk c starts at "
    "rank c+1, grows by one rank's part in each step and is complete at rank c. All-gather, steps "
    "4 to 6: each rank passes on the complete chunk that it got last, until all ranks have all "
    "four."
)

CELL, PITCH, GAP, PART = 36, 43, 20, 12
PANEL, ROW = 224, 328


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 736, TITLE, ALT)
    for place, phase in ((1, "reduce-scatter"), (5, "all-gather")):
        x, y = corner(place)
        canvas.text(x, y - 30, phase, size=16, weight="bold")
        canvas.line(x + 146, y - 30, 876, y - 30, FAINT, 1.6)
    for step in range(len(STATES)):
        draw_panel(canvas, *corner(step if step < RANKS else step + 1), step)
    draw_key(canvas, *corner(RANKS))
    return canvas


def corner(place: int) -> tuple[float, float]:
    """Where the panel in this place, of two rows with four each, has its top left corner."""
    return 24 + place % 4 * PANEL, 112 + place // 4 * ROW


def draw_panel(canvas: Canvas, x: float, y: float, step: int) -> None:
    canvas.text(x, y, HEADS[step][0], weight="bold")
    canvas.text(x + 54, y, HEADS[step][1], size=13, color=MUTED)
    left, top = x + 16, y + 60
    for chunk in range(RANKS):
        canvas.text(left + chunk * PITCH + CELL / 2, top - 31, str(chunk), size=13, color=MUTED,
                    ha="center")
    for rank in range(RANKS):
        row = top + rank * (CELL + GAP)
        canvas.text(x, row + CELL / 2, str(rank), weight="bold", color=rank_color(rank))
        for chunk in range(RANKS):
            draw_cell(canvas, left + chunk * PITCH, row, STATES[step][rank][chunk])
    for rank in range(RANKS if step else 0):
        chunk = sent_chunk(rank, step, RANKS)
        draw_hop(canvas, left + chunk * PITCH + CELL / 2, top, CELL, GAP, rank, RANKS)


def draw_cell(canvas: Canvas, x: float, y: float, parts: frozenset) -> None:
    if len(parts) == RANKS:
        canvas.box(x, y, CELL, CELL, INK)
        canvas.box(x + 3, y + 3, CELL - 6, CELL - 6, "white", radius=1)
    else:
        canvas.box(x + 0.5, y + 0.5, CELL - 1, CELL - 1, "white", edge=FAINT)
    for rank in parts:
        canvas.box(x + CELL / 2 + (rank % 2 - 1) * (PART + 1) + 0.5,
                   y + CELL / 2 + (rank // 2 - 1) * (PART + 1) + 0.5, PART, PART,
                   rank_color(rank), radius=1)


def draw_key(canvas: Canvas, x: float, y: float) -> None:
    canvas.text(x, y, "Rows: ranks. Columns: chunks.", size=13, color=MUTED)
    draw_cell(canvas, x, y + 50, frozenset({0, 1}))
    canvas.text(x + 50, y + 68, "the sum of rank 0's\nand rank 1's chunk", size=13)
    draw_cell(canvas, x, y + 110, frozenset(range(RANKS)))
    canvas.text(x + 50, y + 128, "complete: the sum\nof all four ranks'", size=13)
    canvas.arrow(x + CELL / 2, y + 174, x + CELL / 2, y + 196, rank_color(1), 2.4)
    canvas.text(x + 50, y + 185, "rank 1 has sent it\nto rank 2", size=13)
    canvas.line(x + CELL / 2, y + 236, x + CELL / 2, y + 248, rank_color(3), 2.4)
    canvas.text(x + 50, y + 242, "rank 3 has sent it\nto rank 0, at the top", size=13)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
