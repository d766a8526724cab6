"""The plots show the numbers they are given, and their labels can be read."""

import base64
import io
import itertools
import math
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from dplab import show
from dplab.show.labels import flow, spread, text_width, wrap
from dplab.show.shares import OTHER_COLORS, PART_COLORS, number

STEPS = range(40)
LOSSES = [2.3 * math.exp(-step / 15) + 0.1 * math.sin(step) + 0.3 for step in STEPS]


def linear(color):
    channels = np.array(to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast_with_white(color):
    return 1.05 / (linear(color) @ [0.2126, 0.7152, 0.0722] + 0.05)


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
        assert contrast_with_white(color) >= 4.5, color


def test_a_rank_keeps_its_color():
    assert [show.rank_color(rank) for rank in range(8)] == list(show.RANK_COLORS)
    assert show.rank_color(11) == show.rank_color(3)


def test_show_loads_no_torch_and_nothing_else_of_dplab():
    code = ("import sys, dplab.show; cheap = 'matplotlib' not in sys.modules; "
            "dplab.show.loss_curves, dplab.show.time_shares; assert cheap; print(*sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert "dplab.show.curves" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "torch"}
    assert not {name for name in loaded
                if name.startswith("dplab.") and not name.startswith("dplab.show")}
    assert "matplotlib.pyplot" not in loaded


def labels_of(figure):
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    texts += [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
              if axis.get_visible()]
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    return {text: text.get_window_extent(renderer) for text in texts if text.get_text()}


def assert_readable(figure):
    boxes = labels_of(figure)
    paper = figure.bbox
    for text, box in boxes.items():
        assert text.get_fontsize() >= 10, text
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1, text
        assert paper.y0 <= box.y0 and box.y1 <= paper.y1, text
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


def lines_of(figure):
    return {line.get_label(): line for line in figure.axes[0].lines
            if not line.get_label().startswith("_")}


HARD_CURVES = {
    "one": {"one process": LOSSES},
    "coincide": {"one process": LOSSES, "DDP": LOSSES, "FSDP": [v + 1e-7 for v in LOSSES]},
    "sixteen the same": {f"configuration {i}": LOSSES for i in range(16)},
    "end at the top": {f"run {i}": [float(s) for s in STEPS] for i in range(6)},
    "cross": {"up": [0.0, 1.0], "down": [1.0, 0.0], "flat": [0.5, 0.5]},
    "one step": {"a": [1.0], "b": [1.0], "c": [1.0 + 1e-9]},
    "constant": {"a": [3.0] * 5, "b": [3.0] * 5},
    "long names": {"the sum of the gradients instead of their mean, four ranks " * 2: LOSSES,
                   "another configuration with quite a long description": LOSSES},
    "dollars": {"$5 per hour": LOSSES, "$_{x": LOSSES},
    "diverges": {"mean": LOSSES, "sum": [2.0**step if step < 30 else math.inf for step in STEPS],
                 "never": [math.nan] * 40},
    "lengths": {"long": LOSSES, "short": LOSSES[:5], "shorter": LOSSES[:2]},
}


@pytest.mark.parametrize("curves", HARD_CURVES.values(), ids=HARD_CURVES)
@pytest.mark.parametrize("yscale", ["linear", "log"])
def test_curves_are_drawn_as_given_with_labels_apart(curves, yscale):
    figure = show.loss_curves(curves, title="A finding that needs more than one line " * 3,
                              yscale=yscale)
    lines = lines_of(figure)
    assert list(lines) == list(curves)
    for label, values in curves.items():
        finite = [v if math.isfinite(v) else math.nan for v in values]
        np.testing.assert_array_equal(lines[label].get_xdata(), np.arange(len(values)))
        np.testing.assert_array_equal(lines[label].get_ydata(), finite)
    shown = "".join(text.get_text() for text in figure.axes[0].texts).replace("\n", "")
    assert all(label.replace(" ", "") in shown.replace(" ", "") for label in curves)
    assert_readable(figure)


def test_a_leader_starts_where_its_curve_ends():
    figure = show.loss_curves({"high": [3.0, 2.0], "low": [3.0, 1.0]}, title="Two ends")
    axes = figure.axes[0]
    leaders = [line for line in axes.lines if line.get_label() == "_leader"]
    starts = [line.get_transform().transform(line.get_xydata())[0] for line in leaders]
    ends = axes.transData.transform([(1, 1.0), (1, 2.0)])
    np.testing.assert_allclose(sorted(map(tuple, starts)), sorted(map(tuple, ends)), atol=0.01)
    assert {line.get_color() for line in leaders} == {
        line.get_color() for line in lines_of(figure).values()}


def test_coinciding_curves_show_a_margin_of_each_one_and_others_are_thin():
    same = show.loss_curves({"a": LOSSES, "b": LOSSES, "c": LOSSES}, title="Same")
    widths = [line.get_linewidth() for line in lines_of(same).values()]
    assert all(lower - upper >= 3 for lower, upper in itertools.pairwise(widths))
    apart = show.loss_curves({f"rank {r}": [v + r for v in LOSSES] for r in range(4)}, title="")
    assert {line.get_linewidth() for line in lines_of(apart).values()} == {1.6}
    assert len({line.get_color() for line in lines_of(same).values()}) == 3


def test_labels_of_curves_that_end_together_stand_in_their_order():
    figure = show.loss_curves({"a": LOSSES, "b": LOSSES, "c": LOSSES}, title="Same")
    heights = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts}
    assert heights["a"] > heights["b"] > heights["c"]


def test_curves_named_after_a_rank_have_its_color():
    lines = lines_of(show.loss_curves({"rank 2": [2, 1], "rank 0": [3, 1], "mean": [2.5, 1]},
                                      title="", colors={"mean": "#000000"}))
    colors = {label: line.get_color() for label, line in lines.items()}
    assert colors == {"rank 2": show.rank_color(2), "rank 0": show.rank_color(0),
                      "mean": "#000000"}


def test_the_gap_is_the_largest_at_any_step():
    assert show.gap_between({"a": [1.0, 5.0, 2.0], "b": [1.0, 4.75, 2.1]}).endswith(" 0.25")
    assert "identical" in show.gap_between({"a": [1.0, 5.0], "b": [1.0, 5.0]})
    assert show.gap_between({"a": [1.0, math.nan], "b": [1.0, 5.0]}) == ""
    assert show.gap_between({"a": [1.0], "b": [1.0, 5.0]}) == ""


def test_a_curve_that_diverges_says_when():
    figure = show.loss_curves({"ok": [2.0] * 5, "sum": [2, 9, 99, math.inf, math.nan]}, title="")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "ok" in texts and any("sum" in t and "step 3" in t for t in texts)


@pytest.mark.parametrize("curves", [{}, {"a": [1.0], "b": []}])
def test_no_curve_is_an_error(curves):
    with pytest.raises(ValueError, match="at least one"):
        show.loss_curves(curves, title="")


HARD_ROWS = {
    "usual": {"1 rank": {"forward": 12.0, "backward": 25.0, "optimizer": 2.2},
              "4 ranks": {"forward": 12.2, "backward": 25.3, "communication": 18.4,
                          "optimizer": 2.1}},
    "tiny": {"a": {"forward": 1e-4, "backward": 2e-3, "communication": 1000, "optimizer": 3e-3}},
    "all tiny but one row": {"a": {"forward": 1e6},
                             "b": {name: 1.5 for name in (*PART_COLORS, "x", "y", "z")}},
    "zeros": {"nothing": {"forward": 0, "backward": 0}, "all": {"forward": 0, "backward": 0}},
    "many": {f"configuration {i}": {f"a part with a long name {k}": 0.01 + (k == i) * 50
                                    for k in range(6)} for i in range(6)},
    "big numbers": {"a": {"forward": 123456789.0, "backward": 98765.4, "communication": 1.0,
                          "optimizer": 2.0, "x": 3.0}},
    "long names": {"a configuration that one describes in many words, and then in more": {
        "forward": 1.0, "backward": 2.0}, "$b$": {"forward": 3.0}},
    "tall names": {f"configuration {i}, which takes four lines to describe " * 3: {"forward": i}
                   for i in (1.0, 2.0, 3.0)},
    "ten parts": {"a": {name: 1000.0 if name == "forward" else 1.0
                        for name in (*PART_COLORS, "p", "q", "r", "s", "t", "u")}},
}


@pytest.mark.parametrize("rows", HARD_ROWS.values(), ids=HARD_ROWS)
@pytest.mark.parametrize("width", [7.5, 5.5])
def test_bars_are_as_long_as_their_values_with_labels_apart(rows, width):
    figure = show.time_shares(rows, title="A finding", width=width)
    bars = [bar for bar in figure.axes[0].patches if not bar.get_label().startswith("_")]
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    expected = [(part, row[part]) for row in rows.values() for part in parts if row.get(part)]
    assert [(bar.get_label(), bar.get_width()) for bar in bars] == expected
    for before, after in itertools.pairwise(bars):
        same_row = before.get_y() == after.get_y()
        start = before.get_x() + before.get_width() if same_row else 0
        assert after.get_x() == pytest.approx(start)
    texts = [text.get_text() for text in figure.axes[0].texts]
    for part, value in expected:
        assert part in texts and number(value) in texts
    for row in rows.values():
        assert f"{number(sum(row.values()))} ms" in texts
    assert_readable(figure)
    assert_no_text_on_another_bar(figure, bars)


def assert_no_text_on_another_bar(figure, bars):
    """A text may stand inside one bar, and else touches none."""
    for text, box in labels_of(figure).items():
        for bar in bars:
            area = bar.get_window_extent()
            inside = area.x0 <= box.x0 and box.x1 <= area.x1
            crossing = box.x0 < area.x1 and area.x0 < box.x1
            middle = (box.y0 + box.y1) / 2
            assert inside or not (crossing and area.y0 < middle < area.y1), (text, bar)


@pytest.mark.parametrize("rows", [{}, {"a": {"b": -1.0}}, {"a": {"b": math.nan}},
                                  {"a": {f"part {i}": 1.0 for i in range(7)}}])
def test_bars_that_cannot_be_drawn_are_an_error(rows):
    with pytest.raises(ValueError, match="time_shares"):
        show.time_shares(rows, title="")


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
        "image/png": {"width": width, "height": height, "alt": "Two falling lines"}}}
    assert set(bundle) == {"image/png", "text/plain"} and bundle["text/plain"]
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


