"""Draws collectives.svg: what four ranks hold before and after each of eight collectives."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, INK, MUTED

RANKS = range(4)
SUM = "sum"
"""A cell is None, or (origin, chunk): the rank that the numbers come from, or SUM of all four."""

FULL = [[(rank, chunk) for chunk in RANKS] for rank in RANKS]
ROOT = [FULL[0], *[[None] * 4] * 3]
OWN = [[(rank, rank) if chunk == rank else None for chunk in RANKS] for rank in RANKS]
ALL = [(rank, rank) for rank in RANKS]
ADDED = [(SUM, chunk) for chunk in RANKS]

COLLECTIVES = (
    ("broadcast", "one rank's tensor, for everyone", ROOT, [FULL[0]] * 4),
    ("reduce", "the sum of all, on one rank", FULL, [ADDED, *[[None] * 4] * 3]),
    ("scatter", "one rank deals out its chunks", ROOT,
     [[(0, rank) if chunk == rank else None for chunk in RANKS] for rank in RANKS]),
    ("gather", "one rank collects the chunks", OWN, [ALL, *[[None] * 4] * 3]),
    ("all-gather", "everyone collects the chunks", OWN, [ALL] * 4),
    ("reduce-scatter", "everyone gets one chunk of the sum", FULL,
     [[(SUM, rank) if chunk == rank else None for chunk in RANKS] for rank in RANKS]),
    ("all-reduce", "the sum of all, for everyone", FULL, [ADDED] * 4),
    ("all-to-all", "everyone deals out, everyone collects", FULL,
     [[(origin, rank) for origin in RANKS] for rank in RANKS]),
)

TITLE = "Five collectives move chunks, three also add them up"
ALT = (
    "Eight before-and-after panels for ranks 0 to 3, each rank with four chunks. Broadcast, "
    "scatter, gather, all-gather and all-to-all only move chunks. Reduce, reduce-scatter and "
    "all-reduce also sum them: reduce puts the sum on rank 0, reduce-scatter gives each rank one "
    "chunk of it, all-reduce gives all of it to every rank."
)

CELL, GAP = 30, 3
PANEL_WIDTH, PANEL_HEIGHT = 418, 192


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 928, TITLE, ALT)
    draw_key(canvas, 78)
    for index, collective in enumerate(COLLECTIVES):
        draw_panel(canvas, 24 + index % 2 * (PANEL_WIDTH + 16),
                   110 + index // 2 * (PANEL_HEIGHT + 10), *collective)
    return canvas


def draw_key(canvas: Canvas, y: float) -> None:
    canvas.text(24, y, "colour: the rank it comes from", color=MUTED)
    canvas.text(290, y, "number: the chunk", color=MUTED)
    draw_cell(canvas, 470, y - CELL / 2, (SUM, 0))
    canvas.text(510, y, "chunk 0 of all four ranks, summed", color=MUTED)


def draw_panel(canvas: Canvas, x: float, y: float, name: str, caption: str, before, after) -> None:
    canvas.box(x, y, PANEL_WIDTH, PANEL_HEIGHT, "white", edge=FAINT, radius=8)
    canvas.text(x + 14, y + 23, name, size=16, weight="bold")
    canvas.text(x + PANEL_WIDTH - 14, y + 23, caption, size=13, color=MUTED, ha="right")
    for rank in RANKS:
        row = y + 46 + rank * (CELL + GAP + 1)
        canvas.text(x + 14, row + CELL / 2, f"rank {rank}", size=14, weight="bold",
                    color=rank_color(rank))
        for chunk in RANKS:
            draw_cell(canvas, x + 78 + chunk * (CELL + GAP), row, before[rank][chunk])
            draw_cell(canvas, x + 274 + chunk * (CELL + GAP), row, after[rank][chunk])
    middle = y + 46 + 2 * (CELL + GAP + 1) - 2
    canvas.arrow(x + 222, middle, x + 262, middle, INK, 2.4)


def draw_cell(canvas: Canvas, x: float, y: float, cell) -> None:
    if cell is None:
        canvas.box(x + 0.5, y + 0.5, CELL - 1, CELL - 1, "white", edge=FAINT, dashed=True)
        return
    origin, chunk = cell
    canvas.box(x, y, CELL, CELL, INK if origin == SUM else rank_color(origin))
    if origin == SUM:
        for rank in RANKS:
            canvas.box(x + rank * CELL / 4, y + CELL - 8, CELL / 4, 8, rank_color(rank), radius=0)
        canvas.line(x, y + CELL - 8.5, x + CELL, y + CELL - 8.5, "white", 1.2)
    canvas.text(x + CELL / 2, y + (11 if origin == SUM else CELL / 2), str(chunk), size=14,
                weight="bold", color="white", ha="center")


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
