"""One look for the whole course: colours, matplotlib settings, and how a figure is displayed.

Sizes are in points; JupyterLab shows 0.75 pt as one CSS pixel, so 10.5 pt is 14 px. Every figure
has an opaque white ground, which keeps it readable on a dark page.
"""

import base64
import io
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import matplotlib.style
from cycler import cycler
from matplotlib.figure import Figure
from PIL import Image

from dplab.show.labels import wrap
from dplab.show.palette import RANK_COLORS

INK = "#1F2933"
MUTED = "#5B6670"
FAINT = "#C9D1D9"
WARNING = "#B3261E"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 10.5,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.prop_cycle": cycler(color=RANK_COLORS),
    "grid.color": "#E6EAEE",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.color": INK,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.figsize": (7.5, 3.6),
    "figure.facecolor": "white",
    "savefig.facecolor": "auto",
    "svg.fonttype": "path",
    "svg.hashsalt": "dplab",
}


@contextmanager
def style():
    """Draws in the course's style inside the block, whatever was set before, and restores it."""
    with matplotlib.style.context(STYLE, after_reset=True):
        yield


class CourseFigure(Figure):
    """A matplotlib figure with a text alternative, which a notebook shows once, as PNG.

    It is not registered with pyplot: nothing has to be closed, and no cell shows it twice. It is a
    PNG, two pixels for each CSS pixel, since JupyterLab hides SVG until the reader runs the cell.
    """

    def __init__(self, *args, alt: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.alt = alt

    def _ipython_display_(self):
        from IPython.display import display

        png, width, height = self.embedded()
        bundle = {"image/png": png, "text/plain": self.alt or repr(self)}
        metadata = {"image/png": {"width": width, "height": height, "alt": self.alt}}
        display(bundle, raw=True, metadata=metadata)

    def embedded(self) -> tuple[str, int, int]:
        """The PNG in base64, and the width and height in CSS pixels at which a page shows it."""
        width, height = (round(96 * inches) for inches in self.get_size_inches())
        return base64.b64encode(to_png(self)).decode(), width, height


def subplots(rows: int = 1, columns: int = 1, *, title: str = "", xlabel: str = "",
             ylabel: str = "", width: float = 7.5, height: float = 3.6, alt: str = ""):
    """An empty ``(figure, axes)`` in the course's style, for a plot of a chapter's own.

    ``title`` states what the figure finds, the labels go to every Axes, ``alt`` says the plot in
    words. ``width`` and ``height`` are in inches (96 CSS pixels each); ``axes`` is one Axes, or an
    array of shape (rows, columns) squeezed as by ``plt.subplots``.
    """
    with style():
        figure = CourseFigure(figsize=(width, height), layout="constrained", alt=alt or title)
        figure.get_layout_engine().set(w_pad=0.14, h_pad=0.14)
        axes = figure.subplots(rows, columns)
        if title:
            figure.suptitle(wrap(title, 12, 72 * width - 24, "bold"), x=12 / (72 * width),
                            ha="left", size=12, weight="bold", parse_math=False)
        for one in figure.axes:
            one.set(xlabel=xlabel, ylabel=ylabel)
        return figure, axes


def to_png(figure: Figure) -> bytes:
    """The figure as PNG, 192 pixels an inch; its 128 colours keep notebooks small."""
    drawn, small = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=192)
    Image.open(drawn).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    return small.getvalue()


def to_svg(figure: Figure, title: str = "") -> bytes:
    """The figure as SVG, the same bytes each time: no date, ids hashed with a fixed salt."""
    alt = getattr(figure, "alt", "")
    metadata = {"Date": None, "Creator": None}
    if title or alt:
        metadata["Title"] = title or alt
    if alt:
        metadata["Description"] = alt
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="svg", metadata=metadata)
    lines = buffer.getvalue().decode().splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()


def save_beside(figure: Figure, script: str, title: str) -> Path:
    """Writes the figure as ``NAME.svg`` next to ``NAME.py`` and returns its path."""
    target = Path(script).resolve().with_suffix(".svg")
    target.write_bytes(to_svg(figure, title))
    return target
