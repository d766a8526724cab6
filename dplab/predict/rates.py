"""What kernels reach on a GPU: published rates, looked up for a shape, a GPU and a pace.

The tables lie in ``kernels.json``, each with its source. Every rate is kept as a share of the peak
of the card that was measured, so that it can stand for another card: where a GPU has too few rows,
those of the GPU with the nearest peak help out, and `Rate.basis` says so.

A matrix product (m, n, k) is as fast as the measured ones that resemble it most: in the size of the
result m × n, in the depth k and in the result's shorter side, each as a distance in powers of two.
That is what decides how many of the GPU's multiprocessors have work, and for how long: small
results leave some idle, and a shallow one spends its time in loading and storing. Taken are the 4
nearest, and 4 more where they are less than a factor of two farther away than the nearest.
Attention is interpolated between sequence lengths. Memory-bound work has one bandwidth for each
kind of operation, of eager kernels and of compiled ones.

The pace is that of `pace.at_pace`, over the rows that were found. Attention was mostly measured
once for each shape: its pace is the spread of the shapes that were measured twice, as a share of
their median, on whatever GPU; likewise for a memory-bound operation with fewer than 3 rows.
"""

import heapq
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

from dplab.predict.catalogue import GPUS, Gpu, nearest_gpu
from dplab.predict.checks import one_of, whole
from dplab.predict.pace import at_pace

NEAREST, AT_MOST = 4, 8
ATTENTION_KERNELS = ("FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "cuDNN",
                     "FlashAttention in Triton", "unfused")
"""The last is attention as separate operations, with scores of sequence × sequence in memory."""
DIRECTIONS = ("forward", "backward")
KINDS = ("eager", "compiled", "handwritten", "fused", "foreach")
"""Of memory-bound work: torch's own kernels, torch.compile's, Liger's and the like; and of the
optimizer's kernels, the last two."""

_PEAKS = {"TFLOP/s": lambda gpu: gpu.bf16_flops / 1e12,
          "GB/s": lambda gpu: gpu.memory_bandwidth / 1e9}


@dataclass(frozen=True)
class Rate:
    """``value``: FLOP/s or bytes/s. ``basis``: the rows it comes from, and their source.

    ``as_asked``: False where another GPU, another kernel, or a shape more than a factor of two away
    had to stand in; ``basis`` says which.
    """

    value: float
    basis: str
    as_asked: bool = True


class Row(NamedTuple):
    gpu: str
    share: float
    source: str
    columns: dict
    features: tuple[float, ...] = ()  # of a matrix product


