"""The planner's answer to an address: memory, traffic, time, scaling, launch, and a recommendation.

    answer("model=Llama-3+8B&gpus=64")

Every number is one that `choose` and `cluster` give; here they are only put together, as plain data
for JSON. Bytes and seconds are plain numbers. `fields` has what may be asked and what is wrong with
an address, `settings` the code to copy.
"""

import json
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dplab.predict import choose, cluster, fields, settings
from dplab.predict.checks import one_of
from dplab.predict.choose import MEMORY_ERROR, Option, Recommendation
from dplab.predict.cluster import BLOCK_RECOMPUTE
from dplab.predict.fields import AS_NEEDED, MOST_GPUS, RECOMMENDED
from dplab.predict.step import COMMUNICATION

PARTS = ("all", "plan", "recommendation")
DIGITS = 6
BETWEEN = "between nodes"
"""The lane of HSDP's all-reduces, which go on beside the gathers inside the nodes."""

COMPARED = {"runs": 313, "inside": 0.55, "within_30_percent": 0.87}
"""Of the published runs of `published` that are predicted: how many there are, and the shares whose
speed lies in the predicted interval, and within 30 % of the prediction."""
SCALED = {"pairs": 49, "too_high": 44, "lost": 0.026, "predicted": 0.002, "most_gpus": 512}
"""Of `published.scaling`: how many there are, how many lost more speed per GPU than predicted, what
the median pair lost, published and predicted, and the most GPUs."""

ASSUMED = (
    "torch runs eagerly (no torch.compile), with FlashAttention-2 or the measured kernel nearest "
    "to it.",
    "One backward to each step: no gradient accumulation.",
    "The optimizer is AdamW, fused.",
    "MFU (model FLOPs utilisation) is the FLOPs of the model over what the GPUs could do in bf16 "
    "in that time. Recomputing does not count; attention counts in full, without its mask.",
    "Left out, and each makes training slower: loading data, the CPU's work beyond launches, "
    "checkpoints, slow ranks, failures, and other jobs on the network.",
)
"""What each plan takes for granted, in sentences."""
STEP_NOTE = (
    "The range is the spread of the measured rates. "
    f"Of {COMPARED['runs']} published runs, {COMPARED['inside']:.0%} lie in their range, and "
    f"{COMPARED['within_30_percent']:.0%} within 30% of the prediction.")
SCALING_NOTE = (
    f"Of {SCALED['pairs']} published pairs with the same batch on few and on many GPUs, "
    f"{SCALED['too_high']} lost more speed per GPU than predicted: the median pair lost "
    f"{SCALED['lost']:.1%}, where {SCALED['predicted']:.1%} was predicted. None of them had more "
    f"than {SCALED['most_gpus']} GPUs.")


def answer(query: str, part: str = "all") -> str:
    """The plan that an address's query asks for, in JSON; ``part`` is one of `PARTS`.

    An object with ``fields`` (every value, after defaults), ``query`` (only what differs from
    them), ``errors`` (of which ``field``, ``why``, and ``needs``: the values of other fields
    without which there is no such field), ``plan`` and ``recommendation``, which are
    null where there are errors or where they were not asked for. What is no whole number has
    `DIGITS` digits: beyond them Pythons differ, since some add floats with less error. Raises
    nothing for a bad query; ValueError for another part.
    """
    one_of(part, PARTS, "part")
    values, errors = fields.read(query)
    found: dict[str, Any] = {
        "fields": values, "query": "" if errors else fields.query_of(values),
        "errors": [{"field": error.name, "why": error.why, "needs": error.needs}
                   for error in errors],
        "plan": None, "recommendation": None}
    if not errors:
        recommendation, option, scaling = _predicted(tuple(values.items()))
        if part != "recommendation":
            found["plan"] = _plan(option, scaling)
        if part != "plan":
            found["recommendation"] = _advice(recommendation, option, scaling["points"])
    return json.dumps(_rounded(found), allow_nan=False)


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


