"""The picture of a step: bars where the spans are, and what is exposed marked."""

import itertools
import math
import random

import pytest
from matplotlib.colors import same_color, to_hex
from timelines import (
    CASES,
    NAMES,
    UNITS,
    bars_of,
    ends,
    measured,
    predicted,
    rows_of,
    times,
    unit_of,
)

from dplab import show
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span
from dplab.show.palette import PART_COLORS


def covered(intervals, time):
    return any(start < time < end for start, end in intervals)


def between(*intervals):
    """A time between any two neighbouring ends."""
    edges = sorted({edge for some in intervals for interval in some for edge in interval})
    return [(one + other) / 2 for one, other in itertools.pairwise(edges) if other - one > 1e-9]


@pytest.fixture(params=CASES, scope="module")
def case(request):
    ranks = CASES[request.param]
    return ranks, show.timeline(ranks, names=NAMES.get(request.param), title="A finding")


def test_bars_are_where_the_spans_are(case):
    ranks, figure = case
    factor = UNITS[unit_of(figure)]
    for spans, bars in zip(ranks, rows_of(figure, ranks), strict=True):
        collectives = {span.name for span in spans if span.lane == COMMUNICATION}
        sending = [bar for bar in bars if bar.get_label() in collectives]
        assert ends(sending) == [pytest.approx(pair)
                                 for pair in times(spans, factor, COMMUNICATION)]
        computing = [bar for bar in bars
                     if bar.get_label() not in {*collectives, "exposed", "stalled"}]
        assert len({(bar.get_y(), bar.get_height()) for bar in computing}) <= 1
        computed = sorted((span for span in spans if span.lane == COMPUTE),
                          key=lambda span: (span.start, -span.end))
        for time in between(ends(computing), times(spans, factor, COMPUTE)):
            innermost = [span.name for span in computed
                         if factor * span.start < time < factor * span.end][-1:]
            shown = [bar.get_label() for bar in computing if covered(ends([bar]), time)]
            assert shown == [name.partition(" layer")[0] for name in innermost]
        if ranks is not CASES["nested"]:
            expected = [pair for pair in times(spans, factor, COMPUTE) if pair[0] < pair[1]]
            assert ends(computing) == [pytest.approx(pair) for pair in expected]


def test_parts_have_their_color_everywhere():
    figure = show.timeline([predicted()], title="")
    for bar in bars_of(figure):
        if bar.get_label() in PART_COLORS:
            assert same_color(bar.get_facecolor(), PART_COLORS[bar.get_label()])
    labels = [bar.get_label() for bar in bars_of(figure)]
    assert labels.count("backward") == 8 and labels.count("forward") == 1


def test_what_is_exposed_and_who_waits_is_marked(case):
    ranks, figure = case
    factor = UNITS[unit_of(figure)]
    for spans, bars in zip(ranks, rows_of(figure, ranks), strict=True):
        computing, sending, waiting = (times(spans, factor, lane)
                                       for lane in (COMPUTE, COMMUNICATION, STALLED))
        exposed, hatched = ends(bars, "exposed"), ends(bars, "stalled")
        for time in between(computing, sending, waiting, exposed, hatched):
            bare = covered(sending, time) and not covered(computing, time)
            idle = covered(waiting, time) and not covered(computing, time)
            assert covered(exposed, time) == bare, time
            assert covered(hatched, time) == (bare or idle), time
        assert all(bar.get_hatch() for bar in bars if bar.get_label() == "stalled")


def test_a_wait_for_data_is_told_apart_from_what_else_stalls():
    spans = [Span("data", STALLED, 0, 2), Span("forward", COMPUTE, 2, 3),
             Span("wait", STALLED, 3, 5), Span("all-reduce 0", COMMUNICATION, 1, 5)]
    bars = {bar.get_label(): bar for bar in bars_of(show.timeline([spans], title=""))}
    assert (bars["data"].get_x(), bars["data"].get_width()) == (0, 2)
    assert (bars["stalled"].get_x(), bars["stalled"].get_width()) == (3, 2)
    assert bars["data"].get_hatch() != bars["stalled"].get_hatch()


def test_solid_and_light_parts_of_a_collective_are_its_own_bar():
    spans = [Span("backward", COMPUTE, 0, 4), Span("all-reduce 0", COMMUNICATION, 1, 6),
             Span("all-reduce 1", COMMUNICATION, 2, 5), Span("optimizer", COMPUTE, 6, 7)]
    bars = bars_of(show.timeline([spans], title=""))
    whole = {bar.get_label(): bar for bar in bars}
    solid = [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in bars
             if bar.get_label() == "exposed"]
    assert solid == [(4, 2, whole["all-reduce 0"].get_y()), (4, 1, whole["all-reduce 1"].get_y())]
    assert same_color(whole["exposed"].get_facecolor(), PART_COLORS["communication"])
    assert to_hex(whole["all-reduce 0"].get_facecolor()) != PART_COLORS["communication"].lower()


def test_what_waits_for_the_link_is_hollow():
    spans = [Span("backward", COMPUTE, 0, 4),
             Span("all-reduce 0", COMMUNICATION, 1, 6, queued=2)]
    bars = bars_of(show.timeline([spans], title=""))
    [hollow] = [bar for bar in bars if bar.get_label() == "all-reduce 0 queued"]
    assert (hollow.get_x(), hollow.get_width()) == (1, 2) and hollow.get_facecolor()[3] == 0
    [light] = [bar for bar in bars if bar.get_label() == "all-reduce 0"]
    assert (light.get_x(), light.get_x() + light.get_width()) == (3, 6)
    [solid] = [bar for bar in bars if bar.get_label() == "exposed"]
    assert (solid.get_x(), solid.get_width()) == (4, 2)


def test_messages_that_touch_share_a_line_though_their_times_are_rounded():
    spans = [Span("backward", COMPUTE, 0, 1), Span("all-reduce 0", COMMUNICATION, 0.1, 0.1 + 0.2),
             Span("all-reduce 1", COMMUNICATION, 0.3, 0.5)]
    assert spans[1].end > spans[2].start
    [first, second] = [bar for bar in bars_of(show.timeline([spans], title=""))
                       if bar.get_label().startswith("all-reduce")]
    assert first.get_y() == second.get_y()


def test_no_bar_covers_another(case):
    _, figure = case
    bars = [bar for bar in bars_of(figure) if bar.get_label() != "exposed" and bar.get_width()]
    for one, other in itertools.combinations(bars, 2):
        across = min(one.get_x() + one.get_width(), other.get_x() + other.get_width()) - max(
            one.get_x(), other.get_x())
        along = min(one.get_y() + one.get_height(), other.get_y() + other.get_height()) - max(
            one.get_y(), other.get_y())
        assert across < 1e-9 or along < 1e-9, (one, other)


@pytest.mark.parametrize(("ranks", "names"), [
    ([], None), ([predicted(), []], None), ([predicted()], ["a", "b"]),
    ([[Span("forward", COMPUTE, 2, 1)]], None), ([[Span("forward", COMPUTE, 0, math.inf)]], None),
    ([[Span("forward", "cpu", 0, 1)]], None)])
def test_what_cannot_be_drawn_is_an_error(ranks, names):
    with pytest.raises(ValueError, match="timeline"):
        show.timeline(ranks, names=names, title="")


def test_spans_come_in_any_order_and_stay_as_they_are():
    spans = measured(0)
    shuffled = random.Random(0).sample(spans, len(spans))
    before = list(shuffled)
    assert show.to_svg(show.timeline([shuffled], title="x")) == show.to_svg(
        show.timeline([spans], title="x"))
    assert shuffled == before
