"""Gradients of several ranks as heat maps, in the order in which they lie in buckets."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.colors import SymLogNorm
from matplotlib.patches import Rectangle

from dplab.show.labels import (
    CAP_HEIGHT,
    LINE,
    LINE_SPACING,
    SIZE,
    TITLE_SIZE,
    number,
    text_height,
    text_width,
    wrap,
)
from dplab.show.palette import FAINT, INK, MUTED, PART_COLORS, rank_color
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    add_area,
    place_in_points,
    style,
    wrapped_title,
)

SMALL, ROW, BAR, GAP = 8.5, 16, 13, 7  # points, as all lengths here
BETWEEN_PARAMETERS, BETWEEN_BUCKETS = 2.5, 13
SCALE = 64  # room for the colour scale, at the right
SHOWN = 16  # elements of a parameter
LINEAR_SHARE = 20  # the scale is linear up to one twentieth of the largest value
# White at zero; the two hues stay apart for colour-blind readers. Few steps, since a notebook's PNG
# has 256 colours in all, and those of the ranks' names are to be among them.
COLORS = matplotlib.colormaps["RdBu_r"].resampled(25)


def heat_maps(panels: Mapping[str, Sequence[Mapping[str, Sequence[float]]]],
              buckets: Sequence[Sequence[str]], *, title: str, note: str | None = None,
              bars: Mapping[str, Mapping[str, float | None]] | None = None) -> CourseFigure:
    """Draws for each panel a row per rank and a block of columns per parameter.

    ``panels`` maps a panel's name to each rank's gradients, by parameter: arrays of any shape, of
    equal sizes. ``buckets`` are the parameters' names in the order of the columns; a line parts
    the buckets. Of each parameter SHOWN elements are drawn, at equal distances. All share one
    colour scale, symmetric about zero: linear around it, then logarithmic. ``bars``: for each
    heading the lengths of bars by row, drawn below; None is "not counted", and what a heading calls
    exposed has the colour of exposed communication. ``note`` stands below the title. Raises
    ValueError without a panel, a rank or a parameter, and for values that are not finite.
    """
    names = [name for bucket in buckets for name in bucket]
    if not names or not panels or not all(panels.values()):
        raise ValueError("heat_maps needs a panel with at least one rank, and a parameter")
    values = {panel: [[_sample(rank[name]) for name in names] for rank in ranks]
              for panel, ranks in panels.items()}
    largest = max(np.abs(part).max() for ranks in values.values() for row in ranks for part in row)
    if not np.isfinite(largest):
        raise ValueError("heat_maps draws finite values only")
    largest = largest or 1.0
    linear = largest / LINEAR_SHARE
    bars = bars or {}
    rows = list(dict.fromkeys(row for lengths in bars.values() for row in lengths))
    most = max(map(len, values.values()))
    left = 20 + max(text_width(text, SIZE) for text in [*rows, f"rank {most - 1}"])
    plot_width = 72 * WIDTH - left - SCALE
    finding, title = title, wrapped_title(title)
    note = wrap(note or "", SIZE, 72 * WIDTH - 24)

    with style():
        figure = CourseFigure(figsize=(WIDTH, 1))
        axes = figure.add_axes((0, 0, 1, 1))
        draw = _Board(axes, plot_width, SymLogNorm(linear, vmin=-largest, vmax=largest))
        y = text_height(title, TITLE_SIZE)
        draw.text(12 - left, y - LINE / 2, title, TITLE_SIZE, weight="bold")
        y += 4 + (text_height(note, SIZE) if note else 0)
        draw.text(12 - left, y - LINE / 2, note, color=MUTED)
        y = top = draw.columns(buckets, values, y + 10)
        for panel, ranks in values.items():
            y = draw.panel(panel, ranks, y)
        bottom = y - GAP
        y = draw.bars(bars, rows, y + GAP) if bars else y
        figure.set_figheight((y + 24) / 72)
        axes.set_position(place_in_points(figure, left, 12, plot_width, y))
        axes.set(xlim=(0, plot_width), ylim=(y, 0))
        axes.axis("off")
        scale = figure.add_axes(place_in_points(
            figure, left + plot_width + 12, 12 + y - bottom, 8, bottom - top - LINE))
        figure.colorbar(draw.mesh, cax=scale, ticks=[-largest, -linear, 0, linear, largest],
                        format=lambda tick, _: f"{tick:+.2g}" if tick else "0")
        scale.minorticks_off()
        scale.tick_params(length=0, labelsize=SMALL)
        scale.grid(False)
    said = "; ".join(
        f"{heading}: " + ", ".join(f"{row} {_length(value)}" for row, value in lengths.items())
        for heading, lengths in bars.items())
    figure.alt = " ".join(f"{finding}. {len(names)} parameters in {len(buckets)} buckets on "
                          f"{len(ranks)} ranks: {', '.join(panels)}. {said} {note}".split())
    return figure


def _sample(values):
    flat = np.asarray(values, dtype=float).ravel()
    return flat[np.linspace(0, flat.size - 1, min(SHOWN, flat.size)).round().astype(int)]


def _length(value):
    return "not counted" if value is None else str(value) if value == int(value) else number(value)


class _Board:
    """Draws in axes of points, x from the first column, y downwards."""

    def __init__(self, axes, width, norm):
        self.axes, self.width, self.norm = axes, width, norm

    def text(self, x, y, text, size=SIZE, **kwargs):
        """``text`` with the middle of its last line at height y."""
        self.axes.text(x, y + CAP_HEIGHT / 2 * size, text, va="baseline", size=size,
                       parse_math=False, linespacing=LINE_SPACING, **kwargs)

    def columns(self, buckets, values, y):
        """Decides where the parameters' columns lie, and names them."""
        sizes = [part.size for part in next(iter(values.values()))[0]]
        gaps = BETWEEN_BUCKETS * (len(buckets) - 1)
        gaps += BETWEEN_PARAMETERS * (len(sizes) - len(buckets))
        cell = (self.width - gaps) / sum(sizes)
        self.edges, self.lines, texts, x = [], [], [], 0.0
        for index, bucket in enumerate(buckets):
            start = x
            for name in bucket:
                end = x + cell * sizes[len(self.edges)]
                self.edges.append((x, end))
                texts.append(((x + end) / 2, name.replace(".", "\n")))
                x = end + BETWEEN_PARAMETERS
            x -= BETWEEN_PARAMETERS
            self.axes.plot([start, x], [y + LINE, y + LINE], color=MUTED, linewidth=1)
            self.text((start + x) / 2, y + LINE / 2 - 2, f"bucket {index}", ha="center")
            self.lines.append(x + BETWEEN_BUCKETS / 2)
            x += BETWEEN_BUCKETS
        y += LINE + 5 + max(text_height(text, SMALL) for _, text in texts)
        for middle, text in texts:
            self.text(middle, y - SMALL / 2, text, SMALL, ha="center", color=MUTED)
        return y + 4

    def panel(self, name, ranks, y):
        self.text(0, y + LINE / 2, name, weight="bold")
        y += LINE + 2
        pitch = max(5, min(ROW, 12 * ROW / len(ranks)))
        bottom = y + pitch * len(ranks)
        for index, (start, end) in enumerate(self.edges):
            grid = np.stack([row[index] for row in ranks])
            self.mesh = self.axes.pcolormesh(
                np.linspace(start, end, grid.shape[1] + 1),
                np.linspace(y, bottom, grid.shape[0] + 1), grid, norm=self.norm, cmap=COLORS)
            self.axes.add_patch(Rectangle((start, y), end - start, bottom - y, fill=False,
                                          edgecolor=FAINT, linewidth=0.8))
        for line in self.lines[:-1]:
            self.axes.plot([line, line], [y, bottom], color=INK, linewidth=1.4)
        every = 1 if pitch >= LINE else max(1, len(ranks) - 1)
        for rank in range(0, len(ranks), every):
            self.text(-8, y + pitch * (rank + 0.5), f"rank {rank}", ha="right",
                      color=rank_color(rank))
        return bottom + GAP

    def bars(self, bars, rows, y):
        slot = (self.width + SCALE - 12) / len(bars)
        headings = [wrap(heading, SIZE, slot - 14, "bold") for heading in bars]
        y += max(text_height(heading, SIZE) for heading in headings)
        for index, (heading, lengths) in enumerate(zip(headings, bars.values(), strict=True)):
            x = index * slot
            self.text(x, y - LINE / 2, heading, weight="bold")
            texts = {row: _length(lengths.get(row)) for row in rows}
            room = slot - 20 - max(text_width(text, SIZE) for text in texts.values())
            longest = max([value for value in lengths.values() if value] or [1])
            color = PART_COLORS["communication" if "exposed" in heading else "optimizer"]
            for place, row in enumerate(rows):
                middle = y + 4 + (place + 0.5) * (BAR + 4)
                length = max(0.0, (lengths.get(row) or 0) / longest * room)
                add_area(self.axes, Rectangle((x, middle - BAR / 2), length, BAR,
                                              facecolor=color, clip_on=False))
                self.text(x + length + 4, middle, texts[row])
                if index == 0:
                    self.text(-8, middle, row, ha="right")
        return y + 4 + len(rows) * (BAR + 4)