@lru_cache(maxsize=16)
def _predicted(items: tuple) -> tuple[Recommendation, Option, dict]:
    """The recommendation; the strategy asked for, or else the best; how that one scales."""
    values = dict(items)
    wish = {"model": fields.model_of(values), "cluster": fields.cluster_of(values),
            "batch": values["batch"], "sequence": values["sequence"],
            "precision": values["precision"], "recompute": (
                BLOCK_RECOMPUTE if values["recompute"] == AS_NEEDED else values["recompute"])}
    found = choose.recommend(**wish, most_tokens=values["most_tokens"] or math.inf)
    option = found.best
    if option is None or values["strategy"] != RECOMMENDED:
        # FSDP needs least where nothing fits.
        name = "FSDP" if values["strategy"] == RECOMMENDED else values["strategy"]
        option = next((each for each in found.options if each.strategy == name), None) or (
            choose.option_of(name, **wish))
    scaling = _scaling(option, None if found.best else found.least_ranks)
    most = values["most_tokens"]
    return found, option, scaling | {
        "most_gpus": None if most is None else int(most // option.job.tokens)}


def _plan(option: Option, scaling: dict) -> dict:
    job, on, budget = option.job, option.cluster, option.budget
    return {
        "title": f"{job.model.name} on {on.ranks:,} × {on.gpu.name}, {job.batch:,} × "
                 f"{job.sequence:,} tokens each",
        "model": {"name": job.model.name, "parameters": job.model.parameters},
        "strategy": option.strategy, "name": option.name, "recompute": job.recompute,
        "memory": {
            "parts": [{"name": name, "bytes": size} for name, size in budget.parts.items()],
            "total": budget.total, "limit": option.limit, "gpu": budget.memory_bytes,
            "fits": option.fits, "margin": option.margin, "moment": budget.moment,
            "uncertain": abs(option.margin) <= MEMORY_ERROR * budget.total},
        "traffic": _traffic(option), "step": _step(option) if option.fits else None,
        "scaling": scaling, "launch": _launch(option), "assumed": ASSUMED,
        "basis": option.basis, "stand_ins": option.stand_ins}


def _traffic(option):
    parts: dict[str, dict] = {}
    for each in option.transfers:
        if each.world_size == 1:
            continue
        where = "" if option.cluster.nodes == 1 else "all nodes"
        if where and option.strategy == "HSDP":
            where = BETWEEN if each.of == "shards of gradients" else "inside a node"
        name = f"{each.algorithm.removeprefix('ring ')} of {each.of}"
        part = parts.setdefault(name, {"name": name, "bytes": 0, "calls": 0,
                                       "ranks": each.world_size, "where": where})
        part["bytes"] += each.bytes_sent
        part["calls"] = None if each.count is None else part["calls"] + each.count
    return {"parts": list(parts.values()),
            "sent_bytes": sum(part["bytes"] for part in parts.values())}


def _times(option):
    """What there is to say of an option that fits."""
    fast, slow = option.interval
    return {"seconds": option.seconds, "fast": fast, "slow": slow, "mfu": option.mfu,
            "bound": option.bound}


def _step(option):
    return _times(option) | {
        "note": STEP_NOTE, "compute_seconds": option.compute_seconds,
        "exposed_seconds": option.exposed_seconds, "tokens_per_second": option.tokens_per_second,
        "global_tokens": option.cluster.ranks * option.job.tokens,
        "savings": [{"resource": name, "seconds": saved}
                    for name, saved in option.savings.items()],
        "spans": _drawn(option)}


def _drawn(option):
    """The spans to draw: one for those of a lane and of one name that touch each other."""
    drawn: list[dict] = []
    last: dict[str, dict] = {}
    apart = option.strategy == "HSDP" and option.cluster.nodes > 1
    for span in option.spans:
        lane = BETWEEN if apart and span.name.startswith("all-reduce") else span.lane
        in_buckets = option.strategy == "DDP" and span.lane == COMMUNICATION
        name = "all-reduce" if in_buckets else span.name
        before = last.get(lane)
        if before and before["name"] == name and span.start <= before["end"]:
            before["end"] = span.end
            continue
        last[lane] = {"name": name, "lane": lane, "start": span.start, "end": span.end}
        drawn.append(last[lane])
    return drawn


def _scaling(option: Option, advised: int | None) -> dict:
    """The same batch on each rank, at each number of ranks on which it fits."""
    on = option.cluster
    points: list[dict[str, Any]] = []
    curve = []
    for ranks in _counts(on, advised):
        there = option if ranks == on.ranks else replace(option, cluster=on.of(ranks))
        if there.fits:
            curve.append((ranks, there.tokens_per_second))
        points.append({"gpus": ranks, "fits": there.fits,
                       "seconds": there.seconds if there.fits else None,
                       "tokens_per_second": there.tokens_per_second if there.fits else None,
                       "efficiency": cluster.efficiency(curve)[-1] if there.fits else None})
    return {"points": points, "stops_paying": cluster.stops_paying(curve) if curve else None,
            "note": SCALING_NOTE}


def _counts(on, advised):
    """Numbers of ranks: doubled from 1 to a node, then whole nodes, to 8 times as many as asked.

    With them the number asked for, and the one that the advice names where nothing fits.
    """
    node, most = on.node_size, min(MOST_GPUS, max(1024, 8 * on.ranks))
    powers = [2**power for power in range(18)]
    return sorted({on.ranks, advised or on.ranks,
                   *(count for count in powers if count <= node),
                   *(node * count for count in powers if node * count <= most)})


def _launch(option):
    job, on, strategy = option.job, option.cluster, option.strategy
    deepspeed = None
    notes = ["The numbers here are those of torch with these settings." if option.fits else
             "This plan does not fit: it would run out of memory."]
    if on.nodes > 1:
        notes.append(f"Run the torchrun line on each of the {on.nodes:,} nodes; FIRST_HOST is the "
                     "name of one of them.")
    if option.is_plain:
        pass  # nothing is distributed
    elif option.precision == "mixed":
        near = "ZeRO-2" if strategy == "FSDP, kept" else strategy
        deepspeed = settings.in_deepspeed(near, job.batch, on.per_node)
        notes.append("DeepSpeed's file comes nearest to torch's settings; it holds and sends "
                     "other bytes.")
        if job.recompute == "full":
            notes.append("With DeepSpeed too, the blocks are wrapped with checkpoint_wrapper.")
    else:
        notes.append("There is no file for DeepSpeed: this planner does not know its switches for "
                     "bf16 alone.")
    return {
        "torchrun": "python train.py" if option.is_plain else settings.torchrun(
            on.nodes, on.per_node),
        "torch": settings.in_torch(strategy, on.ranks, on.per_node, recompute=job.recompute,
                                   precision=option.precision),
        "deepspeed": deepspeed, "notes": notes}


def _advice(recommendation: Recommendation, planned: Option, points: list[dict]) -> dict:
    options, best = [*recommendation.options], recommendation.best
    if planned.strategy not in {each.strategy for each in options}:
        options.append(planned)
    whose = [] if best is None or best.strategy == planned.strategy else [
        f"You chose {planned}. What follows is about {best}, which is recommended."]
    return {
        "options": [_row(each, recommendation, planned) for each in options],
        "advice": [*_fewer(planned, points), *whose, *recommendation.advice],
        "unknown": recommendation.unknown}


def _row(option, recommendation, planned):
    times = dict.fromkeys(("seconds", "fast", "slow", "mfu", "bound"))
    return {
        "strategy": option.strategy, "name": option.name, "recompute": option.job.recompute,
        "bytes": option.budget.total, "fits": option.fits, "margin": option.margin,
        "best": option is recommendation.best, "planned": option.strategy == planned.strategy,
        "tie": option in recommendation.ties and len(recommendation.ties) > 1,
        **(_times(option) if option.fits else times)}


def _fewer(planned, points):
    """Advice where the plan's curve has fewer GPUs that do more in all."""
    fewer = [point for point in points if point["fits"] and point["gpus"] < planned.cluster.ranks]
    best = max(fewer, key=lambda point: point["tokens_per_second"], default=None)
    if best is None or not planned.fits or (
            best["tokens_per_second"] <= planned.tokens_per_second):
        return []
    count = best["gpus"]
    more, less = map(_rounded, (best["tokens_per_second"], planned.tokens_per_second))
    return [f"Use fewer GPUs. With {planned.strategy}, {count:,} "
            f"{'GPUs reach' if count > 1 else 'GPU reaches'} {more:,.0f} tokens/s in all, and "
            f"{planned.cluster.ranks:,} GPUs only {less:,.0f}."]
