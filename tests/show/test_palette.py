"""Colours can be told apart and read with any colour vision, and labels stay apart."""

import itertools

import numpy as np
import pytest
from pictures import contrast, linear

from dplab.show import palette
from dplab.show.labels import spread
from dplab.show.memory_areas import CATEGORY_COLORS
from dplab.show.palette import OTHER_COLORS, PART_COLORS, RANK_COLORS
from dplab.show.timelines import HIDDEN

PAGES = pytest.mark.parametrize(("drawn", "ground"), [
    (str, palette.WHITE), (palette.on_dark, palette.GROUND)], ids=["light", "dark"])
# Usual, protanopia, deuteranopia, tritanopia: Machado, Oliveira, Fernandes 2009, severity 1.0
COLOR_VISION = [np.eye(3), *(np.reshape(on_linear_rgb, (3, 3)) for on_linear_rgb in (
    (0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998),
    (0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881),
    (1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039)))]


def oklab(light):
    """Perceptual coordinates (Ottosson 2020) of linear RGB, shape (..., 3)."""
    to_cones = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740],
                         [0.08830, 0.28172, 0.62998]])
    to_lab = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059],
                       [0.02590, 0.78277, -0.80868]])
    return np.cbrt(light @ to_cones.T) @ to_lab.T


@PAGES
@pytest.mark.parametrize(("colors", "least"), [
    (RANK_COLORS, 0.09), ((*PART_COLORS.values(), *OTHER_COLORS), 0.08)], ids=["ranks", "parts"])
def test_colors_stay_apart_and_texts_lines_and_areas_stand_out(colors, least, drawn, ground):
    light = np.array([linear(drawn(color)) for color in colors])
    for vision in COLOR_VISION:
        seen = oklab(np.clip(light @ vision.T, 0, 1))
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > least
    for text in (palette.INK, palette.MUTED, palette.WARNING, *RANK_COLORS):
        assert contrast(drawn(text), ground) >= 4.5, text
    assert contrast(drawn(palette.REFERENCE), ground) >= 3
    for area in {*PART_COLORS.values(), *OTHER_COLORS, *CATEGORY_COLORS.values(), HIDDEN}:
        assert contrast(drawn(palette.outline(area)), ground) >= 3, area
        assert contrast(drawn(palette.readable_on(area)), drawn(area)) >= 4.4, area
        assert palette.outline(area) == area or contrast(area, palette.WHITE) < 3
        assert palette.contrast(area, ground) == pytest.approx(contrast(area, ground))


def test_an_area_keeps_the_color_by_which_a_text_names_it_and_a_light_grey_becomes_dark():
    assert palette.on_dark(PART_COLORS["communication"]) == PART_COLORS["communication"]
    for ground in (palette.WHITE, "#EEF1F4", "#DDE3E9", palette.GRID):
        assert contrast(palette.on_dark(ground), palette.GROUND) < 1.6
        assert contrast(palette.on_dark(palette.INK), palette.on_dark(ground)) >= 4.5


def test_spread_moves_only_the_labels_that_it_must():
    assert spread([0, 3, 95], [10, 10, 20], 0, 100, gap=2) == pytest.approx([5, 17, 90])
    assert spread([10, 50, 90], [10, 10, 10], 0, 100) == pytest.approx([10, 50, 90])
    assert spread([90, 50, 50], [10, 10, 10], 0, 100) == pytest.approx([90, 45, 55])
