"""Published measurements of data-parallel and FSDP runs, beside the prediction of `cluster`.

`published_runs` gives every run with what it assumes; nothing is fitted to it: the share of the
peak is that of large matrix products, the links are the makers'. `runs_with_fitted_share` asks a
second question: with the share of the peak fitted to one run of a series, how well are the others
predicted? Runs with tensor or pipeline parallelism are listed as out of scope.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dplab.predict import step
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.cluster import (
    Cluster,
    Job,
    collective_seconds,
    fsdp_spans,
    predict,
    ring_link,
)
from dplab.predict.cost import Link
from dplab.predict.step import Layer
from dplab.predict.transformer_config import TransformerConfig

FOUNDRY = "mosaicml/llm-foundry 061f2c7c, scripts/train/benchmarking/README.md"
TITAN = "pytorch/torchtitan 04133643, docs/performance.md"
FMS = "foundation-model-stack/fms-fsdp 0d319983, README.md"
_NVLINK_3, _NVLINK_4 = LINKS["NVLink 3"], LINKS["NVLink 4"]
_A100, _H100 = GPUS["A100"], GPUS["H100"]
_A100_40 = replace(_A100, memory_bytes=40e9, memory_bandwidth=1.555e12)
CLUSTERS = {
    "A100 40 GB, 8 × 200 Gb/s a node": Cluster(_A100_40, 1, _NVLINK_3, LINKS["200 Gb/s"]),
    "H100, 8 × 400 Gb/s a node": Cluster(_H100, 1, _NVLINK_4, LINKS["400 Gb/s"]),
    "A100, 8 × 200 Gb/s a node": Cluster(_A100, 1, _NVLINK_3, LINKS["200 Gb/s"]),
    "A100, 400 Gb/s a node": Cluster(_A100, 1, _NVLINK_3, LINKS["400 Gb/s"], nics=1),
    "A100, 2 Tb/s a node": Cluster(_A100, 1, _NVLINK_3, replace(LINKS["200 Gb/s"], bandwidth=250e9),
                                   nics=1),
}


@dataclass(frozen=True)
class PublishedRun:
    """A published run beside its prediction; ``predicted`` is None where it is out of scope.

    ``series``: runs that differ in ranks and batch alone; ``unit`` of both numbers.
    """

    what: str
    ranks: int
    unit: str
    published: float
    predicted: float | None
    assumptions: str
    source: str
    bound: str = ""
    series: str = ""

    @property
    def error(self) -> float | None:
        """Relative: above zero is too fast."""
        return None if self.predicted is None else self.predicted / self.published - 1


def _mpt(layers, d_model, heads, context=2048):
    return TransformerConfig(layers, d_model, heads, 4 * d_model, 50368, context, name="MPT")


MPT = {"3B": _mpt(32, 2560, 20), "7B": _mpt(32, 4096, 32), "13B": _mpt(40, 5120, 40),
       "30B": _mpt(48, 7168, 56), "70B": _mpt(80, 8192, 64)}
_MIXED = "bf16 gathered, fp32 reduced"

# series, cluster, job without its batch, what is assumed, source, then (ranks, batch, tokens/s of a
# GPU) for each run.
SERIES = [
    *[(f"MPT {size}, A100 40 GB", "A100 40 GB, 8 × 200 Gb/s a node",
       Job(MPT[size], 1, 2048, recompute="none" if size == "3B" else "full"),
       "bf16 gathered and reduced", FOUNDRY, runs) for size, runs in {
        "3B": [(64, 6, 9736), (128, 6, 9538)],
        "7B": [(16, 16, 3645), (32, 18, 3725), (64, 18, 3665), (128, 18, 3623)],
        "13B": [(16, 10, 1993), (32, 14, 1998), (64, 16, 1976), (128, 16, 1972)],
        "30B": [(32, 4, 857), (128, 6, 865)],
        "70B": [(64, 2, 276), (128, 4, 376)]}.items()],
    ("MPT 13B, H100", "H100, 8 × 400 Gb/s a node", Job(MPT["13B"], 1, 2048, gradient_bytes=4),
     f"{_MIXED}; its network is not stated", FOUNDRY,
     [(8, 2, 4792), (16, 2, 4767), (32, 2, 4811), (64, 2, 4800)]),
    ("Llama-2 13B, A100", "A100, 8 × 200 Gb/s a node",
     Job(MODELS["Llama-2 13B"], 1, 4096, gradient_bytes=4),
     f"{_MIXED}; its network is not stated", TITAN, [(64, 2, 2162)]),
    *[(f"{name}, A100", "A100, 8 × 200 Gb/s a node",
       Job(MODELS[name], 1, sequence, gradient_bytes=4, recompute="full"),
       f"{_MIXED}; its network is not stated", TITAN, runs) for name, sequence, runs in (
        ("Llama-2 70B", 4096, [(64, 2, 353)]), ("Llama-3 70B", 8192, [(64, 1, 331)]))],
    ("Llama-2 7B HSDP, A100", "A100, 400 Gb/s a node",
     Job(MODELS["Llama-2 7B"], 1, 4096, "HSDP"), "bf16 throughout", FMS, [(128, 2, 3760)]),
    ("Llama-2 13B HSDP, A100", "A100, 400 Gb/s a node",
     Job(MODELS["Llama-2 13B"], 1, 4096, "HSDP"), "bf16 throughout", FMS, [(128, 1, 1700)]),
    ("Llama-2 70B, A100, 400 Gb/s", "A100, 400 Gb/s a node",
     Job(MODELS["Llama-2 70B"], 1, 4096, recompute="full"),
     "bf16 throughout", FMS, [(128, 6, 380)]),
]


def published_runs() -> list[PublishedRun]:
    """Every published run: first those of single papers, then tokens/s by series."""
    return [*_goyal(), *_t5(), *_gpt(), *_out_of_scope(),
            *(_beside_prediction(*each) for each in _runs())]


def runs_with_fitted_share() -> list[PublishedRun]:
    """The later runs of each series, with the share of the peak fitted to its first run."""
    found, shares = [], {}
    for series, cluster, job, assumed, source, published in _runs():
        if series not in shares:
            shares[series] = fitted_share(job, cluster, published)
            continue
        cluster = replace(cluster, matmul_share=shares[series])
        run = _beside_prediction(series, cluster, job, assumed, source, published)
        found.append(replace(run, assumptions=f"{shares[series]:.2f} of the peak; {assumed}"))
    return found


def fitted_share(job: Job, cluster: Cluster, tokens_per_second: float) -> float:
    """The `Cluster.matmul_share` with which a GPU is predicted to do so many tokens/s."""
    low, high = 1e-3, 1.0
    for _ in range(40):
        share = (low + high) / 2
        rate = predict(job, replace(cluster, matmul_share=share)).tokens_per_second
        low, high = (share, high) if rate / cluster.ranks < tokens_per_second else (low, share)
    return share


def _runs() -> Iterator:
    for series, cluster, job, assumed, source, runs in SERIES:
        for ranks, batch, published in runs:
            yield (series, CLUSTERS[cluster].of(ranks), replace(job, batch=batch),
                   f"{cluster}; {assumed}", source, published)


def _beside_prediction(series, cluster, job, assumed, source, published):
    prediction = predict(job, cluster)
    return PublishedRun(
        f"{series}, {job.batch} × {job.sequence}, recompute {job.recompute}", cluster.ranks,
        "tokens/s/GPU", published, prediction.tokens_per_second / cluster.ranks, assumed, source,
        prediction.bound, series)


def _goyal():
    """ResNet-50, 102 MB of fp32 gradients, in 16 equal layers."""
    busy = 3600 / (90 * 1.281e6 / 8192)  # "in 1 hour": the step of 256 GPUs
    layers = [Layer(busy / 48, busy / 24, 4 * 25.56e6 / 16)] * 16
    # Only the links matter here: the time of computing is given.
    machine = Cluster(_A100, 1, Link("NVLink of a P100", 80e9, 3.4e-6),
                      Link("50 Gb/s", 6.25e9, 14e-6), nics=1)
    for overlap in (True, False):
        seconds = [step.step_seconds(step.ddp_spans(
            layers, ranks, ring_link(machine.of(ranks), ranks, 8), bucket_bytes=1, overlap=overlap))
            for ranks in (8, 256)]
        yield PublishedRun(
            f"ResNet-50 8 → 256 P100, {'with' if overlap else 'without'} overlap", 256,
            "efficiency", 0.9, seconds[0] / seconds[1],
            f"computing takes {busy:.3f} s, the whole published step; one 50 Gb/s link a node is "
            "assumed; a flat ring", "arXiv:1706.02677, abstract")


def _t5():
    """T5-11B: 24 encoder blocks of 201 M parameters and 24 decoder blocks of 268 M."""
    parts = [1024 * (4 * 16384 + 2 * 65536)] * 24 + [1024 * (8 * 16384 + 2 * 65536)] * 24
    for tokens in (2048, 4096, 8192):
        seconds = []
        for ranks in (8, 512):
            cluster = CLUSTERS["A100, 2 Tb/s a node"].of(ranks)
            forward = [2 * tokens * part / (_A100.bf16_flops * cluster.matmul_share)
                       for part in parts]
            blocks = [Layer(time, 3 * time, 2 * part, f"block {place}")
                      for place, (part, time) in enumerate(zip(parts, forward, strict=True))]
            seconds.append(step.step_seconds(fsdp_spans(
                blocks, Layer(0, 0, 2 * 33e6, "root"), gather=_on(cluster, "all-gather"),
                scatter=_on(cluster, "reduce-scatter"))))
        yield PublishedRun(
            f"T5-11B FSDP 8 → 512 A100, {tokens} tokens/GPU", 512, "efficiency", 0.93,
            seconds[0] / seconds[1], "batch not published: three tried; matrices alone; "
            "recomputed; 2 Tb/s a node", "arXiv:2304.11277, 5.4")


def _gpt():
    model = TransformerConfig(96, 12288, 96, 4 * 12288, 50000, 2048, name="GPT-175B")
    for batch, published in ((1, 173), (2, 186)):
        for ranks in (128, 512):
            cluster = CLUSTERS["A100, 2 Tb/s a node"].of(ranks)
            job = Job(model, batch, 2048, recompute="full")
            prediction = predict(job, cluster)
            flops = job.model_flops * 4 / 3 / prediction.seconds
            yield PublishedRun(
                f"GPT-175B FSDP, batch {batch}", ranks, "TFLOP/s/GPU", published, flops / 1e12,
                "the recomputed forward counts as done (by model FLOPs, 3/4 of it); bf16; 2 Tb/s a "
                "node", "arXiv:2304.11277, 5.4", prediction.bound)


def _out_of_scope():
    reason = "out of scope: tensor or pipeline parallelism"
    yield PublishedRun("Megatron-LM 8.3B, TP 8 × DP 64", 512, "efficiency", 0.76, None, reason,
                       "arXiv:1909.08053, abstract")
    for ranks, mfu in ((8192, 0.43), (16384, 0.41)):
        yield PublishedRun("Llama 3 405B, TP × PP × DP", ranks, "MFU", mfu, None, reason,
                           "arXiv:2407.21783, table 4")


def _on(cluster, collective) -> Callable[[float], float]:
    return lambda nbytes: collective_seconds(cluster, collective, nbytes)
