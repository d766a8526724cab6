"""What the time of a step, or any other whole, is made of: stacked bars with direct labels."""

from collections.abc import Mapping

from matplotlib.patches import Rectangle

from dplab.show import labels
from dplab.show.labels import LINE, SIZE, SWATCH, number, text_height, text_width
from dplab.show.palette import FAINT, MUTED, OTHER_COLORS, PART_COLORS, readable_on
from dplab.show.theme import WIDTH, CourseFigure, add_area, frame, style

BAR, GAP = 24, 7
LEADER = 9


def time_shares(rows: Mapping[str, Mapping[str, float]], *, title: str, unit: str = "ms",
                xlabel: str = "time per step",
                colors: Mapping[str, str] | None = None) -> CourseFigure:
    """Draws one horizontal bar per row, made of its parts, with every part's value beside it.

    ``rows`` maps a configuration to its parts, and a part to its length in ``unit``, at least 0;
    parts stack in the order in which they first appear, and a row may lack some. A value stands
    in its segment where it fits, else below it. ``colors`` maps a part to a colour ``#RRGGBB``;
    at most six parts have none there, nor in PART_COLORS.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    known = {**PART_COLORS, **(colors or {})}
    known |= zip([part for part in parts if part not in known], OTHER_COLORS, strict=False)
    totals = {row: sum(values.values()) for row, values in rows.items()}
    names = {row: labels.wrap(row, SIZE, 190) for row in rows}

    left = 20 + max(text_width(name, SIZE) for name in names.values())
    right = 14 + max(text_width(f"{number(t)} {unit}", SIZE, "bold") for t in totals.values())
    with style():
        draw = LabelledBars(left, right, max(totals.values()), known)
        y = draw.header(parts, next(iter(rows.values())))
        for row, values in rows.items():
            y = draw.row(names[row], {part: values.get(part, 0.0) for part in parts},
                         f"{number(totals[row])} {unit}", y)
        said = "; ".join(f"{row}: " + ", ".join(f"{p} {number(v)}" for p, v in values.items())
                         + f", together {number(totals[row])} {unit}"
                         for row, values in rows.items())
        return draw.finished(title, f"{said}.", f"{xlabel} [{unit}]", y)


class LabelledBars:
    """Draws bars and labels. In its axes x is in the unit of the data, y in points, downwards.

    ``left`` and ``right``: the points for labels beside bars, the longest of which is ``longest``.
    """

    def __init__(self, left, right, longest, colors):
        self.left, self.right, self.colors = left, right, colors
        self.plot_width = 72 * WIDTH - left - right
        self.label_width = self.plot_width + right - 8
        self.scale = self.plot_width / (longest or 1)  # points of a unit
        self.axes = CourseFigure(figsize=(WIDTH, 1)).add_axes((0, 0, 1, 1))

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
        end = self.outside(list(small), self.centers(segments), small, y + BAR) if small else 0
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
        if sum(widths) + GAP * (len(widths) - 1) > self.label_width:
            return self.swatches(parts, texts, y)
        places = labels.spread(wished, widths, 0, self.label_width, GAP)
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
        for row in labels.flow([width + SWATCH for width in widths], self.label_width, 2 * GAP):
            x, y = 0.0, y + LINE + 4
            for index in row:
                self.swatch(x, y - LINE / 2, self.colors[parts[index]])
                self.text((x + SWATCH) / self.scale, y - LINE / 2, texts[parts[index]])
                x += widths[index] + SWATCH + 2 * GAP
        return y + 7

    def swatch(self, x, y, color):
        """A square of 9 points, whose left side is ``x`` points from the bars' start."""
        add_area(self.axes, Rectangle((x / self.scale, y - 4.5), 9 / self.scale, 9,
                                      facecolor=color, label="_swatch", clip_on=False))

    def text(self, x, y, text, *, ha="left", **kwargs):
        lines = "\n" in text
        self.axes.text(x, y if lines else y + labels.CAP_HEIGHT / 2 * SIZE, text, ha=ha, size=SIZE,
                       va="center" if lines else "baseline", parse_math=False,
                       linespacing=labels.LINE_SPACING, **kwargs)

    def finished(self, title, said, xlabel, height):
        """The figure, with its title, text alternative and axis around rows of this height."""
        self.axes.set(xlim=(0, self.plot_width / self.scale), ylim=(height, 0), xlabel=xlabel)
        self.axes.grid(False)
        self.axes.yaxis.set_visible(False)
        self.axes.spines["left"].set_visible(False)
        self.axes.spines["bottom"].set_color(FAINT)
        return frame(self.axes, title, said, left=self.left, right=self.right, height=height)
