"""Steps of many kinds for the tests of timelines, and what is drawn of them."""

import itertools
import math
import random

from dplab.predict import step
from dplab.predict.cost import Link
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Layer, Span

MB = 1e6
UNITS = {"µs": 1e6, "ms": 1e3, "s": 1.0}


def predicted(layers=8, *, seconds=1e-3, bandwidth=1.25e9, world_size=4, bucket=25 * MB, **options):
    sizes = [1, 1, 2, 8, 10, 20, 12, 30]
    return step.ddp_spans([Layer(seconds, 2 * seconds, sizes[index % 8] * MB, f"layer {index}")
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
    spans.append(Span("backward: wait", STALLED, backward, end))
    return [*spans, Span("optimizer", COMPUTE, end, end + draw.uniform(6e-4, 8e-4))]


CASES = {
    "no overlap": [predicted(overlap=False), predicted()],
    "four ranks": [measured(rank) for rank in range(4)],
    "eight ranks": [measured(rank, late=8e-3 * (rank == 7)) for rank in range(8)],
    "sixty": [predicted(60, seconds=2e-4, bucket=1, bandwidth=1.2e10), measured(0, 60)],
    "one rank alone": [predicted(world_size=1), predicted(world_size=2)],
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
                          Span("barrier", STALLED, 1.5, 4), Span("optimizer", COMPUTE, 3.5, 5)]],
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
