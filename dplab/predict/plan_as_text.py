"""A plan as a page of text, at most 100 columns wide, from what `plan.answer` gives."""

import itertools
import textwrap
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from dplab.predict.precision import readable

_WIDTH = 100
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def page(answer: Mapping[str, Any]) -> str:
    """The page of an answer without errors, whose plan and recommendation are both there."""
    plan, recommendation = answer["plan"], answer["recommendation"]
    recomputed = ", blocks recomputed" if plan["recompute"] == "full" else ""
    launch, memory, basis = plan["launch"], plan["memory"], (
        f"{len(plan['basis'])} published rates, of which {len(plan['stand_ins'])} stand in for a "
        "shape, a GPU or a link that nobody measured: --json names them all, under basis and "
        "stand_ins.")
    parts = {
        f"{plan['title']} (prediction)": [f"{plan['model']['parameters']:,} parameters; planned: "
                                          f"{plan['name']}{recomputed}"],
        "Strategies": _strategies(recommendation["options"]),
        f"Memory of a GPU, at its highest: {memory['moment']}": _memory(memory),
        "Sent by a GPU in a step": _traffic(plan["traffic"]),
        "Time of a step": _step(plan["step"]),
        f"Scaling of {plan['strategy']}{recomputed}, with the same batch on each GPU":
            _scaling(plan["scaling"]),
        "Advice": _listed(recommendation["advice"]),
        "Start it": [*_code(launch["torchrun"]), *_listed(launch["notes"])],
        "Settings for torch": _code(launch["torch"]),
        "Settings for DeepSpeed": _code(launch["deepspeed"] or ""),
        "What is assumed": _listed(plan["assumed"]),
        "What it rests on": _listed([basis, *(f"{each}." for each in recommendation["unknown"])])}
    pages = ((title, [*lines]) for title, lines in parts.items())
    return "\n\n".join("\n".join([title, *lines]) for title, lines in pages if lines)


def duration(seconds: float, like: float | None = None) -> str:
    """Seconds with three digits: "1.23 s", "45.6 ms"; in the unit and decimals of ``like``."""
    like = seconds if like is None else like
    size, unit = next((each for each in _UNITS if like >= 0.9995 * each[0]), _UNITS[-1])
    decimals = 2 if like / size < 9.995 else 1 if like / size < 99.95 else 0
    return f"{seconds / size:,.{decimals}f} {unit}"


def _interval(times):
    """"1.23 s (1.11 to 1.35)", in the unit of the first."""
    fast, slow = (duration(times[each], times["seconds"]).split()[0] for each in ("fast", "slow"))
    return f"{duration(times['seconds'])} ({fast} to {slow})"


def _strategies(options):
    for each in options:
        mark = "→" if each["best"] else "=" if each["tie"] else " "
        mark += "*" if each["planned"] else " "
        name = each["name"] + (", recomputed" if each["recompute"] == "full" else "")
        rest = (f"{_interval(each):26}{each['mfu']:6.1%} MFU  {each['bound']}" if each["fits"]
                else f"{readable(-each['margin'])} too much")
        yield f"{mark} {name:23}{readable(each['bytes']):>9}  {rest}"
    yield ("  *: planned; →: recommended; =: as fast, within what this prediction may be off"
           if any(each["best"] for each in options) else "  *: planned. None of them fits.")


def _memory(memory):
    for part in memory["parts"]:
        if part["bytes"]:
            yield f"  {part['name']:15}{readable(part['bytes']):>9}"
    verdict = "fits" if memory["fits"] else f"{readable(-memory['margin'])} too much"
    if memory["uncertain"]:
        verdict += ", but by less than this prediction may be off"
    yield (f"  {'together':15}{readable(memory['total']):>9} of {readable(memory['limit'])}: "
           f"{verdict}")
    yield (f"  A tenth of the GPU's {readable(memory['gpu'])} is left to the allocator and the "
           "libraries.")


def _traffic(traffic):
    for part in traffic["parts"]:
        calls = "" if part["calls"] is None else f", {part['calls']:,} calls"
        yield (f"  {part['name']:34}{readable(part['bytes']):>9}  among {part['ranks']:,} "
               f"GPUs{part['where'] and ', '}{part['where']}{calls}")
    yield (f"  {'together':34}{readable(traffic['sent_bytes']):>9}" if traffic["parts"]
           else "  One GPU sends nothing.")


def _step(step):
    if step is None:
        yield "  No time is predicted for what does not fit."
        return
    yield f"  {_interval(step)}, bound by {step['bound']}"
    yield from _wrapped(step["note"])
    yield (f"  {duration(step['compute_seconds'])} computing, "
           f"{duration(step['exposed_seconds'])} only sending; MFU {step['mfu']:.1%}")
    yield (f"  {step['tokens_per_second']:,.0f} tokens/s of all GPUs, {step['global_tokens']:,} "
           "tokens in a step")
    saved = ", ".join(f"{each['resource']} {each['seconds'] / step['seconds']:.0%}"
                      for each in step["savings"] if each["seconds"] >= 0.005 * step["seconds"])
    if saved:
        yield from _wrapped("If one of these took no time, the step would be so much shorter: "
                            f"{saved}.")


def _scaling(scaling):
    yield f"  {'GPUs':>7}  {'a step':>8}  {'tokens/s':>14}  efficiency"
    for fits, points in itertools.groupby(scaling["points"], key=itemgetter("fits")):
        points = list(points)
        if not fits:
            until = f" to {points[-1]['gpus']:,}" if len(points) > 1 else ""
            yield f"  {points[0]['gpus']:7,}{until}: does not fit"
            continue
        for point in points:
            yield (f"  {point['gpus']:7,}  {duration(point['seconds']):>8}  "
                   f"{point['tokens_per_second']:14,.0f}  {point['efficiency']:10.1%}")
    stops, most = scaling["stops_paying"], scaling["most_gpus"]
    if stops is not None:
        yield (f"  Beyond {stops:,} GPU{'s' if stops > 1 else ''} more no longer pay: each brings "
               "less than half of what the first ones do.")
    if most is not None:
        yield (f"  The largest useful batch is enough for {most:,} GPUs." if most else
               "  The largest useful batch is smaller than that of one GPU.")
    if any(point["fits"] for point in scaling["points"]):
        yield from _wrapped(scaling["note"])


def _wrapped(text):
    return textwrap.wrap(text, _WIDTH - 2, initial_indent="  ", subsequent_indent="  ")


def _listed(sentences):
    return [textwrap.fill(each, _WIDTH - 4, initial_indent="- ", subsequent_indent="  ",
                          break_on_hyphens=False) for each in sentences]


def _code(text):
    return [line and f"    {line}" for line in text.strip("\n").splitlines()]
