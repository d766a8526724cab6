"""What the tests of figures share: where texts stand, whether they can be read, contrasts."""

import itertools

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb

from dplab.show.palette import on_dark


def labels_of(figure):
    """Each text that is shown, ticks apart, with its box in pixels."""
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    texts += [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
              if axis.get_visible()]
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    return {text: text.get_window_extent(renderer) for text in texts if text.get_text()}


def assert_readable(figure, points=10, margin=0):
    """No text is smaller than ``points``, nearer to the edge than ``margin``, or on another."""
    boxes = labels_of(figure)
    paper = figure.bbox.padded(-margin)
    for text, box in boxes.items():
        assert text.get_fontsize() >= points, text
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1, text
        assert paper.y0 <= box.y0 and box.y1 <= paper.y1, text
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


def linear(color):
    """Linear RGB from 0 to 1, by the definition of sRGB."""
    channels = np.array(to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2.2's contrast of two colours, from 1 to 21."""
    darker, lighter = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] for color in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def areas_of(figure):
    """(box in pixels, colour) of each filled area, in the order in which they are drawn."""
    return [(patch.get_window_extent(), to_hex(patch.get_facecolor()))
            for axes in figure.axes for patch in axes.patches if patch.get_fill()]


def ground_of(text, box, areas):
    """The colour on which a text stands: of its own box, the area drawn last there, or white."""
    if text.get_bbox_patch():
        return to_hex(text.get_bbox_patch().get_facecolor())
    middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return next((color for extent, color in reversed(areas) if extent.contains(*middle)), "#ffffff")


def assert_read_on_either_page(figure):
    """Each text stands out from the area that it is on, and on a dark page from its counterpart."""
    texts = shown_texts(figure)  # which lays the figure out
    areas = areas_of(figure)
    for text, box in texts.items():
        color = to_hex(text.get_color()).upper()
        ground = ground_of(text, box, areas).upper()
        assert contrast(color, ground) >= 4.4, (text, ground)
        assert contrast(on_dark(color), on_dark(ground)) >= 4.4, (text, ground)


def shown_texts(figure):
    """Every text that is shown, ticks and all, with its box in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    return {text: text.get_window_extent(renderer)
            for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))
            if text.get_text() and text.get_visible()}
