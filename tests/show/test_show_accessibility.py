"""Figures and sliders for all: contrast, outlines, texts that say what a picture finds, names."""

import html.parser
import io
import itertools
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest
from ipywidgets import Box, Play
from matplotlib import image
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle
from pictures import areas_of, contrast, ground_of, shown_texts

from dplab import show
from dplab.show import palette
from dplab.show.memory_areas import CATEGORY_COLORS
from dplab.show.theme import with_title
from dplab.show.timelines import HIDDEN

AREAS = {**palette.PART_COLORS, **dict(enumerate(palette.OTHER_COLORS)), "hidden": HIDDEN,
         "does not fit": palette.FAINT}
TITLE = "What this picture finds"


def span(name, lane, start, end):
    return SimpleNamespace(name=name, lane=lane, start=start, end=end)


def gradients(rank):
    draw = np.random.default_rng(rank)
    return {"weight": draw.normal(size=24), "bias": draw.normal(size=3)}


HELD = [SimpleNamespace(op=op, bytes={
    name: 1e9 * (1 + (op + index) % 4) for index, name in enumerate(CATEGORY_COLORS)})
    for op in range(9)]
STEPS = [[span("forward", "compute", 0, 2), span("backward", "compute", 2, 6),
          span("a part of its own", "compute", 6, 7), span("all_reduce 0", "communication", 4, 10),
          span("wait", "stalled", 10, 11), span("optimizer", "compute", 11, 13)]] * 2
RING = [[[1, 2, 3], [10, 20, 30], [100, 200, 300]], [[1, 2, 303], [11, 20, 30], [100, 220, 300]]]
FIGURES = {
    "loss_curves": lambda: show.loss_curves(
        {f"rank {rank}": [8.0, 4.0 + rank / 2] for rank in range(8)}, title=TITLE, note="Measured"),
    "batch_sweep": lambda: show.batch_sweep(
        {"SGD": {"one": {8: [3, 4], 16: [2, 3]}, "grey": {8: [9, 9], 16: [8, 8]}}}, title=TITLE,
        ylabel="loss", dashed=["grey"]),
    "time_shares": lambda: show.time_shares(
        {"a": {part: 9.0 for part in (*palette.PART_COLORS, *"uvwxyz")}}, title=TITLE),
    "timeline": lambda: show.timeline(STEPS, title=TITLE, note="Measured"),
    "ring_step": lambda: show.ring_step(RING, 1),
    "memory_over_step": lambda: show.memory_over_step(
        HELD, [SimpleNamespace(name="forward", start=0, end=5)], title=TITLE, limit=9e9),
    "heat_maps": lambda: show.heat_maps(
        {"before": [gradients(rank) for rank in range(8)]}, [["weight"], ["bias"]], title=TITLE,
        bars={"calls": {"one": 3}, "ms exposed": {"one": 2.5}}),
    "choices": lambda: show.choices(
        [show.Bar("DDP", 300e9, 0.5, 0.1, False), show.Bar("FSDP", 50e9, 0.4, 0.1, True)], 72e9,
        title=TITLE),
    "over_ranks": lambda: show.over_ranks(
        {f"curve {index}": [(8, 9.0), (16, 8.0 - index)] for index in range(8)}, title=TITLE,
        ylabel="efficiency [%]"),
    "predicted_beside_published": lambda: show.predicted_beside_published(
        [show.Beside("one", "assumed: much", [1.2, 1.4]), show.Beside("two", "n", None)],
        title=TITLE),
    "row_limits": lambda: show.row_limits(
        {"fast": 1e3, "middle": 12e3, "slow": 15e3}, {"a model": 2e3, "another": 11e3},
        title=TITLE),
    "subplots": lambda: show.subplots(title=TITLE, xlabel="ranks", ylabel="time [ms]",
                                      alt="An empty plot.")[0],
}
TITLES = {"ring_step": "After step 1 of 4, 0 of 9 chunks are complete"}
each_figure = pytest.mark.parametrize("name", FIGURES)


