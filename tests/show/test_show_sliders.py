"""Sliders change the picture below them, which a notebook keeps without them."""

import base64
import html
import io
import re

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from ipywidgets import Dropdown, SelectionSlider
from matplotlib import image

from dplab import show

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def drawn():
    return []


@pytest.fixture
def walk(drawn):
    """A stepper through three pictures, which notes in ``drawn`` what it draws."""
    def draw(size):
        drawn.append(size)
        figure, axes = show.subplots(title=f"Size {size}", alt=f'"<{size}>" & so on')
        axes.plot([0, size])
        return figure

    return show.stepper(draw, (1, 4, 2000), label="bucket size", unit="MiB", start=4)


@pytest.fixture
def outputs(monkeypatch):
    """What IPython sends to the notebook, message by message."""
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "display_pub", CapturingDisplayPublisher(parent=shell))
    return shell.display_pub.outputs


def seen(sliders):
    """The alternative text and the PNG of the picture that is shown."""
    data, metadata = sliders.picture()
    image = re.search(r'<img alt="([^"]*)" width="720".* src="data:image/png;base64,([^"]*)"',
                      data["text/html"])
    assert image[2] == data["image/png"] and html.unescape(image[1]) == data["text/plain"]
    assert metadata["image/png"]["alt"] == data["text/plain"]
    return data["text/plain"], base64.b64decode(data["image/png"])


@pytest.mark.slow
def test_the_slider_changes_the_picture_and_its_alternative_text(walk):
    assert walk.sliders["bucket size"].description == "bucket size"
    assert walk.sliders["bucket size"].options == (("1 MiB", 1), ("4 MiB", 4), ("2,000 MiB", 2000))
    alt, png = seen(walk)
    assert alt == 'Size 4. "<4>" & so on'
    assert image.imread(io.BytesIO(png)).shape[1] == pytest.approx(2 * 720, abs=2)
    walk.sliders["bucket size"].value = 2000
    alt, other = seen(walk)
    assert alt == 'Size 2000. "<2000>" & so on' and other != png
    walk.sliders["bucket size"].value = 4
    assert seen(walk) == ('Size 4. "<4>" & so on', png)


def test_the_picture_is_an_output_of_its_own_which_the_slider_changes(walk, outputs):
    walk._ipython_display_()
    walk._ipython_display_()  # and once more: both pictures change
    controls, first, _, again = outputs
    assert controls["data"][WIDGET]["model_id"] == walk.controls.model_id
    assert controls["data"]["text/plain"] == ""  # without widgets, nothing is shown of them
    assert WIDGET not in first["data"] and not first["update"]
    assert (first["data"], first["metadata"]) == walk.picture()
    walk.sliders["bucket size"].value = 2000
    second, last = outputs[-2:]
    assert again["transient"] != first["transient"] and last["transient"] == again["transient"]
    assert second["update"] and second["transient"] == first["transient"]
    assert (second["data"], second["metadata"]) == walk.picture()
    assert second["data"]["text/plain"].startswith("Size 2000")


def test_the_picture_says_how_its_controls_come_back(walk, budget):
    for sliders, names in ((walk, "bucket size"), (budget, "ranks and precision")):
        text = sliders.picture()[0]["text/html"]
        assert f"Run this cell to change {names}." in re.sub("<[^>]*>", "", text)


@pytest.fixture
def budget(drawn):
    """A calculator of a slider and a drop-down, which notes in ``drawn`` what it draws."""
    def draw(ranks, precision):
        drawn.append((ranks, precision))
        return show.subplots(title=f"{precision} on {ranks}")[0]

    return show.calculator(draw, {"ranks": [1, 2, 4096], "precision": ["bf16", "fp32"]},
                           {"ranks": 2}, units={"ranks": "GPUs"})


def test_each_control_of_a_calculator_changes_the_picture(budget, drawn):
    ranks, precision = budget.sliders.values()
    assert isinstance(ranks, SelectionSlider) and isinstance(precision, Dropdown)
    assert ranks.options == (("1 GPUs", 1), ("2 GPUs", 2), ("4,096 GPUs", 4096))
    assert precision.options == (("bf16", "bf16"), ("fp32", "fp32"))
    assert [slider.description for slider in budget.sliders.values()] == ["ranks", "precision"]
    assert [slider.value for slider in budget.sliders.values()] == [2, "bf16"]
    assert seen(budget)[0] == "bf16 on 2"
    budget.sliders["precision"].value = "fp32"
    budget.sliders["ranks"].value = 4096
    assert seen(budget)[0] == "fp32 on 4096"
    budget.sliders["ranks"].value = 2
    budget.sliders["precision"].value = "bf16"
    assert drawn == [(2, "bf16"), (2, "fp32"), (4096, "fp32")]


def test_a_control_starts_where_it_can_stand():
    with pytest.raises(ValueError, match="bucket 3 is not one of "):
        show.stepper(lambda size: None, (1, 4), label="bucket", start=3)
    with pytest.raises(ValueError, match="ranks 3 is not one of "):
        show.calculator(lambda ranks: None, {"ranks": [1, 2, 4]}, {"ranks": 3})


def test_controls_are_named_again_after_each_change(walk, budget):
    for made, name, value in ((walk, "bucket size", 1), (budget, "ranks", 4096)):
        before = made.controls.children[-1].value
        names = html.unescape(re.search('onload="([^"]*)"', before)[1])
        assert "'.dplab-sliders'" in names and "dplab-sliders" in made.controls._dom_classes
        assert names.count("'aria-label'") == 3  # of sliders, drop-downs and buttons
        made.sliders[name].value = value
        assert made.controls.children[-1].value != before
