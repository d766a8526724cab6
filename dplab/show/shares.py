"""What the time of a step, or any other whole, is made of: stacked bars with direct labels."""

import math
from collections.abc import Mapping

from matplotlib.patches import Rectangle

from dplab.show.labels import (
    CAP_HEIGHT,
    LINE,
    LINE_SPACING,
    SIZE,
    SWATCH,
    TITLE_SIZE,
    flow,
    number,
    spread,
    text_height,
    text_width,
    wrap,
)
from dplab.show.palette import FAINT, MUTED, OTHER_COLORS, PART_COLORS, readable_on
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    add_area,
    place_in_points,
    style,
    wrapped_title,
    write_title,
)

BAR = 24
LEADER = 9
GAP = 7


def time_shares(
    rows: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    unit: str = "ms",
    xlabel: str = "time per step",
    colors: Mapping[str, str] | None = None,
) -> CourseFigure:
    """Draws one horizontal bar per row, made of its parts, with every part's value beside it.

    ``rows`` maps a configuration to its parts, and a part to its length in ``unit``, at least 0;
    parts stack in the order in which they first appear, and a row may lack some. A value stands
    in its segment where it fits, else below it. ``colors`` maps a part to a colour ``#RRGGBB``.
    Raises ValueError for no rows, for a value that is negative or not finite, and for more than
    six parts that have no colour.
    """
    data = {row: {p: float(v) for p, v in values.items()} for row, values in rows.items()}
    values = [value for row in data.values() for value in row.values()]
    if not data or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError("time_shares needs at least one row, and only values of 0 or more")
    parts = list(dict.fromkeys(part for row in data.values() for part in row))
    colors = _colors(parts, colors or {})
    totals = {row: sum(values.values()) for row, values in data.items()}
    names = {row: wrap(row, SIZE, 190) for row in data}

    left = 20 + max(text_width(name, SIZE) for name in names.values())
    right = 14 + max(text_width(f"{number(t)} {unit}", SIZE, "bold") for t in totals.values())
    plot_width = max(72 * WIDTH - left - right, 120)
    scale = plot_width / (max(totals.values()) or 1)

    with style():
        figure = CourseFigure(figsize=(WIDTH, 1))
        axes = figure.add_axes((0, 0, 1, 1))
        draw = LabelledBars(axes, scale, plot_width, plot_width + right - 8, colors)
        y = draw.header(parts, next(iter(data.values())))
        for row, segments in data.items():
            y = draw.row(names[row], {p: segments.get(p, 0.0) for p in parts},
                         f"{number(totals[row])} {unit}", y)
        frame_rows(figure, axes, title, f"{xlabel} [{unit}]", left, plot_width, y, scale)
    said = "; ".join(
        f"{row}: " + ", ".join(f"{p} {number(v)}" for p, v in segments.items())
        + f", together {number(totals[row])} {unit}" for row, segments in data.items()
    )
    figure.alt = f"{title}. {said}.".replace("\n", " ")
    return figure


