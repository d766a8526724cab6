"""The figure of two limits: each line crosses 1 at the rows that its link needs."""

import pytest

from dplab import show


def test_lines_cross_where_the_link_needs_and_walls_stand_where_memory_is_full():
    needed, fitting = {"fast": 1000.0, "middle": 12000.0, "slow": 15000.0}, {"model": 11000.0}
    figure = show.row_limits(needed, fitting, title="A finding")
    lines = {line.get_color(): line for line in figure.axes[0].lines}
    for number, rows in enumerate(needed.values()):
        line = lines[show.rank_color(number)]
        for end, ratio in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert end * ratio == pytest.approx(rows)
    wall = figure.axes[0].lines[-1]
    assert list(wall.get_xdata()) == [11000.0, 11000.0]
    assert figure.alt.startswith("A finding") and "12,000 rows over middle" in figure.alt
