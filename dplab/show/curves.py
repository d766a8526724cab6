"""Curves that are named at their right ends, such as losses."""

import math
import re
from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from dplab.show.labels import LINE_SPACING, SIZE, spread, text_height, text_width, wrap
from dplab.show.palette import INK, RANK_COLORS, REFERENCE, rank_color
from dplab.show.theme import WIDTH, CourseFigure, frame, style

LEADER = 22  # points, of the line that ties a name to its curve's end
THINNEST = 1.6
ROUNDING = 1e-5


def loss_curves(curves: Mapping[str, Sequence[float]], *, title: str, ylabel: str = "loss",
                note: str = "", height: float = 3.6, first: int = 0) -> CourseFigure:
    """Draws one line per curve; of curves that coincide, each later one lies thinner on top.

    ``curves`` maps a label to its losses, shape (steps,), any real numbers; lengths may differ,
    and ``first`` is the number of the first step. A curve named "rank r" has that rank's colour,
    else the first is grey and the others follow the palette. A value that is not finite leaves a
    hole. ``note`` stands below the title. ``height`` is in inches of 96 CSS pixels, and more where
    labels need it.
    """
    data = {label: [float(v) if math.isfinite(v) else math.nan for v in values]
            for label, values in curves.items()}
    colors, covering = _colors(list(data)), _covering(list(data.values()))
    names = [wrap(label, SIZE, 180) for label in data]
    heights = [text_height(name, SIZE) for name in names]
    height = max(72 * height - 100, sum(heights) + 3 * len(heights))
    left, right = 66, LEADER + 12 + max(text_width(name, SIZE) for name in names)
    ends = [[(step, v) for step, v in enumerate(values, first) if v == v][-1:]
            for values in data.values()]

    with style():
        axes = CourseFigure(figsize=(WIDTH, 1)).add_axes((0, 0, 1, 1))
        step = min(3.4, 13 / max(*covering, 1))
        for covers, (label, values) in zip(covering, data.items(), strict=True):
            size = THINNEST + step * covers
            axes.plot(range(first, first + len(values)), values, color=colors[label], label=label,
                      linewidth=size, marker="o" if len(values) == 1 else None, markersize=size + 4)
        axes.set(xlabel="step", ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(x=0.01)
        axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
        _name_ends(axes, (72 * WIDTH - left - right, height), names, heights, ends,
                   list(colors.values()))
        said = "; ".join(f"{label} from {values[0]:.3g} to {values[-1]:.3g}"
                         for label, values in data.items())
        return frame(axes, title, f"{ylabel} per step: {said}. {note}", left=left, right=right,
                     height=height, note=note)


def _covering(columns: list[list[float]]) -> list[int]:
    """For each curve how many later ones coincide with it: mostly within 1% of the range."""
    finite = [value for column in columns for value in column if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    near = max(0.01 * (high - low), ROUNDING * max(abs(low), abs(high)))

    def coincide(one, other):
        gaps = [abs(a - b) for a, b in zip(one, other, strict=False)]
        return 2 * sum(gap <= near for gap in gaps) > len(gaps)

    return [sum(coincide(one, other) for other in columns[index + 1:])
            for index, one in enumerate(columns)]


def _colors(labels: list[str]) -> dict[str, str]:
    series = [REFERENCE, *RANK_COLORS] if len(labels) > 1 else RANK_COLORS
    ranks = [re.fullmatch(r"rank (\d+)", label) for label in labels]
    return {label: rank_color(int(rank[1])) if rank else series[index % len(series)]
            for index, (label, rank) in enumerate(zip(labels, ranks, strict=True))}


def _name_ends(axes, size, names, heights, ends, colors):
    """Writes the curves' names right of ``axes``, each tied to its curve's end by a line.

    ``size``: width and height of the axes in points; ``ends``: of each curve its last point, or
    nothing. Names stay between the axes' bottom and top; of curves that end within 4 points of each
    other, the first is named on top.
    """
    across, up = size
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [to_axes.transform(end[0]) if end else None for end in ends]
    wished = [0.0 if place is None else round(place[1] * up / 4) * 4 for place in places]
    found = spread(wished[::-1], heights[::-1], 0, up, gap=2)[::-1]
    for name, place, color, y in zip(names, places, colors, found, strict=True):
        if place is not None:
            axes.plot([place[0], 1 + LEADER / across], [place[1], y / up],
                      transform=axes.transAxes, color=color, linewidth=1, label="_leader",
                      linestyle=(0, (1, 1.5)), clip_on=False, zorder=1.5)
        axes.text(1 + (LEADER + 4) / across, y / up, name, transform=axes.transAxes,
                  va="center", size=SIZE, parse_math=False, linespacing=LINE_SPACING,
                  color=INK if color == REFERENCE else color)
