"""Draws sum_over_ranks.svg: a sum over two ranks, forward and backward, with numbers."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, INK, MUTED

HELD = [2, 3]
TOTAL = sum(HELD)
LOSSES = ["L₀ = s²", "L₁ = 4 s"]
OWN = [2 * TOTAL, 4]  # the derivative of each loss by the total
BACK = sum(OWN)

TITLE = "In backward, each x gets the sum of both losses' gradients"
ALT = (
    "A sum over two ranks in two rows, forward and backward. Forward, left to right: rank 0 has "
    f"x = {HELD[0]}, rank 1 has x = {HELD[1]}, and an all-reduce gives both s = {TOTAL}, from "
    "which each computes a loss of its own. Backward, right to left: the derivatives of the two "
    f"losses by s, {OWN[0]} and {OWN[1]}, go into a second all-reduce, which gives both ranks "
    f"{BACK}, the gradient of their x."
)

FOOTER = ("Each rank knows the derivative of its own loss only. The second all-reduce adds "
          "both.")

X, SUM, S, LOSS = 196, 416, 628, 812  # the middles of the columns
TOP, ROW, HALF = 128, 56, 190


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 450, TITLE, ALT)
    canvas.text(24, 84, "forward", size=15, weight="bold")
    canvas.text(24, 84 + HALF, "backward", size=15, weight="bold")
    canvas.line(24, 60 + HALF, 876, 60 + HALF, FAINT)
    for top in (TOP, TOP + HALF):
        canvas.box(SUM - 52, top - 26, 104, ROW + 52, INK, radius=8)
        canvas.text(SUM, top + ROW / 2, "all-reduce\nsum", size=15, weight="bold", color="white",
                    ha="center")
    for rank in range(2):
        forward(canvas, rank, TOP + rank * ROW)
        backward(canvas, rank, TOP + HALF + rank * ROW)
    canvas.text(24, 424, FOOTER, size=14, color=MUTED)
    return canvas


def forward(canvas: Canvas, rank: int, y: float) -> None:
    color = rank_color(rank)
    canvas.text(24, y, f"rank {rank}", weight="bold", color=color)
    value(canvas, X, y, f"x{'₀₁'[rank]} = {HELD[rank]}", color)
    canvas.arrow(X + 52, y, SUM - 56, y, color, 2.4)
    canvas.arrow(SUM + 56, y, S - 52, y, color, 2.4)
    value(canvas, S, y, f"s = {TOTAL}", color)
    canvas.arrow(S + 52, y, LOSS - 62, y, color, 2.4)
    value(canvas, LOSS, y, LOSSES[rank], color, width=120)


def backward(canvas: Canvas, rank: int, y: float) -> None:
    color = rank_color(rank)
    canvas.text(24, y, f"rank {rank}", weight="bold", color=color)
    small = "₀₁"[rank]
    value(canvas, LOSS, y, f"L{small}", color)
    canvas.arrow(LOSS - 52, y, S + 68, y, color, 2.4)
    value(canvas, S, y, f"∂L{small}/∂s = {OWN[rank]}", color, width=128)
    canvas.arrow(S - 68, y, SUM + 56, y, color, 2.4)
    canvas.arrow(SUM - 56, y, X + 92, y, color, 2.4)
    value(canvas, X, y, f"∂(L₀ + L₁)/∂x{small} = {BACK}", color, width=176)


def value(canvas: Canvas, x: float, y: float, text: str, color: str, width: float = 96) -> None:
    canvas.box(x - width / 2, y - 19, width, 38, "white", edge=color, radius=6)
    canvas.text(x, y, text, size=15, ha="center")


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
