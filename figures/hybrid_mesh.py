"""Draws hybrid_mesh.svg: eight ranks on two hosts as the table that hybrid sharding needs."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import INK, MUTED

HOSTS, RANKS = "ab", 4

TITLE = "Sharded along a row, replicated along a column"
ALT = (
    "A table of eight ranks, a row for each of two hosts: ranks 0 to 3 on host a, ranks 4 to 7 on "
    "host b. The ranks of a column hold the same shard. Along a row, units are gathered and "
    "gradients reduced and scattered. Along a column, such as ranks 0 and 4, a shard's gradient is "
    "all-reduced."
)

LEFT, TOP, WIDTH, HEIGHT, ACROSS, DOWN = 110, 70, 110, 58, 130, 106


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 260, TITLE, ALT)
    for row, host in enumerate(HOSTS):
        y = TOP + row * DOWN
        canvas.text(24, y + HEIGHT / 2, f"host {host}", weight="bold")
        for column in range(RANKS):
            x = LEFT + column * ACROSS
            canvas.box(x, y, WIDTH, HEIGHT, rank_color(column))
            canvas.text(x + WIDTH / 2, y + HEIGHT / 2,
                        f"rank {row * RANKS + column}\nshard {column}", ha="center", color="white")
        end = LEFT + RANKS * ACROSS
        double_arrow(canvas, end - 10, y + HEIGHT / 2, end + 34, y + HEIGHT / 2)
        canvas.text(end + 44, y + HEIGHT / 2, "all-gather,\nreduce-scatter", color=INK)
    for column in range(RANKS):
        x = LEFT + column * ACROSS + WIDTH / 2
        double_arrow(canvas, x, TOP + HEIGHT + 4, x, TOP + DOWN - 4)
    canvas.text(LEFT + RANKS * ACROSS + 44, TOP + (HEIGHT + DOWN) / 2,
                "↕ all-reduce of a shard", color=INK)
    return canvas


def double_arrow(canvas: Canvas, x0: float, y0: float, x1: float, y1: float) -> None:
    middle = (x0 + x1) / 2, (y0 + y1) / 2
    canvas.arrow(*middle, x0, y0, MUTED)
    canvas.arrow(*middle, x1, y1, MUTED)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
