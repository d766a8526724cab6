"""What holds of every figure: it can be read on either page, says what it finds, and is an SVG."""

import base64
import functools
import html
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle
from pictures import assert_read_on_either_page, contrast, shown_texts

from dplab import show
from dplab.show import palette
from dplab.show.memory_areas import CATEGORY_COLORS

TITLE = "What this picture finds"


def span(name, lane, start, end):
    return SimpleNamespace(name=name, lane=lane, start=start, end=end)


HELD = [SimpleNamespace(op=op, bytes={
    name: 1e9 * (1 + (op + index) % 4) for index, name in enumerate(CATEGORY_COLORS)})
    for op in range(9)]
STEPS = [[span("forward", "compute", 0, 2), span("backward", "compute", 2, 6),
          span("a part of its own", "compute", 6, 7), span("all_reduce 0", "communication", 4, 10),
          span("wait", "stalled", 10, 11), span("optimizer", "compute", 11, 13)]] * 2
RING = [[[1, 2, 3], [10, 20, 30], [100, 200, 300]], [[1, 2, 303], [11, 20, 30], [100, 220, 300]],
        [[111, 2, 303], [11, 22, 30], [100, 220, 333]]]
FIGURES = {
    "loss_curves": lambda: show.loss_curves(
        {f"rank {rank}": [8.0, 4.0 + rank / 2] for rank in range(8)}, title=TITLE, note="Measured"),
    "time_shares": lambda: show.time_shares(
        {"a": {part: 9.0 for part in (*palette.PART_COLORS, *"uvwxyz")}}, title=TITLE),
    "timeline": lambda: show.timeline(STEPS, title=TITLE, note="Measured"),
    "ring_step": lambda: show.ring_step(RING, 2),
    "units_over_step": lambda: show.units_over_step(
        [SimpleNamespace(unit=unit, start=at, end=at + 2)
         for unit, at in ((0, 1), (1, 4), (1, 8), (0, 11))], [3e6, 5e6], ["first", "second"],
        forward=7, operations=14, chunks=2e6, title=TITLE),
    "memory_over_step": lambda: show.memory_over_step(
        HELD, [SimpleNamespace(name="forward", start=0, end=5)], title=TITLE),
    "predicted_beside_published": lambda: show.predicted_beside_published(
        [show.Beside("one", "assumed: much", [1.2, 1.4]), show.Beside("two", "n", None)],
        title=TITLE),
    "row_limits": lambda: show.row_limits(
        {"fast": 1e3, "middle": 12e3, "slow": 15e3}, {"a model": 2e3, "another": 11e3},
        title=TITLE),
    "subplots": lambda: show.subplots(title=TITLE, xlabel="ranks", ylabel="time [ms]",
                                      alt="An empty plot.")[0],
}
TITLES = {"ring_step": "After step 2 of 4, 2 of 9 chunks are complete"}
drawn = functools.cache(lambda name: FIGURES[name]())
each_figure = pytest.mark.parametrize("name", FIGURES)


@each_figure
def test_a_figure_can_be_read_on_either_page(name):
    figure = drawn(name)
    assert_read_on_either_page(figure)
    assert min(text.get_fontsize() / 0.75 for text in shown_texts(figure)) >= 11
    for axes in figure.axes:  # pale areas have an outline
        areas = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        framed = {(*patch.get_xy(), patch.get_width()): to_hex(patch.get_edgecolor())
                  for patch in areas if patch.get_label() == "_outline"}
        for patch in areas:
            color = to_hex(patch.get_facecolor())
            if patch.get_fill() and patch.get_width() and contrast(color, "#FFFFFF") < 3:
                line = to_hex(patch.get_edgecolor()) if patch.get_hatch() else framed[
                    (*patch.get_xy(), patch.get_width())]
                assert contrast(line, "#FFFFFF") >= 3, patch


