"""What the time of a step, or any other whole, is made of: stacked bars with direct labels."""

import math
from collections.abc import Mapping

from matplotlib.patches import Rectangle

from dplab.show.labels import CAP_HEIGHT, flow, spread, text_height, text_width, wrap
from dplab.show.theme import FAINT, INK, MUTED, CourseFigure, style

PART_COLORS = {
    "forward": "#A9C4E0",
    "backward": "#4F7CAC",
    "communication": "#F0B429",
    "optimizer": "#8A929B",
}
OTHER_COLORS = ("#373790", "#C46A2B", "#EEEAB8", "#5B2A0C", "#66A4FB", "#7B3A49")

SIZE = 10.5
TITLE_SIZE = 12
BAR = 24
LINE = SIZE * 1.25
LEADER = 9
GAP = 7
SWATCH = 13


def time_shares(
    rows: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    unit: str = "ms",
    xlabel: str = "time per step",
    colors: Mapping[str, str] | None = None,
    width: float = 7.5,
    alt: str | None = None,
) -> CourseFigure:
    """Draws one horizontal bar per row, made of its parts, with every part's value beside it.

    ``rows`` maps a configuration to its parts, and a part to its length in ``unit``, at least 0;
    parts stack in the order in which they first appear, and a row may lack some. A value stands
    in its segment where it fits, else below it. ``colors`` maps a part to a colour; ``width`` is
    in inches. Raises ValueError for no rows, for a value that is negative or not finite, and
    for more than six parts that have no colour.
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
    plot_width = max(72 * width - left - right, 120)
    scale = plot_width / (max(totals.values()) or 1)
    title = wrap(title, TITLE_SIZE, 72 * width - 24, "bold")

    with style():
        figure = CourseFigure(figsize=(width, 1), alt=alt or "")
        axes = figure.add_axes((0, 0, 1, 1))
        draw = Bars(axes, scale, plot_width, plot_width + right - 8, colors)
        y = draw.header(parts, next(iter(data.values())))
        for row, segments in data.items():
            y = draw.row(names[row], {p: segments.get(p, 0.0) for p in parts},
                         f"{number(totals[row])} {unit}", y)
        frame_rows(figure, axes, title, f"{xlabel} [{unit}]", left, plot_width, y, scale)
    if alt is None:
        said = "; ".join(
            f"{row}: " + ", ".join(f"{p} {number(v)}" for p, v in segments.items())
            + f", together {number(totals[row])} {unit}" for row, segments in data.items()
        )
        figure.alt = f"{title}. {said}.".replace("\n", " ")
    return figure


def number(value: float) -> str:
    """``value`` with about three significant digits and no exponent where it can do without."""
    if value == 0:
        return "0"
    if value < 0.01:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


class Bars:
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
            self.axes.add_patch(Rectangle((x, y), value, BAR, facecolor=self.colors[part],
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
                self.axes.add_patch(Rectangle(
                    (x / self.scale, y - LINE / 2 - 4.5), 9 / self.scale, 9,
                    facecolor=self.colors[part], label="_swatch", clip_on=False))
                self.text((x + SWATCH) / self.scale, y - LINE / 2, texts[part])
                x += widths[index] + SWATCH + 2 * GAP
        return y + 7

    def text(self, x, y, text, *, ha="left", **kwargs):
        if "\n" not in text:
            y += CAP_HEIGHT / 2 * SIZE
        self.axes.text(x, y, text, ha=ha, va="center" if "\n" in text else "baseline",
                       size=SIZE, parse_math=False, linespacing=1.25, **kwargs)


def frame_rows(figure, axes, title, xlabel, left, plot_width, rows_height, scale):
    """Fits the figure around the rows and gives it its title and its axis."""
    width = 72 * figure.get_figwidth()
    above, below = 12 + text_height(title, TITLE_SIZE) + 14, 46
    height = above + rows_height + below
    figure.set_figheight(height / 72)
    axes.set_position((left / width, below / height, plot_width / width, rows_height / height))
    axes.set(xlim=(0, plot_width / scale), ylim=(rows_height, 0), xlabel=xlabel)
    axes.grid(False)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    figure.text(12 / width, 1 - 12 / height, title, size=TITLE_SIZE, weight="bold", va="top",
                parse_math=False, linespacing=1.25)


def _colors(parts, chosen):
    known = {**PART_COLORS, **chosen}
    others = [part for part in parts if part not in known]
    if len(others) > len(OTHER_COLORS):
        raise ValueError(f"time_shares has no distinct colours left: give some to {others}")
    return {**known, **dict(zip(others, OTHER_COLORS, strict=False))}


def readable_on(color):
    """INK or white, whichever has the higher contrast with ``color`` (#RRGGBB)."""
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.07 else INK
