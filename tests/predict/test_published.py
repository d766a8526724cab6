"""Predictions beside runs that were published."""

from dataclasses import replace

import pytest

from dplab.predict import published
from dplab.predict.catalogue import MODELS
from dplab.predict.cluster import Job, predict
from dplab.predict.published import PublishedRun, Ranking

ROWS = {row["id"]: row for row in published.TABLE["runs"]}


@pytest.fixture(scope="module")
def runs():
    return published.published_runs()


def beside(published, predicted, unit="tokens/s/GPU", low=None, high=None):
    return PublishedRun(f"{published} {unit}", 8, unit, published, predicted, low or predicted,
                        high or predicted, "", "")


def test_every_row_is_there_and_every_row_in_scope_is_predicted(runs):
    assert [run.id for run in runs] == [*ROWS]
    for run, row in zip(runs, ROWS.values(), strict=True):
        assert (run.published, run.held_out) == (row["published"], row["held_out"])
        assert run.source and (run.predicted is not None) == row["in_scope"], run.id
        if row["in_scope"]:
            assert 0 < run.low <= run.predicted <= run.high, run.id
        else:
            assert run.error is None and run.inside is None and row["reason"] in run.assumptions


def test_a_run_is_what_the_simulator_says_of_its_job(runs):
    by_id = {run.id: run for run in runs}
    cluster = published.CLUSTERS["A100, 8 × 200 Gb/s a node"].of(64)
    job = Job(MODELS["Llama-3 70B"], 1, 8192, recompute="full", gradient_bytes=4)
    rate = predict(job, cluster).tokens_per_second / 64
    assert by_id["titan-a100-l3-70b-full"].predicted == pytest.approx(rate)


@pytest.mark.parametrize(("unit", "more", "factor"), [
    ("tokens/s", {}, 64), ("sequences/s", {}, 64 / 8192),
    ("TFLOP/s/GPU", {"flops": "hardware"}, None), ("MFU", {}, None), ("s/step", {}, None)])
def test_each_unit_says_the_same_speed(unit, more, factor):
    row = ROWS["titan-a100-l3-70b-full"]
    rate = published._in_unit(row, 2.0)
    said = published._in_unit(row | {"unit": unit} | more, 2.0)
    job = published._job(row)
    expected = {"s/step": 2.0, "MFU": job.model_flops / 2 / 312e12,
                "TFLOP/s/GPU": job.model_flops * 4 / 3 / 2 / 1e12}
    assert rate == 8192 / 2
    assert said == pytest.approx(rate * factor if factor else expected[unit])


def test_micro_batches_send_once_or_each_time():
    cluster = published.CLUSTERS["A100, 400 Gb/s a node"].of(128)
    row = ROWS["fms-a100-7b-hsdp-first"] | {"batch": 1, "sequence": 512}

    def seconds(strategy, accumulation):
        return published._seconds(row | {"strategy": strategy, "accumulation": accumulation},
                                  cluster)

    for strategy, once in (("DDP", True), ("ZeRO-1", True), ("FSDP", False)):
        one = predict(replace(published._job(row | {"strategy": strategy})), cluster)
        optimizer = one.spans[-1].seconds
        further = one.compute_seconds if once else one.seconds
        assert seconds(strategy, 1) == one.seconds
        assert seconds(strategy, 4) == pytest.approx(one.seconds + 3 * (further - optimizer))
    assert seconds("DDP", 4) < 4 * seconds("DDP", 1) / 1.5, "sending bounds a step here"


def test_what_is_partly_recomputed_lies_between():
    cluster = published.CLUSTERS["A100, 8 × 200 Gb/s a node"].of(64)
    row = ROWS["titan-a100-l2-13b-layer"]
    none, full = (published._seconds(
        row | {"recompute": recompute, "recompute_share": None}, cluster)
        for recompute in ("none", "full"))
    assert none < full and published._seconds(row, cluster) == pytest.approx((none + full) / 2)
    products = published._seconds(ROWS["titan-a100-l2-13b-op"], cluster)
    assert none < products < full


def test_a_summary_of_runs():
    outside = PublishedRun("tensor parallel", 8, "MFU", 0.4, None, None, None, "", "")
    found = published.summary([beside(100, 110), beside(100, 90, low=80, high=100),
                               beside(100, 150), beside(2.0, 1.0, "s/step"), outside])
    assert (found.count, found.within_30_percent, found.inside) == (4, 0.5, 0.25)
    assert found.error == pytest.approx((0.1 + 0.5) / 2)
    assert found.absolute_error == pytest.approx((0.1 + 0.5) / 2)
    assert found.worst.unit == "s/step"
    with pytest.raises(ValueError, match="in scope"):
        published.summary([outside])


def test_a_ratio_of_two_runs_is_compared_with_that_of_their_predictions():
    found = Ranking("", ("a", "b", "c"), (100, 50, 20), (80, 50, 16)).ratio_errors
    assert found == pytest.approx([-0.2, 0, 0.25])


def test_rankings_compare_tokens_of_one_gpu(runs):
    found = {ranking.what: ranking for ranking in published.rankings(runs)}
    assert len(found) == len(published.TABLE["rankings"])
    nodes = next(ranking for ranking in found.values() if "oumi-2b-fsdp-16" in ranking.runs)
    assert nodes.published == pytest.approx((74.41 * 2048 / 16, 55.349 * 2048 / 16))
    kept = next(ranking for ranking in found.values() if "smollm3-zero2" in ranking.runs)
    assert kept.published == pytest.approx((8192 / 0.974, 8192 / 0.997))


def test_scaling_is_that_of_one_gpu(runs):
    found = {run.what: run for run in published.scaling(runs)}
    assert len(found) > 40
    run = found["MPT 7B × 2048, H100: 128 → 512 GPUs"]
    assert run.published == pytest.approx(9670 / 10475)
    oumi = found["FineWeb ablation 1.7B HSDP, A100 40 GB: 4 → 16 GPUs"]
    assert oumi.published == pytest.approx(74.41 / 21.7 / 4), "samples of all GPUs"
    assert 0 < oumi.low <= oumi.predicted <= oumi.high