def test_every_function_that_draws_is_tried():
    draws = {name for name in show.__all__ if name.islower()} - {
        "rank_color", "save_beside", "style", "to_png", "to_svg", "gap_between", "stepper",
        "calculator", "given", "table"}
    assert draws == set(FIGURES)


def test_contrast_is_that_of_wcag():
    for one, other in itertools.combinations(("#FFFFFF", "#000000", "#777777", *AREAS.values()), 2):
        assert palette.contrast(one, other) == pytest.approx(contrast(one, other))
    assert contrast("#FFFFFF", "#000000") == pytest.approx(21)
    assert contrast("#FFFFFF", "#767676") == pytest.approx(4.54, abs=0.005)  # as WebAIM has it


@pytest.mark.parametrize("color", [palette.INK, palette.MUTED, palette.WARNING,
                                   *palette.RANK_COLORS])
def test_texts_can_be_read_on_white(color):
    assert contrast(color, "#FFFFFF") >= 4.5


@pytest.mark.parametrize("name", AREAS)
def test_a_text_can_be_read_on_every_area(name):
    assert contrast(palette.readable_on(AREAS[name]), AREAS[name]) >= 4.5


@pytest.mark.parametrize("name", AREAS)
def test_every_area_or_its_outline_stands_out_from_white(name):
    color, line = AREAS[name], palette.outline(AREAS[name])
    assert contrast(line, "#FFFFFF") >= 3
    assert line == color or contrast(color, "#FFFFFF") < 3


def test_lines_of_comparison_stand_out_from_white():
    assert contrast(palette.REFERENCE, "#FFFFFF") >= 3


@each_figure
def test_every_text_of_a_figure_can_be_read_on_its_ground(name):
    figure = FIGURES[name]()
    texts, areas = shown_texts(figure), areas_of(figure)
    for text, box in texts.items():
        ground = ground_of(text, box, areas)
        assert contrast(to_hex(text.get_color()), ground) >= 4.5, (text, ground)


@each_figure
def test_every_text_of_a_figure_has_at_least_11_pixels(name):
    assert min(text.get_fontsize() / 0.75 for text in shown_texts(FIGURES[name]())) >= 11


@each_figure
def test_pale_areas_have_an_outline(name):
    for axes in FIGURES[name]().axes:
        areas = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        framed = {(*patch.get_xy(), patch.get_width()): to_hex(patch.get_edgecolor())
                  for patch in areas if patch.get_label() == "_outline"}
        for patch in areas:
            color = to_hex(patch.get_facecolor())
            if patch.get_fill() and patch.get_width() and contrast(color, "#FFFFFF") < 3:
                line = to_hex(patch.get_edgecolor()) if patch.get_hatch() else framed[
                    (*patch.get_xy(), patch.get_width())]
                assert contrast(line, "#FFFFFF") >= 3, patch


def test_pale_memory_has_an_outline_where_there_is_some():
    axes = FIGURES["memory_over_step"]().axes[0]
    lines = {to_hex(line.get_colors()[0]): line for line in axes.collections
             if line.get_label() == "_outline"}
    pale = {palette.outline(color).lower() for color in (
        palette.PART_COLORS["forward"], palette.PART_COLORS["communication"],
        palette.OTHER_COLORS[2])}
    assert set(lines) == pale
    tops = [segment[0][1] for segment in lines[palette.outline(palette.OTHER_COLORS[2]).lower()]
            .get_segments()]
    assert tops == pytest.approx([sum(sample.bytes.values()) / 1e9 for sample in HELD])


@each_figure
def test_the_text_alternative_begins_with_the_finding_and_goes_on(name):
    alt, title = FIGURES[name]().alt, TITLES.get(name, TITLE)
    assert alt.startswith(f"{title}. ") and len(alt) > len(title) + 10
    assert "\n" not in alt


