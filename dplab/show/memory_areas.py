"""What a rank's memory holds over a step: stacked areas by category, and which units are whole."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.patches import Rectangle

from dplab.show import palette
from dplab.show.labels import SIZE, SWATCH, TITLE_SIZE, number, spread, text_height, text_width
from dplab.show.theme import WIDTH, CourseFigure, add_area, frame, style, wrapped_title

CATEGORY_COLORS = {  # from the bottom up
    "parameters": palette.PART_COLORS["backward"],
    "optimizer": palette.PART_COLORS["optimizer"],
    "gradients": palette.OTHER_COLORS[1],
    "gathered": palette.PART_COLORS["forward"],
    "communication": palette.PART_COLORS["communication"],
    "activations": palette.OTHER_COLORS[5],
    "other": palette.OTHER_COLORS[2],
}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
HEIGHT = 187.2  # points, of the axes, phases and title together, and more where labels need it
PITCH = SIZE * 1.45


def memory_over_step(samples: Sequence, phases: Sequence = (), *, title: str) -> CourseFigure:
    """Draws what is held after each change, one area on another, and what that is at the peak.

    ``samples``, in order: ``op``, a count of operations, and ``bytes``, each of CATEGORY_COLORS to
    bytes; those of one ``op`` share its width. Categories that never hold anything are left out.
    ``phases`` have ``name``, ``start``, ``end`` in operations.
    """
    rows = [dict(sample.bytes) for sample in samples]
    categories = [each for each in CATEGORY_COLORS if any(row.get(each) for row in rows)]
    totals = [sum(row.values()) for row in rows]
    peak = max(range(len(rows)), key=totals.__getitem__)
    factor, unit = next((f, u) for f, u in UNITS if totals[peak] >= f or f == 1)
    edges = [op + place / count for op, count in Counter(each.op for each in samples).items()
             for place in range(count)]
    end = max([edges[-1] + 1, *(phase.end for phase in phases)])
    edges.append(end)

    total = number(totals[peak] / factor)
    digits = len(total.partition(".")[2])
    texts = {category: f"{category} {rows[peak].get(category, 0) / factor:,.{digits}f}"
             for category in reversed(categories)}
    head = f"{total} {unit} at the peak"
    left = 66
    right = 24 + max([text_width(head, SIZE, "bold"),
                      *(SWATCH + text_width(text, SIZE) for text in texts.values())])
    width = 72 * WIDTH - left - right
    names = [phase.name for phase in phases]
    centers = spread([(phase.start + phase.end) / 2 / end * width for phase in phases],
                     [text_width(name, SIZE) for name in names], 0, width, gap=6)
    above = PITCH + 2 if phases else 2
    height = max(HEIGHT - above - text_height(wrapped_title(title), TITLE_SIZE),
                 PITCH * (len(texts) + 2))

    with style():
        axes = CourseFigure(figsize=(WIDTH, 1)).add_axes((0, 0, 1, 1))
        low = [0.0] * len(edges)
        for category in categories:
            own = [row.get(category, 0) / factor for row in rows]
            high = [a + b for a, b in zip(low, [*own, own[-1]], strict=True)]
            color = CATEGORY_COLORS[category]
            axes.fill_between(edges, low, high, step="post", color=color, linewidth=0,
                              label=category)
            if palette.outline(color) != color:
                held = [index for index, value in enumerate(own) if value]
                axes.hlines([high[index] for index in held], [edges[index] for index in held],
                            [edges[index + 1] for index in held], palette.outline(color),
                            linewidth=0.8, label="_outline")
            low = high
        axes.set(xlim=(0, end), ylim=(0, 1.04 * totals[peak] / factor or 1),
                 xlabel="operations of torch since the step began",
                 ylabel=f"memory of one rank [{unit}]")
        axes.grid(False, axis="x")
        for place in sorted({phase.start for phase in phases} - {0}):
            axes.axvline(place, color=palette.MUTED, linewidth=0.8)
        axes.plot([edges[peak]], [totals[peak] / factor], "o", color=palette.INK, markersize=4,
                  clip_on=False, label="_peak")

        def write(across, up, text, **options):
            axes.text(across / width, up / height, text, transform=axes.transAxes,
                      va="center", size=SIZE, parse_math=False, **options)

        for name, center in zip(names, centers, strict=True):
            write(center, height + 4 + PITCH / 2, name, ha="center", color=palette.MUTED)
        across, up = width + 12, height - PITCH / 2
        write(across, up, head, weight="bold")
        for category, text in texts.items():
            up -= PITCH
            add_area(axes, Rectangle((across / width, (up - 4.5) / height), 9 / width, 9 / height,
                                     transform=axes.transAxes, clip_on=False, label="_swatch",
                                     facecolor=CATEGORY_COLORS[category]))
            write(across + SWATCH, up, text)
        during = [f", in {phase.name}" for phase in phases
                  if phase.start < samples[peak].op <= phase.end][:1]
        said = f"{head}{''.join(during)}: {', '.join(texts.values())}, in {unit}."
        if phases:
            said += f" Phases: {', '.join(names)}."
        return frame(axes, title, said, left=left, right=right, height=height, above=above)


def units_over_step(spans: Sequence, nbytes: Sequence[float], names: Sequence[str], *,
                    forward: int, operations: int, chunks: float, title: str) -> CourseFigure:
    """Draws a row for each unit, with a bar while it is whole; below, the bytes of all bars.

    ``spans`` have ``unit``, ``start`` and ``end``, in operations; ``nbytes`` and ``names`` are
    those of each unit. Forward ends with operation ``forward``, and the step with ``operations``.
    ``chunks``: the bytes that the rank keeps all the time. A dashed line is all units together.
    """
    changes = sorted([(0, chunks), (operations, 0), *((each.start, nbytes[each.unit])
                     for each in spans), *((each.end, -nbytes[each.unit]) for each in spans)])
    held = list(accumulate(change for _, change in changes))
    whole = sum(nbytes)
    factor, unit = next((f, u) for f, u in UNITS if whole >= f)
    often = sorted({sum(each.unit == index for each in spans) for index in range(len(names))})
    said = (f"{title}. A row for each of {len(names)} units, from {names[0]} to {names[-1]}; each "
            f"is whole {' or '.join(map(str, often))} times, first going down the rows and then up "
            f"again. Below, the parameters that the rank holds: at most {max(held) / factor:.2f} "
            f"{unit}, and the whole model has {whole / factor:.2f} {unit}.")
    with style():
        rows = 0.24 * len(names)
        figure = CourseFigure(figsize=(WIDTH, rows + 3.6), layout="constrained", alt=said)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(rows + 0.4, 1.7))
        figure.suptitle(wrapped_title(title), x=0.01, ha="left", weight="bold", size=13)
        for each in spans:
            color = palette.PART_COLORS["forward" if each.start < forward else "backward"]
            add_area(above, Rectangle((each.start, each.unit - 0.4),
                                      max(each.end - each.start, operations / 400), 0.8,
                                      facecolor=color))
        above.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, operations))
        above.set_yticks(range(len(names)), names)
        above.grid(axis="x", visible=False)
        for axes in (above, below):
            axes.axvline(forward, color=palette.MUTED, linewidth=1, linestyle=":")
        above.text(forward / 2, -0.75, "forward", ha="center", color=palette.MUTED)
        above.text((forward + operations) / 2, -0.75, "backward", ha="center", color=palette.MUTED)
        below.fill_between([place for place, _ in changes], [each / factor for each in held],
                           step="post", color=palette.PART_COLORS["communication"], linewidth=0)
        kept = palette.PART_COLORS["optimizer"]
        below.add_patch(Rectangle((0, 0), operations, chunks / factor, facecolor=kept,
                                  linewidth=0))
        below.axhline(whole / factor, color=palette.REFERENCE, linestyle="--", linewidth=1.5)
        below.text(operations * 0.01, whole / factor, "the whole model", va="bottom",
                   color=palette.INK)
        below.text(operations * 0.01, chunks / factor * 0.45, "this rank's chunks", va="center",
                   color=palette.readable_on(kept), weight="bold")
        below.set(ylim=(0, 1.25 * whole / factor), ylabel=f"parameters [{unit}]",
                  xlabel="operations of torch, one after another")
    return figure
