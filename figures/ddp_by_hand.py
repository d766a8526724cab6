"""Draws ddp_by_hand.svg: the four steps of data-parallel training, and what each is there for."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, GRID, INK, MUTED, WARNING

RANKS = 4
WEIGHTS = [0.6, -0.3, 0.5, 0.7]
GRADIENTS = [[0.9, 0.4, -0.8, 0.7], [-0.3, 0.9, 0.35, -0.6], [0.7, -0.5, -0.9, 0.95],
             [0.6, 0.7, 0.3, -0.4]]
MEAN = [sum(column) / RANKS for column in zip(*GRADIENTS, strict=True)]
INITIAL = [WEIGHTS, [-0.6, 0.8, 0.35, -0.9], [0.4, 0.9, -0.7, 0.25], [-0.9, -0.35, 0.6, 0.8]]
UPDATED = [w - 0.5 * g for w, g in zip(WEIGHTS, MEAN, strict=True)]
DRIFTED = [w - 1.8 * g for w, g in zip(WEIGHTS, MEAN, strict=True)]
SPLIT = [list(range(rank, 16, RANKS)) for rank in range(RANKS)]

STEPS = (
    ("The same start", "once, before the first step",
     "weights at the start",
     "The ranks start from different\nweights, and equal updates\nkeep them apart."),
    ("Own data", "in each step",
     "samples of each rank",
     "All ranks compute the same\nsamples; three quarters of the\nbatch are never seen."),
    ("The mean of gradients", "in each step, after backward",
     "gradients in the step",
     "Every rank follows its own\ngradient: four models, each\ntrained on a quarter."),
    ("The same update", "in each step, same optimizer",
     "weights after the step",
     "A rank with another learning\nrate or momentum drifts away\nfrom the others."),
)

TITLE = "Data-parallel training is four steps, and leaving one out raises no error"
ALT = (
    "The four steps of data-parallel training, in order, each with how four ranks look with it and "
    "without it. The same start, once, or the ranks start from different weights and stay apart. "
    "Own data in each step, or all ranks compute the same samples and three quarters of the batch "
    "are never seen. The mean of the gradients after each backward, or every rank trains a model "
    "of its own. The same update, or one rank's weights drift away. None of the four omissions "
    "raises an error."
)

TOP, ROW = 104, 126
DONE, LEFT_OUT, SAY = 296, 476, 656


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 620, TITLE, ALT)
    canvas.text(DONE + 76, 82, "done", size=15, weight="bold", ha="center")
    canvas.text(LEFT_OUT + 76, 82, "left out", size=15, weight="bold", color=WARNING, ha="center")
    canvas.text(SAY, 82, "then", size=15, weight="bold", color=WARNING)
    for index, (name, when, shown, loss) in enumerate(STEPS):
        y = TOP + index * ROW
        canvas.line(24, y, 876, y, FAINT)
        canvas.disc(42, y + 60, 18, INK)
        canvas.text(42, y + 60, str(index + 1), size=17, weight="bold", color="white", ha="center")
        canvas.text(74, y + 49, name, size=15, weight="bold")
        canvas.text(74, y + 73, when, size=13, color=MUTED)
        canvas.text(DONE + 76, y + 108, shown, size=13, color=MUTED, ha="center")
        canvas.text(LEFT_OUT + 76, y + 108, shown, size=13, color=MUTED, ha="center")
        canvas.text(SAY, y + 60, loss, size=14)
    pictures(canvas)
    return canvas


def pictures(canvas: Canvas) -> None:
    four_charts(canvas, DONE, TOP, [WEIGHTS] * 4)
    four_charts(canvas, LEFT_OUT, TOP, INITIAL)
    four_shares(canvas, DONE, TOP + ROW, SPLIT)
    four_shares(canvas, LEFT_OUT, TOP + ROW, [SPLIT[0]] * 4)
    four_charts(canvas, DONE, TOP + 2 * ROW, [MEAN] * 4)
    four_charts(canvas, LEFT_OUT, TOP + 2 * ROW, GRADIENTS)
    four_charts(canvas, DONE, TOP + 3 * ROW, [UPDATED] * 4)
    four_charts(canvas, LEFT_OUT, TOP + 3 * ROW, [UPDATED, UPDATED, DRIFTED, UPDATED])


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
