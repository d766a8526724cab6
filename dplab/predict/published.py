"""Published training runs beside what is predicted for them, as intervals.

    runs = published_runs()
    print(summary([run for run in runs if run.held_out]).error)

The runs lie in ``runs.json``, each with its source and with what it leaves open; nothing is fitted
to them. A run is predicted three times, at the slow, the typical and the fast pace of everything
that was measured: the first and the last bound the interval. `rankings` has the ratios of
runs that were published side by side, and `scaling` whether one scales as predicted.
"""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources

from dplab.predict.catalogue import GPUS, LINKS, MODELS, Gpu
from dplab.predict.cluster import predict
from dplab.predict.job import Cluster, Job
from dplab.predict.pace import PACES
from dplab.predict.transformer_config import TransformerConfig

TABLE = json.loads(resources.files(__package__).joinpath("runs.json").read_text("utf-8"))
ROWS = {row["id"]: row for row in TABLE["runs"]}
# What each published strategy is to `Job`, and whether it sends once in a step of micro-batches.
# ZeRO-1 and ZeRO-2 send the bytes of FSDP without resharding, and hold their share of the states.
_JOBS = {
    "DDP": ({"strategy": "DDP"}, True),
    "ZeRO-1": ({"strategy": "FSDP", "reshard": False}, True),
    "ZeRO-2": ({"strategy": "FSDP", "reshard": False}, True),
    "SHARD_GRAD_OP": ({"strategy": "FSDP", "reshard": False}, False),
    "ZeRO-3": ({"strategy": "FSDP"}, False),
    "FSDP": ({"strategy": "FSDP"}, False),
    "HSDP": ({"strategy": "HSDP"}, False),
}
_ATTENTION = {"flash2": "FlashAttention-2", "flash3": "FlashAttention-3",
              "flash4": "FlashAttention-4", "cudnn": "cuDNN", "triton": "FlashAttention in Triton",
              "none": "unfused"}


