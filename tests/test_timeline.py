"""The picture of a step: bars where the spans are, what is exposed marked, texts apart."""

import itertools
import math
import random

import pytest
from matplotlib.colors import same_color, to_hex
from test_show import assert_readable

from dplab import show
from dplab.predict import step
from dplab.predict.cost import Link
from dplab.predict.step import COMMUNICATION, COMPUTE, WAITING, Layer, Span
from dplab.show.shares import PART_COLORS

MB = 1e6
UNITS = {"µs": 1e6, "ms": 1e3, "s": 1.0}


def predicted(layers=8, *, seconds=1e-3, bandwidth=1.25e9, world_size=4, bucket=25 * MB, **options):
    sizes = [1, 1, 2, 8, 10, 20, 12, 30]
    return step.timeline([Layer(seconds, 2 * seconds, sizes[index % 8] * MB, f"layer {index}")
                          for index in range(layers)],
                         world_size, Link("chosen", bandwidth, 50e-6), bucket_bytes=bucket,
                         **{"optimizer_seconds": 2 * seconds, **options})


def measured(rank, collectives=6, late=0.0):
    """As a trace has it: collectives without numbers, several under way at once, waiting noted."""
    draw = random.Random(rank)
    start = draw.uniform(0, 4e-4)
    forward = start + draw.uniform(9e-3, 11e-3)
    backward = forward + draw.uniform(19e-3, 21e-3) + late
    spans = [Span("forward", COMPUTE, start, forward),
             Span("backward", COMPUTE, forward + 2e-5, backward)]
    end = 0.0
    for index in range(collectives):
        launch = forward + (backward - forward) * (index + 1) / collectives
        end = max(end, launch) + draw.uniform(0.5, 1.6) * 35e-3 / collectives
        spans.append(Span("all_reduce", COMMUNICATION, launch, end, 4 * MB))
    spans.append(Span("backward: wait", WAITING, backward, end))
    return [*spans, Span("optimizer", COMPUTE, end, end + draw.uniform(6e-4, 8e-4))]


CASES = {
    "one": [predicted()],
    "no overlap": [predicted(overlap=False), predicted()],
    "four ranks": [measured(rank) for rank in range(4)],
    "eight ranks": [measured(rank, late=8e-3 * (rank == 7)) for rank in range(8)],
    "sixty": [predicted(60, seconds=2e-4, bucket=1, bandwidth=1.2e10), measured(0, 60)],
    "0.1 ms": [predicted(3, seconds=1e-5, bandwidth=1e13, bucket=1)],
    "100 s": [predicted(3, seconds=11.0, bandwidth=1e6, bucket=1)],
    "one rank alone": [predicted(world_size=1), predicted(world_size=2)],
    "no optimizer": [predicted(optimizer_seconds=0.0)],
    "only hidden": [predicted(bandwidth=1e12)],
    "no communication": [[Span("forward", COMPUTE, 0, 1), Span("backward", COMPUTE, 1, 3)]] * 2,
    "only communication": [[Span("all_gather", COMMUNICATION, 0.2, 1)]],
    "nothing lasts": [[Span("forward", COMPUTE, 0, 0), Span("all-reduce 0", COMMUNICATION, 0, 0)]],
    "two kinds": [[Span("forward", COMPUTE, 1, 3), Span("all-gather 0", COMMUNICATION, 0, 1),
                   Span("reduce-scatter 1", COMMUNICATION, 2, 6)]],
    "parts of other rows": [
        [Span("forward", COMPUTE, 0, 1e-3)],
        [Span("data loading", COMPUTE, 0, 5e-4), Span("loss", COMPUTE, 6e-4, 7e-4),
         Span("optimizer", COMPUTE, 7e-4, 7.01e-4)]],
    "micro-batches": [[Span(name, COMPUTE, index, index + 0.9)
                       for index, name in enumerate(["forward", "backward"] * 3 + ["optimizer"])]],
    "nested": [[Span("backward", COMPUTE, 0, 4), Span("hook", COMPUTE, 1, 2),
                Span("zeros", COMPUTE, 0, 0.6), Span("all-reduce 0", COMMUNICATION, 1.5, 5)]],
    "waits for others": [[Span("forward", COMPUTE, 0, 1), Span("all_reduce", COMMUNICATION, 1, 2),
                          Span("barrier", WAITING, 1.5, 4), Span("optimizer", COMPUTE, 3.5, 5)]],
    "late": [[Span("forward", COMPUTE, 5.0, 5.1), Span("all_reduce", COMMUNICATION, 5.1, 5.3)]],
    "many parts": [[Span(f"a phase called {letter}", COMPUTE, index, index + 1)
                    for index, letter in enumerate("abcdefghijkl")]],
}
NAMES = {"two kinds": ["a configuration with a name that takes two lines or even more to tell"],
         "no overlap": ["$no$ overlap", "25 MB buckets"]}


