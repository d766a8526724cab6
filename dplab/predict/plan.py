"""The planner's answer to an address: memory, traffic, time, scaling, launch, and a recommendation.

    answer("model=Llama-3+8B&gpus=64")

Every number is one that `choose`, `cluster`, `memory` and `traffic` give; here they are only put
together, as plain data for JSON. Bytes and seconds are plain numbers. `fields` has what may be
asked and what is wrong with an address, `settings` the code to copy.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dplab.predict import choose, cluster, fields, settings
from dplab.predict.checks import one_of
from dplab.predict.choose import MEMORY_ERROR, Option, Recommendation
from dplab.predict.cluster import BLOCK_RECOMPUTE
from dplab.predict.fields import AS_NEEDED, MOST_GPUS, RECOMMENDED, schema
from dplab.predict.network import Cluster
from dplab.predict.step import COMMUNICATION, Span

__all__ = ["FIELDS", "PARTS", "answer", "schema"]

FIELDS = fields.FIELDS
PARTS = ("all", "plan", "recommendation")
DIGITS = 6
BETWEEN = "between nodes"
"""The lane of HSDP's all-reduces, which go on beside the gathers inside the nodes."""


def answer(query: str, part: str = "all") -> str:
    """The plan that an address's query asks for, in JSON; ``part`` is one of `PARTS`.

    An object with ``fields`` (every value, after defaults), ``query`` (only what differs from
    them), ``errors`` (of which ``field`` and ``why``), ``plan`` and ``recommendation``, which are
    null where there are errors or where they were not asked for. What is no whole number has
    `DIGITS` digits: beyond them Pythons differ, since some add floats with less error. Raises
    nothing for a bad query; ValueError for another part.
    """
    one_of(part, PARTS, "part")
    values, errors = fields.read(query)
    found: dict[str, Any] = {
        "fields": values, "query": "" if errors else fields.query_of(values),
        "errors": [{"field": error.name, "why": error.why} for error in errors],
        "plan": None, "recommendation": None}
    if not errors:
        recommendation = _recommendation(tuple(values.items()))
        if part != "recommendation":
            found["plan"] = _plan(values, _chosen(values, recommendation))
        if part != "plan":
            found["recommendation"] = _advice(recommendation)
    return json.dumps(_rounded(found), allow_nan=False)


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


@lru_cache(maxsize=16)
def _recommendation(items: tuple) -> Recommendation:
    values = dict(items)
    return choose.recommend(
        fields.model_of(values), fields.cluster_of(values), batch=values["batch"],
        sequence=values["sequence"], most_tokens=values["most_tokens"] or math.inf,
        precision=values["precision"], recompute=_ways(values))


def _ways(values):
    return BLOCK_RECOMPUTE if values["recompute"] == AS_NEEDED else (values["recompute"],)


def _chosen(values, recommendation) -> Option:
    """The strategy asked for; the best where none is, or what needs least where nothing fits."""
    name = values["strategy"]
    if name == RECOMMENDED:
        if recommendation.best is not None:
            return recommendation.best
        name = "FSDP"
    for option in recommendation.options:
        if option.strategy == name:
            return option
    return choose.option_of(name, fields.model_of(values), fields.cluster_of(values),
                            batch=values["batch"], sequence=values["sequence"],
                            precision=values["precision"], recompute=_ways(values))


def _plan(values: Mapping[str, Any], option: Option) -> dict:
    job, on = option.job, option.cluster
    return {
        "title": f"{job.model.name} on {on.ranks:,} × {on.gpu.name}, {job.batch:,} × "
                 f"{job.sequence:,} tokens each",
        "model": {"name": job.model.name, "parameters": job.model.parameters},
        "strategy": option.strategy, "recompute": job.recompute,
        "memory": _memory(option), "traffic": _traffic(option),
        "step": _step(option) if option.fits else None,
        "scaling": _scaling(option, values["most_tokens"]), "launch": _launch(option),
        "basis": option.basis, "stand_ins": option.stand_ins}


def _memory(option):
    budget = option.budget
    return {
        "parts": [{"name": name, "bytes": size} for name, size in budget.parts.items()],
        "total": budget.total, "limit": option.limit, "gpu": budget.memory_bytes,
        "fits": option.fits, "margin": option.margin, "moment": budget.moment,
        "uncertain": abs(option.margin) <= MEMORY_ERROR * budget.total}


def _traffic(option):
    parts: dict[str, dict] = {}
    for each in choose.strategy_transfers(option.strategy, option.job.model, option.cluster,
                                          precision=option.precision):
        name = f"{each.algorithm.removeprefix('ring ')} of {each.of}"
        part = parts.setdefault(name, {"name": name, "bytes": 0, "calls": 0,
                                       "ranks": each.world_size})
        part["bytes"] += each.bytes_sent
        part["calls"] = None if each.count is None else part["calls"] + each.count
    return {"parts": list(parts.values()),
            "sent_bytes": sum(part["bytes"] for part in parts.values())}


