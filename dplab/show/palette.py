"""The course's colours, the same in every figure and in what ranks print, and their contrasts.

Text has a contrast of at least 4.5 with what it stands on, lines and areas one of at least 3 (WCAG
2.2, AA); a colour that is too pale for that is drawn with an `outline`. The same holds on a dark
page, where each colour gives way to its `on_dark`.
"""

import functools

INK = "#1F2933"
MUTED = "#5B6670"
FAINT = "#C9D1D9"
"""For frames that carry no meaning."""
GRID = "#E6EAEE"
WARNING = "#B3261E"
REFERENCE = "#87919C"
"""Curves that others are compared with, and time in which a rank waits."""

RANK_COLORS = (
    "#1C74CC",
    "#C05600",
    "#0B5A36",
    "#96127A",
    "#6907C0",
    "#966580",
    "#143500",
    "#4F0250",
)
"""Rank r is drawn in the r-th colour everywhere. Each has a contrast of at least 4.5 with white
(WCAG AA for text), and any two stay apart in simulated protanopia, deuteranopia, tritanopia."""

PART_COLORS = {
    "forward": "#A9C4E0",
    "backward": "#4C79A9",
    "communication": "#F0B429",
    "optimizer": "#8A929B",
}
OTHER_COLORS = ("#373790", "#B75E24", "#EEEAB8", "#5B2A0C", "#66A4FB", "#7B3A49")
"""Areas, all of which stay apart as the ranks' colours do."""

WHITE, GROUND = "#FFFFFF", "#181B1F"
"""What figures stand on, on a light page and on a dark one."""
ON_LIGHT_AREA, ON_DARK_AREA = "#1E2832", "#FFFFFE"
"""Texts on areas that a dark page leaves as they are: these stay as well, INK and white do not."""
_DARK = {
    WHITE: GROUND,
    ON_LIGHT_AREA: ON_LIGHT_AREA,
    ON_DARK_AREA: ON_DARK_AREA,
    INK: "#E6EAEE",
    MUTED: "#A3ADB8",
    FAINT: "#4A535D",
    GRID: "#2C3239",
    WARNING: "#F0554A",
    REFERENCE: "#7B8590",
    **dict(zip(RANK_COLORS, (
        "#6591FF", "#E6742C", "#78D791", "#BF62BF", "#C4B0FF", "#B797A8", "#C2F9B1", "#FAD3FC",
    ), strict=True)),
    # Those of OTHER_COLORS that are too near to the ground; they stay apart from the rest.
    "#373790": "#7C4AD3", "#5B2A0C": "#DF7C40", "#7B3A49": "#8C5769",
}


def rank_color(rank: int) -> str:
    """The colour of a rank, as ``#RRGGBB``; ranks beyond the palette start over."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours ``#RRGGBB`` as WCAG 2.2 defines it, from 1 to 21."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def readable_on(color: str) -> str:
    """The colour of a text on an area of ``color`` (#RRGGBB) that reads best on either page."""
    return max((INK, WHITE, ON_LIGHT_AREA, ON_DARK_AREA), key=lambda text: min(
        contrast(text, color), contrast(on_dark(text), on_dark(color))))


@functools.cache
def on_dark(color: str) -> str:
    """The counterpart of ``color`` on a dark page, both ``#RRGGBB``.

    Areas keep their colour, by which texts name them; a light grey becomes a dark one, and a colour
    that is too near to the dark ground lighter.
    """
    if color in _DARK:
        return _DARK[color]
    channels = _channels(color)
    if max(channels) - min(channels) <= 12 and contrast(color, WHITE) < 1.4:
        less = 255 - sum(channels) // 3
        return _hex(channel + less for channel in _channels(GROUND))
    shades = (_hex(c + (255 - c) * share // 100 for c in channels) for share in range(100))
    return next(shade for shade in shades if contrast(shade, GROUND) >= 3)


@functools.cache
def outline(color: str) -> str:
    """``color``, or where white is too near to it, a darker shade with a contrast of 3 to white."""
    shades = (_hex(channel * share // 100 for channel in _channels(color))
              for share in range(100, 0, -1))
    return next(shade for shade in shades if contrast(shade, WHITE) >= 3)


def _channels(color):
    return [int(color[i:i + 2], 16) for i in (1, 3, 5)]


def _hex(channels):
    return "#{:02X}{:02X}{:02X}".format(*channels)


def _luminance(color):
    parts = [channel / 255 for channel in _channels(color)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
