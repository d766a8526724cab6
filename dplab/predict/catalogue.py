"""Links, GPUs and models as their makers publish them: `LINKS`, `GPUS` and `MODELS`, by name.

The numbers lie in ``catalogue.json``, each table with its source. Those of links and GPUs are
peaks: in use they reach less. A GPU's memory is what ``nvidia-smi`` shows: the GB with which it is
sold have 2³⁰ bytes each. `VARIANTS` have other memory; their chip's name is theirs, for its rates.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from dplab.predict.cost import Link
from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``bf16_flops`` in FLOP/s (dense), memory in bytes, its bandwidth in bytes/s."""

    name: str
    bf16_flops: float
    memory_bytes: float
    memory_bandwidth: float
    source: str = ""

    @property
    def ridge_point(self) -> float:
        """FLOP per byte of memory traffic from which on bf16 arithmetic is the limit.

        Source: S. Williams, A. Waterman and D. Patterson, "Roofline", 2009.
        """
        return self.bf16_flops / self.memory_bandwidth


def _links(table):
    source = f"bandwidth: {table['source']}; latency: {table['latency_source']}"
    return {name: Link(name, 1e9 * row["bandwidth"], 1e-6 * row["latency"],
                       f"{row['what']}; {source}") for name, row in table["rows"].items()}


def _gpus(table, rows="rows"):
    return {name: Gpu(row.get("chip", name), 1e12 * row["bf16"], 2**20 * row["memory"],
                      1e12 * row["memory_bandwidth"], f"{row['what']}; {table['source']}")
            for name, row in table[rows].items()}


def _models(table):
    return {name: TransformerConfig(**row["sizes"], **table["families"][row["family"]], name=name,
                              source=f"{row['what']}; {table['source']}")
            for name, row in table["rows"].items()}


_TABLES = json.loads(resources.files(__package__).joinpath("catalogue.json").read_text("utf-8"))

LINKS: dict[str, Link] = _links(_TABLES["links"])
GPUS: dict[str, Gpu] = _gpus(_TABLES["gpus"])
VARIANTS: dict[str, Gpu] = _gpus(_TABLES["gpus"], "variants")
MODELS: dict[str, TransformerConfig] = _models(_TABLES["models"])

MATMUL_SHARE = {"A100": 271.2 / 312, "H100": 794.5 / 989, "H200": 794.5 / 989,
                "B200": 1745 / 2250}
"""What the best bf16 matrix products reach of the peak, measured; H200: the H100's, the same chip.

Source: stas00/ml-engineering 744d01e, compute/accelerator/README.md."""


def matmul_share(gpu: Gpu) -> float:
    """`MATMUL_SHARE` of the GPU, or of that with the nearest peak."""
    return MATMUL_SHARE[gpu.name if gpu.name in MATMUL_SHARE else nearest_gpu(gpu, MATMUL_SHARE)]


def nearest_gpu(gpu: Gpu, names: Iterable[str]) -> str:
    """Of these names that of the peak in `GPUS` nearest to ``gpu``'s; the first, if none is there.
    """
    peak = min(GPUS.get(gpu.name, gpu).bf16_flops, 1e30)  # a cluster "without arithmetic" has none
    return min(names, key=lambda name: abs(math.log(GPUS[name].bf16_flops / peak))
               if name in GPUS else math.inf)
