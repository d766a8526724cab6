"""Curves that are named at their right ends: losses, sweeps over the batch, rates over ranks."""

import math
import re
from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from dplab.show.labels import (
    LINE_SPACING,
    SIZE,
    TITLE_SIZE,
    spread,
    text_height,
    text_width,
    wrap,
)
from dplab.show.palette import INK, RANK_COLORS, REFERENCE, rank_color
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    place_in_points,
    style,
    with_title,
    wrapped_title,
    write_title,
)

HEIGHT = 3.6  # inches
LEADER = 22  # points, of the line that ties a name to its curve's end
THINNEST = 1.6
ROUNDING = 1e-5


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    *,
    title: str,
    ylabel: str = "loss",
    note: str | None = None,
    height: float = HEIGHT,
    first: int = 0,
) -> CourseFigure:
    """Draws one line per curve; of curves that coincide, each later one lies thinner on top.

    ``curves`` maps a label to its losses, shape (steps,), any real numbers; lengths may differ,
    and ``first`` is the number of the first step. A curve named "rank r" has that rank's colour,
    else the first is grey and the others follow the palette. A value that is not finite leaves a
    hole, and the label says from which step on. ``note`` stands below the title; by default it is
    the largest gap between the curves, if they coincide. ``height`` is in inches of 96 CSS pixels,
    and more where labels need it. Raises ValueError when there is no curve, or an empty one.
    """
    data = {label: [float(value) for value in values] for label, values in curves.items()}
    if not data or not all(data.values()):
        raise ValueError("loss_curves needs at least one curve, and a value in each")
    colors = _colors(list(data))
    texts = {label: wrap(_label(label, values, first), SIZE, 180)
             for label, values in data.items()}
    covering = _covering(list(data.values()))
    if note is None:
        note = _gap_between(data) if covering[0] == len(data) - 1 else ""

    heights = [text_height(text, SIZE) for text in texts.values()]
    plot_height = max(72 * height - 100, sum(heights) + 3 * len(heights))
    left, right, bottom = 66, LEADER + 12 + max(text_width(t, SIZE) for t in texts.values()), 46
    plot_width = 72 * WIDTH - left - right
    finding, title = title, wrapped_title(title)
    head = 12 + text_height(title, TITLE_SIZE) + (text_height(note, SIZE) if note else 0) + 14

    with style():
        figure = CourseFigure(figsize=(WIDTH, (bottom + plot_height + head) / 72))
        axes = figure.add_axes(place_in_points(figure, left, bottom, plot_width, plot_height))
        step = min(3.4, 13 / max(*covering, 1))
        for covers, (label, values) in zip(covering, data.items(), strict=True):
            size = THINNEST + step * covers
            axes.plot(
                range(first, first + len(values)),
                [v if math.isfinite(v) else math.nan for v in values],
                color=colors[label], linewidth=size, label=label,
                marker="o" if len(values) == 1 else None, markersize=size + 4,
            )
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(x=0.01)
        axes.set(xlim=axes.get_xlim(), ylim=_limits(axes))
        _name_ends(axes, (plot_width, plot_height), list(texts.values()),
                   [_last(values, first) for values in data.values()], list(colors.values()))
        write_title(figure, title, note)
    ends = "; ".join(f"{label} from {values[0]:.3g} to {values[-1]:.3g}"
                     for label, values in data.items())
    said = f"{ylabel} per step: {ends}. {note}"
    figure.alt = with_title(finding, " ".join(said.split()))
    return figure


def _gap_between(curves: Mapping[str, Sequence[float]]) -> str:
    """The largest distance between two curves at one step, in words; "" where it has no value."""
    columns = list(curves.values())
    if len(columns) < 2 or len({len(column) for column in columns}) > 1:
        return ""
    gap = max(max(values) - min(values) for values in zip(*columns, strict=True))
    if not all(math.isfinite(value) for column in columns for value in column):
        return ""
    if gap == 0:
        return "All curves are identical, bit for bit"
    return f"Largest gap between two curves at any step: {gap:.2g}"


def _limits(axes) -> tuple[float, float]:
    """The y limits, kept so wide that rounding errors alone do not fill the plot."""
    low, high = axes.get_ylim()
    size = max(abs(low), abs(high))
    if high - low < ROUNDING * size:
        return (low + high) / 2 - 0.05 * size, (low + high) / 2 + 0.05 * size
    return low, high


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
    series = [REFERENCE, *RANK_COLORS] if len(labels) > 1 else list(RANK_COLORS)
    colors = {}
    for index, label in enumerate(labels):
        rank = re.fullmatch(r"rank (\d+)", label)
        colors[label] = rank_color(int(rank[1])) if rank else series[index % len(series)]
    return colors


def _label(label: str, values: list[float], first: int) -> str:
    broken = [step for step, value in enumerate(values, first) if not math.isfinite(value)]
    return f"{label}\n(not finite from step {broken[0]})" if broken else label


def _last(values: list[float], first: int) -> tuple[int, float] | None:
    """A curve's last point that is drawn, if there is one."""
    finite = [(step, value) for step, value in enumerate(values, first) if math.isfinite(value)]
    return finite[-1] if finite else None


def _name_ends(axes, size, names, ends, colors):
    """Writes the curves' names right of ``axes``, each tied to its curve's end by a line.

    ``size``: width and height of the axes in points; ``ends``: the last point of each curve, or
    None for a curve that has none. Names stay between the axes' bottom and top; of curves that end
    within 4 points of each other, the first is named on top.
    """
    across, up = size
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [end and to_axes.transform(end) for end in ends]
    wished = [round((0.0 if place is None else place[1] * up) / 4) * 4 for place in places]
    found = spread(wished[::-1], [text_height(name, SIZE) for name in names][::-1],
                   0, up, gap=2)[::-1]
    for name, place, color, y in zip(names, places, colors, found, strict=True):
        if place is not None:
            axes.plot([place[0], 1 + LEADER / across], [place[1], y / up],
                      transform=axes.transAxes, color=color, linewidth=1, label="_leader",
                      linestyle=(0, (1, 1.5)), clip_on=False, zorder=1.5)
        axes.text(1 + (LEADER + 4) / across, y / up, name, transform=axes.transAxes,
                  va="center", size=SIZE, parse_math=False, linespacing=LINE_SPACING,
                  color=INK if color == REFERENCE else color)
