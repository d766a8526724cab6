"""What the tests of figures share: whether texts can be read, and contrasts."""

import itertools

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text

from dplab.show.palette import on_dark


def linear(color):
    """Linear RGB from 0 to 1, by the definition of sRGB."""
    channels = np.array(to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2.2's contrast of two colours, from 1 to 21."""
    darker, lighter = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] for color in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def shown_texts(figure):
    """Each text that is shown, the ticks' too, with its box in pixels."""
    figure.draw_without_rendering()
    texts = set(figure.findobj(Text))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        texts -= {tick.label1 for tick in axis.get_major_ticks() + axis.get_minor_ticks()
                  if not axis.get_visible() or not low <= tick.get_loc() <= high}
        texts -= {tick.label2 for tick in axis.get_major_ticks() + axis.get_minor_ticks()}
    return {text: text.get_window_extent() for text in texts
            if text.get_text() and text.get_visible()}


def assert_readable(figure, points=9, margin=0):
    """Each text is large enough, within the figure, on no other, and stands out on either page."""
    texts, paper = shown_texts(figure), figure.bbox.padded(-margin)
    areas = [(patch.get_window_extent(), patch.get_facecolor()) for axes in figure.axes
             for patch in axes.patches if patch.get_fill()]
    for text, box in texts.items():
        assert text.get_fontsize() >= points, text
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1, text
        assert paper.y0 <= box.y0 and box.y1 <= paper.y1, text
        middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        own = text.get_bbox_patch()
        ground = own.get_facecolor() if own else next(
            (color for extent, color in reversed(areas) if extent.contains(*middle)), "#FFFFFF")
        pair = [to_hex(color).upper() for color in (text.get_color(), ground)]
        assert contrast(*pair) >= 4.4 and contrast(*map(on_dark, pair)) >= 4.4, (text, pair)
    for one, other in itertools.combinations(texts, 2):
        assert not texts[one].overlaps(texts[other]), (one, other)
