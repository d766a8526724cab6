"""What stands beside the bars of a step: names, times, units, none on another."""

import itertools

import pytest
from pictures import assert_readable
from timelines import (
    CASES,
    NAMES,
    UNITS,
    measured,
    predicted,
    rows_of,
    texts_of,
    unit_of,
)

from dplab import show
from dplab.predict import step
from dplab.predict.step import COMMUNICATION, COMPUTE, Span
from dplab.show import theme, timelines


@pytest.fixture(params=CASES, scope="module")
def case(request):
    ranks = CASES[request.param]
    return ranks, show.timeline(ranks, names=NAMES.get(request.param), title="A finding")


@pytest.mark.slow
def test_rows_say_how_long_they_are_and_how_much_is_exposed(case):
    ranks, figure = case
    unit = unit_of(figure)
    totals = [text for text in texts_of(figure) if text.endswith(f" {unit}")]
    exposed = iter([text for text in texts_of(figure) if text.endswith(" exposed")])
    assert len(totals) == len(ranks)
    for spans, total in zip(ranks, totals, strict=True):
        assert float(total.split()[0]) == pytest.approx(
            UNITS[unit] * step.step_seconds(spans), rel=5e-3)
        if any(span.lane == COMMUNICATION for span in spans):
            digits = len(total.split()[0].partition(".")[2])
            assert float(next(exposed).split()[0]) == pytest.approx(
                UNITS[unit] * step.exposed_seconds(spans), abs=0.51 * 10.0**-digits)
    assert next(exposed, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_texts_are_apart_and_on_nothing_else(case, monkeypatch):
    monkeypatch.setattr(timelines, "WIDTH", 5.5)  # narrower than any page
    monkeypatch.setattr(theme, "WIDTH", 5.5)
    figure = show.timeline(CASES[case], names=NAMES.get(case),
                           title="A finding that needs more than one line " * 3,
                           note="A note that has to be wrapped as well " * 4)
    assert_readable(figure)
    bars = [(bar.get_label(), bar.get_window_extent().padded(-0.5))
            for bar in figure.axes[0].patches]
    for text in (*figure.texts, *figure.axes[0].texts):
        box = text.get_window_extent()
        under = {label for label, extent in bars if extent.overlaps(box)} - {"exposed", "_outline"}
        assert len(under) < 2, (text, under)
        if under:
            [bar] = under
            assert bar == text.get_text() or text.get_text().isdigit(), (text, under)
    ticks = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()
             if 0 <= label.get_position()[0] <= figure.axes[0].get_xlim()[1]]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(ticks, 2))


@pytest.mark.parametrize("count", [1, 8])
def test_ranks_have_their_names_and_colors_top_down(count):
    figure = show.timeline([measured(rank) for rank in range(count)], title="")
    labels = {text.get_text(): text for text in figure.axes[0].texts
              if text.get_text().startswith("rank ")}
    assert list(labels) == [f"rank {rank}" for rank in range(count)]
    assert [label.get_color() for label in labels.values()] == [
        show.rank_color(rank) for rank in range(count)]
    heights = [label.get_window_extent().y0 for label in labels.values()]
    assert heights == sorted(heights, reverse=True)
    assert figure.get_figheight() < 8


@pytest.mark.parametrize("case", CASES)
def test_each_part_is_named_once(case):
    texts = texts_of(show.timeline(CASES[case], title=""))
    first = {span.name: span for spans in CASES[case] for span in spans
             if span.lane == COMPUTE and span.end > span.start}
    for part in {name.split(" layer")[0] for name in first}:
        assert texts.count(part) == 1, part


def test_a_part_is_named_in_its_block_or_by_a_line_to_it():
    figure = show.timeline([measured(0), measured(1)], title="")
    axes = figure.axes[0]
    places = {text.get_text(): text.get_position() for text in axes.texts}
    first = rows_of(figure, [0, 1])[0]
    for part in ("forward", "backward", "stalled"):
        [bar] = [bar for bar in first if bar.get_label() == part]
        assert places[part][0] == pytest.approx(bar.get_x() + bar.get_width() / 2)
        assert bar.get_y() < places[part][1] < bar.get_y() + bar.get_height()
    [bar] = [bar for bar in first if bar.get_label() == "optimizer"]
    [line] = axes.lines
    assert line.get_xdata()[0] == pytest.approx(bar.get_x() + bar.get_width() / 2)
    assert line.get_ydata()[0] == pytest.approx(bar.get_y())
    assert places["optimizer"][1] < bar.get_y()


