"""Draws one_step.svg: one step of data-parallel training on four ranks."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, INK, MUTED

RANKS = 4
LEARNING_RATE = 0.5
WEIGHTS = [0.70, -0.45, 0.30, 0.85, -0.60]
GRADIENTS = [
    [0.90, 0.35, -0.55, 0.20, -0.75],
    [-0.30, 0.80, -0.20, 0.95, 0.40],
    [0.75, -0.60, 0.65, 0.50, -0.90],
    [0.25, 0.65, -0.90, -0.35, 0.45],
]
MEAN = [sum(column) / RANKS for column in zip(*GRADIENTS, strict=True)]
UPDATED = [w - LEARNING_RATE * g for w, g in zip(WEIGHTS, MEAN, strict=True)]

TITLE = "Every rank sees other data and takes the same step"
ALT = (
    "One training step on four ranks, left to right. The global batch is split into four local "
    "batches. Four equal copies of the model turn them into four different gradients. One "
    "all-reduce crosses all ranks and gives each of them the same mean gradient, and with the "
    "same update all four models stay equal."
)

HEADS = (
    (121, "global batch", "split in four"),
    (238, "model copy", "equal weights"),
    (404, "gradient", "different on each"),
    (532, "all-reduce", "the mean"),
    (656, "mean gradient", "equal on all ranks"),
    (824, "new weights", "equal again"),
)
ROW = 92
TOP = 128


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 530, TITLE, ALT)
    for x, head, below in HEADS:
        canvas.text(x, 78, head, size=15, weight="bold", ha="center")
        canvas.text(x, 99, below, size=13, color=MUTED, ha="center")

    canvas.box(82, TOP - 6, 78, RANKS * ROW - 8, "#EEF1F4", radius=8)
    canvas.box(498, TOP - 6, 68, RANKS * ROW - 8, INK, radius=8)
    for rank in range(RANKS):
        draw_rank(canvas, rank, TOP + rank * ROW)
    canvas.text(532, TOP + 2 * ROW - 10, "sum\n÷ 4", size=17, weight="bold", color="white",
                ha="center")
    canvas.text(24, 506, "The all-reduce is the only moment at which the ranks talk to each other.",
                size=14)
    return canvas


def draw_rank(canvas: Canvas, rank: int, y: float) -> None:
    middle = y + 36
    color = rank_color(rank)
    canvas.text(24, middle, f"rank {rank}", weight="bold", color=color)
    for sample in range(8):
        canvas.box(88.5 + sample % 4 * 17, middle - 15.5 + sample // 4 * 17, 14, 14, color,
                   radius=2)
    canvas.arrow(164, middle, 188, middle)
    panel(canvas, 192, y, WEIGHTS, MUTED)
    canvas.arrow(288, middle, 354, middle)
    canvas.text(320, middle - 14, "forward", size=13, color=MUTED, ha="center")
    canvas.text(320, middle + 14, "backward", size=13, color=MUTED, ha="center")
    panel(canvas, 358, y, GRADIENTS[rank], color)
    canvas.arrow(454, middle, 494, middle, color, 2.4)
    canvas.arrow(570, middle, 606, middle, INK, 2.4)
    panel(canvas, 610, y, MEAN, INK)
    canvas.arrow(706, middle, 780, middle)
    canvas.text(740, middle - 14, "optimizer", size=13, color=MUTED, ha="center")
    canvas.text(740, middle + 14, "step", size=13, color=MUTED, ha="center")
    panel(canvas, 784, y, UPDATED, MUTED)


def panel(canvas: Canvas, x: float, y: float, values: list[float], color: str) -> None:
    canvas.box(x, y + 2, 92, 68, "white", edge=FAINT, radius=6)
    canvas.bars(x + 8, y + 6, values, color, width=76, height=60)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
