"""The figure of a sweep over batch sizes."""

import pytest

from dplab import show


def test_a_sweep_draws_means_and_ranges():
    lines = {"linear": {32: [2.0, 4.0], 64: [3.0, 9.0]}, "best": {32: [1.0], 64: [2.0]}}
    figure = show.batch_sweep({"SGD": lines, "Adam": {"linear": {32: [5.0], 64: [6.0]}}},
                              title="a title", ylabel="error", dashed=("best",))
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == [3.0, 6.0]
    assert left.lines[0].get_color() == right.lines[0].get_color() != left.lines[1].get_color()
    band = left.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 2.0 and band[:, 1].max() == 9.0
    assert "a title" in figure.alt and "SGD, linear from 3 to 6" in figure.alt
    with pytest.raises(ValueError, match="at least one panel"):
        show.batch_sweep({"SGD": {}}, title="", ylabel="")
