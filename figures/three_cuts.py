"""Draws three_cuts.svg: one layer on two ranks, cut along each of its three letters."""

from collections.abc import Sequence

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, MUTED

SIZES = {"b": 5120, "d": 2048, "f": 1024}
COPY = "copy"
"""A rank holds matrices (name, rows, columns, whose, part): ``whose`` is the rank whose part it
is, or COPY; ``part`` is "whole", "rows" or "columns". A pass sends (what, rows, columns)."""

WAYS = (
    ("cut b", "data parallelism", "x and y, by rows", "w",
     [[("x", "b", "d", rank, "rows"), ("w", "d", "f", COPY, "whole"),
       ("y", "b", "f", rank, "rows")] for rank in range(2)],
     None, ("all-reduce of w's gradient", "d", "f")),
    ("cut d", "tensor parallelism", "x by columns, w by rows; y = y₀ + y₁", "nothing",
     [[("x", "b", "d", rank, "columns"), ("w", "d", "f", rank, "rows"),
       ("y" + "₀₁"[rank], "b", "f", rank, "whole")] for rank in range(2)],
     ("all-reduce of y", "b", "f"), None),
    ("cut f", "tensor parallelism", "w and y, by columns", "x",
     [[("x", "b", "d", COPY, "whole"), ("w", "d", "f", rank, "columns"),
       ("y", "b", "f", rank, "columns")] for rank in range(2)],
     None, ("all-reduce of x's gradient", "b", "d")),
)
PRODUCTS = (("y", "bd,df→bf", "d"), ("w's gradient", "bd,bf→df", "b"),
            ("x's gradient", "bf,df→bd", "f"))
"""Of the layer: what it gives, its letters, and the letter that is summed."""

TITLE = "Each letter of a layer is summed in one of its three products"
ALT = (
    "A layer y = x · w on two ranks, cut along each of its letters. Cut b, data parallelism: w is "
    "copied, backward all-reduces w's gradient, d × f = 2.1 million numbers. Cut d, tensor "
    "parallelism: forward all-reduces two summands of y, b × f = 5.2 million. Cut f, tensor "
    "parallelism: x is copied, backward all-reduces x's gradient, b × d = 10.5 million."
)

SCALE = 0.03
PANEL_WIDTH, PANEL_HEIGHT, BLOCK = 418, 346, 192


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 862, TITLE, ALT)
    canvas.text(24, 72, "x[b, d] · w[d, f] = y[b, f] on two ranks, with b = 5120, d = 2048, "
                "f = 1024. M: million numbers.", color=MUTED)
    draw_key(canvas, 104)
    for index, way in enumerate(WAYS):
        draw_way(canvas, 24 + index % 2 * (PANEL_WIDTH + 16),
                 130 + index // 2 * (PANEL_HEIGHT + 16), *way)
    draw_products(canvas, 24 + PANEL_WIDTH + 16, 130 + PANEL_HEIGHT + 16)
    return canvas


def draw_products(canvas: Canvas, x: float, y: float) -> None:
    """Says of each product which letter it sums, and so which cut costs an all-reduce of it."""
    canvas.box(x, y, PANEL_WIDTH, PANEL_HEIGHT, "white", edge=FAINT, radius=8)
    canvas.text(x + 14, y + 23, "the three products of a layer", size=16, weight="bold")
    for row, (what, letters, summed) in enumerate(PRODUCTS):
        line = y + 84 + row * 76
        canvas.text(x + 14, line, what, weight="bold")
        canvas.text(x + 150, line, letters, size=16)
        canvas.text(x + 14, line + 26, f"sums over {summed}: cut {summed}, and the ranks have "
                    "partial sums", color=MUTED)


def draw_key(canvas: Canvas, y: float) -> None:
    for x, fill, text in ((24, rank_color(0), "part of rank 0"), (170, rank_color(1),
                          "part of rank 1"), (316, MUTED, "copy on both")):
        canvas.box(x, y - 7, 14, 14, fill, radius=1)
        canvas.text(x + 22, y, text)
    canvas.box(454.5, y - 6.5, 13, 13, "white", edge=FAINT, radius=1, dashed=True)
    canvas.text(476, y, "not on this rank")


def draw_way(canvas: Canvas, x: float, y: float, name: str, how: str, split: str, copied: str,
             ranks: Sequence, forward, backward) -> None:
    canvas.box(x, y, PANEL_WIDTH, PANEL_HEIGHT, "white", edge=FAINT, radius=8)
    canvas.text(x + 14, y + 23, name, size=16, weight="bold")
    canvas.text(x + PANEL_WIDTH - 14, y + 23, how, color=MUTED, ha="right")
    for rank, matrices in enumerate(ranks):
        draw_rank(canvas, x + 14 + rank * BLOCK, y + 54, rank, matrices)
    if ranks[0][-1] == ranks[1][0]:
        middle = y + 54 + 18 + SIZES["b"] * SCALE / 2
        canvas.arrow(x + BLOCK - 10, middle, x + BLOCK + 11, middle, rank_color(0), 2.4)
    facts = (("split", split, ""), ("copied", copied, ""), ("forward", *sent(forward)),
             ("backward", *sent(backward)))
    for row, (word, what, size) in enumerate(facts):
        line = y + 255 + row * 24
        canvas.text(x + 14, line, word, weight="bold")
        canvas.text(x + 102, line, what)
        canvas.text(x + PANEL_WIDTH - 14, line, size, color=MUTED, ha="right")


def sent(message) -> tuple[str, str]:
    """What a pass sends, and the size of the whole tensor."""
    if message is None:
        return "sends nothing", ""
    what, rows, columns = message
    return what, f"{rows} × {columns} = {SIZES[rows] * SIZES[columns] / 1e6:.1f} M"


def draw_rank(canvas: Canvas, x: float, y: float, rank: int, matrices: Sequence) -> None:
    canvas.text(x, y, f"rank {rank}", weight="bold", color=rank_color(rank))
    axis = y + 18 + SIZES["b"] * SCALE / 2
    for index, matrix in enumerate(matrices):
        width, height = SIZES[matrix[2]] * SCALE, SIZES[matrix[1]] * SCALE
        draw_matrix(canvas, x, axis - height / 2, width, height, rank, matrix)
        x += width
        if index < 2:
            canvas.text(x + 10, axis, "·="[index], size=18, ha="center")
            x += 20


def draw_matrix(canvas: Canvas, x: float, y: float, width: float, height: float, rank: int,
                matrix) -> None:
    name, _, _, whose, part = matrix
    canvas.box(x + 0.5, y + 0.5, width - 1, height - 1, "white", edge=FAINT, radius=1, dashed=True)
    if part == "rows":
        y, height = y + rank * height / 2, height / 2
    elif part == "columns":
        x, width = x + rank * width / 2, width / 2
    canvas.box(x, y, width, height, MUTED if whose == COPY else rank_color(whose), radius=1)
    canvas.text(x + width / 2, y + height / 2, name, size=13, weight="bold",
                color="white", ha="center")


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
