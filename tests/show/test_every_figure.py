"""Every figure shows the data that it is given, can be read, and says in words what it finds."""

import functools
import itertools
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import partial
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import same_color, to_hex, to_rgb
from matplotlib.patches import Rectangle
from pictures import assert_readable, contrast, shown_texts

from dplab import show
from dplab.predict import step
from dplab.predict.cost import Link
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Layer, Span
from dplab.show import palette
from dplab.show.memory_areas import CATEGORY_COLORS

TITLE = f"What this picture finds, in more words than one line has room for:{9 * ' more'}"
DRAW = random.Random(0)
LOSSES = [2.3 * math.exp(-step / 15) + 0.1 * math.sin(step) + 0.3 for step in range(40)]


def predicted(layers, bandwidth, **options):
    """A step of DDP on four ranks, whose layers have gradients of different sizes."""
    sizes = [1, 1, 2, 8, 10, 20, 12, 30]
    return step.ddp_spans(
        [Layer(1e-3, 2e-3, 1e6 * sizes[index % 8], f"layer {index}") for index in range(layers)],
        4, Link("chosen", bandwidth, 50e-6), optimizer_seconds=2e-3,
        **{"bucket_bytes": 25e6, **options})


def traced(late=0.0):
    """As a trace has it: collectives without numbers, several under way at once, a noted wait."""
    start = DRAW.uniform(0, 4e-4)
    forward = start + DRAW.uniform(9e-3, 11e-3)
    backward = forward + DRAW.uniform(19e-3, 21e-3) + late
    spans = [Span("optimizer", COMPUTE, 0.09, 0.0907), Span("forward", COMPUTE, start, forward),
             Span("backward", COMPUTE, forward + 2e-5, backward)]
    end = 0.0
    for launch in np.linspace(forward, backward, 6):
        end = max(end, launch) + DRAW.uniform(3e-3, 9e-3)
        spans.append(Span("all_reduce", COMMUNICATION, launch, end, 4e6, DRAW.uniform(0, 2e-3)))
    return [*spans, Span("backward: wait", STALLED, backward, end)]


ODD_STEPS = [
    [Span("data", STALLED, 0, 2), Span("forward", COMPUTE, 2, 3), Span("wait", STALLED, 3, 5),
     Span("all-gather 7", COMMUNICATION, 1, 5), Span("loss", COMPUTE, 6, 7)],
    [Span("backward", COMPUTE, 0, 4), Span("hook", COMPUTE, 1, 2), Span("zeros", COMPUTE, 0, 0.6),
     Span("all-reduce 0", COMMUNICATION, 1.5, 8, queued=1.5), Span("optimizer", COMPUTE, 8, 8.01),
     Span("all-reduce 1", COMMUNICATION, 2, 5.5), Span("barrier", STALLED, 5.2, 7.1)],
    [Span("forward", COMPUTE, 1, 2)]]
NUMBERS = [[DRAW.gauss(0, 10**rank) for _ in range(5)] for rank in range(-4, 6, 2)]


def ring(own):
    """``[step][rank][chunk]`` of a ring all-reduce, chunk by chunk."""
    size, states = len(own), [own]
    for number in range(2 * (size - 1)):
        states.append([list(chunks) for chunks in states[-1]])
        for chunk in range(size):
            to = (chunk + 2 + number) % size
            arriving = states[-2][to - 1][chunk]
            states[-1][to][chunk] = arriving + (states[-2][to][chunk] if number < size - 1 else 0)
    return states


def held(op, **nbytes):
    return SimpleNamespace(op=op, bytes=nbytes)


def phase(name, start, end):
    return SimpleNamespace(name=name, start=start, end=end)


SAWTOOTH = [held(op, parameters=8e8, gathered=[0, 12e8, 24e8, 12e8][op % 4], other=0, activations=7,
                 gradients=op * 4e7, **({"optimizer": 3e8, "communication": 1e8} if op > 9 else {}))
            for op in range(24)]
ROWS = [show.Beside("one series", "assumed: much", [1.2, 1.4]),
        show.Beside("another", "with pipelines, and with a note that takes two lines", None),
        show.Beside("third", "far off", [2.5, 11.0, 1.8, 0.4])]
