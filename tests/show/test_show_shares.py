"""Bars are as long as their values, and every part has its value beside it."""

import itertools
import math

import pytest
from pictures import assert_readable, labels_of

from dplab import show
from dplab.show import shares, theme
from dplab.show.labels import number
from dplab.show.palette import PART_COLORS

HARD_ROWS = {
    "usual": {"1 rank": {"forward": 12.0, "backward": 25.0, "optimizer": 2.2},
              "4 ranks": {"forward": 12.2, "backward": 25.3, "communication": 18.4,
                          "optimizer": 2.1}},
    "all tiny but one row": {"a": {"forward": 1e6},
                             "b": {name: 1.5 for name in (*PART_COLORS, "x", "y", "z")}},
    "zeros": {"nothing": {"forward": 0, "backward": 0}, "all": {"forward": 0, "backward": 0}},
    "long names": {"a configuration that one describes in many words, and then in more": {
        "forward": 1.0, "backward": 2.0}, "$b$": {"forward": 3.0}},
    "ten parts": {"a": {name: 1000.0 if name == "forward" else 1.0
                        for name in (*PART_COLORS, "p", "q", "r", "s", "t", "u")}},
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", HARD_ROWS.values(), ids=HARD_ROWS)
@pytest.mark.parametrize("width", [7.5, 5.5])
def test_bars_are_as_long_as_their_values_with_labels_apart(rows, width, monkeypatch):
    monkeypatch.setattr(shares, "WIDTH", width)
    monkeypatch.setattr(theme, "WIDTH", width)
    figure = show.time_shares(rows, title="A finding")
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
    assert all(f"{part} {number(value)}" in figure.alt for part, value in expected)
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


def test_lines_lead_from_a_value_to_the_middle_of_its_segment():
    axes = show.time_shares({"a": {"forward": 97.0, "backward": 1.0, "communication": 2.0}},
                            title="").axes[0]
    below = [line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] > 0
             and line.get_ydata()[1] > line.get_ydata()[0]]
    assert below == pytest.approx([97.5, 99.0])
