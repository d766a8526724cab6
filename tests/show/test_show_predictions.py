"""The pictures of scale show the numbers they are given, and say them in words."""

import itertools

import pytest
from matplotlib.colors import same_color
from pictures import shown_texts

from dplab import show
from dplab.show.palette import FAINT
from dplab.show.predictions import KEY
from dplab.show.theme import to_png

BARS = [show.Bar("DDP", 300e9, 0.5, 0.1, False), show.Bar("FSDP", 50e9, 0.4, 0.1, True),
        show.Bar("HSDP", 60e9, 0.25, 0.0, True)]
CURVES = {"one": [(8, 100.0), (16, 90.0), (32, 30.0)], "two": [(8, 80.0), (16, 80.0), (32, 79.0)]}
ROWS = [show.Beside("one series", "assumed: much", [1.2, 1.4]),
        show.Beside("another", "with pipelines", None), show.Beside("third", "little", [0.88]),
        show.Beside("fourth", "far off", [2.5, 11.0, 1.8]), show.Beside("fifth", "slow", [0.4])]


def words(figure):
    return [text.get_text() for text in shown_texts(figure)]


def outside(figure):
    """The texts that reach beyond the figure's edges."""
    width, height = figure.bbox.size
    boxes = {text.get_text(): box for text, box in shown_texts(figure).items()}
    return [word for word, box in boxes.items() if not word.isdigit()  # ticks that are cut off
            and (box.x0 < 0 or box.y0 < 0
                 or box.x1 > width or box.y1 > height)]


def drawn(figure):
    to_png(figure)
    return figure


def test_choices_draw_what_is_held_and_how_long_it_takes():
    figure = drawn(show.choices(BARS, 72e9, title="FSDP fits"))
    memory, _ = figure.axes
    held, lasting = ([bar for bar in axes.patches if bar.get_label() != "_outline"]
                     for axes in figure.axes)
    assert [bar.get_width() for bar in held] == pytest.approx([144, 50, 60])
    assert [same_color(bar.get_facecolor(), FAINT) for bar in held] == [True, False, False]
    widths = [bar.get_width() for bar in lasting]
    assert widths == pytest.approx([300, 100, 250, 0])  # computing, then only sending
    limit, gap = memory.lines
    assert limit.get_xdata()[0] == pytest.approx(72)
    assert all(72 < x < 144 for x in gap.get_xdata()) and max(gap.get_ydata()) < 0.5
    found = words(figure)
    for said in ("300 GB", "50 GB", "400 ms", "250 ms", "does not fit", "DDP", "FSDP fits"):
        assert said in found
    assert "DDP: 300 GB, does not fit" in figure.alt and "400 ms, 100 ms of it" in figure.alt
    assert not outside(figure)


def test_choices_where_nothing_fits():
    figure = drawn(show.choices(BARS[:1], 72e9, title="Nothing fits"))
    assert not figure.axes[1].patches and "does not fit" in words(figure)
    with pytest.raises(ValueError):
        show.choices([], 72e9, title="")


def test_over_ranks_draws_and_names_the_curves():
    figure = drawn(show.over_ranks(CURVES, title="One stops", ylabel="efficiency [%]",
                                   stops={"one": 16, "two": None}))
    [axes] = figure.axes
    points = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    for values in CURVES.values():
        assert [tuple(map(float, point)) for point in values] in [
            [tuple(map(float, point)) for point in line] for line in points]
    rings = [line for line in axes.lines if line.get_markersize() == 11]
    assert [list(zip(*ring.get_data(), strict=True)) for ring in rings] == [[(16, 90.0)]]
    assert {"one", "two", "ranks", "efficiency [%]", "16", "One stops"} <= set(words(figure))
    assert "one: from 100 at 8 ranks to 30 at 32, stops paying at 16" in figure.alt
    assert "two: from 80 at 8 ranks to 79 at 32" in figure.alt
    assert not outside(figure)
    with pytest.raises(ValueError):
        show.over_ranks({}, title="", ylabel="")


def test_names_of_curves_that_end_together_do_not_overlap():
    figure = drawn(show.over_ranks({name: [(8, 1.0), (16, 1.0 + shift)] for name, shift in (
        ("a\nb", 0), ("c", 1e-3), ("d", 2e-3))}, title="Alike", ylabel="rate"))
    boxes = [text.get_window_extent() for text in shown_texts(figure)
             if text.get_text() in ("a\nb", "c", "d")]
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_predicted_beside_published_has_a_line_for_each():
    figure = drawn(show.predicted_beside_published(ROWS, title="Too fast"))
    [axes] = figure.axes
    points = {marker: sorted(x for line in axes.lines if line.get_marker() == marker
                             for x in line.get_xdata()) for marker in "o<>"}
    assert points == {"o": [0.88, 1.2, 1.4, 1.8], "<": [0.5], ">": [2, 2]}
    assert axes.get_xlim() == pytest.approx((0.5, 2))
    medians = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 2
               and line.get_marker() == "None"]
    assert medians == pytest.approx([1.3, 0.88, 2, 0.5])
    found = words(figure)
    for said in ("one series", "assumed: much", "out of scope", "+30% (+20% to +40%)", "−12%",
                 "+150% (+80% to +1000%)", "−60%", KEY):
        assert said in found
    for said in ("another: out of scope", "third: −12%", "fourth: +150% (+80% to +1000%)"):
        assert said in figure.alt
    assert not outside(figure)
    with pytest.raises(ValueError):
        show.predicted_beside_published(ROWS[1:2], title="")


def test_lines_cross_where_the_link_needs_and_walls_stand_where_memory_is_full():
    needed, fitting = {"fast": 1000.0, "middle": 12000.0, "slow": 15000.0}, {"model": 11000.0}
    figure = show.row_limits(needed, fitting, title="A finding")
    lines = {line.get_color(): line for line in figure.axes[0].lines}
    for number, rows in enumerate(needed.values()):
        line = lines[show.rank_color(number)]
        for end, ratio in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert end * ratio == pytest.approx(rows)
    assert list(figure.axes[0].lines[-1].get_xdata()) == [11000.0, 11000.0]
    assert "12,000 rows over middle" in figure.alt