def ring_states(parts):
    """``[step][rank][chunk]`` of a ring all-reduce of ``parts[rank][chunk]``, chunk by chunk."""
    size = len(parts)
    states = [[list(chunks) for chunks in parts]]
    for step in range(2 * (size - 1)):
        states.append([list(chunks) for chunks in states[-1]])
        for chunk in range(size):
            to = (chunk + 2 + step) % size
            arriving = states[-2][to - 1][chunk]
            states[-1][to][chunk] = arriving + (states[-2][to][chunk] if step < size - 1 else 0)
    return states


def parts_of(size):
    return [[10**rank * (chunk + 1) for chunk in range(size)] for rank in range(size)]


AWKWARD = random.Random(0)
RINGS = {
    **{f"{size} ranks": parts_of(size) for size in (1, 2, 3, 4, 8)},
    "fractions": [[AWKWARD.gauss(0, 1) for _ in range(4)] for _ in range(4)],
    "awkward": [[AWKWARD.gauss(0, 10**rank) for _ in range(8)] for rank in range(-4, 4)],
    "zeros": [[0.0] * 3] * 3,
}


def cells_of(figure, size):
    """``[rank][chunk]``: the text of a cell, and whether it stands on black, as a sum does."""
    axes = figure.axes[0]
    texts = [text for text in axes.texts if text.get_text()[-1].isdigit()
             and not text.get_text().startswith(("rank", "chunk"))
             and text.get_position()[1] > 140]
    rows = sorted({round(text.get_position()[1], 3) for text in texts})
    cells = [sorted((t for t in texts if round(t.get_position()[1], 3) == row),
                    key=lambda text: text.get_position()[0]) for row in rows]
    assert [len(row) for row in cells] == [size] * size
    return [[(text.get_text(), text.get_color() == "white") for text in row] for row in cells]


