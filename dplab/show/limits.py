"""Two limits of a local batch in one figure: rows that hide the all-reduce, and rows that fit."""

from collections.abc import Mapping

from dplab.show.palette import MUTED, rank_color
from dplab.show.theme import CourseFigure, style, subplots

ROWS = (500, 1000, 2000, 5000, 10000, 20000, 50000)


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
