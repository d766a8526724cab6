"""Sliders change the picture below them, and where there are none a picture is shown."""

import base64
import io
import xml.etree.ElementTree as ElementTree

import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib import image

from dplab import show


@pytest.fixture
def drawn():
    return []


@pytest.fixture
def walk(drawn):
    """A stepper through three pictures, which notes in ``drawn`` what it draws."""
    def draw(step):
        drawn.append(step)
        figure, axes = show.subplots(title=f"Step {step}", alt=f'"<{step}>" & so on')
        axes.plot([0, step])
        return figure

    return show.stepper(draw, 3, label="bucket", start=1)


def shown(walk):
    """The alternative text and the PNG of the picture that a stepper shows."""
    [image] = ElementTree.fromstring(f"<p>{walk.picture.value.replace('>', '/>')}</p>")
    assert int(image.get("width")) == 720
    head, _, data = image.get("src").partition(",")
    assert head == "data:image/png;base64"
    return image.get("alt"), base64.b64decode(data)


def test_the_slider_changes_the_picture_and_its_alternative_text(walk):
    assert (walk.slider.min, walk.slider.value, walk.slider.max) == (0, 1, 2)
    assert walk.slider.description == "bucket"
    alt, png = shown(walk)
    assert alt == 'Step 1. "<1>" & so on'
    assert image.imread(io.BytesIO(png)).shape[1] == pytest.approx(2 * 720, abs=2)
    walk.slider.value = 2
    alt, other = shown(walk)
    assert alt == 'Step 2. "<2>" & so on' and other != png
    walk.slider.value = 1
    assert shown(walk) == ('Step 1. "<1>" & so on', png)


def test_each_picture_is_drawn_once_and_when_it_is_needed(walk, drawn):
    assert drawn == [1]
    for step in (2, 1, 0, 2, 1):
        walk.slider.value = step
    walk._repr_mimebundle_()
    assert drawn == [1, 2, 0]


def test_without_widgets_the_picture_is_shown(walk):
    walk.slider.value = 2
    data, metadata = InteractiveShell.instance().display_formatter.format(walk)
    alt, png = shown(walk)
    assert base64.b64decode(data["image/png"]) == png
    assert data["text/plain"] == alt == metadata["image/png"]["alt"]
    assert metadata["image/png"]["width"] == 720
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == walk.model_id


@pytest.mark.parametrize(("steps", "start"), [(3, 3), (3, -1), (0, 0)])
def test_a_stepper_starts_at_one_of_its_steps(steps, start):
    with pytest.raises(ValueError, match=f"bucket {start} is not one of 0 to {steps - 1}"):
        show.stepper(lambda step: None, steps, label="bucket", start=start)


@pytest.fixture
def budget(drawn):
    """A calculator of two sliders, which notes in ``drawn`` what it draws."""
    def draw(ranks, precision):
        drawn.append((ranks, precision))
        return show.subplots(title=f"{precision} on {ranks}")[0]

    return show.calculator(draw, {"ranks": [1, 2, 4], "precision": ["bf16", "fp32"]}, {"ranks": 2})


def test_each_slider_of_a_calculator_changes_the_picture(budget, drawn):
    assert [slider.description for slider in budget.sliders.values()] == ["ranks", "precision"]
    assert [slider.value for slider in budget.sliders.values()] == [2, "bf16"]
    assert shown(budget)[0] == "bf16 on 2"
    budget.sliders["precision"].value = "fp32"
    budget.sliders["ranks"].value = 4
    assert shown(budget)[0] == "fp32 on 4"
    budget.sliders["ranks"].value = 2
    budget.sliders["precision"].value = "bf16"
    assert drawn == [(2, "bf16"), (2, "fp32"), (4, "fp32")]


def test_without_widgets_a_calculator_shows_its_picture(budget):
    data, metadata = InteractiveShell.instance().display_formatter.format(budget)
    alt, png = shown(budget)
    assert base64.b64decode(data["image/png"]) == png
    assert data["text/plain"] == alt == metadata["image/png"]["alt"] == "bf16 on 2"
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == budget.model_id


@pytest.mark.parametrize("start", [{"ranks": 3}, {"GPU": "H100"}])
def test_a_calculator_starts_where_its_sliders_can_stand(start):
    with pytest.raises(ValueError, match="is not one of"):
        show.calculator(lambda ranks: None, {"ranks": [1, 2, 4]}, start)
