"""Curves of losses are drawn as given, and their names can be read."""

import itertools
import math

import numpy as np
import pytest
from pictures import assert_readable

from dplab import show
from dplab.show.curves import _gap_between

STEPS = range(40)
LOSSES = [2.3 * math.exp(-step / 15) + 0.1 * math.sin(step) + 0.3 for step in STEPS]


def lines_of(figure):
    return {line.get_label(): line for line in figure.axes[0].lines
            if not line.get_label().startswith("_")}


HARD_CURVES = {
    "coincide": {"one process": LOSSES, "DDP": LOSSES, "FSDP": [v + 1e-7 for v in LOSSES]},
    "cross": {"up": [0.0, 1.0], "down": [1.0, 0.0], "flat": [0.5, 0.5]},
    "one step": {"a": [1.0], "b": [1.0], "c": [1.0 + 1e-9]},
    "long names": {"the sum of the gradients instead of their mean, four ranks " * 2: LOSSES,
                   "another configuration with quite a long description": LOSSES},
    "dollars": {"$5 per hour": LOSSES, "$_{x": LOSSES},
    "diverges": {"mean": LOSSES, "sum": [2.0**step if step < 30 else math.inf for step in STEPS],
                 "never": [math.nan] * 40},
    "lengths": {"long": LOSSES, "short": LOSSES[:5], "shorter": LOSSES[:2]},
}


@pytest.mark.parametrize("curves", HARD_CURVES.values(), ids=HARD_CURVES)
def test_curves_are_drawn_as_given_with_labels_apart(curves):
    figure = show.loss_curves(curves, title="A finding that needs more than one line " * 3)
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
    heights = {text.get_text(): text.get_position()[1] for text in same.axes[0].texts}
    assert heights["a"] > heights["b"] > heights["c"]


def test_curves_named_after_a_rank_have_its_color():
    lines = lines_of(show.loss_curves({"rank 2": [2, 1], "rank 0": [3, 1], "mean": [2.5, 1]},
                                      title=""))
    colors = {label: line.get_color() for label, line in lines.items()}
    assert colors["rank 2"] == show.rank_color(2) and colors["rank 0"] == show.rank_color(0)
    assert colors["mean"] not in (colors["rank 2"], colors["rank 0"])


def test_the_gap_is_the_largest_at_any_step():
    assert _gap_between({"a": [1.0, 5.0, 2.0], "b": [1.0, 4.75, 2.1]}).endswith(" 0.25")
    assert "identical" in _gap_between({"a": [1.0, 5.0], "b": [1.0, 5.0]})
    assert _gap_between({"a": [1.0, math.nan], "b": [1.0, 5.0]}) == ""
    assert _gap_between({"a": [1.0], "b": [1.0, 5.0]}) == ""


def test_a_curve_that_diverges_says_when_and_alternatives_have_the_numbers():
    figure = show.loss_curves({"ok": [2.0] * 5, "sum": [2, 9, 99, math.inf, math.nan]}, title="")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "ok" in texts and any("sum" in t and "step 3" in t for t in texts)
    alt = show.loss_curves({"a": [2.0, 1.0], "b": [2.0, 1.0]}, title="Falls").alt
    assert "a from 2 to 1" in alt and "identical" in alt


def test_the_first_step_may_have_another_number():
    figure = show.loss_curves({"sum": [2.0, math.inf]}, title="", first=1)
    assert [list(line.get_xdata()) for line in lines_of(figure).values()] == [[1, 2]]
    assert "step 2" in figure.axes[0].texts[0].get_text()


@pytest.mark.parametrize("curves", [{}, {"a": [1.0], "b": []}])
def test_no_curve_is_an_error(curves):
    with pytest.raises(ValueError, match="at least one"):
        show.loss_curves(curves, title="")
