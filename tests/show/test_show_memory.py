"""Memory is stacked as it was held, and its peak is said in numbers."""

import itertools

import pytest
from matplotlib.colors import to_hex
from pictures import assert_readable

from dplab import show
from dplab.show import palette
from dplab.show.memory_areas import CATEGORY_COLORS


class Held:
    def __init__(self, op, **nbytes):
        self.op, self.bytes = op, nbytes


class Part:
    def __init__(self, name, start, end):
        self.name, self.start, self.end = name, start, end


def sawtooth(top):
    """Six layers, each gathered and freed, while gradients grow."""
    for op in range(24):
        gathered = [0, 30, 60, 30][op % 4] * top / 100
        yield Held(op, parameters=top // 5, gathered=gathered, other=0, gradients=op * top / 100,
                   activations=7)


STEPS_OF_MEMORY = {
    "usual": (list(sawtooth(4e9)), [Part("forward", 0, 10), Part("backward", 10, 20),
                                    Part("optimizer", 20, 24)]),
    "one sample": ([Held(0, parameters=5)], [Part("all", 0, 1)]),
    "nothing": ([Held(0, parameters=0), Held(3, parameters=0)], []),
    "several in one operation": ([Held(0, other=1), Held(2, other=9e3, optimizer=4),
                                  Held(2, other=2e3), Held(5, other=1)], []),
    "short phases": (list(sawtooth(1e3)), [Part(f"micro-step {i}, its forward", i, i + 1)
                                           for i in range(9)]),
}


def extent_at(path, x):
    """The bottom and the top of an area there."""
    crossed = [a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])
               for a, b in itertools.pairwise(path.vertices) if (a[0] - x) * (b[0] - x) < 0]
    return min(crossed), max(crossed)


@pytest.mark.parametrize("step", STEPS_OF_MEMORY.values(), ids=STEPS_OF_MEMORY)
def test_memory_is_stacked_as_given_with_texts_apart(step):
    samples, phases = step
    figure = show.memory_over_step(samples, phases, title="A finding " * 12)
    assert_readable(figure)
    most = max(sum(sample.bytes.values()) for sample in samples)
    unit = next(f for f in (1e12, 1e9, 1e6, 1e3, 1) if most >= f or f == 1)
    areas = {area.get_label(): area.get_paths()[0] for area in figure.axes[0].collections
             if not area.get_label().startswith("_")}
    held = {name for sample in samples for name, value in sample.bytes.items() if value}
    assert set(areas) == held
    seen = dict.fromkeys((sample.op for sample in samples), 0)
    for sample in samples:
        share = 1 / sum(other.op == sample.op for other in samples)
        inside = sample.op + (seen[sample.op] + 0.5) * share
        seen[sample.op] += 1
        below = 0
        for name, path in areas.items():
            bottom, top = (unit * height for height in extent_at(path, inside))
            assert bottom == pytest.approx(below)
            assert top - bottom == pytest.approx(sample.bytes.get(name, 0), abs=1e-6 * most)
            below = top
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert all(phase.name in texts for phase in phases)
    peak = max(samples, key=lambda sample: sum(sample.bytes.values()))
    [marker] = [line for line in figure.axes[0].lines if line.get_label() == "_peak"]
    [x], [y] = marker.get_data()
    assert peak.op <= x < peak.op + 1 and y * unit == pytest.approx(sum(peak.bytes.values()))
    for name in held:
        [label] = [text for text in texts if text.startswith(f"{name} ")]
        shown = float(label.removeprefix(name).replace(",", ""))
        assert shown * unit == pytest.approx(peak.bytes.get(name, 0), abs=0.005 * most)


def test_a_memory_figure_says_its_peak_in_words():
    figure = show.memory_over_step(*STEPS_OF_MEMORY["usual"], title="Gathered in turn")
    assert figure.alt == ("Gathered in turn. 4.08 GB at the peak, in optimizer: activations 0.00, "
                          "gathered 2.40, gradients 0.88, parameters 0.80, in GB. "
                          "Phases: forward, backward, optimizer.")


def test_pale_memory_has_an_outline_where_there_is_some():
    samples = [Held(op, gathered=op % 3, other=1 + op % 4) for op in range(9)]
    axes = show.memory_over_step(samples, title="").axes[0]
    lines = {to_hex(line.get_colors()[0]): line for line in axes.collections
             if line.get_label() == "_outline"}
    pale = {name: palette.outline(CATEGORY_COLORS[name]).lower() for name in ("gathered", "other")}
    assert set(lines) == set(pale.values())
    tops = [segment[0][1] for segment in lines[pale["other"]].get_segments()]
    assert tops == pytest.approx([sum(sample.bytes.values()) for sample in samples])
