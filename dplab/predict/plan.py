"""The planner's answer to an address: memory, traffic, time, scaling, launch, and a recommendation.

    answer("model=Llama-3+8B&gpus=64")

Every number is one that `choose` and `cluster` give; here they are only put together, as plain data
for JSON. Bytes and seconds are plain numbers. `fields` has what may be asked and what is wrong with
an address, `settings` the code to copy.
"""

import json
from dataclasses import asdict, replace
from functools import cache, lru_cache
from typing import Any

from dplab.predict import choose, cluster, cost, fields, reached, settings
from dplab.predict.checks import one_of
from dplab.predict.choose import BLOCK_RECOMPUTE, MEMORY_ERROR, Option, Recommendation
from dplab.predict.fields import AS_NEEDED, MOST_GPUS, RECOMMENDED
from dplab.predict.published import ROWS, model_of
from dplab.predict.reached import LARGE, Range
from dplab.predict.rent import Rent
from dplab.predict.step import COMMUNICATION

PARTS = ("all", "plan", "recommendation")
DIGITS = 6
BETWEEN = "between nodes"
"""The lane of HSDP's all-reduces, which go on beside the gathers inside the nodes."""
SENT = {**dict.fromkeys(("gather", "all-gather"), ("all-gather", "parameters")),
        **{name: (name, "gradients") for name in ("reduce-scatter", "all-reduce")}}
"""The collective of a span by the first word of its name, and what it carries."""
LOW_MFU = 0.05
"""Below this share of what the GPUs could do, a plan is called a waste."""

ASSUMED = (
    "FlashAttention-2, or the measured kernel nearest to it; AdamW, fused.",
    "Of several micro-batches DDP all-reduces the sum (no_sync), FSDP gathers and reduces for "
    "each, and HSDP all-reduces between nodes for the last alone (set_requires_all_reduce).",
    "MFU (model FLOPs utilisation) is the FLOPs of the model over what the GPUs could do in bf16 "
    "in that time. Recomputing does not count; attention counts in full, without its mask.",
    "What kernels allow leaves out loading data, the CPU's work beyond launches, slow ranks, and "
    "other jobs on the network. What runs like yours reached has them, as far as theirs had.",
    "Failures come as often per GPU as in Llama 3's run on 16,384 H100s, and ten minutes go by "
    "before training goes on. It waits while a checkpoint is staged, as long as 360 H200s did; "
    "checkpoints are as far apart as loses least (Daly).",
)
"""What each plan takes for granted, in sentences."""
RANGE_NOTE = (
    "The range is made of {runs} published runs from {sources} sources, each source counting the "
    "same, on GPUs of this generation and {size} of them: what they reached over what is predicted "
    "for them. With each source left out in turn, {held_out:.0%} of its runs lie in the range.")
NO_RANGE = "No runs like yours: fewer than three sources published runs on such GPUs."


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
        recommendation, option = _predicted(tuple(values.items()))
        if part != "recommendation":
            found["plan"] = _plan(option, recommendation, values)
        if part != "plan":
            found["recommendation"] = _advice(recommendation, option, values)
    return json.dumps(_rounded(found) | {"fields": values}, allow_nan=False)


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


@lru_cache(maxsize=16)
def _predicted(items):
    """The recommendation; and the strategy asked for, or else the best."""
    values = dict(items)
    found = choose.recommend(
        fields.model_of(values), fields.cluster_of(values), batch=values["batch"],
        global_batch=fields.sequences_of(values), sequence=values["sequence"],
        precision=values["precision"], compiled=values["compile"], recompute=(
            BLOCK_RECOMPUTE if values["recompute"] == AS_NEEDED else (values["recompute"],)))
    if values["strategy"] != RECOMMENDED:
        return found, found.option(values["strategy"])
    return found, found.best or found.option("FSDP")  # which needs least


def _plan(option: Option, recommendation: Recommendation, values: dict) -> dict:
    job, on, budget, basis = option.job, option.cluster, option.budget, option.basis
    runs, starved, outside = recommendation.runs(option), recommendation.starved, _outside(option)
    sequences = recommendation.global_batch if starved else option.global_batch
    like = None if outside else reached.reached(on.gpu.name, on.ranks)
    speeds = _speeds(option, like) if runs else None
    return {
        "title": f"{job.model.name} on {on.ranks:,} × {values['gpu']}, "
                 f"{sequences * job.sequence:,} tokens in a step",
        "strategy": option.strategy, "name": option.name, "recompute": job.recompute,
        "runs": runs, "starved": starved,
        "batch": {"micro": job.batch, "accumulation": job.accumulation},
        "speeds": speeds, "range": outside or _said(like, on.ranks),
        "warnings": _warnings(option, values) if runs else [],
        "rent": _rents(option, speeds, values) if runs else None,
        "nearest": reached.nearest(on.gpu.name, on.ranks, job.model.parameters, job.compiled),
        "other_ways": reached.other_ways(on.gpu.name, on.ranks, job.model.parameters),
        "memory": {
            "parts": [{"name": name, "bytes": size} for name, size in budget.parts.items()],
            "total": budget.total, "limit": option.limit, "gpu": budget.memory_bytes,
            "fits": option.fits, "margin": option.margin, "moment": budget.moment,
            "uncertain": abs(option.margin) <= MEMORY_ERROR * budget.total},
        "traffic": _traffic(option), "step": _step(option) if runs else None,
        "launch": _launch(option, runs), "assumed": ASSUMED,
        "basis": [*basis], "stand_ins": [line for line, asked in basis.items() if not asked]}