@pytest.mark.parametrize("parts", RINGS.values(), ids=RINGS)
def test_a_ring_is_drawn_as_given_with_texts_apart(parts):
    states, size = ring_states(parts), len(parts)
    total = np.sum(parts, axis=0)
    for step, ranks in enumerate(states):
        figure = show.ring_step(states, step)
        assert_readable_at_13_pixels(figure)
        cells = cells_of(figure, size)
        for row, numbers in zip(cells, ranks, strict=True):
            for (text, is_sum), held, whole in zip(row, numbers, total, strict=True):
                assert float(text) == pytest.approx(held, rel=0.06)
                assert is_sum == math.isclose(held, whole, rel_tol=1e-6)
        assert f"{sum(is_sum for row in cells for _, is_sum in row)} of {size**2}" in figure.alt


def assert_readable_at_13_pixels(figure):
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = {text: text.get_window_extent(renderer) for text in figure.axes[0].texts}
    for text, box in boxes.items():
        assert text.get_fontsize() / 0.75 >= 13, text
        assert figure.bbox.padded(-4).containsx(box.x0) and box.x1 < figure.bbox.x1 - 4, text
        assert figure.bbox.padded(-4).containsy(box.y0) and box.y1 < figure.bbox.y1 - 4, text
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


def test_a_ring_writes_whole_numbers_out():
    [first, *_] = cells_of(show.ring_step(ring_states([[1, 123456], [2.5, 0.1]]), 0), 2)
    assert [text for text, _ in first] == ["1", "123456"]


