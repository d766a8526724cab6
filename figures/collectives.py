"""Draws collectives.svg: what four ranks hold before and after each of eight collectives."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, INK, MUTED

RANKS = range(4)
SUM = "sum"
"""A cell is None, or (origin, place): the rank that the number comes from, or SUM of all four."""

FULL = [[(rank, place) for place in RANKS] for rank in RANKS]
OWN = [[(rank, rank)] for rank in RANKS]
ALL = [(rank, rank) for rank in RANKS]
ADDED = [(SUM, place) for place in RANKS]
LEFT_OVER = [[None] * 4] * 3

COLLECTIVES = (
    ("broadcast", "one rank's numbers, for everyone", FULL, [FULL[0]] * 4),
    ("all-reduce", "the sums, for everyone", FULL, [ADDED] * 4),
    ("all-gather", "everyone collects the parts", OWN, [ALL] * 4),
    ("reduce-scatter", "each gets one of the sums", FULL, [[(SUM, rank)] for rank in RANKS]),
    ("all-to-all", "everyone deals out and collects", FULL,
     [[(origin, rank) for origin in RANKS] for rank in RANKS]),
    ("reduce", "the sums, on one rank", FULL, [ADDED, *LEFT_OVER]),
    ("scatter", "one rank deals out", [FULL[0], [], [], []], [[(0, rank)] for rank in RANKS]),
    ("gather", "one rank collects", OWN, [ALL, [], [], []]),
)

TITLE = "Of eight collectives, five only move numbers and three add them up"
ALT = (
    "Eight before-and-after panels for ranks 0 to 3. Rank 0 has the thousands 1000 to 4000, rank 1 "
    "the hundreds, rank 2 the tens, rank 3 the ones. Broadcast gives every rank rank 0's numbers. "
    "All-reduce gives every rank the four sums 1111 to 4444; reduce gives them to rank 0 alone, "
    "and reduce-scatter gives each rank one of them. All-gather gives every rank the parts of all, "
    "1000, 200, 30 and 4; gather gives them to rank 0 alone. Scatter deals rank 0's numbers out. "
    "All-to-all gives rank r the number at place r of each rank."
)

CELL, HEIGHT, GAP = 40, 28, 2
PANEL_WIDTH, PANEL_HEIGHT = 420, 178
BEFORE, AFTER = 62, 250  # where a panel's cells begin
MARGIN = 24


@style()
def draw() -> Canvas:
    rows = (len(COLLECTIVES) + 1) // 2
    canvas = Canvas(2 * MARGIN + 2 * PANEL_WIDTH + 12, 110 + rows * (PANEL_HEIGHT + 10) + 8,
                    TITLE, ALT)
    draw_key(canvas, 78)
    draw_panels(canvas, 104, COLLECTIVES)
    return canvas


def draw_key(canvas: Canvas, y: float) -> None:
    canvas.text(MARGIN, y, "colour: the rank that the number comes from", color=MUTED)
    draw_cell(canvas, 374, y - HEIGHT / 2, (SUM, 0))
    canvas.text(422, y, "a sum over all four ranks", color=MUTED)
    canvas.box(634.5, y - HEIGHT / 2 + 0.5, CELL - 1, HEIGHT - 1, "white", edge=FAINT, dashed=True)
    canvas.text(682, y, "left over: not a result", color=MUTED)


def draw_panels(canvas: Canvas, y: float, panels) -> None:
    """Two in a row; a panel is (name, caption, before, after)."""
    for index, panel in enumerate(panels):
        draw_panel(canvas, MARGIN + index % 2 * (PANEL_WIDTH + 12),
                   y + index // 2 * (PANEL_HEIGHT + 10), *panel)


def draw_panel(canvas: Canvas, x: float, y: float, name: str, caption: str, before, after) -> None:
    canvas.box(x, y, PANEL_WIDTH, PANEL_HEIGHT, "white", edge=FAINT, radius=8)
    canvas.text(x + 14, y + 23, name, size=16, weight="bold")
    canvas.text(x + PANEL_WIDTH - 14, y + 23, caption, size=13, color=MUTED, ha="right")
    for rank in RANKS:
        row = y + 46 + rank * (HEIGHT + GAP)
        canvas.text(x + 12, row + HEIGHT / 2, f"rank {rank}", size=13, weight="bold",
                    color=rank_color(rank))
        for left, cells in ((BEFORE, before[rank]), (AFTER, after[rank])):
            for place, cell in enumerate(cells):
                draw_cell(canvas, x + left + place * (CELL + GAP), row, cell)
            if not cells:
                words = "nothing" if left == BEFORE else "no result"
                canvas.text(x + left + 6, row + HEIGHT / 2, words, size=13, color=MUTED)
    middle = y + 46 + 2 * (HEIGHT + GAP) - 2
    canvas.arrow(x + 230, middle, x + 247, middle, INK, 2.4)


def draw_cell(canvas: Canvas, x: float, y: float, cell) -> None:
    if cell is None:
        canvas.box(x + 0.5, y + 0.5, CELL - 1, HEIGHT - 1, "white", edge=FAINT, dashed=True)
        return
    origin, place = cell
    canvas.box(x, y, CELL, HEIGHT, INK if origin == SUM else rank_color(origin))
    if origin == SUM:
        for rank in RANKS:
            canvas.box(x + rank * CELL / 4, y + HEIGHT - 6, CELL / 4, 6, rank_color(rank), radius=0)
        canvas.line(x, y + HEIGHT - 6.5, x + CELL, y + HEIGHT - 6.5, "white", 1.2)
    number = (place + 1) * (1111 if origin == SUM else 10 ** (3 - origin))
    canvas.text(x + CELL / 2, y + (11 if origin == SUM else HEIGHT / 2), str(number), size=13,
                weight="bold", color="white", ha="center")


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
