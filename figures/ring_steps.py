"""Draws ring_steps.svg: the way of one chunk through a ring all-reduce on four ranks."""

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
FOLLOWED = 2
"""The chunk whose way is drawn."""

WAY = [next(rank for rank in range(RANKS) if sent_chunk(rank, step, RANKS) == FOLLOWED)
       for step in range(1, len(STATES))]
"""Who sends it in each step."""

TITLE = "Chunk 2 grows on its way to rank 2, and is then copied to all others"
ALT = (
    "A ring all-reduce on four ranks, each with four chunks, in seven small pictures that follow "
    "chunk 2. At the start each rank has its own. Reduce-scatter: in step 1, rank 3 sends it to "
    "rank 0, which adds its own part; in step 2, rank 0 sends the sum to rank 1; in step 3, rank 1 "
    "sends the sum to rank 2, where it is complete. All-gather: in step 4, rank 2 sends the "
    "complete chunk to rank 3, in step 5 rank 3 to rank 0, in step 6 rank 0 to rank 1. Now all "
    "four have it. The other three chunks travel in the same steps and are not drawn."
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
    canvas.text(x, y, f"step {step}" if step else "start", weight="bold")
    canvas.text(x + 54, y, f"rank {WAY[step - 1]} to rank {(WAY[step - 1] + 1) % RANKS}"
                if step else "each rank has its own", size=13, color=MUTED)
    left, top = x + 16, y + 60
    for chunk in range(RANKS):
        canvas.text(left + chunk * PITCH + CELL / 2, top - 31, str(chunk), size=13, color=MUTED,
                    ha="center", weight="bold" if chunk == FOLLOWED else "normal")
    for rank in range(RANKS):
        row = top + rank * (CELL + GAP)
        canvas.text(x, row + CELL / 2, str(rank), weight="bold", color=rank_color(rank))
        for chunk in range(RANKS):
            draw_cell(canvas, left + chunk * PITCH, row,
                      STATES[step][rank][chunk] if chunk == FOLLOWED else frozenset())
    if step:
        draw_hop(canvas, left + FOLLOWED * PITCH + CELL / 2, top, CELL, GAP, WAY[step - 1], RANKS)


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
