"""A drawing board for the course's diagrams, measured in the pixels in which a page shows them."""

from collections.abc import Sequence

from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from dplab.show.labels import CAP_HEIGHT
from dplab.show.palette import FAINT, INK, MUTED
from dplab.show.theme import CourseFigure

POINTS_PER_PIXEL = 0.75
MARGIN = 24


class Canvas:
    """A white card of ``width`` × ``height`` CSS pixels; x grows to the right, y downwards.

    The title stands at its top left, ``alt`` is the text alternative, ``self.figure`` the figure.
    To be used inside ``with style():``, or in a function decorated with ``@style()``.
    """

    def __init__(self, width: int, height: int, title: str, alt: str):
        self.width, self.height, self.title = width, height, title
        inches = POINTS_PER_PIXEL / 72
        self.figure = CourseFigure(figsize=(width * inches, height * inches), alt=alt)
        self.figure.patch.set_alpha(0)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")
        self.box(1, 1, width - 2, height - 2, "white", edge=FAINT, radius=10)
        self.text(MARGIN, 36, title, size=19, weight="bold")

    def text(self, x: float, y: float, text: str, *, size: float = 14, color: str = INK,
             weight: str = "normal", ha: str = "left") -> None:
        """``text`` with its middle at height y, one line or more; ``size`` in pixels."""
        lines = "\n" in text
        y += 0 if lines else CAP_HEIGHT / 2 * size
        self.axes.text(x, y, text, fontsize=size * POINTS_PER_PIXEL, color=color, ha=ha,
                       weight=weight, va="center" if lines else "baseline", linespacing=1.35,
                       parse_math=False)

    def box(self, x: float, y: float, width: float, height: float, fill: str, *,
            edge: str | None = None, radius: float = 3, dashed: bool = False) -> None:
        """A rectangle with round corners, its top left corner at (x, y)."""
        self.axes.add_patch(FancyBboxPatch(
            (x, y), width, height, boxstyle=f"round,pad=0,rounding_size={radius}",
            facecolor=fill, edgecolor=edge or "none", linewidth=1,
            linestyle=(0, (2.5, 2.5)) if dashed else "solid",
        ))

    def disc(self, x: float, y: float, radius: float, fill: str) -> None:
        """A filled circle around (x, y)."""
        self.axes.add_patch(Circle((x, y), radius, facecolor=fill, edgecolor="none"))

    def bars(self, x: float, y: float, values: Sequence[float], color: str, *,
             width: float = 72, height: float = 40) -> None:
        """A small bar chart of ``values`` between -1 and 1, its zero line in the middle."""
        slot = width / len(values)
        for index, value in enumerate(values):
            self.axes.add_patch(Rectangle(
                (x + index * slot + slot * 0.14, y + height / 2), slot * 0.72,
                -value * height / 2, facecolor=color))
        self.line(x, y + height / 2, x + width, y + height / 2, MUTED)

    def line(self, x0: float, y0: float, x1: float, y1: float, color: str = MUTED,
             width: float = 1.2) -> None:
        """A straight line, ``width`` in pixels."""
        self.axes.plot([x0, x1], [y0, y1], color=color, linewidth=width * POINTS_PER_PIXEL,
                       solid_capstyle="butt")

    def arrow(self, x0: float, y0: float, x1: float, y1: float, color: str = MUTED,
              width: float = 1.6) -> None:
        """An arrow from (x0, y0) to (x1, y1), ``width`` in pixels."""
        self.axes.add_patch(FancyArrowPatch(
            (x0, y0), (x1, y1), arrowstyle="-|>,head_length=5,head_width=2.6", color=color,
            linewidth=width * POINTS_PER_PIXEL, shrinkA=0, shrinkB=0, joinstyle="miter",
        ))
