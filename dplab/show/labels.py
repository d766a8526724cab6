"""Where labels go so that none covers another, and how they look. All lengths are in points."""

import math
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

SIZE = 10.5
TITLE_SIZE = 12
LINE_SPACING = 1.25
LINE = SIZE * LINE_SPACING
SWATCH = 13
"""Room for a square of 9 points before a label that names its colour."""
CAP_HEIGHT = 0.73
"""Height of a capital or a digit over the font size, by which one line is centred."""


def number(value: float) -> str:
    """``value`` with about three significant digits and no exponent where it can do without."""
    if value == 0:
        return "0"
    if value < 0.01:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width of the widest line of ``text`` in points, as the SVG will have it."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return max(
        text_to_path.get_text_width_height_descent(line or " ", font, ismath=False)[0]
        for line in text.split("\n")
    )


def text_height(text: str, size: float) -> float:
    """Height of all lines of ``text`` in points."""
    return (text.count("\n") + 1) * size * LINE_SPACING


def wrap(text: str, size: float, width: float, weight: str = "normal") -> str:
    """``text`` broken at spaces into lines of at most ``width`` points (a longer word stays)."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, size, weight) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return "\n".join(lines)


def spread(centers: Sequence[float], sizes: Sequence[float], low: float, high: float,
           gap: float = 0.0) -> list[float]:
    """Centres as near to ``centers`` as can be, in the same order, that do not overlap.

    Label i takes ``sizes[i]``, neighbours keep ``gap`` between them, and all stay in [low, high],
    which has room for them. Least squares: subtracting what lies before each label leaves an
    isotonic regression, solved by pooling adjacent violators.
    """
    room = high - low - sum(sizes) - gap * (len(sizes) - 1)
    order = sorted(range(len(centers)), key=lambda i: centers[i])
    starts = accumulate((sizes[i] + gap for i in order), initial=low)
    offsets = [start + sizes[i] / 2 for start, i in zip(starts, order, strict=False)]
    blocks: list[tuple[float, int]] = []  # of labels that touch: the sum of their shifts, and count
    for i, offset in zip(order, offsets, strict=True):
        total, count = centers[i] - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    shifts = [min(max(total / count, 0.0), room) for total, count in blocks for _ in range(count)]
    placed = {i: offset + shift for i, offset, shift in zip(order, offsets, shifts, strict=True)}
    return [placed[i] for i in range(len(centers))]


def flow(widths: Sequence[float], width: float, gap: float) -> list[list[int]]:
    """Indices in reading order, broken into rows that are at most ``width`` points wide."""
    rows: list[list[int]] = [[]]
    used = 0.0
    for i, own in enumerate(widths):
        if rows[-1] and used + gap + own > width:
            rows.append([])
            used = 0.0
        used += own + (gap if rows[-1] else 0.0)
        rows[-1].append(i)
    return rows
