"""Draws alpha_beta.svg: the time of an all-reduce against its size, as the α–β model has it."""

import math

from dplab.predict.cost import ALGORITHMS
from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import GRID, INK, MUTED

RANKS = 8
ALPHA = 20e-6
"""Seconds that each message takes besides its bytes."""
BANDWIDTH = 10e9
"""Bytes per second that a rank sends."""


def messages_and_chain(name: str) -> tuple[int, float]:
    """Messages one after another, and how many times the tensor's bytes they carry together."""
    algorithm = ALGORITHMS[name]
    return algorithm.messages(RANKS), algorithm.chain(RANKS)


RING, TREE = messages_and_chain("ring all-reduce"), messages_and_chain("tree all-reduce")


def seconds(algorithm: tuple[int, float], size: float) -> float:
    messages, times = algorithm
    return ALPHA * messages + times * size / BANDWIDTH


CROSSING = ALPHA * BANDWIDTH * (RING[0] - TREE[0]) / (TREE[1] - RING[1])
TITLE = "Small tensors wait for latency, large ones for bandwidth"
ALT = (
    "Time of an all-reduce on 8 ranks against its size, both axes logarithmic, from 1 kB to 1 GB "
    "and from 0.1 ms to 1 s, as T = α · messages + bytes / bandwidth gives it with α = 20 µs and "
    "10 GB/s. Both curves are flat for small sizes and rise in proportion to the size for large "
    "ones. The binary tree, 9 messages of M, starts at 0.18 ms and ends at 900 ms. The ring, 14 "
    "messages of M/8, starts at 0.28 ms and ends at 175 ms. They cross at 138 kB: below, the tree "
    "takes less time, above, the ring."
)

SIZES, SECONDS = (1e3, 1e9), (6e-5, 1)
LEFT, RIGHT, TOP, BOTTOM = 92, 716, 118, 492
RING_COLOR, TREE_COLOR = rank_color(0), rank_color(1)


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 568, TITLE, ALT)
    canvas.text(24, 72, f"All-reduce of M bytes on {RANKS} ranks: T = α · messages + bytes / "
                f"bandwidth, with α = {ALPHA * 1e6:.0f} µs and {BANDWIDTH / 1e9:.0f} GB/s.",
                color=MUTED)
    draw_axes(canvas)
    draw_crossing(canvas)
    for algorithm, color in ((TREE, TREE_COLOR), (RING, RING_COLOR)):
        draw_curve(canvas, algorithm, color)

    x = RIGHT + 14
    canvas.text(x, down(seconds(TREE, SIZES[1])), f"binary tree:\n{TREE[0]} messages of M",
                size=13, weight="bold", color=TREE_COLOR)
    canvas.text(x, down(seconds(RING, SIZES[1])), f"ring: {RING[0]} messages\nof M/{RANKS}",
                size=13, weight="bold", color=RING_COLOR)
    canvas.text(LEFT + 12, down(seconds(RING, SIZES[0])) - 15,
                f"{RING[0]} α = {ALPHA * RING[0] * 1e6:.0f} µs", color=RING_COLOR)
    canvas.text(LEFT + 12, down(seconds(TREE, SIZES[0])) + 12,
                f"{TREE[0]} α = {ALPHA * TREE[0] * 1e6:.0f} µs", color=TREE_COLOR)
    canvas.text(across(2e7), down(seconds(TREE, 3e7)), f"{TREE[1]} M / bandwidth",
                color=TREE_COLOR, ha="right")
    canvas.text(across(3.6e7), down(seconds(RING, 2e7)), f"{RING[1]} M / bandwidth",
                color=RING_COLOR)
    return canvas


def across(size: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(size / SIZES[0]) / math.log(SIZES[1] / SIZES[0])


def down(time: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(time / SECONDS[0]) / math.log(
        SECONDS[1] / SECONDS[0])


def draw_axes(canvas: Canvas) -> None:
    for power, label in enumerate(("1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB")):
        x = across(SIZES[0] * 10**power)
        canvas.line(x, BOTTOM, x, BOTTOM + 5, MUTED)
        canvas.text(x, BOTTOM + 20, label, size=13, color=MUTED, ha="center")
    for power, label in enumerate(("0.1 ms", "1 ms", "10 ms", "100 ms", "1 s")):
        y = down(1e-4 * 10**power)
        canvas.line(LEFT, y, RIGHT, y, GRID)
        canvas.text(LEFT - 10, y, label, size=13, color=MUTED, ha="right")
    canvas.line(LEFT, BOTTOM, RIGHT, BOTTOM, MUTED)
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 48, "M, bytes in the tensor", color=MUTED,
                ha="center")
    canvas.text(LEFT - 10, TOP - 20, "time T", color=MUTED, ha="right")


def draw_crossing(canvas: Canvas) -> None:
    x, y = across(CROSSING), down(seconds(RING, CROSSING))
    canvas.line(x, TOP, x, BOTTOM, MUTED)
    canvas.text(x - 12, TOP + 46, "fewer messages:\nthe tree is faster", color=TREE_COLOR,
                ha="right")
    canvas.text(x + 12, TOP + 46, "fewer bytes:\nthe ring is faster", color=RING_COLOR)
    canvas.text(x + 12, TOP + 12, f"M = {CROSSING / 1e3:.0f} kB", weight="bold")
    canvas.disc(x, y, 5.5, INK)


def draw_curve(canvas: Canvas, algorithm: tuple[int, float], color: str) -> None:
    sizes = [SIZES[0] * (SIZES[1] / SIZES[0]) ** (point / 240) for point in range(241)]
    canvas.axes.plot([across(size) for size in sizes],
                     [down(seconds(algorithm, size)) for size in sizes], color=color, linewidth=2)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
