"""Colours, labels and files are those of the course, and show loads only what it has to."""

import base64
import io
import itertools
import random
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import contrast, linear

from dplab import show
from dplab.show.labels import flow, number, spread, text_width, wrap
from dplab.show.palette import OTHER_COLORS, PART_COLORS


def oklab(light):
    """Perceptual coordinates (Ottosson 2020) of linear RGB, shape (..., 3)."""
    to_cones = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740],
                         [0.08830, 0.28172, 0.62998]])
    to_lab = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059],
                       [0.02590, 0.78277, -0.80868]])
    return np.cbrt(light @ to_cones.T) @ to_lab.T


COLOR_VISION = {  # Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB
    "usual": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}


@pytest.mark.parametrize("vision", COLOR_VISION)
@pytest.mark.parametrize("palette", [show.RANK_COLORS, (*PART_COLORS.values(), *OTHER_COLORS)],
                         ids=["ranks", "parts"])
def test_colors_stay_apart(palette, vision):
    light = np.array([linear(color) for color in palette])
    seen = oklab(np.clip(light @ COLOR_VISION[vision].T, 0, 1))
    least = 0.09 if palette is show.RANK_COLORS else 0.08
    for (one, a), (other, b) in itertools.combinations(zip(palette, seen, strict=True), 2):
        assert np.linalg.norm(a - b) > least, (one, other)


def test_rank_colors_can_be_read_on_white_and_carry_white_text():
    assert len(set(show.RANK_COLORS)) == 8
    for color in show.RANK_COLORS:
        assert contrast(color, "#FFFFFF") >= 4.5, color


def test_a_rank_keeps_its_color():
    assert [show.rank_color(rank) for rank in range(8)] == list(show.RANK_COLORS)
    assert show.rank_color(11) == show.rank_color(3)


def test_show_loads_no_torch_and_nothing_else_of_dplab():
    code = ("import sys, dplab; own = {*sys.modules}; import dplab.show; "
            "cheap = 'matplotlib' not in sys.modules; dplab.show.loss_curves; "
            "dplab.show.time_shares; assert cheap; print(*{*sys.modules} - own)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert "dplab.show.curves" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "torch"}
    assert not {name for name in loaded
                if name.startswith("dplab.") and not name.startswith("dplab.show")}
    assert "matplotlib.pyplot" not in loaded


def test_numbers_keep_three_digits():
    values = (0, 0.0012, 0.0345, 1, 23.45, 999.9, 123456)
    assert [number(v) for v in values] == [
        "0", "0.0012", "0.0345", "1.00", "23.4", "1,000", "123,456"]


def test_spread_keeps_labels_apart_in_order_and_near():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.uniform(1, 20) for _ in range(draw.randint(1, 9))]
        centers = [draw.choice([draw.uniform(-20, 220), 50.0]) for _ in sizes]
        high = sum(sizes) + 2 * len(sizes) + draw.uniform(0, 100)
        placed = spread(centers, sizes, 0, high, gap=2)
        order = sorted(range(len(sizes)), key=lambda i: centers[i])
        for i, j in itertools.pairwise(order):
            assert placed[j] - placed[i] >= (sizes[i] + sizes[j]) / 2 + 2 - 1e-9
        for place, size in zip(placed, sizes, strict=True):
            assert place - size / 2 >= -1e-9 and place + size / 2 <= high + 1e-9


def test_spread_moves_only_what_it_must():
    assert spread([10, 50, 90], [10, 10, 10], 0, 100) == pytest.approx([10, 50, 90])
    assert spread([50, 50, 90], [10, 10, 10], 0, 100) == pytest.approx([45, 55, 90])
    assert spread([0, 0], [10, 10], 0, 100) == pytest.approx([5, 15])
    with pytest.raises(ValueError, match="pt more"):
        spread([0, 0], [60, 60], 0, 100)


