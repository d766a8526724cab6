"""Ranges of published runs about their predictions: what makes them, and whether they hold."""

import math
import statistics

import pytest

from dplab.predict import published, reached

CLASSES = [(gpu, ranks) for gpu in ("A100", "H100") for ranks in (8, 64)]


@pytest.mark.slow
def test_the_stored_ratios_are_those_of_the_predictions():
    """Else: python -m dplab.bench cluster --write dplab/predict/ratios.json."""
    assert reached.measured_ratios() == pytest.approx(reached.RATIOS, rel=1e-3)


@pytest.mark.parametrize(("gpu", "ranks"), CLASSES)
def test_four_fifths_of_held_out_runs_lie_in_the_range_each_source_weighted_alike(gpu, ranks):
    """Asked anew: the class is fitted without a source, and stretched as the whole class is."""
    found = reached.like(reached.GENERATIONS[gpu], ranks >= 64)
    wide = reached.reached(gpu, ranks)
    width = math.log(wide.high / wide.middle)
    stretch = width / reached._fit(found)[1]
    inside = []
    for source, ratios in found.items():
        others = {name: each for name, each in found.items() if name != source}
        middle, half = reached._fit(others)
        inside.append(statistics.mean(
            abs(ratio - middle) <= stretch * half + 1e-12 for ratio in ratios))
    assert statistics.mean(inside) == pytest.approx(wide.held_out) and wide.held_out >= 0.8
    assert wide.high / wide.low <= 2.5 and wide.low < wide.middle < wide.high
    assert (wide.sources, wide.runs) == (len(found), sum(map(len, found.values())))


def test_a_source_counts_once_however_many_runs_it_has(monkeypatch):
    """By hand: sources at 0.8, 0.9 and 1.0; the last published a hundred times."""
    of = {"a": [math.log(0.8)], "b": [math.log(0.9)], "c": [math.log(1.0)] * 100}
    middle, half = reached._fit(of)
    assert math.exp(middle) == pytest.approx(0.9)
    # The farthest from what the two others make is 0.8, whose others have (0.9 · 1.0)^½.
    assert half == pytest.approx(math.log(math.sqrt(0.9) / 0.8))
    assert reached._holding([(1, 0.5), (2, 0.5), (3, 1.0)], 0.5) == 2


def test_fewer_than_three_sources_make_no_range():
    assert reached.reached("B200", 8) is reached.reached("V100", 8) is None
    assert reached.reached("a GPU of the future", 8) is None


def test_the_nearest_runs_are_near_and_have_their_figures():
    first, *_ = reached.nearest("H100", 128, 8_030_261_248, True)
    row = next(row for row in published.TABLE["runs"] if row["series"] == first.what)
    assert first.gpu == "H100" and "8B" in first.what and first.source
    assert 64 <= first.ranks <= 256 and row["table"] in published.TABLE["tables"]
    rows = {row["id"]: row for row in published.TABLE["runs"]}
    for name, rate in (("titan-h100-8b-8", 5762), ("oumi-2b-hsdp-16", 74.41 * 2048 / 16),
                       ("smollm3-zero2", 8192 / 0.974), ("gpt-simple-2.8b", 65_000 / 8)):
        found = published.tokens_per_gpu(rows[name], rows[name]["published"])
        assert found == pytest.approx(rate), name
    assert not reached.other_ways("A100", 8, 8e9) and not reached.other_ways("H100", 8, 1e9)
