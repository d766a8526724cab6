"""Figures in a dark theme: another picture, in which everything can be read and told apart."""

import base64
import io
import itertools
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import contrast, linear, shown_texts
from test_show import COLOR_VISION, oklab
from test_show_accessibility import AREAS, FIGURES

from dplab import show
from dplab.show import dark, palette

SCRIPTS = sorted((Path(__file__).parents[2] / "figures").glob("*.py"))
LINES = [palette.INK, palette.MUTED, palette.WARNING, palette.REFERENCE, *palette.RANK_COLORS]
TEXTS = [color for color in LINES if color != palette.REFERENCE]


def hexadecimal(rgb):
    return "#{:02X}{:02X}{:02X}".format(*(round(255 * channel) for channel in rgb))


def test_no_text_can_be_read_on_white_and_on_a_dark_page():
    """Why there are two pictures, and not one without a ground."""
    greys = [f"#{level:02X}{level:02X}{level:02X}" for level in range(256)]
    assert not [grey for grey in greys
                if min(contrast(grey, "#FFFFFF"), contrast(grey, "#111111")) >= 4.5]


@pytest.mark.parametrize("color", TEXTS)
def test_texts_can_be_read_on_the_dark_ground(color):
    assert contrast(dark.line(color), dark.GROUND) >= 4.5


@pytest.mark.parametrize("color", LINES)
def test_lines_stand_out_from_the_dark_ground(color):
    assert contrast(dark.line(color), dark.GROUND) >= 3


@pytest.mark.parametrize("name", AREAS)
def test_areas_stand_out_from_the_dark_ground_and_can_be_told_by_their_color(name):
    before, after = AREAS[name], dark.fill(AREAS[name])
    assert contrast(after, dark.GROUND) >= 3
    if contrast(before, dark.GROUND) >= 3:
        assert after == before  # "the yellow" of a text stays yellow
    assert contrast(palette.readable_on(after), after) >= 4.5


@pytest.mark.parametrize("vision", COLOR_VISION)
@pytest.mark.parametrize(("colors", "counterpart", "least"), [
    (palette.RANK_COLORS, dark.line, 0.09),
    ((*palette.PART_COLORS.values(), *palette.OTHER_COLORS), dark.fill, 0.08)],
    ids=["ranks", "parts"])
def test_colors_stay_apart_in_the_dark(colors, counterpart, least, vision):
    light = np.array([linear(counterpart(color)) for color in colors])
    seen = oklab(np.clip(light @ COLOR_VISION[vision].T, 0, 1))
    for (one, a), (other, b) in itertools.combinations(zip(colors, seen, strict=True), 2):
        assert np.linalg.norm(a - b) > least, (one, other)


@pytest.mark.parametrize("ground", ["#FFFFFF", "#EEF1F4", "#DDE3E9"])
def test_light_grounds_become_dark(ground):
    assert contrast(dark.fill(ground), dark.GROUND) < 1.6
    assert contrast(dark.line(palette.INK), dark.fill(ground)) >= 4.5


def pixels_of(figure):
    return image.imread(io.BytesIO(show.to_png(figure, for_dark_page=True)))[..., :3]


def assert_texts_can_be_read(figure):
    """Each text of the dark picture stands out from what is around it, pixel by pixel."""
    light = image.imread(io.BytesIO(show.to_png(figure)))[..., :3]
    pixels, read = pixels_of(figure), 0
    figure.dpi = 192
    FigureCanvasAgg(figure)
    height = len(pixels)
    for text, box in shown_texts(figure).items():
        there = (slice(max(0, round(height - box.y1)), max(0, round(height - box.y0))),
                 slice(max(0, round(box.x0)), max(0, round(box.x1))))
        if not light[there].size or highest_contrast(light[there]) < 1.5:
            continue  # a tick outside the axes is not drawn
        best, read = highest_contrast(pixels[there]), read + 1
        assert best >= 4.4, (text, best)  # 4.5, but for the rounding to 256 colours
    assert read >= 3


def highest_contrast(pixels):
    """Of any pixel, with the ground, which has most of them."""
    flat = pixels.reshape(-1, 3)
    ground = hexadecimal(np.median(flat, axis=0))
    return max(contrast(hexadecimal(color), ground) for color in np.unique(flat.round(2), axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_text_of_a_figure_can_be_read_in_the_dark(name):
    assert_texts_can_be_read(FIGURES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_text_of_a_drawing_can_be_read_in_the_dark(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))  # a script may draw with another
    assert_texts_can_be_read(runpy.run_path(str(script))["draw"]().figure)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_no_white_is_left(name):
    pixels = pixels_of(FIGURES[name]())
    assert (pixels.min(axis=-1) > 0.95).mean() < 0.03  # some texts, and the zero of a heat map
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        assert pixels[corner].max() < 0.3


def test_the_light_picture_is_what_it_would_be_without_a_dark_one():
    figure = FIGURES["timeline"]()
    before = show.to_png(figure)
    show.to_png(figure, for_dark_page=True)
    dark.svg(figure)
    assert show.to_png(figure) == before and figure.dpi == show.subplots()[0].dpi


def test_a_notebook_gets_both_pictures_and_a_page_without_styles_the_light_one():
    figure = show.subplots(title="Found")[0]
    data, _ = figure.display_data()
    shown, hidden = re.fullmatch("(<img .*>)<style(.*)</style>", data["text/html"],
                                 re.DOTALL).groups()
    [light] = re.findall('src="data:image/png;base64,([^"]*)"', shown)
    [night] = re.findall(r'url\("data:image/png;base64,([^"]*)"\)', hidden)
    assert base64.b64decode(light) == show.to_png(figure)
    assert base64.b64decode(night) == show.to_png(figure, for_dark_page=True)
    [name] = re.findall('class="([^"]*)"', shown)
    assert '[data-jp-theme-light="false"]' in hidden and f".{name} {{ content:" in hidden


def test_two_figures_of_one_page_keep_their_own_dark_pictures():
    names = [re.search('class="([^"]*)"', show.subplots(title=title)[0].display_data()[0][
        "text/html"])[1] for title in ("one", "other")]
    assert len({*names}) == 2


def styles(svg, page):
    """The fill and stroke of each element of an SVG, in order, on a page of that theme."""
    root = ElementTree.fromstring(svg)
    [css] = [node.text for node in root.iter() if node.tag.endswith("}style")]
    _, _, night = css.partition("@media (prefers-color-scheme: dark) {")
    rules = dict(re.findall(r"\.(d\d+) \{ (.*?) \}", night)) if page == "dark" else {}
    assert all(declaration.endswith("!important")
               for rule in rules.values() for declaration in rule.split(";"))
    return [(rules.get(node.get("class")) or node.get("style")).replace(" !important", "")
            for node in root.iter() if node.get("style")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_drawing_has_the_colors_of_its_theme(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))  # a script may draw with another
    drawing = runpy.run_path(str(script))["draw"]()
    svg = script.with_suffix(".svg").read_bytes()
    light, night = (styles(svg, page) for page in ("light", "dark"))
    assert len(light) == len(night) and light != night
    assert any("fill: #ffffff" in style for style in light)
    assert any(f"fill: {dark.GROUND.lower()}" in style for style in night)
    bare = re.sub(r'style="[^"]*"|class="d\d+" |<style.*?</style>', "", svg.decode(),
                  flags=re.DOTALL)
    assert drawing.title in bare  # and so the texts and shapes are there once
    assert not [style for style in night if palette.INK.lower() in style]