def _speeds(option, like: Range | None):
    """Tokens/s of all GPUs: what kernels allow, and what runs like this one reached."""
    allowed = option.tokens_per_second
    return {"allowed": allowed, **{name: like and getattr(like, name) * allowed
                                   for name in ("low", "middle", "high")}}


def _said(like, ranks):
    size = f"{'at least' if ranks >= LARGE else 'fewer than'} {LARGE}"
    return NO_RANGE if like is None else RANGE_NOTE.format(**asdict(like), size=size)


@cache
def _compared():
    """The least and the most of the runs that were compared: parameters, GPUs, sequence."""
    rows = [ROWS[name] for name in reached.RATIOS]
    ends = [[model_of(row).parameters for row in rows], [row["ranks"] for row in rows],
            [row["sequence"] for row in rows]]
    return [(min(each), max(each)) for each in ends]


def _outside(option):
    """What is more than twice beyond every run that was compared, in a sentence; else ""."""
    job = option.job
    asked = zip(("parameters", "GPUs", "tokens in a sequence"),
                (job.model.parameters, option.cluster.ranks, job.sequence), _compared(),
                strict=True)
    beyond = [f"{value:,} {what} (there {least:,} to {most:,})"
              for what, value, (least, most) in asked if not least / 2 <= value <= 2 * most]
    return f"Outside what was compared with published runs: {'; '.join(beyond)}." if beyond else ""


def _warnings(option, values):
    """What a newcomer would not see, in sentences."""
    said = []
    if option.mfu < LOW_MFU:
        said.append(f"This wastes the GPUs: they do {option.mfu:.1%} of the model FLOPs that they "
                    f"could. The step waits for {option.bound}.")
    asked = fields.sequences_of(values)
    if option.global_batch != asked:
        said.append(f"{option.cluster.ranks:,} GPUs cannot share {asked:,} sequences evenly: the "
                    f"plan takes {option.global_batch:,}.")
    return said


def _rents(option, speeds, values):
    """`Rent` at what kernels allow and at what was reached; the fastest and the slowest."""
    found = {name: speed and _rent(option, speed, values) for name, speed in speeds.items()}
    one = found["allowed"]
    return {"tokens": values["tokens"], "price": values["price"],
            "checkpoint_bytes": one.checkpoint_bytes, "save_seconds": one.save_seconds,
            "save_every": one.save_every, "failures_a_day": one.failures_a_day,
            "goodput": one.goodput,
            **{name: each and {"days": each.days, "gpu_hours": each.gpu_hours, "money": each.money}
               for name, each in found.items()}}


def _rent(option, speed, values):
    stored = option.budget.precision
    return Rent(values["tokens"], speed, option.cluster.ranks,
                (stored.parameters + stored.optimizer) * option.job.model.parameters,
                values["price"])


def _traffic(option):
    """What a GPU sends in a step, by the collectives that are simulated; there is no padding."""
    on, hybrid, replicated = option.cluster, option.strategy == "HSDP", option.job.strategy == "DDP"
    parts: dict[str, dict] = {}
    for span in option.spans if on.ranks > 1 else ():
        if span.lane != COMMUNICATION:
            continue
        collective, of = SENT[span.name.split()[0]]
        copies = hybrid and collective == "all-reduce"
        name = f"{collective} of {'shards of ' if copies else ''}{of}"
        part = parts.setdefault(name, {
            "name": name, "bytes": 0, "calls": None if replicated else 0,
            "ranks": on.nodes if copies else on.per_node if hybrid else on.ranks,
            "where": "" if on.nodes == 1 else "all nodes" if not hybrid else
                     BETWEEN if copies else "inside a node"})
        # Of several micro-batches what is all-reduced is sent for the last alone.
        times = 1 if replicated or copies else option.job.accumulation
        part["bytes"] += times * cost.bytes_sent(f"ring {collective}", part["ranks"], span.nbytes)
        if not replicated:
            part["calls"] += times
    return {"parts": list(parts.values()),
            "sent_bytes": sum(part["bytes"] for part in parts.values())}