CASES = {
    "curves": partial(show.loss_curves, {
        "one process": LOSSES, "DDP": LOSSES, "rank 7": [v + 1e-7 for v in LOSSES],
        "without the division, which is a long name for a curve": [v + 1 for v in LOSSES[:5]],
        "$5 per hour": [1.1**step if step < 9 else math.inf for step in range(40)],
        "never": [math.nan] * 40}, note="Measured", first=1),
    "a curve's one value": partial(show.loss_curves, {"a": [1.0]}, ylabel="loss of a batch"),
    "shares": partial(show.time_shares, {
        "1 rank": {"forward": 12.0, "backward": 25.0, "optimizer": 3.2},
        "4 ranks": {"backward": 25.3, "forward": 1.22, "communication": 18.4}}),
    "small shares": partial(show.time_shares, {
        "a configuration that one describes in many words, and then in more": {"$a": 1e4},
        "b": {name: 150.0 for name in (*palette.PART_COLORS, "$a", "a part", "y", "z")},
        "nothing": {"$a": 0}}, unit="GB", xlabel="memory", colors={"a part": "#2F6DB5"}),
    "traced steps": partial(show.timeline, [traced(8e-3 * (rank == 7)) for rank in range(9)],
                            note="A note that has to be wrapped as well " * 4),
    "predicted steps": partial(show.timeline, [
        predicted(8, 1.25e9, overlap=False), predicted(8, 1.25e9),
        predicted(60, 1e12, bucket_bytes=1)],
        names=["$no$ overlap", "a configuration that takes two lines to name", "many"]),
    "odd steps": partial(show.timeline, ODD_STEPS, since="backward began"),
    "steps in µs": partial(show.timeline, [[Span("loss", COMPUTE, 0, 9.99e-4)], [
        Span("forward", COMPUTE, 0, 0), Span("all_gather", COMMUNICATION, 2e-4, 4e-4)]]),
    **{f"ring of {len(own)}, step {number}": partial(show.ring_step, ring(own), number)
       for own, numbers in (([[3.0]], [0]), (NUMBERS, [0, 1, 4, 5, 8]), (
           [[10**rank * (chunk + 1) for chunk in range(8)] for rank in range(8)], [7]), (
           [[1, 123456], [2.5, 0.1]], [0])) for number in numbers},
    "memory": partial(show.memory_over_step, SAWTOOTH, [
        phase("forward", 0, 10), phase("backward", 10, 20), phase("optimizer", 20, 24)]),
    "memory at once": partial(show.memory_over_step, [
        held(0, other=1), held(2, other=9e3, optimizer=4), held(2, other=2e3), held(5, other=1)]),
    "units": partial(show.units_over_step, [
        SimpleNamespace(unit=unit, start=at, end=at + 2)
        for unit, at in ((0, 1), (1, 2), (1, 8), (0, 11))], [3e6, 5e6], ["first", "second"],
        forward=7, operations=14, chunks=2e6),
    "predicted beside published": partial(show.predicted_beside_published, ROWS),
    "limits": partial(show.row_limits, {"fast": 1e3, "middle": 12e3, "slow": 15e3},
                      {"a model": 2e3, "another": 11e3}),
    "a plot": lambda title: show.subplots(title=title, xlabel="ranks", ylabel="time [ms]",
                                          alt="An empty plot.")[0],
}


@functools.cache
def drawn(case):
    function = CASES[case]
    figure = function() if case.startswith("ring") else function(title=TITLE)
    figure.draw_without_rendering()
    return figure


def each(function=None):
    """For each case, or for each of one function."""
    return pytest.mark.parametrize("case", [
        case for case, made in CASES.items() if function in (None, getattr(made, "func", None))])


def words(figure):
    return [text.get_text() for text in shown_texts(figure)]


def bars_of(figure):
    return [bar for bar in figure.axes[0].patches if not bar.get_label().startswith("_")]


def amount(text):
    return float(text.split()[0].replace(",", ""))