def test_a_text_alternative_that_begins_with_the_title_is_left():
    assert with_title("It falls", "It falls: from 2 to 1") == "It falls: from 2 to 1"
    assert with_title("It falls", "") == "It falls"
    curve = show.loss_curves({"a": [2, 1]}, title=("It falls " * 20).strip(), alt="From 2 to 1.")
    assert curve.alt == "It falls " * 19 + "It falls. From 2 to 1."


def test_the_png_of_a_notebook_keeps_the_colors_of_names():
    figure = show.timeline(STEPS * 4, title=TITLE)
    pixels = 255 * image.imread(io.BytesIO(show.to_png(figure)))[..., :3].reshape(-1, 3)
    for color in (*palette.RANK_COLORS, palette.MUTED, *palette.PART_COLORS.values()):
        assert abs(pixels - 255 * np.array(to_rgb(color))).sum(axis=1).min() < 25, color


class Picture(html.parser.HTMLParser):
    """The attributes of the one picture in ``text``."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)
        [self.attributes] = [attributes for tag, attributes in self.found if tag == "img"]

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_a_notebook_shows_a_picture_that_has_its_text_alternative(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    figure, _ = show.subplots(title='"A" < B & C')
    figure._ipython_display_()
    picture = Picture(shown[0]["text/html"]).attributes
    assert picture["alt"] == '"A" < B & C' == shown[0]["text/plain"]
    assert picture["src"] == f"data:image/png;base64,{shown[0]['image/png']}"
    assert picture["width"] == "720" and "max-width:100%;height:auto" in picture["style"]


@each_figure
def test_an_svg_says_what_it_shows(name):
    figure = FIGURES[name]()
    root = ElementTree.fromstring(show.to_svg(figure, "A title"))
    assert root.get("role") == "img"
    assert [child.tag.partition("}")[2] for child in root][:2] == ["title", "desc"]
    assert [child.text for child in root][:2] == ["A title", figure.alt]


def controls(widget):
    """The widgets in ``widget`` that a reader sets, and the pictures."""
    if not isinstance(widget, Box):
        return [widget]
    return [control for child in widget.children for control in controls(child)]


def drawn(*_, **__):
    return show.subplots(title="Drawn")[0]


@pytest.mark.parametrize("made", [
    show.stepper(drawn, range(3), label="bucket"),
    show.calculator(drawn, {"ranks": [1, 2], "precision": ["bf16", "fp32"]})],
    ids=["stepper", "calculator"])
def test_every_control_has_a_label_and_every_picture_a_text_alternative(made):
    *sliders, namer = [each for each in controls(made.controls) if not isinstance(each, Play)]
    assert sliders and all(slider.description.strip() for slider in sliders)
    assert len({slider.description for slider in sliders}) == len(sliders)
    assert 'alt="Drawn"' in made.picture()[0]["text/html"]
    names = Picture(namer.value).attributes
    assert "dplab-sliders" in made.controls._dom_classes and "'.dplab-sliders'" in names["onload"]
    assert names["onload"].count("'aria-label'") == 3  # of sliders, drop-downs and buttons


def test_names_are_given_again_after_each_change():
    made = show.stepper(drawn, range(3))
    *_, namer = controls(made.controls)
    before = namer.value
    made.slider.value = 2
    assert namer.value != before


def test_curves_that_coincide_are_told_by_more_than_their_color():
    lines = [line for line in show.loss_curves({"a": [2, 1], "b": [2, 1], "c": [2, 1]},
                                               title="").axes[0].lines
             if not line.get_label().startswith("_")]
    assert len({line.get_linewidth() for line in lines}) == 3
    dashed = FIGURES["batch_sweep"]().axes[0].lines
    assert {line.get_linestyle() for line in dashed if len(line.get_xdata()) == 2 and
            line.get_marker() == "o"} == {"-", "--"}
