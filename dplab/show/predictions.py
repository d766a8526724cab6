"""Predictions as pictures: beside published runs, and as limits of a local batch."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dplab.show.labels import SIZE, text_height, wrap
from dplab.show.palette import GRID, INK, MUTED, rank_color
from dplab.show.theme import WIDTH, CourseFigure, frame, style, subplots

SMALL = 9
BEYOND = 2
"""The axis of predicted over published ends here, and at its inverse."""
_TICKS = (0.5, 0.6, 0.8, 1, 1.25, 1.6, 2)
KEY = "● a run    ┃ the median of its source    ▶ beyond the axis"
ROWS = (500, 1000, 2000, 5000, 10000, 20000, 50000)  # ticks of the local batch


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
    column = 72 * WIDTH * 0.36
    texts = [wrap(row.note, SMALL, column - 24) for row in rows]
    sizes = [text_height(row.name, SIZE) + text_height(text, SMALL) + 8
             for row, text in zip(rows, texts, strict=True)]
    with style():
        axes = CourseFigure(figsize=(WIDTH, 1)).add_axes((0, 0, 1, 1))
        axes.set(xscale="log", xlim=(1 / BEYOND, BEYOND), xlabel="predicted / published")
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.set_xticks([], minor=True)
        axes.axvline(1, color=INK, linewidth=1.2)
        outside: dict[str, Any] = dict(textcoords="offset points", annotation_clip=False,
                                       xycoords=("axes fraction", "data"), parse_math=False)
        y = 0.0
        for row, text, size in zip(rows, texts, sizes, strict=True):
            axes.axhline(y + size, color=GRID, linewidth=0.8)
            axes.annotate(row.name, (0, y + 4), (12 - column, 0), size=SIZE, va="top", **outside)
            axes.annotate(text, (0, y + 4 + text_height(row.name, SIZE)), (12 - column, 0),
                          size=SMALL, color=MUTED, va="top", **outside)
            _dots(axes, row.ratios or (), y + size / 2)
            axes.annotate(_errors(row.ratios), (1, y + size / 2), (10, 0), va="center", size=SIZE,
                          color=INK if row.ratios else MUTED, **outside)
            y += size
        axes.set(ylim=(y, 0), yticks=[])
        axes.spines["left"].set_visible(False)
        said = "; ".join(f"{row.name}: {_errors(row.ratios)}" for row in rows)
        return frame(axes, title, f"Error: {said}.", note=KEY, left=column, right=164, height=y,
                     above=20 - text_height(KEY, SIZE), below=48)


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


@style()
def row_limits(needed: Mapping[str, float], fitting: Mapping[str, float], *,
               title: str) -> CourseFigure:
    """Draws the time of the all-reduce over that of backward for each link, over the local batch.

    ``needed``: by link, the rows at which both take as long; ``fitting``: by model, the rows at
    which memory is full, each a dashed wall. The title states what the figure finds.
    """
    figure, axes = subplots(
        title=title, xlabel="rows (tokens) that a rank computes at a time", height=4.4,
        ylabel="all-reduce ÷ backward, in time",
        alt="The time of the all-reduce over that of backward falls with the rows. It reaches 1 at "
        + ", ".join(f"{rows:,.0f} rows over {link}" for link, rows in needed.items())
        + ". Memory is full at "
        + ", ".join(f"{rows:,.0f} rows for {model}" for model, rows in fitting.items()) + ".")
    slowest_first = sorted(needed, key=needed.__getitem__, reverse=True)
    for number, (link, rows) in enumerate(needed.items()):
        ratios = [rows / end for end in (ROWS[0], ROWS[-1])]
        axes.loglog((ROWS[0], ROWS[-1]), ratios, color=rank_color(number))
        # In turn above a line's beginning and below its end, where neighbours are close.
        above = slowest_first.index(link) % 2 == 0
        axes.annotate(link, (ROWS[0], ratios[0]) if above else (ROWS[-1], ratios[-1]),
                      (4, 3) if above else (-4, -6), textcoords="offset points",
                      ha="left" if above else "right", va="bottom" if above else "top",
                      color=rank_color(number))
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.annotate("below: hidden", (ROWS[0], 1), (4, -14), textcoords="offset points",
                  color=MUTED)
    for model, rows in fitting.items():
        axes.axvline(rows, color=MUTED, linewidth=1, linestyle="--")
        axes.annotate(f"full:\n{model}", (rows, 200), (-4, -4), ha="right", va="top",
                      textcoords="offset points", color=MUTED)
    axes.set(xlim=(ROWS[0], ROWS[-1]), ylim=(0.03, 200))
    axes.set_xticks(ROWS, [f"{rows:,}" for rows in ROWS])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    return figure
