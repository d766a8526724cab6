"""The pictures of scale show the numbers they are given, and say them in words."""


import pytest
from pictures import shown_texts

from dplab import show
from dplab.show.predictions import KEY
from dplab.show.theme import to_png

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