def test_the_arrows_of_a_ring_go_where_the_chunks_go():
    states = ring_states(parts_of(4))
    for step in range(7):
        axes = show.ring_step(states, step).axes[0]
        columns = {text.get_text(): text.get_position()[0] for text in axes.texts}
        arrows = {(patch.get_edgecolor(), round(patch._posA_posB[0][0]))
                  for patch in axes.patches if hasattr(patch, "_posA_posB")}
        moved = [(to, chunk) for to in range(4) for chunk in range(4)
                 if step and states[step][to][chunk] != states[step - 1][to][chunk]]
        assert len(moved) == (4 if step else 0)
        assert arrows == {((*to_rgb(show.rank_color((to - 1) % 4)), 1.0),
                           round(columns[f"chunk {chunk}"])) for to, chunk in moved}


def test_a_ring_says_in_words_what_it_shows():
    states = ring_states(parts_of(3))
    alt = show.ring_step(states, 2).alt
    assert alt.startswith("After step 2 of 4, 3 of 9 chunks are complete.")
    assert "reduce-scatter, step 2 of 2" in alt and "each rank has sent 2 of 4 chunks" in alt
    assert "Rank 0 holds 111 (complete), 202, 3, after sending chunk 1 to rank 1." in alt
    assert "all-gather, step 1 of 2" in show.ring_step(states, 3).alt
    assert "sending" not in show.ring_step(states, 0).alt
    assert show.ring_step(states, 1, title="Own").alt.startswith("Own.")


STATES_OF_3 = ring_states(parts_of(3))


@pytest.mark.parametrize(("states", "step", "says"), [
    (STATES_OF_3, 5, "step 5 is not one of 0 to 4"),
    (STATES_OF_3, -1, "step -1 is not one of 0 to 4"),
    (STATES_OF_3[:3], 3, "step 3 is not one of 0 to 2"),
    ([*STATES_OF_3, STATES_OF_3[-1]], 0, "takes 4 steps, these are 5"),
    ([], 0, "N ranks with N chunks"),
    ([[]], 0, "N ranks with N chunks"),
    ([[[1, 2], [3]]], 0, "N ranks with N chunks"),
    ([[[1, 2, 3], [4, 5, 6]]], 0, "N ranks with N chunks"),
    ([[[1, 2], [3, 4]], [[1, 2]]], 0, "N ranks with N chunks"),
    ([[[0] * 9] * 9], 0, "from 1 to 8"),
])
def test_a_ring_that_cannot_be_drawn_is_an_error(states, step, says):
    with pytest.raises(ValueError, match=says):
        show.ring_step(states, step)


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
    assert alt == '"<1>" & so on'
    assert image.imread(io.BytesIO(png)).shape[1] == pytest.approx(2 * 720, abs=2)
    walk.slider.value = 2
    alt, other = shown(walk)
    assert alt == '"<2>" & so on' and other != png
    walk.slider.value = 1
    assert shown(walk) == ('"<1>" & so on', png)


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


def test_a_table_of_three_rows():
    made = show.table(["ranks", "bytes"], [1, 0], (2, "1.5 M"))
    assert made.data == "| ranks | bytes |\n|:--|--:|\n| 1 | 0 |\n| 2 | 1.5 M |"
    with pytest.raises(ValueError, match="a row of 1 under a head of 2"):
        show.table(["ranks", "bytes"], [1])


def test_a_guess_that_is_not_there_reads_none():
    assert (show.given(None), show.given(0), show.given("ring")) == ("none", "0", "ring")


MAPS = {
    "one parameter, one rank": ([["w"]], {"w": (1,)}, 1),
    "more ranks than rows have room for": ([["b", "w"]], {"b": (3,), "w": (40, 2)}, 23),
    "three buckets": ([["d.weight"], ["c.bias", "c.weight"], ["a.bias"]],
                      {"d.weight": (7, 5), "c.bias": (4,), "c.weight": (2, 3, 4), "a.bias": (9,)},
                      4),
}