class LabelledBars:
    """Draws bars and labels. In its axes x is in the unit of the data, y in points, downwards."""

    def __init__(self, axes, scale, plot_width, label_width, colors):
        self.axes, self.scale, self.colors = axes, scale, colors
        self.plot_width, self.label_width = plot_width, label_width

    def header(self, parts, first):
        """Names the parts above the first bar; returns the y at which that bar starts."""
        names = dict(zip(parts, parts, strict=True))
        if not all(first.get(part) for part in parts):
            return self.swatches(parts, names, 0)
        return self.outside(parts, self.centers({p: first[p] for p in parts}), names, 0,
                            above=True)

    def row(self, name, segments, total, y):
        """Draws one bar from y on and returns the y at which the next one starts."""
        x, small = 0.0, {}
        for part, value in segments.items():
            if value == 0:
                continue
            add_area(self.axes, Rectangle((x, y), value, BAR, facecolor=self.colors[part],
                                          edgecolor="white", linewidth=0.8, label=part))
            text = number(value)
            if text_width(text, SIZE) + 6 <= value * self.scale:
                self.text(x + value / 2, y + BAR / 2, text, ha="center",
                          color=readable_on(self.colors[part]))
            else:
                small[part] = text
            x += value
        self.text(x + 6 / self.scale, y + BAR / 2, total, weight="bold")
        name_height = max(BAR, text_height(name, SIZE))
        self.text(-10 / self.scale, y + name_height / 2, name, ha="right")
        end = y + BAR
        if small:
            centers = self.centers(segments)
            end = self.outside(list(small), {p: centers[p] for p in small}, small, end)
        return max(end, y + name_height) + 14

    def centers(self, segments):
        """Each part's middle in points from the bar's start."""
        x, centers = 0.0, {}
        for part, value in segments.items():
            centers[part] = (x + value / 2) * self.scale
            x += value
        return centers

    def outside(self, parts, centers, texts, y, above=False):
        """Labels with leaders to their segments or, where they do not fit, with swatches."""
        widths = [text_width(texts[part], SIZE) for part in parts]
        wished = [centers[part] for part in parts]
        try:
            places = spread(wished, widths, 0, self.label_width, GAP)
        except ValueError:
            return self.swatches(parts, texts, y)
        moved = [abs(a - b) - w / 2 for a, b, w in zip(places, wished, widths, strict=True)]
        if above and max(moved) > 0:
            return self.swatches(parts, texts, y)
        text_y = y + LINE / 2 + (0 if above else LEADER)
        ends = (y + LINE + LEADER, y + LINE + 1) if above else (y, y + LEADER - 1)
        for part, place in zip(parts, places, strict=True):
            self.text(place / self.scale, text_y, texts[part], ha="center")
            self.axes.plot([centers[part] / self.scale, place / self.scale], ends,
                           color=MUTED, linewidth=0.8, clip_on=False)
        return y + LINE + LEADER

    def swatches(self, parts, texts, y):
        """Labels in reading order, each with a swatch of its part's colour."""
        widths = [text_width(texts[part], SIZE) for part in parts]
        for row in flow([width + SWATCH for width in widths], self.label_width, 2 * GAP):
            x, y = 0.0, y + LINE + 4
            for index in row:
                part = parts[index]
                add_area(self.axes, Rectangle(
                    (x / self.scale, y - LINE / 2 - 4.5), 9 / self.scale, 9,
                    facecolor=self.colors[part], label="_swatch", clip_on=False))
                self.text((x + SWATCH) / self.scale, y - LINE / 2, texts[part])
                x += widths[index] + SWATCH + 2 * GAP
        return y + 7

    def text(self, x, y, text, *, ha="left", **kwargs):
        if "\n" not in text:
            y += CAP_HEIGHT / 2 * SIZE
        self.axes.text(x, y, text, ha=ha, va="center" if "\n" in text else "baseline",
                       size=SIZE, parse_math=False, linespacing=LINE_SPACING, **kwargs)


def frame_rows(figure, axes, title, xlabel, left, plot_width, rows_height, scale):
    """Fits the figure around the rows and gives it its title and its axis."""
    title = wrapped_title(title)
    above, below = 12 + text_height(title, TITLE_SIZE) + 14, 46
    figure.set_figheight((above + rows_height + below) / 72)
    axes.set_position(place_in_points(figure, left, below, plot_width, rows_height))
    axes.set(xlim=(0, plot_width / scale), ylim=(rows_height, 0), xlabel=xlabel)
    axes.grid(False)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    write_title(figure, title)


def _colors(parts, chosen):
    known = {**PART_COLORS, **chosen}
    others = [part for part in parts if part not in known]
    if len(others) > len(OTHER_COLORS):
        raise ValueError(f"time_shares has no distinct colours left: give some to {others}")
    return {**known, **dict(zip(others, OTHER_COLORS, strict=False))}
