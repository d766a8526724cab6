"""The predicted timeline of a step, against one made by hand and one made in small ticks."""

import math

import pytest

from dplab.exercises import predict_sharded_step, predict_step
from dplab.exercises.ring_seconds import ring_seconds
from dplab.predict import step
from dplab.predict.cost import Link
from dplab.predict.step import COMMUNICATION, COMPUTE, Layer, Span

MB = 1e6
LINK = Link("chosen", bandwidth=1e9, latency=1e-3)  # a ring of 2: 2 ms and M / (1 GB/s)


def layers_of(*rows):
    return [Layer(forward, backward, nbytes, f"layer {index}")
            for index, (forward, backward, nbytes) in enumerate(rows)]


def spans_by_name(spans):
    return {span.name: (round(1e3 * span.start, 6), round(1e3 * span.end, 6)) for span in spans}


THREE = layers_of((0.001, 0.004, 3 * MB), (0.002, 0.006, 5 * MB), (0.003, 0.008, 1 * MB))


def test_a_schedule_worked_out_by_hand():
    spans = step.ddp_spans(THREE, 2, LINK, bucket_bytes=4 * MB, optimizer_seconds=0.002)
    assert spans_by_name(spans) == {
        "forward": (0, 6),
        "backward layer 2": (6, 14), "backward layer 1": (14, 20), "backward layer 0": (20, 24),
        "all-reduce 0": (20, 28),  # layers 2 and 1: 6 MB
        "all-reduce 1": (28, 33),  # layer 0 is ready at 24, the link at 28
        "optimizer": (33, 35)}
    assert step.step_seconds(spans) == pytest.approx(0.035)
    assert step.exposed_seconds(spans) == pytest.approx(0.009)


def test_without_overlap_everything_waits_for_backward():
    spans = step.ddp_spans(THREE, 2, LINK, bucket_bytes=4 * MB, overlap=False)
    named = spans_by_name(spans)
    assert (named["all-reduce 0"], named["all-reduce 1"]) == ((24, 32), (32, 37))
    assert step.exposed_seconds(spans) == pytest.approx(0.013)


@pytest.mark.parametrize(("bucket_bytes", "expected"), [
    (0.5 * MB, [[2], [1], [0]]), (1 * MB, [[2], [1], [0]]), (1.5 * MB, [[2, 1], [0]]),
    (6 * MB, [[2, 1], [0]]), (6.5 * MB, [[2, 1, 0]]), (100 * MB, [[2, 1, 0]]),
])
def test_buckets_close_when_they_reach_their_size(bucket_bytes, expected):
    assert step.bucket_layers(THREE, bucket_bytes) == expected


@pytest.mark.parametrize("case", [case for case in predict_step.CASES if len(case) == 6],
                         ids=lambda case: case[0])  # those whose buckets all close at one size
def test_the_end_of_a_step_is_that_of_the_exercise(case):
    _, layers, bucket_bytes, ranks, *link = case
    spans = step.ddp_spans(layers, ranks, Link("any", *link), bucket_bytes=bucket_bytes)
    end, exposed = predict_step.bucket_by_bucket(layers, bucket_bytes, ranks, *link)
    assert step.step_seconds(spans) == pytest.approx(end)
    assert step.exposed_seconds(spans) == pytest.approx(exposed)


def test_exposed_and_hidden_of_overlapping_spans():
    spans = [Span("a", COMPUTE, 0, 10), Span("b", COMPUTE, 8, 12), Span("w", step.STALLED, 12, 20),
             Span("c", COMMUNICATION, 9, 15), Span("d", COMMUNICATION, 14, 16),
             Span("e", COMMUNICATION, 18, 19)]
    assert step.exposed_seconds(spans) == pytest.approx(16 - 12 + 1)
    assert step.step_seconds(spans) == 20


def test_impossible_layers_and_buckets_are_refused():
    for values in ((-1, 0, 0), (0, math.inf, 0), (0, 0, math.nan)):
        with pytest.raises(ValueError, match="0 or more"):
            Layer(*values)
    with pytest.raises(ValueError, match="more than 0 bytes"):
        step.ddp_spans(THREE, 2, LINK, bucket_bytes=0)


def test_backward_beside_an_all_reduce_takes_longer_where_it_is_told_so():
    """4 s alone; of the next 4, 1.5 in the 3 s beside the first all-reduce, then 2.5 alone."""
    layers = [step.Layer(0, 4, 1, "first"), step.Layer(0, 4, 1, "last")]
    spans = step.ddp_spans(layers, 2, lambda nbytes: 3 * nbytes, bucket_bytes=1, slowdown=2)
    found = {span.name: (span.start, span.end) for span in spans}
    assert found["backward last"] == (0, 4) and found["all-reduce 0"] == (4, 7)
    assert found["backward first"] == (4, 9.5) and found["all-reduce 1"] == (9.5, 12.5)
    apart = step.ddp_spans(layers, 2, lambda nbytes: 3 * nbytes, bucket_bytes=1, slowdown=2,
                           overlap=False)
    assert step.step_seconds(apart) == 14


@pytest.mark.parametrize("case", predict_sharded_step.CASES, ids=lambda case: case[0])
def test_the_end_of_a_sharded_step_is_that_of_the_exercise(case):
    _, layers, *link, ahead = case
    spans = step.sharded_spans(layers, lambda nbytes: ring_seconds(nbytes, *link) / 2, ahead=ahead)
    end = predict_sharded_step.by_two_lists(layers, *link, ahead)
    assert step.step_seconds(spans) == pytest.approx(end)
