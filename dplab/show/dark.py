"""The same figure for a dark page: each colour gives way to its counterpart as it is drawn.

No colour of a text has a contrast of 4.5 with white and with a dark page as well, so a picture on
both has to be two. Areas keep their colours, by which texts name them; only those too near to the
dark ground become lighter. A text on the ground takes its counterpart, a text on an area stays.
"""

import functools
import io
import re

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.backends.backend_svg import RendererSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dplab.show.palette import (
    FAINT,
    GRID,
    INK,
    MUTED,
    RANK_COLORS,
    REFERENCE,
    WARNING,
    contrast,
    readable_on,
)

GROUND = "#181B1F"
COUNTERPARTS = {
    INK: "#E6EAEE",
    MUTED: "#A3ADB8",
    FAINT: "#4A535D",
    GRID: "#2C3239",
    WARNING: "#F0554A",
    REFERENCE: "#7B8590",
    **dict(zip(RANK_COLORS, (
        "#6591FF", "#E6742C", "#78D791", "#BF62BF", "#C4B0FF", "#B797A8", "#C2F9B1", "#FAD3FC",
    ), strict=True)),
}
"""Of lines, and of texts on the ground."""
AREAS = {"#373790": "#7C4AD3", "#5B2A0C": "#DF7C40", "#7B3A49": "#8C5769"}
"""Of OTHER_COLORS, those that are too near to the ground; they stay apart from the rest."""


class DarkRenderer:
    """Draws with another of matplotlib's renderers, in the colours for a dark page.

    What stands below a text is read from the picture drawn so far, and its colour noted in
    ``texts``. A renderer that has no pixels takes these ``texts`` of one that has.
    """

    def __init__(self, renderer, texts=None):
        self._renderer = renderer
        self.texts = [] if texts is None else texts
        self._known = None if texts is None else iter(texts)

    def __getattr__(self, name):
        return getattr(self._renderer, name)

    def draw_path(self, gc, path, transform, rgbFace=None):
        one = rgbFace is not None and gc.get_linewidth() and (*rgbFace[:3],) == gc.get_rgb()[:3]
        self._renderer.draw_path(self._with_line(gc), path, transform,
                                 _map(line if one else fill, rgbFace))

    def draw_markers(self, gc, marker_path, marker_trans, path, trans, rgbFace=None):
        self._renderer.draw_markers(self._with_line(gc), marker_path, marker_trans, path, trans,
                                    _map(line, rgbFace))

    def draw_path_collection(self, gc, master_transform, paths, all_transforms, offsets,
                             offset_trans, facecolors, edgecolors, *args, **kwargs):
        self._renderer.draw_path_collection(
            self._with_line(gc), master_transform, paths, all_transforms, offsets, offset_trans,
            _map_all(fill, facecolors), _map_all(line, edgecolors), *args, **kwargs)

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        if self._known is None:
            ground = self._ground(x, y, s, prop, angle, ismath)
            self.texts.append(text_on(ground, to_hex(gc.get_rgb()).upper()))
            color = self.texts[-1]
        else:
            color = next(self._known)
        self._renderer.draw_text(self._recolored(gc, color), x, y, s, prop, angle, ismath, mtext)

    def _ground(self, x, y, s, prop, angle, ismath):
        width, height, _ = self._renderer.get_text_width_height_descent(s, prop, ismath)
        if angle:  # a quarter turn: the text goes up from y, to the left of x
            left, right, top, bottom = x - height, x, y - width, y
        else:
            left, right, top, bottom = x, x + width, y - height, y
        pixels = np.asarray(self._renderer.buffer_rgba())
        below = pixels[max(0, int(top)):int(bottom) + 1, max(0, int(left)):int(right) + 1, :3]
        if not below.size:
            return GROUND
        return "#{:02X}{:02X}{:02X}".format(*np.median(below.reshape(-1, 3), axis=0).astype(int))

    def _with_line(self, gc):
        new = self._recolored(gc, line(to_hex(gc.get_rgb()).upper()))
        if gc.get_hatch():
            new.set_hatch_color(_map(line, gc.get_hatch_color()))
        return new

    def _recolored(self, gc, color):
        new = self._renderer.new_gc()
        new.copy_properties(gc)
        new.set_foreground(color)
        return new


