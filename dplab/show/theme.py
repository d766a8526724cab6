"""One look for the whole course: colours, matplotlib settings, and how a figure is displayed.

Sizes are in points; JupyterLab shows 0.75 pt as one CSS pixel, so 10.5 pt is 14 px. Every figure
has an opaque white ground, which keeps it readable on any page; as SVG it also has other colours,
which it takes on a dark one.
"""

import base64
import html
import io
import re
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import matplotlib.style
from cycler import cycler
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from PIL import Image

from dplab.show.labels import LINE_SPACING, SIZE, TITLE_SIZE, text_height, wrap
from dplab.show.palette import GRID, INK, MUTED, RANK_COLORS, on_dark, outline

WIDTH = 7.5
"""Inches, for all figures but a chapter's own."""

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
    "axes.titlesize": TITLE_SIZE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": SIZE,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.prop_cycle": cycler(color=RANK_COLORS),
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.color": INK,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "svg.hashsalt": "dplab",
}

DARK_PAGE = ':is([data-jp-theme-light="false"], [data-theme="dark"], .dark, .vscode-dark)'
"""Selects the body, or the root, of a page in a dark theme: JupyterLab, a book, an editor."""
PAGE_OF_DRAWINGS = f"""{DARK_PAGE} img {{ color-scheme: dark; }}
[data-jp-theme-light="true"] img {{ color-scheme: light; }}"""
"""JupyterLab does not say to the SVG drawings in a page which theme it has; this does."""


@contextmanager
def style():
    """Draws in the course's style inside the block, whatever was set before, and restores it."""
    with matplotlib.style.context(STYLE, after_reset=True):
        yield


class CourseFigure(Figure):
    """A matplotlib figure with a text alternative, which a notebook shows once.

    It is not registered with pyplot: nothing has to be closed, and no cell shows it twice. It is
    an HTML page's picture, since JupyterLab gives a PNG alone no ``alt`` and hides an SVG alone
    until the reader runs the cell.
    """

    def __init__(self, *args, alt: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.alt = alt

    def _ipython_display_(self):
        from IPython.display import display

        data, metadata = self.display_data()
        display(data, raw=True, metadata=metadata)

    def display_data(self) -> tuple[dict, dict]:
        """What a notebook shows of it, by MIME type, and the metadata.

        The picture shows the SVG, in the colours of the page's theme. A page that takes it away, as
        JupyterLab does with a notebook that it does not trust, shows the PNG, and so does a stored
        notebook.
        """
        width, height = (round(96 * inches) for inches in self.get_size_inches())
        png, svg = (base64.b64encode(drawn).decode() for drawn in (to_png(self), to_svg(self)))
        picture = (f'<picture><source class="dplab-dark" type="image/svg+xml" '
                   f'srcset="data:image/svg+xml;base64,{svg}">'
                   f'<img alt="{html.escape(self.alt)}" width="{width}" height="{height}" '
                   f'style="max-width:100%;height:auto;border-radius:6px" '
                   f'src="data:image/png;base64,{png}"></picture>'
                   f'<style class="dplab-dark">{PAGE_OF_DRAWINGS}</style>')
        data = {"text/html": picture, "image/png": png, "text/plain": self.alt or repr(self)}
        return data, {"image/png": {"width": width, "height": height, "alt": self.alt}}


def wrapped_title(title: str) -> str:
    """``title`` in lines that fit a figure of WIDTH."""
    return wrap(title, TITLE_SIZE, 72 * WIDTH - 24, "bold")


def frame(axes, title: str, said: str, *, left: float, right: float, height: float,
          note: str = "", above: float = 0.0, below: float = 46.0) -> CourseFigure:
    """Makes the figure of ``axes`` as high as they and all around them need; titles, returns it.

    All in points: the axes' ``height``, and what is kept free beside them, ``below`` them, and
    ``above`` them up to the title and its ``note``. The text alternative is the title, then
    ``said``.
    """
    figure = axes.figure
    figure.alt = " ".join(f"{title}. {said}".split())
    title = wrapped_title(title)
    note_height = text_height(note, SIZE) if note else 0
    width = 72 * WIDTH
    whole = below + height + above + note_height + text_height(title, TITLE_SIZE) + 26
    figure.set_size_inches(WIDTH, whole / 72)
    axes.set_position((left / width, below / whole, (width - left - right) / width, height / whole))
    figure.text(12 / width, 1 - 12 / whole, title, size=TITLE_SIZE, weight="bold", va="top",
                parse_math=False, linespacing=LINE_SPACING)
    figure.text(12 / width, 1 - (16 + text_height(title, TITLE_SIZE)) / whole, note, size=SIZE,
                color=MUTED, va="top", parse_math=False)
    return figure


def subplots(rows: int = 1, columns: int = 1, *, title: str = "", xlabel: str = "",
             ylabel: str = "", height: float = 3.6, alt: str = ""):
    """An empty ``(figure, axes)`` in the course's style, for a plot of a chapter's own.

    ``title`` states what the figure finds, the labels go to every Axes, ``alt`` says the plot in
    words after it. ``height`` is in inches (96 CSS pixels each), as is WIDTH; ``axes`` is one
    Axes, or an array of shape (rows, columns) squeezed as by ``plt.subplots``.
    """
    with style():
        figure = CourseFigure(figsize=(WIDTH, height), alt=". ".join(filter(None, (title, alt))),
                              layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.14))
        axes = figure.subplots(rows, columns)
        if title:
            figure.suptitle(wrapped_title(title), x=12 / (72 * WIDTH), ha="left",
                            size=TITLE_SIZE, weight="bold", parse_math=False)
        for one in figure.axes:
            one.set(xlabel=xlabel, ylabel=ylabel)
        return figure, axes


