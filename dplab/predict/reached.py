"""What runs like a plan reached, beside what kernels allow: a range that held-out runs lie in.

The simulator leaves out what slows real runs: loading of data, the CPU between kernels, clocks that
fall under load. How much that was, published runs say: each has a ratio, what it reached over what
is predicted for it (``ratios.json``, which `measured_ratios` makes). Runs are like a plan if their
GPUs are of its generation and both have fewer than `LARGE` GPUs, or neither. Each source counts the
same, however many runs it published. The middle of a range is the median of the sources' medians,
and its ends are as far from it, as factors, as `SPREAD` of the runs are from the middle of the
other sources. Then each source is left out: if less than `SHARE` of these held-out runs lie in what
the other sources make, the range is stretched until they do. With fewer than `LEAST_SOURCES` there
is no range. Nothing else is fitted.
"""

import functools
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from importlib import resources

from dplab.predict.published import CLUSTERS, ROWS, TABLE, model_of, published_runs, tokens_per_gpu

SPREAD, SHARE = 0.85, 0.8
LEAST_SOURCES, LARGE = 3, 64
GENERATIONS = {"V100": "Volta", "A100": "Ampere", "H100": "Hopper", "H200": "Hopper",
               "B200": "Blackwell"}
RATIOS: dict[str, float] = json.loads(
    resources.files(__package__).joinpath("ratios.json").read_text("utf-8"))


@dataclass(frozen=True)
class Range:
    """Of the speed, over the predicted one: ``low``, ``middle`` and ``high``; from how many.

    ``held_out``: of the runs of each source the share inside the stretched range that the others
    make, on average over the sources.
    """

    low: float
    middle: float
    high: float
    sources: int
    runs: int
    held_out: float


def measured_ratios() -> dict[str, float]:
    """Of each published speed in scope: what it reached over what is predicted for it."""
    return {run.id: float(f"{1 / (1 + run.error):.4g}") for run in published_runs()
            if run.error is not None and run.id in ROWS}


def reached(gpu: str, ranks: int) -> Range | None:
    """The range of the runs like these; None where there are too few sources."""
    generation = GENERATIONS.get(gpu)
    return _range(generation, ranks >= LARGE) if generation else None


def source_of(row: dict) -> str:
    """Who published it: rows of one source may share what made them fast or slow."""
    return TABLE["tables"][row["table"]]["by"]


def like(generation: str, large: bool) -> dict[str, list[float]]:
    """The logarithms of the ratios of all such runs, by source."""
    found = defaultdict(list)
    for name, ratio in RATIOS.items():
        row = ROWS[name]
        if (GENERATIONS[CLUSTERS[row["machine"]].gpu.name] == generation
                and (row["ranks"] >= LARGE) is large):
            found[source_of(row)].append(math.log(ratio))
    return dict(found)


@functools.cache
def _range(generation, large):
    found = like(generation, large)
    if len(found) < LEAST_SOURCES:
        return None
    needed = []
    for source in found:
        middle, width = _fit(_without(found, source))
        needed += [(abs(ratio - middle) / width, 1 / len(found[source])) for ratio in found[source]]
    stretch = max(1.0, _holding(needed, SHARE))
    inside = sum(weight for need, weight in needed if need <= stretch) / len(found)
    middle, width = _fit(found)
    return Range(*(math.exp(middle + side * stretch * width) for side in (-1, 0, 1)), len(found),
                 sum(map(len, found.values())), inside)


def _fit(by_source):
    """The middle, and how far `SPREAD` of the runs are at most from the others' middle."""
    middles = {source: statistics.median(ratios) for source, ratios in by_source.items()}
    return statistics.median(middles.values()), _holding([
        (abs(ratio - statistics.median(_without(middles, source).values())), 1 / len(ratios))
        for source, ratios in by_source.items() for ratio in ratios], SPREAD)


def _holding(weighted, share):
    """The least value that ``share`` of the weight does not exceed."""
    total = sum(weight for _, weight in weighted)
    held = 0.0
    for value, weight in sorted(weighted):
        held += weight
        if held >= share * total - 1e-9:
            return value
    raise AssertionError("all of the weight is more than a share of it")


def _without(by_source, source):
    return {name: found for name, found in by_source.items() if name != source}


def nearest(gpu: str, ranks: int, parameters: int, compiled: bool, count: int = 3) -> list[dict]:
    """The published runs nearest in size of the model and of the cluster, one of each series.

    On GPUs of the same generation, where there are any; else of the nearest. Of each: ``what`` it
    trained, on which ``gpu`` and how many ``ranks``, ``how`` (the strategy, or parallelism), its
    ``rate`` in tokens/s of a GPU, and its ``source``.
    """
    def away(row):
        theirs = CLUSTERS[row["machine"]].gpu.name
        return (8 * (GENERATIONS.get(theirs) != GENERATIONS.get(gpu)) + (theirs != gpu)
                + 2 * abs(math.log2(_parameters(row["model"], row["sequence"]) / parameters))
                + abs(math.log2(row["ranks"] / ranks)) + (row["compiled"] is not compiled) / 2)

    found: dict[str, dict] = {}
    for row in sorted((ROWS[name] for name in RATIOS), key=away):
        found.setdefault(row["series"], row)
    return [{"what": row["series"], "gpu": CLUSTERS[row["machine"]].gpu.name,
             "ranks": row["ranks"], "how": row["strategy"] + ", compiled" * row["compiled"],
             "rate": tokens_per_gpu(row, row["published"]),
             "source": TABLE["tables"][row["table"]]["source"]}
            for row in [*found.values()][:count]]


def other_ways(gpu: str, ranks: int, parameters: int, count: int = 2) -> list[dict]:
    """Published runs of such a model that split sequences or layers too; nearest first.

    Their models have between half and twice the parameters, and their GPUs are alike. As `nearest`.
    """
    rows = [row for row in TABLE["other_ways"]
            if 0.5 <= 1e9 * row["billions"] / parameters <= 2
            and GENERATIONS[row["gpu"]] == GENERATIONS.get(gpu)]
    rows.sort(key=lambda row: (abs(math.log2(1e9 * row["billions"] / parameters)) > 0.5,
                               abs(math.log2(row["ranks"] / ranks))))
    return [{"what": row["model"], "gpu": row["gpu"], "ranks": row["ranks"], "how": row["way"],
             "rate": row["tokens_per_second"], "source": row["source"]} for row in rows[:count]]


@functools.cache
def _parameters(model, sequence):
    return model_of({"model": model, "sequence": sequence}).parameters