def test_flow_and_wrap_stay_within_their_width():
    assert flow([40, 40, 40, 90, 200], 100, 10) == [[0, 1], [2], [3], [4]]
    text = "every rank sees other data and takes the same step"
    lines = wrap(text, 10, 120).split("\n")
    assert len(lines) > 1 and " ".join(lines) == text
    assert all(text_width(line, 10) <= 120 for line in lines)


def figures():
    curve = show.loss_curves({"a": [2, 1], "b": [2, 1]}, title="Falls", alt="Two falling lines")
    bars = show.time_shares({"a": {"forward": 1.0}}, title="Bars")
    plot, axes = show.subplots(title="Own", xlabel="ranks", ylabel="time [ms]")
    axes.plot([1, 2], [3, 4])
    return {"curve": curve, "bars": bars, "plot": plot}


@pytest.mark.parametrize("name", ["curve", "bars", "plot"])
def test_svg_is_the_same_each_time_and_opaque(name):
    first, again = figures()[name], figures()[name]
    svg = show.to_svg(first)
    with matplotlib.rc_context({"svg.fonttype": "none", "savefig.transparent": True,
                                "font.size": 30}):
        assert show.to_svg(again) == svg
    text = svg.decode()
    assert "<text" not in text and "<title>" in text and "<dc:date>" not in text
    assert first.get_facecolor() == (1, 1, 1, 1)
    canvas = FigureCanvasAgg(first)
    canvas.draw()
    assert (np.asarray(canvas.buffer_rgba())[..., 3] == 255).all()


def test_a_long_title_of_a_plot_is_wrapped():
    title = "A title that says what the figure finds takes more words than one line of it can hold"
    figure, _ = show.subplots(1, 2, title=title, width=5)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    box = figure._suptitle.get_window_extent(renderer)
    assert figure._suptitle.get_text().split() == title.split()
    assert box.x0 > 0 and box.x1 < figure.bbox.x1


def test_a_notebook_shows_one_png_with_its_text_alternative(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: shown.append((a, k)))
    figure = figures()["curve"]
    figure._ipython_display_()
    [((bundle,), options)] = shown
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    assert options == {"raw": True, "metadata": {
        "image/png": {"width": width, "height": height, "alt": "Falls. Two falling lines"}}}
    assert set(bundle) == {"text/html", "image/png", "text/plain"} and bundle["text/plain"]
    pixels = image.imread(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert pixels.shape[:2] == pytest.approx((2 * height, 2 * width), abs=2)
    again = figures()["curve"]
    assert show.to_png(again) == base64.b64decode(bundle["image/png"])


def test_text_alternatives_name_the_numbers():
    bars = show.time_shares({"4 ranks": {"forward": 12.5, "communication": 3.0}}, title="Slow")
    assert bars.alt == "Slow. 4 ranks: forward 12.5, communication 3.00, together 15.5 ms."
    curve = show.loss_curves({"a": [2.0, 1.0], "b": [2.0, 1.0]}, title="Falls")
    assert "a from 2 to 1" in curve.alt and "identical" in curve.alt


def test_style_is_put_back():
    with matplotlib.rc_context({"font.size": 31}):
        with show.style():
            assert matplotlib.rcParams["font.size"] == 10.5
        assert matplotlib.rcParams["font.size"] == 31


def test_a_table_of_three_rows():
    made = show.table(["ranks", "bytes"], [1, 0], (2, "1.5 M"))
    assert made.data == "| ranks | bytes |\n|:--|--:|\n| 1 | 0 |\n| 2 | 1.5 M |"
    with pytest.raises(ValueError, match="a row of 1 under a head of 2"):
        show.table(["ranks", "bytes"], [1])


def test_a_norm_does_not_end_a_tables_cell():
    assert show.table(["", "|G|²"], [1, 2]).data.startswith("|  | \\|G\\|² |\n")


def test_a_guess_that_is_not_there_reads_none():
    assert (show.given(None), show.given(0), show.given("ring")) == ("none", "0", "ring")