@pytest.mark.parametrize("case", MAPS.values(), ids=MAPS)
def test_heat_maps_are_drawn_as_given_on_one_scale_with_texts_apart(case):
    buckets, shapes, ranks = case
    random = np.random.default_rng(0)
    before = [{name: random.normal(size=shape) for name, shape in shapes.items()}
              for _ in range(ranks)]
    after = [{name: sum(rank[name] for rank in before) / ranks for name in shapes}] * ranks
    bars = {"calls": {"one by one": 9, "buckets": 3}, "ms exposed": {"one by one": 31.25,
                                                                    "buckets": None}}
    figure = show.heat_maps({"before": before, "after": after}, buckets, title="T", note="N",
                            bars=bars)
    axes = figure.axes[0]
    names = [name for bucket in buckets for name in bucket]
    meshes = [mesh for mesh in axes.collections if hasattr(mesh, "get_clim")]
    assert len(meshes) == 2 * len(names)
    for values, name, mesh in zip([before] * len(names) + [after] * len(names), 2 * names, meshes,
                                  strict=True):
        drawn = mesh.get_array()
        assert drawn.shape == (ranks, min(16, before[0][name].size))
        for rank, row in zip(values, drawn, strict=True):
            places = np.linspace(0, rank[name].size - 1, drawn.shape[1]).round().astype(int)
            assert np.array_equal(row, rank[name].ravel()[places])
    scales = {mesh.get_clim() for mesh in meshes}
    (low, high), = scales
    assert low == -high and high == max(abs(mesh.get_array()).max() for mesh in meshes)

    lengths = [bar.get_width() for bar in axes.patches if bar.get_facecolor()[3] == 1
               and bar.get_fill()]
    assert lengths[0] == pytest.approx(3 * lengths[1]) and lengths[3] == 0
    texts = [text for text in axes.texts if text.get_text()]
    said = [text.get_text() for text in texts]
    assert [f"bucket {number}" in said for number in range(len(buckets))] == [True] * len(buckets)
    assert {"9", "3", "31.2", "not counted", "rank 0"} <= set(said)
    assert "31.2" in figure.alt and "not counted" in figure.alt
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent().shrunk(0.98, 0.8) for text in texts]
    for one, other in itertools.combinations(range(len(boxes)), 2):
        assert not boxes[one].overlaps(boxes[other]), (said[one], said[other])
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_in_a_notebook_heat_maps_leave_the_ranks_their_colors():
    random = np.random.default_rng(0)
    ranks = [{name: random.normal(size=64) for name in "abcdefgh"} for _ in range(4)]
    figure = show.heat_maps({"before": ranks, "after": ranks}, ["abcd", "efgh"], title="T")
    pixels = 255 * image.imread(io.BytesIO(show.to_png(figure)))[..., :3].reshape(-1, 3)
    for color in show.RANK_COLORS[:4]:
        assert abs(pixels - 255 * np.array(to_rgb(color))).sum(axis=1).min() < 25, color


def test_lines_part_the_buckets_where_a_new_one_begins():
    ranks = [{name: [1.0, -1.0] for name in "abc"}]
    figure = show.heat_maps({"p": ranks}, [["a", "b"], ["c"]], title="T", shown=2)
    axes = figure.axes[0]
    a, b, c = [mesh.get_coordinates()[0, :, 0] for mesh in axes.collections]
    upright = [line.get_xdata()[0] for line in axes.lines if line.get_xdata()[0]
               == line.get_xdata()[1]]
    assert len(upright) == 1 and b[-1] < upright[0] < c[0]
    assert c[0] - b[-1] > 3 * (b[0] - a[-1]) > 0


@pytest.mark.parametrize("panels, buckets", [
    ({}, [["a"]]), ({"p": []}, [["a"]]), ({"p": [{"a": [1.0]}]}, []),
    ({"p": [{"a": [1.0, math.nan]}]}, [["a"]])])
def test_heat_maps_that_cannot_be_drawn_are_an_error(panels, buckets):
    with pytest.raises(ValueError, match="heat_maps"):
        show.heat_maps(panels, buckets, title="T")


def test_gradients_of_zero_are_drawn():
    figure = show.heat_maps({"p": [{"a": [0.0, 0.0]}]}, [["a"]], title="T")
    assert figure.axes[0].collections[0].get_array().tolist() == [[0.0, 0.0]]
    assert show.to_png(figure)