@each()
def test_a_figure_can_be_read_and_its_alternative_text_begins_with_its_title(case):
    figure = drawn(case)
    assert_readable(figure)
    title = re.match("(After|Before) .* chunks are complete", figure.alt)[0] if (
        case.startswith("ring")) else TITLE
    assert figure.alt.startswith(f"{title}. ") and len(figure.alt) > len(title) + 10
    assert title in " ".join(" ".join(words(figure)).split()) and "\n" not in figure.alt
    for axes in figure.axes:  # pale areas have an outline
        framed = {(*bar.get_xy(), bar.get_width()): to_hex(bar.get_edgecolor())
                  for bar in axes.patches if bar.get_label() == "_outline"}
        for bar in axes.patches:
            if isinstance(bar, Rectangle) and bar.get_fill() and bar.get_width() and contrast(
                    to_hex(bar.get_facecolor()), "#FFFFFF") < 3:
                line = to_hex(bar.get_edgecolor()) if bar.get_hatch() else framed[
                    (*bar.get_xy(), bar.get_width())]
                assert contrast(line, "#FFFFFF") >= 3, bar


@pytest.mark.parametrize("case", [case for case in CASES if re.search("shares|steps", case)])
def test_a_text_stands_in_one_bar_or_beside_all(case):
    figure = drawn(case)
    bars = [bar.get_window_extent() for bar in bars_of(figure) if bar.get_label() != "exposed"]
    for text, box in shown_texts(figure).items():
        under = [bar for bar in bars if bar.padded(-0.5).overlaps(box)]
        assert len(under) < 2, text
        assert all(bar.x0 - 3 <= box.x0 and box.x1 <= bar.x1 + 3 for bar in under), text


@pytest.mark.parametrize("case", {getattr(made, "func", None): case for case, made in CASES.items()
                                  }.values())
def test_a_figure_is_the_same_accessible_svg_each_time_and_has_colors_for_a_dark_page(case):
    figure = drawn(case)
    svg = show.to_svg(figure, "A title")
    with matplotlib.rc_context({"svg.fonttype": "none", "savefig.transparent": True,
                                "font.size": 30}):
        drawn.cache_clear()
        assert show.to_svg(drawn(case), "A title") == svg
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert [child.tag.partition("}")[2] for child in root][:2] == ["title", "desc"]
    assert [child.text for child in root][:2] == ["A title", figure.alt]
    assert b"<text" not in svg and b"<dc:date>" not in svg
    light, _, dark = svg.decode().replace("</style>", "@media").partition("@media")
    for color in set(re.findall("fill: (#[0-9a-f]{6})", svg.decode().partition("</style>")[2])):
        rule = f'[style*="fill: {color}"], [fill="{color}"] {{ fill: '
        other = palette.on_dark(color.upper()).lower()
        assert color == other or f"{rule}{other} !important }}" in dark
    assert "#181b1f" in dark and "#181b1f" not in light


@each(show.loss_curves)
def test_curves_are_drawn_as_given_each_tied_to_its_name(case):
    curves, figure = CASES[case].args[0], drawn(case)
    axes, first = figure.axes[0], CASES[case].keywords.get("first", 0)
    lines = {line.get_label(): line for line in axes.lines if line.get_label() in curves}
    leaders = {line.get_color(): line for line in axes.lines if line.get_label() == "_leader"}
    assert list(lines) == list(curves)
    names = {text.get_text().replace("\n", " "): text for text in axes.texts}
    for label, values in curves.items():
        finite = [v if math.isfinite(v) else math.nan for v in values]
        np.testing.assert_array_equal(lines[label].get_xdata(), first + np.arange(len(values)))
        np.testing.assert_array_equal(lines[label].get_ydata(), finite)
        color, ends = lines[label].get_color(), np.flatnonzero(np.isfinite(values))
        if len(ends):
            leader = leaders[color].get_transform().transform(leaders[color].get_xydata())
            end = axes.transData.transform((first + ends[-1], values[ends[-1]]))
            np.testing.assert_allclose(leader[0], end, atol=0.01)
            box = names[label].get_window_extent()
            assert box.y0 <= leader[1][1] <= box.y1
        assert f"{label} from {finite[0]:.3g} to {finite[-1]:.3g}" in figure.alt
    if case == "curves":
        widths = [line.get_linewidth() for line in lines.values()]
        assert widths[0] - 3 >= widths[1] >= widths[2] + 3  # of those that coincide, all are seen
        assert widths[2:] == [min(widths)] * 4
        assert lines["rank 7"].get_color() == show.rank_color(7)
        tops = [names[label].get_position()[1] for label in list(curves)[:3]]
        assert tops == sorted(tops, reverse=True)
    assert len({line.get_color() for line in lines.values()}) == len(curves)


