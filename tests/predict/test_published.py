"""Published runs: the frozen table, what is predicted beside it, and the ranges that it makes."""

import hashlib
import math
import statistics

import pytest

from dplab.predict import published, reached
from dplab.predict.catalogue import MODELS
from dplab.predict.cluster import Job, predict
from dplab.predict.published import ROWS, TABLE, PublishedRun, Ranking

IN_SCOPE = [row for row in TABLE["runs"] if row["in_scope"]]


# The table


def test_no_figure_changes_no_row_leaves_and_none_changes_sides():
    """A row is added here, never taken away, and held out by a rule that was set before."""
    assert (len(ROWS), len(TABLE["runs"]), len(IN_SCOPE)) == (351, 351, 322)
    figures = sorted(f"{name}: {row['published']} {row['unit']}" for name, row in ROWS.items())
    assert hashlib.sha256("\n".join(figures).encode()).hexdigest()[:16] == "3a6e161bd578eff3"
    for row in TABLE["runs"]:
        digest = hashlib.sha256(f"{row['table']}: {row['series']}".encode()).hexdigest()
        odd = int(digest, 16) % 2 == 1
        assert row["held_out"] == (row["in_scope"] and not row.get("known", False) and odd), row


# Predictions


@pytest.fixture(scope="module")
def runs():
    return published.published_runs()


def test_every_row_in_scope_is_predicted_and_the_others_say_why_not(runs):
    assert [run.id for run in runs] == [*ROWS]
    for run, row in zip(runs, ROWS.values(), strict=True):
        assert (run.published, run.held_out) == (row["published"], row["held_out"]) and run.source
        if row["in_scope"]:
            assert 0 < run.low <= run.predicted <= run.high, run.id
        else:
            assert run.error is run.inside is None and row["reason"] in run.assumptions
    by_id = {run.id: run for run in runs}
    job = Job(MODELS["Llama-3 70B"], 1, 8192, recompute="full", gradient_bytes=4)
    cluster = published.CLUSTERS["A100, 8 × 200 Gb/s a node"].of(64)
    assert by_id["titan-a100-l3-70b-full"].predicted == pytest.approx(
        predict(job, cluster).tokens_per_second / 64)


@pytest.mark.parametrize(("unit", "more", "expected"), [
    ("tokens/s/GPU", {}, lambda flops: 8192 / 2), ("tokens/s", {}, lambda flops: 64 * 8192 / 2),
    ("sequences/s", {}, lambda flops: 64 / 2), ("s/step", {}, lambda flops: 2.0),
    ("MFU", {}, lambda flops: flops / 2 / 312e12),
    ("TFLOP/s/GPU", {"flops": "hardware"}, lambda flops: flops * 4 / 3 / 2 / 1e12),
    ("TFLOP/s/GPU", {"flops": "causal"}, lambda flops: (
        flops - 12 * 80 * 8192 * 8192**2 / 2) / 2 / 1e12)])
def test_each_unit_says_the_same_speed(unit, more, expected):
    """One sequence of 8,192 tokens on each of 64 A100s, in 2 s."""
    row = ROWS["titan-a100-l3-70b-full"] | {"unit": unit} | more
    said = published._in_unit(row, 2.0)
    assert said == pytest.approx(expected(published._job(row).model_flops))
    assert published.tokens_per_gpu(row, said) == pytest.approx(8192 / 2)


def test_a_summary_counts_errors_as_speeds():
    def beside(value, predicted, unit="tokens/s/GPU", low=None, high=None):
        return PublishedRun("", 8, unit, value, predicted, low or predicted, high or predicted,
                            "", "")

    outside = PublishedRun("tensor parallel", 8, "MFU", 0.4, None, None, None, "", "")
    found = published.summary([beside(100, 110), beside(100, 90, low=80, high=100),
                               beside(100, 150), beside(2.0, 1.0, "s/step"), outside])
    assert (found.count, found.within_30_percent, found.inside) == (4, 0.5, 0.25)
    assert found.error == found.absolute_error == pytest.approx((0.1 + 0.5) / 2)
    assert found.worst.unit == "s/step"