class Held:
    def __init__(self, op, **nbytes):
        self.op, self.bytes = op, nbytes


class Part:
    def __init__(self, name, start, end):
        self.name, self.start, self.end = name, start, end


def sawtooth(top):
    """Six layers, each gathered and freed, while gradients grow."""
    for op in range(24):
        gathered = [0, 30, 60, 30][op % 4] * top / 100
        yield Held(op, parameters=top // 5, gathered=gathered, other=0, gradients=op * top / 100,
                   activations=7)


STEPS_OF_MEMORY = {
    "usual": (list(sawtooth(4e9)), [Part("forward", 0, 10), Part("backward", 10, 20),
                                    Part("optimizer", 20, 24)]),
    "bytes": (list(sawtooth(40)), []),
    "one sample": ([Held(0, parameters=5)], [Part("all", 0, 1)]),
    "nothing": ([Held(0, parameters=0), Held(3, parameters=0)], []),
    "several in one operation": ([Held(0, other=1), Held(2, other=9e3, optimizer=4),
                                  Held(2, other=2e3), Held(5, other=1)], []),
    "short phases": (list(sawtooth(1e3)), [Part(f"micro-step {i}, its forward", i, i + 1)
                                           for i in range(9)]),
    "own categories": ([Held(0, **{"$x": 3, "a cache with quite a long name": 4})], []),
}


def extent_at(path, x):
    """The bottom and the top of an area there."""
    crossed = [a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])
               for a, b in itertools.pairwise(path.vertices) if (a[0] - x) * (b[0] - x) < 0]
    return min(crossed), max(crossed)


@pytest.mark.parametrize("limit", [None, 1e6])
@pytest.mark.parametrize("step", STEPS_OF_MEMORY.values(), ids=STEPS_OF_MEMORY)
def test_memory_is_stacked_as_given_with_texts_apart(step, limit):
    samples, phases = step
    figure = show.memory_over_step(samples, phases, title="A finding " * 12, limit=limit)
    assert_readable(figure)
    most = max(limit or 0, *(sum(sample.bytes.values()) for sample in samples), 0)
    unit = next(f for f in (1e12, 1e9, 1e6, 1e3, 1) if most >= f or f == 1)
    areas = {area.get_label(): area.get_paths()[0] for area in figure.axes[0].collections}
    held = {name for sample in samples for name, value in sample.bytes.items() if value}
    assert set(areas) == held
    seen = dict.fromkeys((sample.op for sample in samples), 0)
    for sample in samples:
        share = 1 / sum(other.op == sample.op for other in samples)
        inside = sample.op + (seen[sample.op] + 0.5) * share
        seen[sample.op] += 1
        below = 0
        for name, path in areas.items():
            bottom, top = (unit * height for height in extent_at(path, inside))
            assert bottom == pytest.approx(below)
            assert top - bottom == pytest.approx(sample.bytes.get(name, 0), abs=1e-6 * most)
            below = top
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert all(phase.name in texts for phase in phases)
    peak = max(samples, key=lambda sample: sum(sample.bytes.values()))
    for name in held:
        [label] = [text for text in texts if text.startswith(f"{name} ")]
        shown = float(label.removeprefix(name).replace(",", ""))
        assert shown * unit == pytest.approx(peak.bytes.get(name, 0), abs=0.005 * most)


def test_a_memory_figure_says_its_peak_in_words():
    figure = show.memory_over_step(*STEPS_OF_MEMORY["usual"], title="Gathered in turn")
    assert figure.alt == ("Gathered in turn. 4.08 GB at the peak, in optimizer: activations 0.00, "
                          "gathered 2.40, gradients 0.88, parameters 0.80, in GB. "
                          "Phases: forward, backward, optimizer.")
    top = show.memory_over_step(*STEPS_OF_MEMORY["usual"], title="", top=8e9).axes[0].get_ylim()[1]
    assert top == pytest.approx(1.04 * 8)


@pytest.mark.parametrize(("samples", "phases", "says"), [
    ([], [], "needs a sample"),
    ([Held(0, a=-1)], [], "0 or more"),
    ([Held(0, a=math.nan)], [], "0 or more"),
    ([Held(0, a=1)], [Part("back", 3, 2)], "ends no earlier"),
    ([Held(0, **{f"c{i}": 1 for i in range(9)})], [], "colours"),
])
def test_memory_that_cannot_be_drawn_is_an_error(samples, phases, says):
    with pytest.raises(ValueError, match=says):
        show.memory_over_step(samples, phases, title="")