def line(color: str) -> str:
    """The counterpart of a line's colour, ``#RRGGBB``."""
    if color in COUNTERPARTS:
        return COUNTERPARTS[color]
    return fill(color)


@functools.cache
def fill(color: str) -> str:
    """The counterpart of an area's colour: light greys become dark, others stay if they show."""
    if color in AREAS:
        return AREAS[color]
    channels = [int(color[i:i + 2], 16) for i in (1, 3, 5)]
    if max(channels) - min(channels) <= 12 and contrast(color, "#FFFFFF") < 1.4:
        less = 255 - sum(channels) // 3
        return "#{:02X}{:02X}{:02X}".format(
            *(int(GROUND[i:i + 2], 16) + less for i in (1, 3, 5)))
    shades = ("#{:02X}{:02X}{:02X}".format(*(c + (255 - c) * share // 100 for c in channels))
              for share in range(100))
    return next(shade for shade in shades if contrast(shade, GROUND) >= 3)


def text_on(ground: str, color: str) -> str:
    """The counterpart of a text's colour, where it stands on ``ground`` in the dark picture."""
    for one in (COUNTERPARTS.get(color, color), color):
        if contrast(one, ground) >= 4.5:
            return one
    return readable_on(ground)


def pixels(figure: Figure, dpi: int) -> np.ndarray:
    """The dark picture as RGB, of shape (height, width, 3)."""
    return np.asarray(_drawn(figure, dpi, _pixels).buffer_rgba())[..., :3]


def svg(figure: Figure) -> str:
    """The dark picture as SVG: the shapes of the light one, in other styles."""
    text = io.StringIO()

    def renderer(width, height, dpi):
        return RendererSVG(width, height, text, image_dpi=dpi)

    _drawn(figure, 72, renderer, _drawn(figure, 72, _pixels).texts).finalize()
    return text.getvalue()


def with_dark_styles(light: str, dark: str) -> str:
    """The SVG ``light``, which takes the styles of ``dark`` where the page is dark."""
    head, start, body = light.partition('<g id="figure_1">')
    parts = re.split(r'(style="[^"]*")', body)
    others = re.findall(r'style="([^"]*)"', dark.partition(start)[2])
    names: dict[str, str] = {}
    for place, other in zip(range(1, len(parts), 2), others, strict=True):
        if parts[place] != f'style="{other}"':
            name = names.setdefault(other, f"d{len(names)}")
            parts[place] = f'class="{name}" {parts[place]}'
    rules = "".join(f".{name} {{ {style.replace(';', ' !important;')} !important }}\n"
                    for style, name in names.items())
    css = f"\n@media (prefers-color-scheme: dark) {{\n{rules}}}"
    return head.replace("</style>", f"{css}</style>", 1) + start + "".join(parts)


def _pixels(width, height, dpi):
    """A renderer with pixels, all of them ground."""
    renderer = RendererAgg(round(width), round(height), dpi)
    np.asarray(renderer.buffer_rgba())[:] = (*bytes.fromhex(GROUND[1:]), 255)
    return renderer


def _drawn(figure, dpi, make_renderer, texts=None):
    """The renderer in which ``figure`` was drawn; the figure stays as it was."""
    before = figure.dpi
    figure.dpi = dpi
    try:
        renderer = DarkRenderer(make_renderer(*figure.bbox.size, dpi), texts)
        figure.draw(renderer)
    finally:
        figure.dpi = before
    return renderer


def _map(counterpart, color):
    """``counterpart`` of a colour as matplotlib has it: RGB, RGBA or None."""
    if color is None:
        return None
    rgb = to_hex(color[:3]).upper()
    new = counterpart(rgb)
    if new == rgb:
        return color
    return (*(int(new[i:i + 2], 16) / 255 for i in (1, 3, 5)), *color[3:])


def _map_all(counterpart, colors):
    return np.array([_map(counterpart, color) for color in colors]) if len(colors) else colors
