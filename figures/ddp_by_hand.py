"""Draws ddp_by_hand.svg: the four steps of data-parallel training, on four ranks."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import GRID, INK, MUTED

RANKS = 4
WEIGHTS = [0.6, -0.3, 0.5, 0.7]
GRADIENTS = [[0.9, 0.4, -0.8, 0.7], [-0.3, 0.9, 0.35, -0.6], [0.7, -0.5, -0.9, 0.95],
             [0.6, 0.7, 0.3, -0.4]]
MEAN = [sum(column) / RANKS for column in zip(*GRADIENTS, strict=True)]
UPDATED = [w - 0.5 * g for w, g in zip(WEIGHTS, MEAN, strict=True)]
SPLIT = [list(range(rank, 16, RANKS)) for rank in range(RANKS)]

STEPS = (
    ("The same start", "once, before the first step", "weights at the start"),
    ("Own data", "in each step", "samples of each rank"),
    ("The mean of gradients", "in each step, after backward", "gradients in the step"),
    ("The same update", "in each step, same optimizer", "weights after the step"),
)

TITLE = "Data-parallel training is four steps around the loop of one device"
ALT = (
    "The four steps of data-parallel training, in order, each with a picture of four ranks. The "
    "same start, once: the four ranks have the same weights. Own data in each step: each rank has "
    "a quarter of the samples. The mean of the gradients after each backward: the same on each "
    "rank. The same update: the weights are the same again."
)

LEFT, RIGHT, TOP, ROW = (24, 284), (472, 726), 66, 130


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 326, TITLE, ALT)
    for index, (name, when, shown) in enumerate(STEPS):
        x, picture = (LEFT, RIGHT)[index % 2]
        y = TOP + index // 2 * ROW
        canvas.disc(x + 18, y + 54, 18, INK)
        canvas.text(x + 18, y + 54, str(index + 1), size=17, weight="bold", color="white",
                    ha="center")
        canvas.text(x + 46, y + 43, name, size=15, weight="bold")
        canvas.text(x + 46, y + 67, when, size=13, color=MUTED)
        canvas.text(picture + 76, y + 108, shown, size=13, color=MUTED, ha="center")
    four_charts(canvas, LEFT[1], TOP, [WEIGHTS] * 4)
    four_shares(canvas, RIGHT[1], TOP, SPLIT)
    four_charts(canvas, LEFT[1], TOP + ROW, [MEAN] * 4)
    four_charts(canvas, RIGHT[1], TOP + ROW, [UPDATED] * 4)
    return canvas


def four_charts(canvas: Canvas, x: float, y: float, values: list[list[float]]) -> None:
    for rank in range(RANKS):
        canvas.bars(x + rank * 40, y + 14, values[rank], rank_color(rank), width=32, height=58)
        canvas.text(x + rank * 40 + 16, y + 86, str(rank), size=13, weight="bold",
                    color=rank_color(rank), ha="center")


def four_shares(canvas: Canvas, x: float, y: float, shares: list[list[int]]) -> None:
    for rank, share in enumerate(shares):
        row = y + 14 + rank * 20
        canvas.text(x, row + 7.5, str(rank), size=13, weight="bold", color=rank_color(rank),
                    ha="right")
        for sample in range(16):
            canvas.box(x + 6 + sample * 9, row, 7.5, 15,
                       rank_color(rank) if sample in share else GRID, radius=1)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
