"""What a notebook shows: a picture with its words, and sliders that change it."""

import base64
import html
import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from ipywidgets import Dropdown, SelectionSlider
from matplotlib import image
from matplotlib.colors import to_rgb

from dplab import show

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def outputs(monkeypatch):
    """What IPython sends to the notebook, message by message."""
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "display_pub", CapturingDisplayPublisher(parent=shell))
    return shell.display_pub.outputs


def lines_of_ranks(title):
    """A plot with a line in each rank's colour."""
    figure, axes = show.subplots(title=title, alt='"<b>" & so on')
    for rank, color in enumerate(show.RANK_COLORS):
        axes.plot([0, rank + 1], color=color, linewidth=9)
    return figure


def test_a_notebook_shows_a_picture_with_its_text_alternative_and_colors(outputs):
    figure = lines_of_ranks("It falls")
    figure._ipython_display_()
    [shown] = outputs
    bundle, metadata = shown["data"], shown["metadata"]["image/png"]
    assert bundle["text/plain"] == metadata["alt"] == figure.alt == 'It falls. "<b>" & so on'
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    assert (metadata["width"], metadata["height"]) == (width, height)
    [img] = re.findall("<img [^>]*>", bundle["text/html"])
    assert f'alt="{html.escape(figure.alt)}" width="{width}"' in img
    assert f'src="data:image/png;base64,{bundle["image/png"]}"' in img
    [svg] = re.findall(r'srcset="data:image/svg\+xml;base64,([^"]*)"', bundle["text/html"])
    ElementTree.fromstring(base64.b64decode(svg))
    pixels = image.imread(io.BytesIO(base64.b64decode(bundle["image/png"])))[..., :3]
    assert pixels.shape[:2] == pytest.approx((2 * height, 2 * width), abs=2)
    for color in show.RANK_COLORS:
        assert abs(pixels - to_rgb(color)).sum(axis=2).min() < 0.1, color


def test_a_stepper_changes_the_picture_that_is_an_output_of_its_own(outputs):
    walk = show.stepper(lambda size: lines_of_ranks(f"Size {size}"), (1, 4, 2000), unit="MiB",
                        label="bucket size", start=4)
    [slider] = walk.sliders.values()
    assert slider.description == "bucket size"
    assert slider.options == (("1 MiB", 1), ("4 MiB", 4), ("2,000 MiB", 2000))
    play = walk.controls.children[0].children[0]
    assert (play.min, play.value, play.max) == (0, 1, 2)
    walk._ipython_display_()
    walk._ipython_display_()  # and once more: both pictures change
    controls, first, _, again = outputs
    assert controls["data"][WIDGET]["model_id"] == walk.controls.model_id
    assert controls["data"]["text/plain"] == ""  # without widgets, nothing is shown of them
    assert WIDGET not in first["data"] and not first["update"]
    assert first["data"]["text/plain"].startswith("Size 4. ")
    said = re.sub("<style.*?</style>|<[^>]*>", "", first["data"]["text/html"], flags=re.DOTALL)
    assert said == "Run this cell to change bucket size."
    names = walk.controls.children[-1].value
    slider.value = 2000
    second, last = outputs[-2:]
    assert second["transient"] == first["transient"] != again["transient"] == last["transient"]
    assert second["update"]
    assert (second["data"], second["metadata"]) == walk.picture()
    assert second["data"]["text/plain"].startswith("Size 2000. ")
    assert second["data"]["image/png"] != first["data"]["image/png"]
    script = html.unescape(re.search('onload="([^"]*)"', names)[1])  # names the controls again
    assert names != walk.controls.children[-1].value and script.count("'aria-label'") == 3
    assert "'.dplab-sliders'" in script and "dplab-sliders" in walk.controls._dom_classes


def test_each_control_of_a_calculator_changes_the_picture_which_is_drawn_once():
    drawn = []

    def draw(ranks, precision):
        drawn.append((ranks, precision))
        return show.subplots(title=f"{precision} on {ranks}")[0]

    budget = show.calculator(draw, {"ranks": [1, 2, 4096], "precision": ["bf16", "fp32"]},
                             {"ranks": 2}, units={"ranks": "GPUs"})
    ranks, precision = budget.sliders.values()
    assert isinstance(ranks, SelectionSlider) and isinstance(precision, Dropdown)
    assert ranks.options == (("1 GPUs", 1), ("2 GPUs", 2), ("4,096 GPUs", 4096))
    assert precision.options == (("bf16", "bf16"), ("fp32", "fp32"))
    assert [slider.description for slider in budget.sliders.values()] == ["ranks", "precision"]
    for slider, value in ((precision, "fp32"), (ranks, 4096), (ranks, 2), (precision, "bf16")):
        slider.value = value
        data = budget.picture()[0]
        assert data["text/plain"] == f"{precision.value} on {ranks.value}"
        assert "Run this cell to change ranks and precision." in data["text/html"]
    assert drawn == [(2, "bf16"), (2, "fp32"), (4096, "fp32")]