@dataclass(frozen=True)
class PublishedRun:
    """A published figure beside its prediction: ``predicted`` at the typical pace, and its bounds.

    ``unit`` is that of all four numbers; the predicted ones are None for what is out of scope, and
    then ``assumptions`` says why. ``series``: runs that differ in ranks and batch alone; ``table``:
    where it was published; ``held_out``: by a rule that was set before anything was compared.
    """

    what: str
    ranks: int
    unit: str
    published: float
    predicted: float | None
    low: float | None
    high: float | None
    assumptions: str
    source: str
    gpu: str = ""
    series: str = ""
    table: str = ""
    id: str = ""
    held_out: bool = False

    @property
    def error(self) -> float | None:
        """Relative, as a speed: above zero is too fast, for seconds too."""
        if self.predicted is None:
            return None
        ratio = self.predicted / self.published
        return (1 / ratio if self.unit == "s/step" else ratio) - 1

    @property
    def inside(self) -> bool | None:
        """Whether the published figure lies in the interval."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.published <= self.high


@dataclass(frozen=True)
class Summary:
    """Of runs in scope: medians of the error and of its size, the share within 30 % and inside."""

    count: int
    error: float
    absolute_error: float
    within_30_percent: float
    inside: float
    worst: PublishedRun


@dataclass(frozen=True)
class Ranking:
    """Runs that were published side by side, by tokens per second on a GPU."""

    what: str
    runs: tuple[str, ...]
    published: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def ratio_errors(self) -> list[float]:
        """Of each two of them, by how much the predicted ratio of their speeds is off."""
        ratios = [[one / other for one, other in itertools.combinations(rates, 2)]
                  for rates in (self.published, self.predicted)]
        return [here / there - 1 for there, here in zip(*ratios, strict=True)]


def published_runs() -> list[PublishedRun]:
    """Every published run, in the order of ``runs.json``."""
    return [*map(_run, TABLE["runs"])]


def scaling(runs: Iterable[PublishedRun] | None = None) -> list[PublishedRun]:
    """For each series with the same batch on more ranks: its rate per GPU over that on the fewest.

    Both rates are taken at one pace, so that the computing that they share widens no interval.
    """
    series = defaultdict(list)
    for run in published_runs() if runs is None else runs:
        if run.predicted is not None:
            row = ROWS[run.id]
            batch = row["batch"], row.get("accumulation", 1)
            series[run.table, run.series, run.unit, *batch].append(run)
    found = []
    for group in series.values():
        few, *many = sorted(group, key=lambda run: run.ranks)
        for run in many:
            if run.ranks > few.ranks:
                published, *paces = (
                    _per_gpu(run, getattr(run, each)) / _per_gpu(few, getattr(few, each))
                    for each in ("published", "low", "predicted", "high"))
                found.append(replace(
                    run, what=f"{run.series}: {few.ranks} → {run.ranks} GPUs", unit="efficiency",
                    published=published, predicted=paces[1], low=min(paces), high=max(paces)))
    return found


def rankings(runs: Iterable[PublishedRun] | None = None) -> list[Ranking]:
    """Every comparison of `runs.json`, in tokens per second and GPU."""
    by_id = {run.id: run for run in (published_runs() if runs is None else runs)}

    def rates(ids, which):
        return tuple(tokens_per_gpu(ROWS[each], getattr(by_id[each], which)) for each in ids)

    return [Ranking(each["what"], tuple(each["runs"]), rates(each["runs"], "published"),
                    rates(each["runs"], "predicted")) for each in TABLE["rankings"]]


def summary(runs: Iterable[PublishedRun]) -> Summary:
    """Of those in scope, of which there is one at least."""
    errors = [(run, run.error) for run in runs if run.error is not None]
    sizes = [abs(error) for _, error in errors]
    return Summary(len(errors), statistics.median(error for _, error in errors),
                   statistics.median(sizes), sum(size <= 0.3 for size in sizes) / len(errors),
                   sum(bool(run.inside) for run, _ in errors) / len(errors),
                   max(errors, key=lambda each: abs(each[1]))[0])


def _cluster(machine):
    gpu = GPUS.get(machine["gpu"]) or Gpu(machine["gpu"], 1, 1, 1, machine["source"])
    units = {"bf16": ("bf16_flops", 1e12), "memory": ("memory_bytes", 1e9),
             "memory_bandwidth": ("memory_bandwidth", 1e12)}
    gpu = replace(gpu, **{name: unit * machine[key] for key, (name, unit) in units.items()
                          if key in machine})
    between = LINKS[machine["between"]]
    if "bandwidth" in machine:
        between = replace(between, bandwidth=1e9 * machine["bandwidth"])
    return Cluster(gpu, 1, LINKS[machine["inside"]], between, machine["per_node"], machine["nics"])


CLUSTERS = {name: _cluster(machine) for name, machine in TABLE["machines"].items()}


def model_of(row: dict) -> TransformerConfig:
    """The model of a row of ``runs.json``; where positions are learned, as many as its tokens."""
    if row["model"] not in TABLE["models"]:
        return MODELS[row["model"]]
    sizes = {key: value for key, value in TABLE["models"][row["model"]].items() if key != "family"}
    family = TABLE["families"][TABLE["models"][row["model"]]["family"]]
    return TransformerConfig(**sizes, **family, context=row["sequence"], name=row["model"])


def _job(row):
    kind, _ = _JOBS[row["strategy"]]
    parameter, gradient = row["wire"]
    return Job(model_of(row), row["batch"], row["sequence"], parameter_bytes=parameter,
               gradient_bytes=gradient, compiled=row["compiled"], cast_weights=parameter == 4,
               attention=_ATTENTION.get(row["attention"], "FlashAttention-2"), **kind)


def _seconds(row, cluster):
    """Of a step of all micro-batches; where some blocks are recomputed, between none and all."""
    share = row.get("recompute_share")
    parts = {"none": 1 - share, "full": share} if share else {row["recompute"]: 1.0}
    if row.get("selects") == "products":
        parts = {"selective": 1.0}
    _, once = _JOBS[row["strategy"]]
    total = 0.0
    for recompute, weight in parts.items():
        prediction = predict(replace(_job(row), recompute=recompute), cluster)
        optimizer = prediction.spans[-1].seconds
        further = prediction.compute_seconds if once else prediction.seconds
        total += weight * (prediction.seconds
                           + (row.get("accumulation", 1) - 1) * (further - optimizer))
    return total


def _in_unit(row, seconds):
    """What a step of so many seconds is in the unit of the row."""
    cluster, job, micro_batches = CLUSTERS[row["machine"]], _job(row), row.get("accumulation", 1)
    sequences = row["batch"] * micro_batches / seconds
    flops = job.model_flops * micro_batches / seconds
    attention = 12 * job.model.layers * job.model.d_model * row["sequence"] ** 2 * sequences
    return {"tokens/s/GPU": lambda: row["sequence"] * sequences,
            "tokens/s": lambda: row["sequence"] * sequences * row["ranks"],
            "sequences/s": lambda: sequences * row["ranks"],
            "s/step": lambda: seconds,
            "MFU": lambda: flops / cluster.gpu.bf16_flops,
            "TFLOP/s/GPU": lambda: {"causal": flops - attention / 2,
                                    "hardware": flops * 4 / 3}[row["flops"]] / 1e12,
            }[row["unit"]]()


def _per_gpu(run, value):
    """A speed of one GPU, in a unit that the runs of a series share."""
    row = ROWS[run.id]
    return value if run.unit in ("MFU", "TFLOP/s/GPU") else tokens_per_gpu(row, value)


def tokens_per_gpu(row: dict, value: float) -> float:
    """Tokens per second of one GPU, where a row in scope says ``value`` in its own unit."""
    seconds = value if row["unit"] == "s/step" else _in_unit(row, 1.0) / value
    return row["batch"] * row["sequence"] * row.get("accumulation", 1) / seconds


def _run(row):
    low = middle = high = None
    said = row.get("assumed")
    if row["in_scope"]:
        cluster = CLUSTERS[row["machine"]].of(row["ranks"])
        paces = [_in_unit(row, _seconds(row, replace(cluster, pace=pace))) for pace in PACES]
        low, middle, high = min(paces), paces[1], max(paces)
        what = f"{row['series']}, {row['batch']} × {row['sequence']}"
    else:
        what, said = row.get("what", row["series"]), f"out of scope: {row['reason']}"
    source = TABLE["tables"][row["table"]]["source"]
    return PublishedRun(what, row["ranks"], row["unit"], row["published"], middle, low, high,
                        "; ".join(filter(None, (row.get("machine"), said))),
                        "; ".join(filter(None, (source, row.get("at")))),
                        TABLE["machines"][row["machine"]]["gpu"] if "machine" in row else "",
                        row["series"], row["table"], row["id"], row["held_out"])
