"""Draws collective_puzzles.svg: what four ranks hold before and after a call without a name."""

from collectives import FULL, MARGIN, OWN, PANEL_HEIGHT, PANEL_WIDTH, RANKS, SUM, draw_panels

from dplab.show import Canvas, save_beside, style
from dplab.show.palette import MUTED

PUZZLES = (
    ("A", "", FULL, [FULL[2]] * 4),
    ("B", "", OWN, [[(rank, rank) for rank in RANKS]] * 4),
    ("C", "", FULL, [[(SUM, rank)] for rank in RANKS]),
    ("D", "", FULL, [[(origin, rank) for origin in RANKS] for rank in RANKS]),
)

TITLE = "Four puzzles: one call turns the left side into the right side"
ALT = (
    "Four before-and-after panels for ranks 0 to 3. In A, C and D each rank has four numbers: rank "
    "0 has 1000, 2000, 3000, 4000, rank 1 the hundreds, rank 2 the tens, rank 3 the ones. In A "
    "every rank ends with 10, 20, 30, 40. In B the ranks have 1000, 200, 30 and 4, and every rank "
    "ends with all four. In C rank 0 ends with 1111, rank 1 with 2222, rank 2 with 3333, rank 3 "
    "with 4444. In D rank 0 ends with 1000, 100, 10, 1, rank 1 with 2000, 200, 20, 2, rank 2 with "
    "3000, 300, 30, 3, and rank 3 with 4000, 400, 40, 4."
)


@style()
def draw() -> Canvas:
    canvas = Canvas(2 * MARGIN + 2 * PANEL_WIDTH + 12, 104 + 2 * (PANEL_HEIGHT + 10) + 8,
                    TITLE, ALT)
    canvas.text(MARGIN, 74, "colour: the rank that the number comes from; four stripes: a sum "
                            "over all four ranks", color=MUTED)
    draw_panels(canvas, 98, PUZZLES)
    return canvas


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
