"""The committed pictures are what their scripts draw, and they can be read."""

import itertools
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

FIGURES = Path(__file__).parents[1] / "figures"
SCRIPTS = sorted(FIGURES.glob("*.py"))
SVG = "{http://www.w3.org/2000/svg}"

HOSTILE_SETTINGS = """
font.size: 30
font.family: serif
savefig.bbox: tight
svg.fonttype: none
axes.facecolor: black
lines.linewidth: 9
lines.antialiased: False
patch.antialiased: False
"""


def named(script):
    return script.stem


def test_every_script_has_its_picture_and_every_picture_its_script():
    assert SCRIPTS
    assert {s.stem for s in SCRIPTS} == {svg.stem for svg in FIGURES.glob("*.svg")}


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_drawing_again_gives_the_same_bytes_whatever_the_readers_settings(script, tmp_path):
    copy = Path(shutil.copy(script, tmp_path))
    (tmp_path / "matplotlibrc").write_text(HOSTILE_SETTINGS)
    subprocess.run([sys.executable, copy.name], cwd=tmp_path, check=True, timeout=120)
    same = copy.with_suffix(".svg").read_bytes() == script.with_suffix(".svg").read_bytes()
    assert same, f"{script.stem}.svg is not what {script.name} draws: run the script"


@pytest.mark.parametrize("svg", sorted(FIGURES.glob("*.svg")), ids=named)
def test_a_picture_has_a_title_and_no_date(svg):
    root = ElementTree.parse(svg).getroot()
    title = root.findtext(f"{SVG}title")
    assert title and len(title.split()) > 4
    assert not list(root.iter(f"{SVG}text")), "letters must be paths"
    assert not list(root.iter("{http://purl.org/dc/elements/1.1/}date"))


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_texts_can_be_read_at_900_pixels(script):
    module = runpy.run_path(str(script))
    canvas = module["draw"]()
    assert canvas.width == 900 and module["ALT"] == canvas.figure.alt
    assert canvas.title == module["TITLE"]
    renderer = FigureCanvasAgg(canvas.figure).get_renderer()
    card = canvas.figure.bbox.padded(-8)
    boxes = {text: text.get_window_extent(renderer) for text in canvas.axes.texts}
    for text, box in boxes.items():
        assert text.get_fontsize() / 0.75 >= 13, text
        assert card.x0 < box.x0 and box.x1 < card.x1 and card.y0 < box.y0 and box.y1 < card.y1, text
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


def test_the_collectives_picture_shows_what_the_collectives_do():
    module = runpy.run_path(str(FIGURES / "collectives.py"))
    whole = np.array([[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [5, 6, 7, 8]])
    total = whole.sum(axis=0)

    def numbers(cells):
        return np.array([
            [0 if cell is None else total[cell[1]] if cell[0] == module["SUM"] else whole[cell]
             for cell in row] for row in cells
        ])

    root_only = np.outer([1, 0, 0, 0], [1, 1, 1, 1])
    own = np.diag(np.diag(whole))
    expected = {
        "broadcast": (root_only * whole, np.tile(whole[0], (4, 1))),
        "reduce": (whole, root_only * total),
        "scatter": (root_only * whole, np.diag(whole[0])),
        "gather": (own, root_only * np.diag(whole)),
        "all-gather": (own, np.tile(np.diag(whole), (4, 1))),
        "reduce-scatter": (whole, np.diag(total)),
        "all-reduce": (whole, np.tile(total, (4, 1))),
        "all-to-all": (whole, whole.T),
    }
    drawn = {name: (before, after) for name, _, before, after in module["COLLECTIVES"]}
    assert drawn.keys() == expected.keys()
    for name, states in drawn.items():
        for cells, numbers_held in zip(states, expected[name], strict=True):
            np.testing.assert_array_equal(numbers(cells), numbers_held, err_msg=name)


def test_the_step_picture_shows_a_real_step():
    module = runpy.run_path(str(FIGURES / "one_step.py"))
    gradients = np.array(module["GRADIENTS"])
    assert len({tuple(gradient) for gradient in gradients}) == len(gradients) == 4
    updated = np.array(module["WEIGHTS"]) - module["LEARNING_RATE"] * gradients.mean(axis=0)
    np.testing.assert_allclose(module["UPDATED"], updated)
    assert np.abs(updated).max() <= 1