@each(show.time_shares)
def test_bars_are_as_long_as_their_values_which_stand_beside_them(case):
    rows, figure, options = CASES[case].args[0], drawn(case), CASES[case].keywords
    parts, texts = list(dict.fromkeys(part for row in rows.values() for part in row)), words(figure)
    expected = [(part, row[part]) for row in rows.values() for part in parts if row.get(part)]
    bars = bars_of(figure)
    assert [(bar.get_label(), bar.get_width()) for bar in bars] == expected
    for before, after in itertools.pairwise(bars):
        start = before.get_x() + before.get_width() if before.get_y() == after.get_y() else 0
        assert after.get_x() == pytest.approx(start)
    colors = palette.PART_COLORS | options.get("colors", {})
    assert all(same_color(bar.get_facecolor(), colors[bar.get_label()]) for bar in bars
               if bar.get_label() in colors)
    assert len({bar.get_facecolor() for bar in bars}) == len(parts)
    shown = [amount(text) for text in texts if re.match(r"[\d.,]+$", text)]
    for part, value in expected:
        assert part in texts and any(value == pytest.approx(each, rel=5e-3) for each in shown)
    totals = [amount(text) for text in texts if text.endswith(f" {options.get('unit', 'ms')}")]
    assert sorted(totals) == pytest.approx(sorted(sum(row.values()) for row in rows.values()),
                                           rel=5e-3)
    for line in figure.axes[0].lines:  # from a value or a name to the middle of its part
        assert any(line.get_xdata()[0] == pytest.approx(bar.get_x() + bar.get_width() / 2)
                   for bar in bars)


def unit_of(figure):
    """The unit of a timeline's axis, and how many of it a second has."""
    unit = re.search(r"\[(.*)\]", figure.axes[0].get_xlabel())[1]
    return unit, {"µs": 1e6, "ms": 1e3, "s": 1}[unit]


def rows_of(figure):
    """The bars of each row of a timeline, told apart by where the rows' totals stand."""
    tops = sorted(text.get_position()[1] - 16 for text in figure.axes[0].texts
                  if text.get_weight() == "bold")
    return [[bar for bar in bars_of(figure) if top < bar.get_y() < bottom]
            for top, bottom in itertools.pairwise([*tops, math.inf])]


def expected_at(spans, time):
    """The labels of the bars that a row has at this moment."""
    now = [span for span in spans if span.start < time < span.end]
    computing = [span for span in now if span.lane == COMPUTE]
    sending = [span for span in now if span.lane == COMMUNICATION]
    waiting = [span for span in now if span.lane == STALLED]
    innermost = max(computing, key=lambda span: (span.start, -span.end), default=None)
    for span in sending:
        queued = time < span.start + span.queued
        yield f"{span.name} queued" if queued else span.name
        if not queued and not computing:
            yield "exposed"
    if innermost:
        yield innermost.name.partition(" layer")[0]
    elif sending or waiting:
        yield "data" if "data" in [span.name for span in waiting] else "stalled"