@each_figure
def test_a_figure_says_what_it_finds_and_is_the_same_svg_each_time(name):
    figure, title = FIGURES[name](), TITLES.get(name, TITLE)
    assert figure.alt.startswith(f"{title}. ") and len(figure.alt) > len(title) + 10
    assert "\n" not in figure.alt
    svg = show.to_svg(figure, "A title")
    with matplotlib.rc_context({"svg.fonttype": "none", "savefig.transparent": True,
                                "font.size": 30}):
        assert show.to_svg(FIGURES[name](), "A title") == svg
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert [child.tag.partition("}")[2] for child in root][:2] == ["title", "desc"]
    assert [child.text for child in root][:2] == ["A title", figure.alt]
    assert b"<text" not in svg and b"<dc:date>" not in svg
    light, _, dark = svg.decode().replace("</style>", "@media").partition("@media")
    for color in set(re.findall("fill: (#[0-9a-f]{6})", svg.decode().partition("</style>")[2])):
        rule = f'[style*="fill: {color}"], [fill="{color}"] {{ fill: '
        other = palette.on_dark(color.upper()).lower()
        in_a_map = "QuadMesh" in dark and color.upper() not in palette._DARK
        assert color == other or in_a_map or f"{rule}{other} !important }}" in dark
    assert "#181b1f" in dark and "#181b1f" not in light


@pytest.mark.slow
def test_a_browser_shows_the_colors_of_the_theme():
    from jupyter import chromium

    shown = drawn("timeline").display_data()[0]["text/html"]
    ground = {}
    with chromium() as browser:
        for theme in ("true", "false"):  # against that of the system
            with browser.new_context(color_scheme="dark" if theme == "true" else "light") as one:
                tab = one.new_page()
                tab.set_content(f'<body data-jp-theme-light="{theme}">{shown}')
                tab.wait_for_function("document.images[0].naturalWidth")
                pixels = image.imread(io.BytesIO(tab.locator("img").screenshot()))
                ground[theme] = np.median(pixels[..., :3], axis=(0, 1))
    assert ground["true"].min() > 0.95 and ground["false"].max() < 0.15


def test_a_notebook_shows_a_picture_with_its_text_alternative(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: shown.append((a, k)))
    figure = show.subplots(title='"A" < B & C', alt="It falls.")[0]
    figure._ipython_display_()
    [((bundle,), options)] = shown
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    assert options == {"raw": True, "metadata": {
        "image/png": {"width": width, "height": height, "alt": figure.alt}}}
    assert bundle["text/plain"] == figure.alt == '"A" < B & C. It falls.'
    [img] = re.findall("<img [^>]*>", bundle["text/html"])
    assert f'alt="{html.escape(figure.alt)}" width="{width}"' in img
    assert f'src="data:image/png;base64,{bundle["image/png"]}"' in img
    [svg] = re.findall(r'srcset="data:image/svg\+xml;base64,([^"]*)"', bundle["text/html"])
    ElementTree.fromstring(base64.b64decode(svg))
    pixels = image.imread(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert pixels.shape[:2] == pytest.approx((2 * height, 2 * width), abs=2)


def test_the_png_of_a_notebook_keeps_the_colors_of_names():
    figure = show.timeline(STEPS * 4, title=TITLE)
    pixels = 255 * image.imread(io.BytesIO(show.to_png(figure)))[..., :3].reshape(-1, 3)
    for color in palette.RANK_COLORS:
        assert abs(pixels - 255 * np.array(to_rgb(color))).sum(axis=1).min() < 25, color


def test_a_long_title_of_a_plot_is_wrapped():
    title = "A title that says what the figure finds takes more words than a line can hold " * 2
    figure, _ = show.subplots(1, 2, title=title)
    box = shown_texts(figure)[figure._suptitle]
    assert figure._suptitle.get_text().split() == title.split()
    assert box.x0 > 0 and box.x1 < figure.bbox.x1


def test_show_loads_no_torch_and_nothing_else_of_dplab():
    code = ("import sys, dplab; own = {*sys.modules}; import dplab.show; "
            "cheap = 'matplotlib' not in sys.modules; dplab.show.loss_curves; "
            "dplab.show.time_shares; assert cheap; print(*{*sys.modules} - own)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert "dplab.show.curves" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "torch"
                or (name.startswith("dplab.") and not name.startswith("dplab.show"))}
    assert "matplotlib.pyplot" not in loaded
