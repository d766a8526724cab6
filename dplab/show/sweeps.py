"""What came out at each batch size, over several seeds: means and ranges, panels side by side."""

import statistics
from collections.abc import Mapping, Sequence

from dplab.show.labels import (
    SIZE,
    TITLE_SIZE,
    name_ends,
    text_height,
    text_width,
)
from dplab.show.palette import MUTED, RANK_COLORS, REFERENCE
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    place_in_points,
    style,
    wrapped_title,
    write_title,
)

HEIGHT = 3.6  # inches
LEFT, GAP, BOTTOM = 52, 14, 46  # points


def batch_sweep(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    *,
    title: str,
    ylabel: str,
    yticks: Sequence[float] = (),
    dashed: Sequence[str] = (),
) -> CourseFigure:
    """One panel for each key, in it one line for each label, in it the values of all seeds.

    A line joins the means, its band goes from the least value to the largest. Both axes are
    logarithmic, so values have to be positive; all panels share the y axis. A line maps a global
    batch size, in samples, to the values of its seeds, in the unit that ``ylabel`` names;
    ``yticks``: values to mark. A label has the same colour in each panel; those in ``dashed`` are
    grey and dashed. Raises ValueError where there is nothing to draw.
    """
    if not panels or not all(panels.values()):
        raise ValueError("batch_sweep needs at least one panel, and a line in each")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    solid = [label for label in labels if label not in dashed]
    colors = dict.fromkeys(dashed, REFERENCE) | dict(zip(solid, RANK_COLORS, strict=False))
    values = [value for lines in panels.values() for points in lines.values()
              for seeds in points.values() for value in seeds]

    beside = GAP + max(text_width(label, SIZE) for label in labels)
    finding, title = title, wrapped_title(title)
    head = 24 + text_height(title, TITLE_SIZE) + text_height("x", SIZE)
    wide = (72 * WIDTH - LEFT - 10) / len(panels) - beside - 14
    high = 72 * HEIGHT - head - BOTTOM
    with style():
        figure = CourseFigure(figsize=(WIDTH, HEIGHT))
        for index, (name, lines) in enumerate(panels.items()):
            left = LEFT + index * (wide + beside + 14)
            axes = figure.add_axes(place_in_points(figure, left, BOTTOM, wide, high))
            axes.set(xscale="log", yscale="log", xlabel="global batch size",
                     ylim=(min(values) / 1.1, max(values) * 1.1))
            for label, points in lines.items():
                _line(axes, points, colors[label], label in dashed)
            _ticks(axes, lines, yticks, ylabel if index == 0 else "")
            axes.set_title(name, size=SIZE, weight="normal", color=MUTED, pad=6)
            name_ends(axes, (wide, high), list(lines),
                      [(max(points), _mean(points, max)) for points in lines.values()],
                      [colors[label] for label in lines], leader=GAP - 4)
        write_title(figure, title)
    figure.alt = f"{finding}. {ylabel} by global batch size: " + "; ".join(
        f"{name}, {label} from {_mean(points, min):.3g} to {_mean(points, max):.3g}"
        for name, lines in panels.items() for label, points in lines.items()) + "."
    return figure


def _mean(points, which):
    return statistics.mean(points[which(points)])


def _line(axes, points, color, dashed):
    batches = sorted(points)
    means = [statistics.mean(points[batch]) for batch in batches]
    axes.plot(batches, means, color=color, marker="o", markersize=4,
              linewidth=1.4 if dashed else 2, linestyle="--" if dashed else "-")
    axes.fill_between(batches, [min(points[batch]) for batch in batches],
                      [max(points[batch]) for batch in batches], color=color, alpha=0.15,
                      linewidth=0)


def _ticks(axes, lines, yticks, ylabel):
    axes.minorticks_off()
    batches = sorted({batch for points in lines.values() for batch in points})
    shown = batches[::2] if len(batches) > 5 else batches
    axes.set_xticks(shown, [f"{batch:,}" for batch in shown])
    if yticks:
        axes.set_yticks(yticks, [f"{tick:g}" if ylabel else "" for tick in yticks])
    elif not ylabel:
        axes.tick_params(labelleft=False)
    axes.set_ylabel(ylabel)
