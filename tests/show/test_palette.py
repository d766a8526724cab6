"""Colours can be read and told apart, on a light page and on a dark one, with any colour vision."""

import itertools

import numpy as np
import pytest
from pictures import contrast, linear

from dplab.show import palette
from dplab.show.memory_areas import CATEGORY_COLORS
from dplab.show.palette import OTHER_COLORS, PART_COLORS, RANK_COLORS
from dplab.show.timelines import HIDDEN

AREAS = {*PART_COLORS.values(), *OTHER_COLORS, *CATEGORY_COLORS.values(), HIDDEN}
PAGES = {"light": (lambda color: color, palette.WHITE), "dark": (palette.on_dark, palette.GROUND)}
each_page = pytest.mark.parametrize("page", PAGES)

COLOR_VISION = {  # Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB
    "usual": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}


def oklab(light):
    """Perceptual coordinates (Ottosson 2020) of linear RGB, shape (..., 3)."""
    to_cones = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740],
                         [0.08830, 0.28172, 0.62998]])
    to_lab = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059],
                       [0.02590, 0.78277, -0.80868]])
    return np.cbrt(light @ to_cones.T) @ to_lab.T


@each_page
@pytest.mark.parametrize("vision", COLOR_VISION)
@pytest.mark.parametrize(("colors", "least"), [
    (RANK_COLORS, 0.09), ((*PART_COLORS.values(), *OTHER_COLORS), 0.08)], ids=["ranks", "parts"])
def test_colors_stay_apart(colors, least, vision, page):
    drawn, _ = PAGES[page]
    light = np.array([linear(drawn(color)) for color in colors])
    seen = oklab(np.clip(light @ COLOR_VISION[vision].T, 0, 1))
    for (one, a), (other, b) in itertools.combinations(zip(colors, seen, strict=True), 2):
        assert np.linalg.norm(a - b) > least, (one, other)


@each_page
def test_texts_lines_and_areas_stand_out_from_the_page(page):
    drawn, ground = PAGES[page]
    for text in (palette.INK, palette.MUTED, palette.WARNING, *RANK_COLORS):
        assert contrast(drawn(text), ground) >= 4.5, text
    assert contrast(drawn(palette.REFERENCE), ground) >= 3
    for area in AREAS:
        assert contrast(drawn(palette.outline(area)), ground) >= 3, area
        assert contrast(drawn(palette.readable_on(area)), drawn(area)) >= 4.4, area
        assert palette.outline(area) == area or contrast(area, palette.WHITE) < 3


def test_an_area_keeps_the_color_by_which_a_text_names_it_and_a_light_grey_becomes_dark():
    assert palette.on_dark(PART_COLORS["communication"]) == PART_COLORS["communication"]
    for ground in (palette.WHITE, "#EEF1F4", "#DDE3E9", palette.GRID):
        assert contrast(palette.on_dark(ground), palette.GROUND) < 1.6
        assert contrast(palette.on_dark(palette.INK), palette.on_dark(ground)) >= 4.5


def test_contrast_is_that_of_wcag():
    for one, other in itertools.combinations(("#FFFFFF", "#000000", *AREAS), 2):
        assert palette.contrast(one, other) == pytest.approx(contrast(one, other))
    assert contrast("#FFFFFF", "#767676") == pytest.approx(4.54, abs=0.005)  # as WebAIM has it
