"""What a rank's memory holds over a step: stacked areas, by category."""

from collections import Counter
from collections.abc import Sequence

from matplotlib.patches import Rectangle

from dplab.show.labels import SIZE, SWATCH, TITLE_SIZE, number, text_height, text_width
from dplab.show.palette import INK, MUTED, OTHER_COLORS, PART_COLORS, outline
from dplab.show.theme import (
    WIDTH,
    CourseFigure,
    add_area,
    place_in_points,
    style,
    wrapped_title,
    write_title,
)

CATEGORY_COLORS = {  # from the bottom up
    "parameters": PART_COLORS["backward"],
    "optimizer": PART_COLORS["optimizer"],
    "gradients": OTHER_COLORS[1],
    "gathered": PART_COLORS["forward"],
    "communication": PART_COLORS["communication"],
    "activations": OTHER_COLORS[5],
    "other": OTHER_COLORS[2],
}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
HEIGHT = 3.6  # inches, and more where labels need it
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
    most = totals[peak]
    factor, unit = next((f, u) for f, u in UNITS if most >= f or f == 1)
    x = _places([sample.op for sample in samples])
    end = max([x[-1] + 1, *(phase.end for phase in phases)])

    shown = categories[::-1]
    total = number(totals[peak] / factor)
    digits = len(total.partition(".")[2])
    texts = [f"{category} {rows[peak].get(category, 0) / factor:,.{digits}f}" for category in shown]
    head = f"{total} {unit} at the peak"
    left, bottom = 66, 46
    right = 24 + max([text_width(head, SIZE, "bold"),
                      *(SWATCH + text_width(text, SIZE) for text in texts)])
    plot_width = max(72 * WIDTH - left - right, 120)
    rows_of_phases = _rows_of([(phase.name, (phase.start + phase.end) / 2 / end * plot_width)
                               for phase in phases], plot_width)
    finding, title = title, wrapped_title(title)
    above = 12 + text_height(title, TITLE_SIZE) + 10 + PITCH * len(rows_of_phases) + 6
    plot_height = max(72 * HEIGHT - above - bottom, PITCH * (len(texts) + 2))

    with style():
        figure = CourseFigure(figsize=(WIDTH, (above + plot_height + bottom) / 72))
        axes = figure.add_axes(place_in_points(figure, left, bottom, plot_width, plot_height))
        low = [0.0] * (len(rows) + 1)
        for category in categories:
            own = [row.get(category, 0) / factor for row in rows]
            high = [a + b for a, b in zip(low, [*own, own[-1]], strict=True)]
            color, edges = CATEGORY_COLORS[category], [*x, end]
            axes.fill_between(edges, low, high, step="post", color=color, linewidth=0,
                              label=category)
            if outline(color) != color:
                held = [index for index, value in enumerate(own) if value]
                axes.hlines([high[index] for index in held], [edges[index] for index in held],
                            [edges[index + 1] for index in held], outline(color),
                            linewidth=0.8, label="_outline")
            low = high
        axes.set(xlim=(0, end), ylim=(0, 1.04 * most / factor or 1),
                 xlabel="operations of torch since the step began",
                 ylabel=f"memory of one rank [{unit}]")
        axes.grid(False, axis="x")
        for place in sorted({phase.start for phase in phases} - {0}):
            axes.axvline(place, color=MUTED, linewidth=0.8)
        axes.plot([x[peak]], [totals[peak] / factor], "o", color=INK, markersize=4, clip_on=False,
                  label="_peak")

        def write(across, up, text, **options):
            axes.text(across / plot_width, up / plot_height, text, transform=axes.transAxes,
                      va="center", size=SIZE, parse_math=False, **options)

        for row, placed in enumerate(rows_of_phases):
            for name, center in placed:
                write(center, plot_height + 8 + PITCH * (row + 0.5) - 4, name, ha="center",
                      color=MUTED)
        across, up = plot_width + 12, plot_height - PITCH / 2
        write(across, up, head, weight="bold")
        for category, text in zip(shown, texts, strict=True):
            up -= PITCH
            add_area(axes, Rectangle((across / plot_width, (up - 4.5) / plot_height),
                                     9 / plot_width, 9 / plot_height, transform=axes.transAxes,
                                     facecolor=CATEGORY_COLORS[category], clip_on=False,
                                     label="_swatch"))
            write(across + SWATCH, up, text)
        write_title(figure, title)
    said = _said(samples, phases, peak, head, texts, unit)
    figure.alt = " ".join(f"{finding}. {said}".split())
    return figure


def _places(ops):
    """Where each sample begins: those of one operation share it."""
    counts, seen, places = Counter(ops), Counter(), []
    for op in ops:
        places.append(op + seen[op] / counts[op])
        seen[op] += 1
    return places


def _rows_of(labels, width):
    """The (text, centre in points), in rows from below in which none covers another."""
    rows, ends = [], []
    for text, center in labels:
        half = text_width(text, SIZE) / 2
        center = min(max(center, half), max(width - half, half))
        row = next((i for i, last in enumerate(ends) if last + 6 <= center - half), len(rows))
        if row == len(rows):
            rows.append([])
            ends.append(0.0)
        rows[row].append((text, center))
        ends[row] = center + half
    return rows


def _said(samples, phases, peak, head, texts, unit):
    during = [phase.name for phase in phases if phase.start < samples[peak].op <= phase.end]
    where = f", in {during[0]}" if during else ""
    last = phases and f" Phases: {', '.join(phase.name for phase in phases)}."
    return f"{head}{where}: {', '.join(texts)}, in {unit}.{last or ''}"
