"""Predictions as pictures: what fits and how fast it is, predicted runs beside published ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.patches import Rectangle

from dplab.show.labels import SIZE, TITLE_SIZE, text_height, wrap
from dplab.show.palette import FAINT, GRID, INK, MUTED, PART_COLORS, WARNING, rank_color
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    add_area,
    place_in_points,
    style,
    subplots,
    wrapped_title,
    write_title,
)

SMALL = 9
KEY = "● nothing fitted    ○ the share of the peak fitted to the first run of a series"


class Bar(NamedTuple):
    """A strategy: bytes of a rank; seconds of a step and, of them, those of sending alone."""

    name: str
    held_bytes: float
    seconds: float
    exposed_seconds: float
    fits: bool


class Beside(NamedTuple):
    """Runs of one kind: predicted over published, or None where it is out of scope."""

    name: str
    note: str
    ratios: Sequence[float] | None
    calibrated: Sequence[float] = ()


def choices(bars: Sequence[Bar], limit: float, *, title: str) -> CourseFigure:
    """What each strategy holds, beside ``limit`` bytes, and how long its step takes if it fits.

    Memory is shown in GB, of 1e9 bytes, and steps in ms. Bars of memory are cut off at twice the
    limit, with a gap before their end and their value beside it. Raises ValueError for no bars.
    """
    if not bars:
        raise ValueError("choices needs at least one bar")
    said = "; ".join(f"{bar.name}: {bar.held_bytes / 1e9:.3g} GB, " + (
        f"{1e3 * bar.seconds:.3g} ms, {1e3 * bar.exposed_seconds:.3g} ms of it only sending"
        if bar.fits else "does not fit") for bar in bars)
    figure, (memory, time) = subplots(1, 2, title=title, height=1.5 + 0.42 * len(bars),
                                      alt=f"{title}. Limit {limit / 1e9:.3g} GB. {said}.")
    longest = max([bar.seconds for bar in bars if bar.fits], default=1.0)
    with style():
        for place, bar in enumerate(bars):
            color = INK if bar.fits else MUTED
            _bar(memory, place, 0, min(bar.held_bytes, 2 * limit) / 1e9,
                 rank_color(0) if bar.fits else FAINT)
            memory.annotate(f"{bar.held_bytes / 1e9:,.3g} GB" if bar.held_bytes < 1e12 else
                            f"{bar.held_bytes / 1e12:,.3g} TB",
                            (max(limit, min(bar.held_bytes, 2 * limit)) / 1e9, place), (4, 0),
                            va="center", textcoords="offset points", size=SIZE, color=color)
            if not bar.fits:
                time.annotate("does not fit", (0, place), (4, 0), va="center", size=SIZE,
                              textcoords="offset points", color=MUTED)
                continue
            busy = 1e3 * (bar.seconds - bar.exposed_seconds)
            _bar(time, place, 0, busy, PART_COLORS["backward"])
            _bar(time, place, busy, 1e3 * bar.exposed_seconds, PART_COLORS["communication"])
            time.annotate(f"{1e3 * bar.seconds:,.3g} ms", (1e3 * bar.seconds, place), (4, 0),
                          va="center", textcoords="offset points", size=SIZE, color=color)
        memory.axvline(limit / 1e9, color=WARNING, linewidth=1.2, linestyle=(0, (4, 3)))
        for place, bar in enumerate(bars):
            if bar.held_bytes > 2 * limit:  # a bar that is cut off has a gap before its end
                memory.plot([1.86e-9 * limit, 1.92e-9 * limit], [place + 0.4, place - 0.4],
                            color="white", linewidth=4, solid_capstyle="butt")
        for axes, most in ((memory, 2.6 * limit / 1e9), (time, 1.35e3 * longest)):
            axes.set(xlim=(0, most), ylim=(len(bars) - 0.5, -0.5), yticks=range(len(bars)))
            axes.grid(False, axis="y")
            axes.tick_params(axis="y", length=0)
        memory.set(yticklabels=[bar.name for bar in bars], xlabel="memory of a rank [GB]")
        time.set(yticklabels=[], xlabel="a step [ms]: computing (blue),\n"
                 "then only sending (yellow)")
    return figure


def predicted_beside_published(rows: Sequence[Beside], *, title: str) -> CourseFigure:
    """A line for each of ``rows``: its name and note, and predicted over published as dots.

    Filled dots: nothing fitted; rings: ``calibrated``. Rows without ratios are out of scope and
    say so. Raises ValueError where no row has any.
    """
    ratios = [each for row in rows if row.ratios for each in (*row.ratios, *row.calibrated)]
    if not ratios:
        raise ValueError("no row has a prediction")
    column, right = 72 * WIDTH * 0.51, 100
    texts = [wrap(row.note, SMALL, column - 24) for row in rows]
    sizes = [text_height(row.name, SIZE) + text_height(text, SMALL) + 8
             for row, text in zip(rows, texts, strict=True)]
    finding, title = title, wrapped_title(title)
    head, bottom = 46 + text_height(title, TITLE_SIZE), 48
    said = "; ".join(f"{row.name}: " + (", ".join(f"{each - 1:+.0%}" for each in row.ratios)
                                        if row.ratios else "out of scope") for row in rows)
    with style():
        figure = CourseFigure(figsize=(WIDTH, (head + sum(sizes) + bottom) / 72),
                              alt=f"{finding}. Error: {said}.")
        axes = figure.add_axes(place_in_points(
            figure, column, bottom, 72 * WIDTH - column - right, sum(sizes)))
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
            if row.ratios:
                axes.plot(row.ratios, [middle] * len(row.ratios), "o", color=rank_color(0),
                          markersize=6, alpha=0.75)
                axes.plot(row.calibrated, [middle] * len(row.calibrated), "o", markersize=10,
                          color=rank_color(1), markerfacecolor="none", markeredgewidth=1.4)
            else:
                axes.text(1, middle, " out of scope", va="center", size=SIZE, color=MUTED)
            axes.annotate(_errors(row.ratios), (1, middle), (10, 0), va="center", size=SIZE,
                          xycoords=("axes fraction", "data"), textcoords="offset points",
                          annotation_clip=False)
            y += size
        low, high = min([*ratios, 1]), max([*ratios, 1])
        axes.set(ylim=(y, 0), yticks=[], xlim=(low - 0.08, high + 0.08),
                 xlabel="predicted / published")
        axes.spines["left"].set_visible(False)
        write_title(figure, title, KEY)
    return figure


def _bar(axes, place, start, length, color):
    add_area(axes, Rectangle((start, place - 0.3), length, 0.6, facecolor=color))


def _errors(ratios):
    if not ratios:
        return ""
    low, high = (f"{each - 1:+.0%}".replace("-", "−") for each in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"