@each(show.timeline)
def test_a_timeline_shows_at_each_moment_what_its_rank_does(case):
    ranks, figure = CASES[case].args[0], drawn(case)
    unit, factor = unit_of(figure)
    since = CASES[case].keywords.get("since", "the step began")
    assert figure.axes[0].get_xlabel() == f"time since {since} [{unit}]"
    longest = max(span.end for spans in ranks for span in spans) * factor
    assert 1 <= longest < 1000 and figure.axes[0].get_xlim() == pytest.approx((0, longest))
    for spans, bars in zip(ranks, rows_of(figure), strict=True):
        ends = [time for bar in bars for time in (bar.get_x(), bar.get_x() + bar.get_width())]
        ends += [factor * time for each in spans
                 for time in (each.start, each.start + each.queued, each.end)]
        for start, end in itertools.pairwise(sorted(ends)):
            if end - start > 1e-9 * longest:
                time = (start + end) / 2
                shown = [bar.get_label() for bar in bars
                         if bar.get_x() < time < bar.get_x() + bar.get_width()]
                assert Counter(shown) == Counter(expected_at(spans, time / factor)), time
        for bar in bars:
            if bar.get_label() in palette.PART_COLORS:
                assert same_color(bar.get_facecolor(), palette.PART_COLORS[bar.get_label()])
    hatches = {bar.get_label(): bar.get_hatch() for bar in bars_of(figure) if bar.get_hatch()}
    assert set(hatches) <= {"data", "stalled"} and len({*hatches.values()}) == len(hatches)


@each(show.timeline)
def test_the_bars_of_a_timeline_lie_apart_and_what_is_exposed_on_its_collective(case):
    bars = [bar for bar in bars_of(drawn(case)) if bar.get_width() > 0]
    spots = [(bar.get_label(), *bar.get_window_extent().padded(-1e-3).extents) for bar in bars]
    for one, other in itertools.combinations(spots, 2):
        apart = one[3] <= other[1] or other[3] <= one[1] or one[4] <= other[2] or other[4] <= one[2]
        on_it = one[2::2] == other[2::2] and [one[0], other[0]].count("exposed") == 1
        assert apart or on_it, (one, other)


@each(show.timeline)
def test_a_timeline_says_how_long_each_row_is_and_what_is_exposed(case):
    ranks, figure = CASES[case].args[0], drawn(case)
    unit, factor = unit_of(figure)
    texts = figure.axes[0].texts
    totals = [text.get_text() for text in texts if text.get_text().endswith(f" {unit}")]
    exposed = [text.get_text() for text in texts if text.get_text().endswith(" exposed")]
    said = figure.alt.removeprefix(f"{TITLE}. ").split(";")
    for spans, total, row in zip(ranks, totals, said, strict=True):
        assert amount(total) == pytest.approx(factor * step.step_seconds(spans), rel=5e-3)
        sending = [span for span in spans if span.lane == COMMUNICATION]
        assert total in row and f"{len(sending) or 'no'} collective" in row
        if sending:
            bare, sent = (factor * step.exposed_seconds(some) for some in (spans, sending))
            numbers = [exposed.pop(0), *re.findall(r"([\d.,]+) \S+ (?:of com|hid)", row)]
            assert [*map(amount, numbers)] == pytest.approx([bare, bare, sent - bare],
                                                            abs=0.006 * amount(total))
    assert not exposed
    names = CASES[case].keywords.get("names") or [f"rank {rank}" for rank in range(len(ranks))]
    labels = sorted((text.get_position()[1], text.get_text().replace("\n", " "), text.get_color())
                    for text in texts if text.get_text().replace("\n", " ") in names)
    assert [name for _, name, _ in labels] == names
    assert names[0] != "rank 0" or [color for *_, color in labels] == [
        *map(show.rank_color, range(len(labels)))]