def test_a_part_is_named_in_its_longest_block():
    spans = [Span("backward 1", COMPUTE, 0, 2), Span("backward 0", COMPUTE, 2, 6),
             Span("forward", COMPUTE, 6, 7), Span("backward 1", COMPUTE, 7, 10)]
    [name] = [text for text in show.timeline([spans], title="").axes[0].texts
              if text.get_text() == "backward"]
    assert name.get_position()[0] == pytest.approx(3)


def test_parts_of_later_rows_alone_have_a_swatch():
    axes = show.timeline(CASES["parts of other rows"], title="").axes[0]
    swatches = [bar for bar in axes.patches if bar.get_label() == "_swatch"]
    colors = {bar.get_label(): bar.get_facecolor() for bar in axes.patches}
    assert [bar.get_facecolor() for bar in swatches] == [
        colors["data loading"], colors["loss"], colors["optimizer"]]
    assert len(set(map(tuple, colors.values()))) == len(colors) - 1  # a swatch repeats its bar


def test_the_band_of_collectives_has_their_name():
    assert "all-reduce" in texts_of(show.timeline([predicted(), measured(0)], title=""))
    assert "communication" in texts_of(show.timeline(CASES["two kinds"], title=""))
    later = show.timeline([CASES["no communication"][0], *CASES["two kinds"] * 2], title="")
    assert texts_of(later).count("communication") == 1


def test_collectives_are_numbered_where_there_is_room():
    wide = show.timeline([[Span(f"bucket {number}", COMMUNICATION, index, index + 1)
                           for index, number in enumerate((7, 8, 9))]], title="")
    assert {"7", "8", "9"} < set(texts_of(wide)) and "bucket" in texts_of(wide)
    unnumbered = texts_of(show.timeline([measured(0, 3)], title=""))
    assert {"0", "1", "2"} < set(unnumbered)
    many = show.timeline([predicted(60, bucket=1, bandwidth=1e13), measured(0, 60)], title="")
    assert not any(text.isdigit() for text in texts_of(many))


@pytest.mark.parametrize(("seconds", "unit", "total"), [
    (9.99e-4, "µs", "999 µs"), (1e-3, "ms", "1.00 ms"), (1.0, "s", "1.00 s")])
def test_the_unit_suits_the_longest_row(seconds, unit, total):
    spans = [Span("forward", COMPUTE, 0, seconds), Span("all_reduce", COMMUNICATION, 0, 0)]
    short = [Span("forward", COMPUTE, 0, seconds / 50)]
    figure = show.timeline([short, spans], title="")
    assert unit_of(figure) == unit
    assert total in texts_of(figure)
    assert figure.axes[0].get_xlim() == pytest.approx((0, seconds * UNITS[unit]))


def test_the_alternative_text_says_each_row():
    spans = [Span("forward", COMPUTE, 0, 0.01), Span("backward", COMPUTE, 0.01, 0.0321),
             Span("all_reduce", COMMUNICATION, 0.02, 0.03),
             Span("all_reduce", COMMUNICATION, 0.03, 0.0395),
             Span("optimizer", COMPUTE, 0.0395, 0.0421)]
    ranks = [spans, [Span("forward", COMPUTE, 0.001, 0.003)], spans[:3]]
    figure = show.timeline(ranks, title="It is late", note="Measured.")
    assert figure.alt.startswith("It is late. ") and figure.alt.endswith(" Measured.")
    for row, facts in zip(figure.alt.split(";"), (
            ("rank 0: 42.1 ms", "2 collectives", "7.4 ms of", "12.1 ms hidden"),
            ("rank 1: 2.00 ms", "no collectives"),
            ("rank 2: 32.1 ms", "1 collective,", "0.0 ms of", "10.0 ms hidden")), strict=True):
        assert all(fact in row for fact in facts), row
    assert {"42.1 ms", "7.4 exposed"} < set(texts_of(figure))