def _step(option):
    fast, slow = option.interval
    return {
        "seconds": option.seconds, "fast": fast, "slow": slow,
        "compute_seconds": option.compute_seconds, "exposed_seconds": option.exposed_seconds,
        "mfu": option.mfu, "tokens_per_second": option.tokens_per_second,
        "global_tokens": option.cluster.ranks * option.job.tokens, "bound": option.bound,
        "savings": [{"resource": name, "seconds": saved}
                    for name, saved in option.savings.items()],
        "spans": _drawn(option.spans, option.strategy, option.cluster)}


def _drawn(spans: Sequence[Span], strategy: str, on: Cluster) -> list[dict]:
    """The spans to draw: one for those of a lane and of one name that touch each other."""
    drawn: list[dict] = []
    last: dict[str, dict] = {}
    for span in spans:
        apart = strategy == "HSDP" and on.nodes > 1 and span.name.startswith("all-reduce")
        lane = BETWEEN if apart else span.lane
        name = "all-reduce" if strategy == "DDP" and span.lane == COMMUNICATION else span.name
        before = last.get(lane)
        if before and before["name"] == name and span.start <= before["end"]:
            before["end"] = span.end
            continue
        last[lane] = {"name": name, "lane": lane, "start": span.start, "end": span.end}
        drawn.append(last[lane])
    return drawn


def _scaling(option: Option, most_tokens: float | None) -> dict:
    """The same batch on each rank, at each number of ranks on which it fits."""
    job = option.job
    points, curve = [], []
    for ranks in _counts(option.cluster):
        there = option if ranks == option.cluster.ranks else choose.option_of(
            option.strategy, job.model, option.cluster.of(ranks), batch=job.batch,
            sequence=job.sequence, precision=option.precision, recompute=(job.recompute,))
        point: dict[str, Any] = {"gpus": ranks, "fits": there.fits, "seconds": None,
                                 "tokens_per_second": None, "efficiency": None}
        if there.fits:
            point |= {"seconds": there.seconds, "tokens_per_second": there.tokens_per_second}
            curve.append((ranks, there.tokens_per_second))
        points.append(point)
    if curve:
        fitting = [point for point in points if point["fits"]]
        for point, share in zip(fitting, cluster.efficiency(curve), strict=True):
            point["efficiency"] = share
    return {"points": points, "stops_paying": cluster.stops_paying(curve) if curve else None,
            "most_gpus": None if most_tokens is None else int(most_tokens // job.tokens)}


def _counts(on: Cluster) -> list[int]:
    """Numbers of ranks: doubled from 1 to a node, then whole nodes, to 8 times as many as asked."""
    most = min(MOST_GPUS, max(1024, 8 * on.ranks))
    counts = {on.ranks}
    counts.update(2**power for power in range(on.node_size.bit_length())
                  if 2**power <= on.node_size)
    counts.update(on.node_size * 2**power for power in range(18)
                  if on.node_size * 2**power <= most)
    return sorted(counts)


def _launch(option: Option) -> dict:
    job, on, strategy = option.job, option.cluster, option.strategy
    deepspeed = None
    notes = ["The numbers here are those of torch with these settings."]
    if on.nodes > 1:
        notes.append(f"Run the torchrun line on each of the {on.nodes:,} nodes; FIRST_HOST is the "
                     "name of one of them.")
    if option.precision == "mixed":
        near = "ZeRO-2" if strategy == "FSDP, kept" else strategy
        deepspeed = settings.in_deepspeed(near, job.batch, on.per_node)
        notes.append("DeepSpeed's file comes nearest to them; it holds and sends other bytes.")
        if job.recompute == "full":
            notes.append("With DeepSpeed too, the blocks are wrapped with checkpoint_wrapper.")
    else:
        notes.append("There is no file for DeepSpeed: with bf16 it keeps parameters in fp32 as "
                     "well.")
    return {
        "torchrun": settings.torchrun(on.nodes, on.per_node),
        "torch": settings.in_torch(strategy, on.ranks, on.per_node, recompute=job.recompute,
                                   precision=option.precision),
        "deepspeed": deepspeed, "notes": notes}


def _advice(recommendation: Recommendation) -> dict:
    return {
        "options": [_option(each, recommendation) for each in recommendation.options],
        "advice": recommendation.advice, "unknown": recommendation.unknown}


def _option(option, recommendation):
    found = {
        "strategy": option.strategy, "recompute": option.job.recompute,
        "bytes": option.budget.total, "fits": option.fits, "margin": option.margin,
        "seconds": None, "fast": None, "slow": None, "mfu": None, "bound": None,
        "best": option is recommendation.best,
        "tie": option in recommendation.ties and len(recommendation.ties) > 1}
    if option.fits:
        fast, slow = option.interval
        found |= {"seconds": option.seconds, "fast": fast, "slow": slow, "mfu": option.mfu,
                  "bound": option.bound}
    return found