def add_area(axes, patch: Rectangle, widest: float = 1.6) -> None:
    """Adds ``patch`` to ``axes``; if it is too pale for white, with an outline along its inside.

    The outline is ``widest`` / 2 points wide at most, so that thin areas keep their colour. The
    limits of ``axes`` stay as they are.
    """
    axes.add_artist(patch)
    color = to_hex(patch.get_facecolor()).upper()
    if outline(color) != color and not patch.get_hatch():
        inside = axes.add_artist(Rectangle(
            patch.get_xy(), patch.get_width(), patch.get_height(), fill=False, label="_outline",
            edgecolor=outline(color), linewidth=min(1.6, widest),
            transform=patch.get_data_transform()))
        inside.set_clip_path(patch)


def to_png(figure: CourseFigure) -> bytes:
    """The figure as PNG, 192 pixels an inch; its 256 colours keep notebooks small.

    With fewer of them, small areas such as a rank's name lose their colour, and names contrast.
    """
    drawn, small = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=192)
    image = Image.open(drawn).convert("RGB").quantize(256)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def to_svg(figure: CourseFigure, title: str = "") -> bytes:
    """The figure as SVG, the same bytes each time: no date, ids hashed with a fixed salt.

    On a dark page it has other colours, where the browser tells it of that.
    """
    drawn, alt = io.BytesIO(), figure.alt or None
    with style():
        figure.savefig(drawn, format="svg", metadata={
            "Date": None, "Creator": None, "Title": title or alt, "Description": alt})
    text = drawn.getvalue().decode().replace("<svg ", '<svg role="img" ', 1)
    text = text.replace("</style>", f"{dark_colors(text)}</style>", 1)
    said = html.escape(figure.alt, quote=False)
    text = text.replace("</title>", f"</title>\n <desc>{said}</desc>", 1)
    return ("\n".join(line.rstrip() for line in text.splitlines()) + "\n").encode()


def dark_colors(svg: str) -> str:
    """The CSS by which an SVG of matplotlib's takes the dark counterpart of each of its colours.

    Heat maps keep theirs, which make a scale.
    """
    rules = []
    without_maps = re.sub('<g id="QuadMesh.*?</g>', "", svg, flags=re.DOTALL)
    for color in sorted(set(re.findall("#[0-9a-f]{6}", without_maps))):
        dark = on_dark(color.upper()).lower()
        if dark != color:
            rules += [f'[style*="fill: {color}"], [fill="{color}"] {{ fill: {dark} !important }}',
                      f'[style*="stroke: {color}"] {{ stroke: {dark} !important }}']
    return "\n".join(["", "@media (prefers-color-scheme: dark) {", *rules, "}"])


def save_beside(figure: CourseFigure, script: str, title: str) -> Path:
    """Writes the figure as ``NAME.svg`` next to ``NAME.py`` and returns its path."""
    target = Path(script).resolve().with_suffix(".svg")
    target.write_bytes(to_svg(figure, title))
    return target