@each(show.timeline)
def test_a_part_of_a_timeline_is_named_once_in_its_longest_block_or_with_a_line_or_a_swatch(case):
    figure = drawn(case)
    axes, first = figure.axes[0], rows_of(figure)[0]
    named = {text.get_text(): text for text in axes.texts}
    bars = {bar.get_label() for bar in bars_of(figure)}
    sent = {span.name for spans in CASES[case].args[0] for span in spans
            if span.lane == COMMUNICATION}
    swatches = [bar.get_facecolor() for bar in axes.patches if bar.get_label() == "_swatch"]
    for part in bars - sent - {"exposed"} - {f"{name} queued" for name in sent}:
        count = [text.get_text() for text in axes.texts].count(part)
        assert count == 1 or (count, part) == (0, "stalled"), part  # its hatch tells
        own = [bar for bar in first if bar.get_label() == part and count]
        middle = named[part].get_position()[0] if own else 0
        if own and not any(line.get_xdata()[1] == pytest.approx(middle) for line in axes.lines):
            inside = [bar for bar in own if bar.get_x() < middle < bar.get_x() + bar.get_width()]
            assert inside or own[0].get_facecolor() in swatches, part
    kinds = {re.sub(r"\W*\d+$", "", name).replace("_", "-") for name in sent}
    assert not kinds or [text.get_text() for text in axes.texts].count(
        kinds.pop() if len(kinds) == 1 else "communication") == 1


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("ring")])
def test_a_ring_shows_what_each_chunk_holds_and_which_ones_move(case):
    (states, number), figure = CASES[case].args, drawn(case)
    size, axes, total = len(states[0]), figure.axes[0], np.sum(states[0], axis=0)
    sent = [[state[rank][(rank - 1 - turn) % size] for turn, state in enumerate(states[:-1])]
            for rank in range(size)]
    assert show.ring_states(states[0], sent) == states
    column = {int(text.get_text()[6:]): text.get_position()[0] for text in axes.texts
              if text.get_text().startswith("chunk ")}
    row = {int(text.get_text()[5:]): text.get_position()[1] for text in axes.texts
           if text.get_text().startswith("rank ")}
    cells = {(round(text.get_position()[0]), round(text.get_position()[1])): text
             for text in axes.texts}
    complete, said = 0, {rank: [] for rank in range(size)}
    for rank, chunk in itertools.product(range(size), repeat=2):
        text = cells[round(column[chunk]), round(row[rank])]
        value, own = states[number][rank][chunk], states[0][rank][chunk]
        assert float(text.get_text()) == pytest.approx(value, rel=0.06)
        is_sum = math.isclose(value, total[chunk], rel_tol=1e-6)
        complete += is_sum
        assert text.get_color() == ("white" if is_sum else show.rank_color(rank) if value == own
                                    else palette.INK)
        said[rank].append(f"{value:.6g}{' (complete)' * is_sum}")
    assert f"{complete} of {size**2} chunks are complete" in figure.alt
    moved = {(rank, chunk) for rank, chunk in itertools.product(range(size), repeat=2)
             if number and states[number][rank][chunk] != states[number - 1][rank][chunk]}
    assert len(moved) == (size if number else 0)
    arrows = {(patch.get_edgecolor(), round(patch._posA_posB[0][0]))
              for patch in axes.patches if hasattr(patch, "_posA_posB")}
    assert arrows == {((*to_rgb(show.rank_color((to - 1) % size)), 1.0), round(column[chunk]))
                      for to, chunk in moved}
    hops = {(to - 1) % size: f", after sending chunk {chunk} to rank {to}" for to, chunk in moved}
    for rank, held_ in said.items():
        assert f" Rank {rank} holds {', '.join(held_)}{hops.get(rank, '')}." in figure.alt
    half = ("each rank has its own numbers" if number == 0 else
            f"reduce-scatter, step {number} of {size - 1}" if number < size else
            f"all-gather, step {number - size + 1} of {size - 1}")
    assert half in figure.alt and half in words(figure)


def extent_at(path, x):
    """The bottom and the top of an area there."""
    crossed = [a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])
               for a, b in itertools.pairwise(path.vertices) if (a[0] - x) * (b[0] - x) < 0]
    return min(crossed), max(crossed)