def _step(option):
    return {
        **{name: getattr(option, name) for name in (
            "seconds", "mfu", "bound", "compute_seconds", "exposed_seconds")},
        "global_tokens": option.global_batch * option.job.sequence,
        "savings": [{"resource": name, "seconds": saved}
                    for name, saved in option.savings.items()],
        "spans": _drawn(option)}


def _drawn(option):
    """The spans of the last micro-batch to draw, as one where they touch in lane and name."""
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


def _scaling(option: Option, recommendation: Recommendation, values: dict) -> dict:
    """The same global batch at each number of GPUs that it has sequences for."""
    on = option.cluster
    points: list[dict[str, Any]] = []
    curve = []
    for ranks in _counts(on, recommendation):
        there = option if ranks == on.ranks else replace(
            recommendation, cluster=on.of(ranks)).option(option.strategy)
        runs = there.fits and ranks <= recommendation.global_batch
        point: dict[str, Any] = {"gpus": ranks, "runs": runs}
        if runs:
            speeds = _speeds(there, None if _outside(there) else reached.reached(
                on.gpu.name, ranks))
            curve.append((ranks, there.tokens_per_second))
            rent = _rent(there, speeds["middle"] or speeds["allowed"], values)
            point |= speeds | {"seconds": there.seconds, "days": rent.days,
                               "gpu_hours": rent.gpu_hours, "money": rent.money}
        points.append(point)
    return {"strategy": option.strategy, "points": points,
            "stops_paying": cluster.stops_paying(curve) if curve else None}


def _counts(on, recommendation):
    """Numbers of GPUs: doubled from 1 to a node, then whole nodes, to 8 times as many as asked.

    With them the number asked for, and the one that the advice names where nothing fits; but none
    for which the global batch has no sequence.
    """
    sequences, node = recommendation.global_batch, on.node_size
    most = min(MOST_GPUS, 8 * on.ranks, max(sequences, on.ranks))
    powers = [2**power for power in range(18)]
    advised = None if recommendation.best else recommendation.enough_ranks
    return sorted({on.ranks, *([advised] if advised else []),
                   *(count for count in powers if count <= min(node, most)),
                   *(node * count for count in powers if node * count <= most)})


def _launch(option, runs):
    job, on, strategy = option.job, option.cluster, option.strategy
    notes = ["The numbers here are those of torch with these settings." if runs else
             "This plan does not fit: it would run out of memory." if not option.fits else
             "This plan cannot run: some GPUs have no sequence."]
    if on.nodes > 1:
        notes.append(f"Run the torchrun line on each of the {on.nodes:,} nodes; FIRST_HOST is the "
                     "name of one of them.")
    torch = settings.in_torch(strategy, on.ranks, on.per_node, recompute=job.recompute,
                              precision=option.precision, compiled=job.compiled,
                              accumulation=job.accumulation)
    if option.is_plain:  # nothing is distributed
        return {"torchrun": "python train.py", "torch": torch, "deepspeed": None, "notes": notes}
    notes.append("DeepSpeed's file comes nearest to torch's settings; it holds and sends other "
                 "bytes, and recomputes where blocks are wrapped with checkpoint_wrapper.")
    return {"torchrun": settings.torchrun(on.nodes, on.per_node), "torch": torch,
            "deepspeed": settings.in_deepspeed(strategy, job.batch, on.per_node,
                                               accumulation=job.accumulation),
            "notes": notes}


def _advice(recommendation: Recommendation, planned: Option, values: dict) -> dict:
    options, best = [*recommendation.options], recommendation.best
    if planned.strategy not in {each.strategy for each in options}:
        options.append(planned)
    whose = [] if best is None or best.strategy == planned.strategy else [
        f"You chose {planned}. What follows is about {best}, which is recommended."]
    return {"options": [_row(each, recommendation, planned) for each in options],
            "advice": [*whose, *recommendation.advice],
            "scaling": _scaling(planned, recommendation, values)}


def _row(option, recommendation, planned):
    runs = recommendation.runs(option)
    return {
        "strategy": option.strategy, "name": option.name, "recompute": option.job.recompute,
        "what": choose.CHOICES[option.strategy].what,
        "micro": option.job.batch, "accumulation": option.job.accumulation,
        "bytes": option.budget.total, "fits": option.fits,
        "best": option is recommendation.best, "planned": option.strategy == planned.strategy,
        "mark": _mark(option, recommendation),
        "tokens_per_second": option.tokens_per_second if runs else None,
        "seconds": option.seconds if runs else None, "mfu": option.mfu if runs else None,
        "bound": option.bound if runs else None}


def _mark(option, recommendation):
    if option is recommendation.best:
        return "recommended" if option.mfu >= LOW_MFU else "fastest, and a waste"
    return "as fast" if option in recommendation.ties else ""
