"""Links, GPUs and models as their makers publish them: `LINKS`, `GPUS` and `MODELS`, by name.

The numbers lie in ``catalogue.json``, each table with its source. Those of links and GPUs are
peaks: in use they reach less. A GPU's memory is what ``nvidia-smi`` shows: the GB with which it is
sold have 2³⁰ bytes each.
"""

import json
from dataclasses import dataclass
from importlib import resources

from dplab.predict.cost import Link
from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``bf16_flops`` in FLOP/s (dense), memory in bytes, its bandwidth in bytes/s.

    Raises ValueError for what is not above 0.
    """

    name: str
    bf16_flops: float
    memory_bytes: float
    memory_bandwidth: float
    source: str = ""

    def __post_init__(self):
        for name in ("bf16_flops", "memory_bytes", "memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"a GPU's {name} is above 0, not {getattr(self, name)}")

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


def _gpus(table):
    return {name: Gpu(name, 1e12 * row["bf16"], 2**20 * row["memory"],
                      1e12 * row["memory_bandwidth"], f"{row['what']}; {table['source']}")
            for name, row in table["rows"].items()}


def _models(table):
    return {name: TransformerConfig(**row["sizes"], **table["families"][row["family"]], name=name,
                              source=f"{row['what']}; {table['source']}")
            for name, row in table["rows"].items()}


_TABLES = json.loads(resources.files(__package__).joinpath("catalogue.json").read_text("utf-8"))

LINKS: dict[str, Link] = _links(_TABLES["links"])
GPUS: dict[str, Gpu] = _gpus(_TABLES["gpus"])
MODELS: dict[str, TransformerConfig] = _models(_TABLES["models"])
