"""Which units a rank holds whole over a step, and how many bytes that is beside the model's."""

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from dplab.show.palette import INK, MUTED, PART_COLORS, REFERENCE, readable_on
from dplab.show.theme import WIDTH, CourseFigure, add_area, style, wrapped_title


def units_over_step(spans: Sequence, nbytes: Sequence[float], names: Sequence[str], *,
                    forward: int, operations: int, chunks: float, title: str) -> CourseFigure:
    """Draws a row for each unit, with a bar while it is whole; below, the bytes of all bars.

    ``spans`` have ``unit``, ``start`` and ``end``, in operations; ``nbytes`` and ``names`` are
    those of each unit. Forward ends with operation ``forward``, and the step with ``operations``.
    ``chunks``: the bytes that the rank keeps all the time. A dashed line is all units together.
    """
    place, held = _held(spans, nbytes, operations)
    most, whole = chunks + max(held), sum(nbytes)
    factor, unit = (1e6, "MB") if whole >= 1e6 else (1e3, "kB")
    with style():
        figure = CourseFigure(figsize=(WIDTH, 1.9 + 0.24 * len(names) + 1.7), layout="constrained",
                              alt=_said(title, spans, names, most, whole, factor, unit))
        above, below = figure.subplots(2, 1, sharex=True,
                                       height_ratios=(0.24 * len(names) + 0.4, 1.7))
        figure.suptitle(wrapped_title(title), x=0.01, ha="left", weight="bold", size=13)
        for each in spans:
            color = PART_COLORS["forward" if each.start < forward else "backward"]
            add_area(above, Rectangle((each.start, each.unit - 0.4),
                                      max(each.end - each.start, operations / 400), 0.8,
                                      facecolor=color))
        above.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, operations))
        above.set_yticks(range(len(names)), names)
        above.grid(axis="x", visible=False)
        for axes in (above, below):
            axes.axvline(forward, color=MUTED, linewidth=1, linestyle=":")
        above.text(forward / 2, -0.75, "forward", ha="center", color=MUTED)
        above.text((forward + operations) / 2, -0.75, "backward", ha="center", color=MUTED)
        below.fill_between(place, [(chunks + each) / factor for each in held], step="post",
                           color=PART_COLORS["communication"], linewidth=0)
        kept = PART_COLORS["optimizer"]
        below.add_patch(Rectangle((0, 0), operations, chunks / factor, facecolor=kept,
                                  linewidth=0))
        below.axhline(whole / factor, color=REFERENCE, linestyle="--", linewidth=1.5)
        below.text(operations * 0.01, whole / factor, "the whole model", va="bottom", color=INK)
        below.text(operations * 0.01, chunks / factor * 0.45, "this rank's chunks", va="center",
                   color=readable_on(kept), weight="bold")
        below.set(ylim=(0, 1.25 * whole / factor), ylabel=f"parameters [{unit}]",
                  xlabel="operations of torch, one after another")
    return figure


def _held(spans, nbytes, operations):
    """The bytes that are whole after each operation at which that changes."""
    changes = sorted([(each.start, nbytes[each.unit]) for each in spans]
                     + [(each.end, -nbytes[each.unit]) for each in spans])
    place, held = [0], [0.0]
    for operation, change in changes:
        place.append(operation)
        held.append(held[-1] + change)
    return [*place, operations], [*held, held[-1]]


def _said(title, spans, names, most, whole, factor, unit):
    times = sorted({sum(each.unit == index for each in spans) for index in range(len(names))})
    often = " or ".join(map(str, times))
    return (f"{title}. A row for each of {len(names)} units, from {names[0]} to {names[-1]}; each "
            f"is whole {often} times, first going down the rows and then up again. Below, the "
            f"parameters that the rank holds: at most {most / factor:.2f} {unit}, and the whole "
            f"model has {whole / factor:.2f} {unit}.")