def bars_of(figure):
    return [bar for bar in figure.axes[0].patches if not bar.get_label().startswith("_")]


def texts_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def unit_of(figure):
    label = figure.axes[0].get_xlabel()
    assert label.startswith("time since the step began [")
    return label.rpartition("[")[2].rstrip("]")


def rows_of(figure, ranks):
    """The bars of each row, told apart by where the rows' totals stand."""
    tops = sorted(text.get_position()[1] - 16 for text in figure.axes[0].texts
                  if text.get_weight() == "bold")
    assert len(tops) == len(ranks)
    return [[bar for bar in bars_of(figure) if top < bar.get_y() < bottom]
            for top, bottom in itertools.pairwise([*tops, math.inf])]


def ends(bars, *names):
    return sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars
                  if not names or bar.get_label() in names)


def times(spans, factor, lane):
    return sorted((factor * span.start, factor * span.end) for span in spans if span.lane == lane)


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
                     if bar.get_label() not in {*collectives, "exposed", "waiting"}]
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
                                       for lane in (COMPUTE, COMMUNICATION, WAITING))
        exposed, hatched = ends(bars, "exposed"), ends(bars, "waiting")
        for time in between(computing, sending, waiting, exposed, hatched):
            bare = covered(sending, time) and not covered(computing, time)
            idle = covered(waiting, time) and not covered(computing, time)
            assert covered(exposed, time) == bare, time
            assert covered(hatched, time) == (bare or idle), time
        assert all(bar.get_hatch() for bar in bars if bar.get_label() == "waiting")


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


def test_no_bar_covers_another(case):
    _, figure = case
    bars = [bar for bar in bars_of(figure) if bar.get_label() != "exposed" and bar.get_width()]
    for one, other in itertools.combinations(bars, 2):
        across = min(one.get_x() + one.get_width(), other.get_x() + other.get_width()) - max(
            one.get_x(), other.get_x())
        along = min(one.get_y() + one.get_height(), other.get_y() + other.get_height()) - max(
            one.get_y(), other.get_y())
        assert across < 1e-9 or along < 1e-9, (one, other)


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


@pytest.mark.parametrize("width", [7.5, 5.5])
@pytest.mark.parametrize("case", CASES)
def test_texts_are_apart_and_on_nothing_else(case, width):
    figure = show.timeline(CASES[case], names=NAMES.get(case), width=width,
                           title="A finding that needs more than one line " * 3,
                           note="A note that has to be wrapped as well " * 4)
    assert_readable(figure)
    for text in (*figure.texts, *figure.axes[0].texts):
        box = text.get_window_extent()
        under = {bar.get_label() for bar in figure.axes[0].patches
                 if bar.get_window_extent().padded(-0.5).overlaps(box)} - {"exposed"}
        assert len(under) < 2, (text, under)
        if under:
            [bar] = under
            assert bar == text.get_text() or text.get_text().isdigit(), (text, under)
    ticks = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()
             if 0 <= label.get_position()[0] <= figure.axes[0].get_xlim()[1]]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(ticks, 2))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
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


def test_rows_have_the_names_given():
    texts = texts_of(show.timeline([predicted(), measured(0)], names=["predicted", "measured"],
                                   title=""))
    assert {"predicted", "measured", "all-reduce"} < set(texts)
    assert not any(text.startswith("rank") for text in texts)


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
    for part in ("forward", "backward", "waiting"):
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


def test_a_part_of_a_later_row_alone_has_no_line():
    one, other = [Span("forward", COMPUTE, 0, 1)], [Span("optimizer", COMPUTE, 0, 1)]
    assert not show.timeline([one, other], title="").axes[0].lines


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
    (1e-4, "µs", "100 µs"), (9.99e-4, "µs", "999 µs"), (1e-3, "ms", "1.00 ms"),
    (0.0421, "ms", "42.1 ms"), (1.0, "s", "1.00 s"), (100.0, "s", "100 s")])
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
    assert figure.alt == (
        "It is late. rank 0: 42.1 ms, 2 collectives, 7.4 ms of communication exposed and 12.1 ms "
        "hidden; rank 1: 2.00 ms, no collectives; rank 2: 32.1 ms, 1 collective, 0.0 ms of "
        "communication exposed and 10.0 ms hidden. Measured.")
    assert {"42.1 ms", "7.4 exposed"} < set(texts_of(figure))
    assert show.timeline(ranks, title="It is late", alt="Bars").alt == "Bars"


@pytest.mark.parametrize(("ranks", "names"), [
    ([], None), ([[]], None), ([predicted(), []], None), ([predicted()], ["a", "b"]),
    ([predicted()], []),
    ([[Span("forward", COMPUTE, 2, 1)]], None), ([[Span("forward", COMPUTE, -1, 1)]], None),
    ([[Span("forward", COMPUTE, 0, math.nan)]], None),
    ([[Span("forward", COMPUTE, 0, math.inf)]], None), ([[Span("forward", "cpu", 0, 1)]], None)])
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
