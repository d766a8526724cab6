"""Predictions as pictures: predicted runs beside published ones."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from dplab.show.labels import SIZE, TITLE_SIZE, text_height, wrap
from dplab.show.palette import GRID, INK, MUTED, rank_color
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    place_in_points,
    style,
    wrapped_title,
    write_title,
)

SMALL = 9
BEYOND = 2
"""The axis of predicted over published ends here, and at its inverse."""
_TICKS = (0.5, 0.6, 0.8, 1, 1.25, 1.6, 2)
KEY = "● a run    ┃ the median of its source    ▶ beyond the axis"


class Beside(NamedTuple):
    """Runs of one source: predicted over published, or None where they are out of scope."""

    name: str
    note: str
    ratios: Sequence[float] | None


def predicted_beside_published(rows: Sequence[Beside], *, title: str) -> CourseFigure:
    """A line for each of ``rows``: its name and note, and predicted over published as dots.

    The axis is logarithmic and goes from half to twice. A ratio beyond it is an arrowhead at its
    end, and the words at the right have its number. Rows without ratios are out of scope and say
    so.
    """
    column, right = 72 * WIDTH * 0.36, 164
    texts = [wrap(row.note, SMALL, column - 24) for row in rows]
    sizes = [text_height(row.name, SIZE) + text_height(text, SMALL) + 8
             for row, text in zip(rows, texts, strict=True)]
    finding, title = title, wrapped_title(title)
    head, bottom = 46 + text_height(title, TITLE_SIZE), 48
    said = "; ".join(f"{row.name}: {_errors(row.ratios)}" for row in rows)
    with style():
        figure = CourseFigure(figsize=(WIDTH, (head + sum(sizes) + bottom) / 72),
                              alt=f"{finding}. Error: {said}.")
        axes = figure.add_axes(place_in_points(
            figure, column, bottom, 72 * WIDTH - column - right, sum(sizes)))
        axes.set(xscale="log", xlim=(1 / BEYOND, BEYOND), xlabel="predicted / published")
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.set_xticks([], minor=True)
        axes.axvline(1, color=INK, linewidth=1.2)
        y = 0.0
        for row, text, size in zip(rows, texts, sizes, strict=True):
            middle = y + size / 2
            axes.axhline(y + size, color=GRID, linewidth=0.8)
            beside: dict[str, Any] = dict(
                xytext=(12 - column, 0), textcoords="offset points", va="top",
                xycoords=("axes fraction", "data"), annotation_clip=False, parse_math=False)
            axes.annotate(row.name, (0, y + 4), size=SIZE, **beside)
            axes.annotate(text, (0, y + 4 + text_height(row.name, SIZE)), size=SMALL, color=MUTED,
                          **beside)
            _dots(axes, row.ratios or (), middle)
            axes.annotate(_errors(row.ratios), (1, middle), (10, 0), va="center", size=SIZE,
                          color=INK if row.ratios else MUTED, annotation_clip=False,
                          xycoords=("axes fraction", "data"), textcoords="offset points")
            y += size
        axes.set(ylim=(y, 0), yticks=[])
        axes.spines["left"].set_visible(False)
        write_title(figure, title, KEY)
    return figure


def _dots(axes, ratios, y):
    """Dots where the axis reaches, and arrowheads at its ends for what is beyond."""
    for marker, size, among in (
            ("o", 5, [each for each in ratios if 1 / BEYOND <= each <= BEYOND]),
            ("<", 7, [1 / BEYOND for each in ratios if each < 1 / BEYOND]),
            (">", 7, [BEYOND for each in ratios if each > BEYOND])):
        axes.plot(among, [y] * len(among), marker, color=rank_color(0), markersize=size,
                  markeredgewidth=0, alpha=0.45, clip_on=False)
    if ratios:
        median = min(max(statistics.median(ratios), 1 / BEYOND), BEYOND)
        axes.plot([median, median], [y - 8, y + 8], color=rank_color(1), linewidth=2)


def _errors(ratios):
    """The median, and from where to where: "+5% (−18% to +40%)"."""
    if not ratios:
        return "out of scope"
    low, middle, high = (f"{each - 1:+.0%}".replace("-", "−") for each in (
        min(ratios), statistics.median(ratios), max(ratios)))
    return middle if low == high else f"{middle} ({low} to {high})"