def test_rankings_and_scaling_compare_tokens_of_one_gpu(runs):
    assert Ranking("", ("a", "b", "c"), (100, 50, 20), (80, 50, 16)).ratio_errors == (
        pytest.approx([-0.2, 0, 0.25]))
    found = published.rankings(runs)
    assert len(found) == len(TABLE["rankings"]) >= 20
    assert all(len({*each.runs}) >= 2 for each in found)
    nodes, kept = (next(each.published for each in found if run in each.runs)
                   for run in ("oumi-2b-fsdp-16", "smollm3-zero2"))
    assert nodes == pytest.approx((74.41 * 2048 / 16, 55.349 * 2048 / 16))
    assert kept == pytest.approx((8192 / 0.974, 8192 / 0.997))
    scaled = {run.what: run for run in published.scaling(runs)}
    assert len(scaled) > 40
    run = scaled["MPT 7B × 2048, H100: 128 → 512 GPUs"]
    assert run.published == pytest.approx(9670 / 10475)
    oumi = scaled["FineWeb ablation 1.7B HSDP, A100 40 GB: 4 → 16 GPUs"]
    assert oumi.published == pytest.approx(74.41 / 21.7 / 4), "samples of all GPUs"
    assert 0 < oumi.low <= oumi.predicted <= oumi.high


# Ranges


@pytest.mark.slow
def test_the_stored_ratios_are_those_of_the_predictions():
    """Else: python -m dplab.bench cluster --write dplab/predict/ratios.json."""
    assert reached.measured_ratios() == pytest.approx(reached.RATIOS, rel=1e-3)


@pytest.mark.parametrize("gpu", ["A100", "H100"])
@pytest.mark.parametrize("ranks", [8, 63, 64])
def test_four_fifths_of_held_out_runs_lie_in_the_range_each_source_weighted_alike(gpu, ranks):
    """Asked anew: the class is fitted without a source, and stretched as the whole class is."""
    found = reached.like(reached.GENERATIONS[gpu], ranks >= 64)
    wide = reached.reached(gpu, ranks)
    stretch = math.log(wide.high / wide.middle) / reached._fit(found)[1]
    inside = []
    for source, ratios in found.items():
        middle, half = reached._fit({name: each for name, each in found.items() if name != source})
        inside.append(statistics.mean(
            abs(ratio - middle) <= stretch * half + 1e-12 for ratio in ratios))
    assert statistics.mean(inside) == pytest.approx(wide.held_out) and wide.held_out >= 0.8
    assert wide.high / wide.low <= 2.5 and wide.low < wide.middle < wide.high
    assert (wide.sources, wide.runs) == (len(found), sum(map(len, found.values())))


def test_a_source_counts_once_and_fewer_than_three_make_no_range():
    """By hand: sources at 0.8, 0.9 and 1.0; the last published a hundred times."""
    of = {"a": [math.log(0.8)], "b": [math.log(0.9)], "c": [math.log(1.0)] * 100}
    middle, half = reached._fit(of)
    assert math.exp(middle) == pytest.approx(0.9)
    # The farthest from what the two others make is 0.8, whose others have (0.9 · 1.0)^½.
    assert half == pytest.approx(math.log(math.sqrt(0.9) / 0.8))
    assert all(reached.reached(gpu, 8) is None for gpu in ("B200", "V100", "one of the future"))


def test_the_nearest_runs_are_near_and_of_the_same_kind():
    first, *others = reached.nearest("H100", 128, 8_030_261_248, True)
    row = next(row for row in TABLE["runs"] if row["series"] == first["what"]
               and row["ranks"] == first["ranks"])
    assert first["gpu"] == "H100" and "8B" in first["what"] and 64 <= first["ranks"] <= 256
    assert first["source"] == TABLE["tables"][row["table"]]["source"]
    assert "compiled" in first["how"]
    assert len({each["what"] for each in (first, *others)}) == 3, "one of each series"
    [tensor, *_] = reached.other_ways("H100", 2048, 405_853_388_800)
    assert "TP 8" in tensor["how"]
    assert not reached.other_ways("A100", 8, 8e9) and not reached.other_ways("H100", 8, 1e9)