@each(show.memory_over_step)
def test_memory_is_stacked_as_given_and_its_peak_said_in_numbers(case):
    (samples, *phases), figure = CASES[case].args, drawn(case)
    axes, most = figure.axes[0], max(sum(each.bytes.values()) for each in samples)
    factor, unit = (1e9, "GB") if case == "memory" else (1e3, "kB")
    areas = {area.get_label(): area for area in axes.collections
             if not area.get_label().startswith("_")}
    assert set(areas) == {name for each in samples for name, value in each.bytes.items() if value}
    seen, count = Counter(), Counter(each.op for each in samples)
    for sample in samples:
        inside = sample.op + (seen[sample.op] + 0.5) / count[sample.op]
        seen[sample.op] += 1
        below = 0
        for name, area in areas.items():
            assert same_color(area.get_facecolor()[0], CATEGORY_COLORS[name])
            bottom, top = (factor * height for height in extent_at(area.get_paths()[0], inside))
            assert bottom == pytest.approx(below)
            assert top - bottom == pytest.approx(sample.bytes.get(name, 0), abs=1e-6 * most)
            below = top
    peak = max(samples, key=lambda sample: sum(sample.bytes.values()))
    [marker] = [line for line in axes.lines if line.get_label() == "_peak"]
    [x], [y] = marker.get_data()
    assert peak.op <= x < peak.op + 1 and y * factor == pytest.approx(most)
    texts = words(figure)
    [head] = [text for text in texts if text.endswith(f" {unit} at the peak")]
    assert amount(head) * factor == pytest.approx(most, rel=5e-3) and head in figure.alt
    for name in areas:
        [text] = [text for text in texts if text.startswith(f"{name} ")]
        assert text in figure.alt
        assert amount(text.removeprefix(name)) * factor == pytest.approx(
            peak.bytes.get(name, 0), abs=0.005 * most)
    if phases:
        assert f"{head}, in optimizer: " in figure.alt
        assert {"forward", "backward", "optimizer"} <= {*texts}
    outlined = {to_hex(lines.get_colors()[0]) for lines in axes.collections
                if lines.get_label() == "_outline"}
    assert outlined == {palette.outline(CATEGORY_COLORS[name]).lower() for name in areas
                        if palette.outline(CATEGORY_COLORS[name]) != CATEGORY_COLORS[name]}


def test_units_have_a_bar_while_they_are_whole_and_their_bytes_add_up():
    figure = drawn("units")
    above, below = figure.axes
    colors = [palette.PART_COLORS[part] for part in ("forward", "forward", "backward", "backward")]
    bars = [bar for bar in above.patches if bar.get_label() != "_outline"]
    assert [(bar.get_x(), bar.get_y() + 0.4, bar.get_width()) for bar in bars] == [
        (1, 0, 2), (2, 1, 2), (8, 1, 2), (11, 0, 2)]
    assert all(map(same_color, (bar.get_facecolor() for bar in bars), colors))
    path = below.collections[0].get_paths()[0]
    held_ = [2, 5, 10, 7, 2, 7, 2, 5, 2]
    for at, megabytes in zip((0.5, 1.5, 2.5, 3.5, 5, 9, 10.5, 12, 13.5), held_, strict=True):
        assert extent_at(path, at)[1] == pytest.approx(megabytes)
    assert [line.get_ydata()[0] for line in below.lines if line.get_linestyle() == "--"] == [8]
    assert "at most 10.00 MB, and the whole model has 8.00 MB" in figure.alt


def test_runs_stand_beside_published_ones_and_lines_cross_where_the_link_needs():
    figure = drawn("predicted beside published")
    [axes] = figure.axes
    points = {marker: sorted(x for line in axes.lines if line.get_marker() == marker
                             for x in line.get_xdata()) for marker in "o<>"}
    assert points == {"o": [1.2, 1.4, 1.8], "<": [0.5], ">": [2, 2]}
    assert axes.get_xlim() == pytest.approx((0.5, 2))
    medians = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 2
               and line.get_marker() == "None"]
    assert medians == pytest.approx([1.3, 2])
    for said in ("one series", "assumed: much", "out of scope", "+30% (+20% to +40%)",
                 "+115% (−60% to +1000%)"):
        assert said in words(figure)
    assert "another: out of scope; third: +115% (−60% to +1000%)." in figure.alt

    figure = drawn("limits")
    needed, fitting = CASES["limits"].args
    lines = {line.get_color(): line for line in figure.axes[0].lines}
    for number, (link, rows) in enumerate(needed.items()):
        line = lines[show.rank_color(number)]
        assert np.multiply(*line.get_data()) == pytest.approx([rows, rows])
        assert f"{rows:,.0f} rows over {link}" in figure.alt
    assert [line.get_xdata()[0] for line in figure.axes[0].lines[-2:]] == [*fitting.values()]