class Rates:
    """Tables of measured rates, in the form of ``kernels.json``: `PUBLISHED`, or one's own.

    ``python -m dplab.bench gpu --save`` writes ``tables`` of a GPU into chapters/data. For pace,
    kind, direction and kernel its methods raise ValueError where it is none that there is.
    """

    def __init__(self, tables: Sequence[dict]):
        self._rows = defaultdict(list)
        self._near: dict[tuple, tuple] = {}
        self._spreads: dict[tuple, list[float]] = {}
        for table in tables:
            unit = table["columns"][-1]
            peak = table.get("peak")
            if peak is None and unit in _PEAKS:
                peak = _PEAKS[unit](GPUS[table["gpu"]])
            for row in table["rows"]:
                columns = dict(zip(table["columns"], row, strict=True))
                self._rows[table["what"]].append(
                    Row(table["gpu"], row[-1] / (peak or 1), table["source"], columns,
                        _measured(columns) if table["what"] == "matmul" else ()))

    def matmul(self, gpu: Gpu, m: int, n: int, k: int, pace: str = "typical") -> Rate:
        """FLOP/s of (m, k) times (k, n) in bf16."""
        # The same at any pace, and where the GPU's peak is taken to be another than its own.
        key = (gpu.name, GPUS.get(gpu.name, gpu).bf16_flops, m, n, k)
        if key not in self._near:
            rows, lent = self._of(gpu, "matmul", AT_MOST)
            asked = _features(whole(m, "m"), whole(n, "n"), whole(k, "k"))
            ranked = heapq.nsmallest(AT_MOST, ((math.dist(asked, row.features), place)
                                               for place, row in enumerate(rows)))
            self._near[key] = ([rows[place] for rank, (away, place) in enumerate(ranked)
                                if rank < NEAREST or away < ranked[0][0] + 1], ranked[0][0], lent)
        nearest, away, lent = self._near[key]
        first = nearest[0]
        shape = " × ".join(str(first.columns[side]) for side in ("batch", "m", "n", "k")
                           if first.columns.get(side, 1) > 1 or side != "batch")
        far = "; more than a factor of two from any measured shape" if away > 1 else ""
        return Rate(gpu.bf16_flops * at_pace([row.share for row in nearest], pace),
                    f"matrix product {m} × {n} × {k}: {len(nearest)} measurements, the nearest "
                    f"{shape} on {first.gpu} ({first.source}){far}{lent}", not (far or lent))

    def attention(self, gpu: Gpu, head_dim: int, sequence: int, *, direction: str = "forward",
                  kernel: str = ATTENTION_KERNELS[0], pace: str = "typical") -> Rate:
        """FLOP/s of causal attention, of the half that the mask leaves.

        ``direction`` one of `DIRECTIONS`, ``kernel`` of `ATTENTION_KERNELS`.
        """
        one_of(direction, DIRECTIONS, "direction"), one_of(kernel, ATTENTION_KERNELS, "kernel")
        rows, lent = self._of(gpu, "attention", 1)
        elsewhere = {row.gpu for row in self._rows["attention"] if row.columns["kernel"] == kernel}
        if elsewhere and kernel not in {row.columns["kernel"] for row in rows}:
            return self._beside_the_usual(gpu, GPUS[nearest_gpu(gpu, elsewhere)], head_dim,
                                          sequence, direction=direction, kernel=kernel, pace=pace)

        def unlike(row):  # another kernel is worst, then the other direction, then the mask
            have = row.columns
            return (100 * (have["kernel"] != kernel) + 3 * (not have["causal"])
                    + {direction: 0, "both": 1}.get(have["direction"], 10))

        least = min(map(unlike, rows))
        rows = [row for row in rows if unlike(row) == least]
        size = min((row.columns["head_dim"] for row in rows),
                   key=lambda each: (abs(math.log2(each / head_dim)), each))
        rows = [row for row in rows if row.columns["head_dim"] == size]
        by_length = defaultdict(list)
        for row in rows:
            by_length[row.columns["sequence"]].append(row.share)
        typical = _interpolated({length: statistics.median(shares)
                                 for length, shares in by_length.items()}, sequence)
        have, shortest, longest = rows[0].columns, min(by_length), max(by_length)
        notes = "".join(note for said, note in (
            (lent, lent),
            (least, f"; measured for {have['kernel']}, {have['direction']}, "
                    f"{'' if have['causal'] else 'not '}causal"),
            (size != head_dim, f"; head dimension {size} is the nearest to {head_dim}"),
            (not shortest / 2 <= sequence <= 2 * longest,
             f"; measured from {shortest} to {longest} tokens")) if said)
        spread = self._spread("attention", "kernel", "direction", "head_dim", "causal", "sequence")
        return Rate(gpu.bf16_flops * _spread_out(typical, spread, pace),
                    f"attention {direction}, {sequence} tokens: {have['kernel']} on {rows[0].gpu} "
                    f"({rows[0].source}){notes}", not notes)

    def _beside_the_usual(self, gpu, other, head_dim, sequence, *, kernel, pace, **which):
        """A kernel that was measured on another GPU alone: as much slower than FlashAttention-2.

        One that is faster there counts as equal here: it was made for that GPU.
        """
        usual, there, slower = (
            self.attention(each, head_dim, sequence, **which, kernel=name, pace=at)
            for each, name, at in ((gpu, ATTENTION_KERNELS[0], pace),
                                   (other, ATTENTION_KERNELS[0], "typical"),
                                   (other, kernel, "typical")))
        ratio = min(1.0, slower.value / there.value)
        return Rate(usual.value * ratio,
                    f"{usual.basis}, times {ratio:.2f} for {kernel}, measured on {other.name}",
                    False)

    def memory(self, gpu: Gpu, operation: str, kind: str = "eager", pace: str = "typical") -> Rate:
        """Bytes/s of memory-bound work, such as a "norm"; ``kind`` is one of `KINDS`.

        An operation that was not measured in that kind has the rates of all that were.
        """
        every = [row for row in self._rows["memory"]
                 if row.columns["kind"] == one_of(kind, KINDS, "kind")]
        if not every:
            raise ValueError(f"no rates of {kind} kernels in these tables: measure some")
        same = [row for row in every if row.columns["operation"] == operation]
        own = [row for row in same if row.gpu == gpu.name]
        ours = [row for row in every if row.gpu == gpu.name]
        lenders = " and ".join(dict.fromkeys(row.gpu for row in same))
        rows, note = next((rows, note) for rows, note in (
            (own, ""), (same, f"; not measured on {gpu.name}: the share of {lenders}"),
            (ours, f"; {operation} was not measured: all {kind} kernels"),
            (every, f"; neither {operation} nor {gpu.name} was measured")) if rows)
        shares = [row.share for row in rows]
        share = at_pace(shares, pace) if len(shares) >= 3 else _spread_out(
            at_pace(shares, "typical"), self._spread("memory", "operation", "kind"), pace)
        sources = "; ".join([*dict.fromkeys(row.source for row in rows)][:2])
        return Rate(gpu.memory_bandwidth * share,
                    f"{kind} {operation}: {len(rows)} measurements ({sources}){note}", not note)

    def launch_seconds(self, kind: str = "eager", pace: str = "typical") -> float:
        """The least time that a kernel takes, as the next one cannot be launched sooner.

        "compiled" code launches from C++, all other kinds from Python; measured on H100 and H200.
        """
        way = "from C++" if kind == "compiled" else "from Python"
        rates = [1e6 / row.columns["microseconds"] for row in self._rows["launch"]
                 if row.columns["kind"] == way]
        return 1 / at_pace(rates, pace) if rates else 0.0

    def _of(self, gpu, what, enough):
        """The rows of the GPU, with those of its nearest in peak where they are not enough."""
        rows = [row for row in self._rows[what] if row.gpu == gpu.name]
        others = sorted({row.gpu for row in self._rows[what]} - {gpu.name})
        if len(rows) >= enough or (rows and not others):
            return rows, ""
        if not others:
            raise ValueError(f"no rates for {what} on {gpu.name} in these tables: measure some")
        other = nearest_gpu(gpu, others)
        lent = f"; {gpu.name} has {len(rows)} measurements, the others are {other}'s"
        return rows + [row for row in self._rows[what] if row.gpu == other], lent

    def _spread(self, what, *columns):
        """Of each shape that was measured more than once, the rates over their median."""
        if (what, columns) not in self._spreads:
            groups = defaultdict(list)
            for row in self._rows[what]:
                groups[row.gpu, *(row.columns[column] for column in columns)].append(row.share)
            self._spreads[what, columns] = [
                share / statistics.median(shares) for shares in groups.values()
                if len(shares) > 1 for share in shares] or [1.0]
        return self._spreads[what, columns]


def _features(m, n, k):
    return math.log2(m * n), math.log2(k), math.log2(min(m, n))


def _measured(columns):
    batch, m, n, k = (columns.get(side, 1) for side in ("batch", "m", "n", "k"))
    return _features(batch * m, n, k)


def _interpolated(points, at):
    """Linear in the logarithm of the place, and flat beyond the ends."""
    places = sorted(points)
    at = min(max(at, places[0]), places[-1])
    above = next(place for place in places if place >= at)
    if above == at:
        return points[above]
    below = max(place for place in places if place < at)
    part = math.log(at / below) / math.log(above / below)
    return points[below] + part * (points[above] - points[below])


def _spread_out(share, spread, pace):
    """The share of the peak at that pace, at most all of it."""
    return min(1.0, share * at_pace(spread, pace) / at_pace(spread, "typical"))


PUBLISHED = Rates(json.loads(
    resources.files(__package__).joinpath("kernels.json").read_text("utf-8"))["tables"])
"""The rates of ``kernels.json``."""
