"""Published training runs beside what is predicted for them, as intervals.

    runs = published_runs()
    print(summary([run for run in runs if run.held_out]))

The runs lie in ``runs.json``, each with its source and with what it leaves open; nothing is fitted
to them. A run is predicted three times, at the slow, the typical and the fast pace of everything
that was measured: the first and the last bound the interval. `rankings` has the ratios of
runs that were published side by side, and `scaling` whether one scales as predicted.
"""

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources

from dplab.predict import step
from dplab.predict.catalogue import GPUS, LINKS, MODELS, Gpu
from dplab.predict.cluster import Job, fsdp_spans, predict
from dplab.predict.cost import Link
from dplab.predict.network import Cluster, collective_seconds, computing_slowdown, ring_link
from dplab.predict.pace import PACES
from dplab.predict.step import Layer
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

    def __str__(self):
        return (f"{self.count} runs: error {self.error:+.0%} in the median, "
                f"{self.absolute_error:.0%} by size; {self.within_30_percent:.0%} within 30 %, "
                f"{self.inside:.0%} between predictions at slow and fast rates; "
                f"the worst {self.worst.error:+.0%}, {self.worst.what}")


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
    """Every published figure: first efficiencies, then the runs in the order of ``runs.json``."""
    return [*map(_efficiency, TABLE["efficiencies"]), *map(_run, TABLE["runs"])]


def scaling(runs: Iterable[PublishedRun] | None = None) -> list[PublishedRun]:
    """For each series with the same batch on more ranks: its rate per GPU over that on the fewest.

    Both rates are taken at one pace, so that the computing that they share widens no interval.
    """
    found = []
    for few, *many in _series(runs, same_batch=True):
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
    """Of those in scope. Raises ValueError where there are none."""
    errors = [(run, run.error) for run in runs if run.error is not None]
    if not errors:
        raise ValueError("none of these runs is in scope, so that there is no error to sum up: "
                         "take others")
    sizes = [abs(error) for _, error in errors]
    return Summary(len(errors), statistics.median(error for _, error in errors),
                   statistics.median(sizes), sum(size <= 0.3 for size in sizes) / len(errors),
                   sum(bool(run.inside) for run, _ in errors) / len(errors),
                   max(errors, key=lambda each: abs(each[1]))[0])


def _series(runs, same_batch=False):
    """Lists of two runs or more of one series and unit, in rising ranks."""
    groups: dict[tuple, list[PublishedRun]] = {}
    for run in published_runs() if runs is None else runs:
        if run.predicted is not None and run.id in ROWS:
            row = ROWS[run.id]
            batch = (row["batch"], row.get("accumulation", 1)) if same_batch else ()
            groups.setdefault((run.table, run.series, run.unit, *batch), []).append(run)
    return [sorted(group, key=lambda run: run.ranks) for group in groups.values() if len(group) > 1]


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
    if not row["in_scope"]:
        return _beside(row, row.get("what", row["series"]), row["ranks"], row["unit"], None)
    cluster = CLUSTERS[row["machine"]].of(row["ranks"])
    paces = [_in_unit(row, _seconds(row, replace(cluster, pace=pace))) for pace in PACES]
    what = f"{row['series']}, {row['batch']} × {row['sequence']}"
    return _beside(row, what, row["ranks"], row["unit"], paces)


def _efficiency(row):
    paces = None
    if row["in_scope"]:
        kinds = {"ResNet-50": _goyal, "T5-11B": _t5, "job": _job_efficiency}
        paces = [kinds[row["kind"]](row, pace) for pace in PACES]
    return _beside(row, row["what"], row["many"], "efficiency", paces)


def _beside(row, what, ranks, unit, paces):
    table = TABLE["tables"][row["table"]]
    said = [row.get("machine"), row.get("assumed") if paces else f"out of scope: {row['reason']}"]
    low, middle, high = (min(paces), paces[1], max(paces)) if paces else (None, None, None)
    machine = TABLE["machines"].get(row.get("machine"))
    return PublishedRun(what, ranks, unit, row["published"], middle, low, high,
                        "; ".join(each for each in said if each),
                        "; ".join(each for each in (table["source"], row.get("at")) if each),
                        machine["gpu"] if machine else "", row.get("series", ""), row["table"],
                        row["id"], row["held_out"])


def _job_efficiency(row, pace):
    seconds = [_seconds(row, replace(CLUSTERS[row["machine"]].of(ranks), pace=pace))
               for ranks in (row["few"], row["many"])]
    return seconds[0] / seconds[1]


def _goyal(row, pace):
    """ResNet-50, 102 MB of fp32 gradients, in 16 equal layers; computing takes what was published.

    Source: P. Goyal et al., "Accurate, large minibatch SGD", 2017: the step of 256 GPUs.
    """
    busy = 3600 / (90 * 1.281e6 / 8192)  # "in 1 hour"
    layers = [Layer(busy / 48, busy / 24, 4 * 25.56e6 / 16)] * 16
    # Only the links matter here: the time of computing is given.
    machine = Cluster(GPUS["A100"], 1, Link("NVLink of a P100", 80e9, 3.4e-6),
                      Link("50 Gb/s", 6.25e9, 14e-6), nics=1, pace=pace)
    seconds = [step.step_seconds(step.ddp_spans(
        layers, ranks, ring_link(machine.of(ranks), ranks, 8), bucket_bytes=1,
        overlap=row["overlap"])) for ranks in (row["few"], row["many"])]
    return seconds[0] / seconds[1]


def _t5(row, pace):
    """T5-11B: 24 encoder blocks of 201 M parameters and 24 decoder blocks of 268 M.

    Source: C. Raffel et al., "Exploring the limits of transfer learning", 2020: the sizes.
    """
    parts = [1024 * (4 * 16384 + 2 * 65536)] * 24 + [1024 * (8 * 16384 + 2 * 65536)] * 24
    seconds = []
    for ranks in (row["few"], row["many"]):
        cluster = replace(CLUSTERS["A100, 2 Tb/s a node"].of(ranks), pace=pace)
        forward = [2 * row["tokens"] * part / (cluster.gpu.bf16_flops * cluster.matmul_share)
                   for part in parts]
        blocks = [Layer(time, 3 * time, 2 * part, f"block {place}")
                  for place, (part, time) in enumerate(zip(parts, forward, strict=True))]
        seconds.append(step.step_seconds(fsdp_spans(
            blocks, Layer(0, 0, 2 * 33e6, "root"), gather=_on(cluster, "all-gather"),
            scatter=_on(cluster, "reduce-scatter"), slowdown=computing_slowdown(cluster))))
    return seconds[0] / seconds[1]


def _on(cluster, collective):
    return lambda nbytes: collective_seconds(cluster, collective, nbytes)
