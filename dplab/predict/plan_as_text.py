"""A plan as a page of text, at most 100 columns wide, from what `plan.answer` gives."""

import itertools
import textwrap
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from dplab.predict.memory import readable

WIDTH = 100
_SIGNS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def page(answer: Mapping[str, Any]) -> str:
    """The page of an answer without errors, whose plan and recommendation are both there."""
    plan, recommendation = answer["plan"], answer["recommendation"]
    recomputed = ", blocks recomputed" if plan["recompute"] == "full" else ""
    parts = [
        [f"{plan['title']} (prediction)",
         f"{plan['model']['parameters']:,} parameters; planned: {plan['name']}{recomputed}"],
        ["Strategies", *_strategies(recommendation["options"])],
        [f"Memory of a GPU, at its highest: {plan['memory']['moment']}", *_memory(plan["memory"])],
        ["Sent by a GPU in a step", *_traffic(plan["traffic"])],
        ["Time of a step", *_step(plan["step"])],
        [f"Scaling of {plan['strategy']}{recomputed}, with the same batch on each GPU",
         *_scaling(plan["scaling"])],
        ["Advice", *_listed(recommendation["advice"])],
        ["Start it", *_code(plan["launch"]["torchrun"]), *_listed(plan["launch"]["notes"])],
        ["Settings for torch", *_code(plan["launch"]["torch"])]]
    if plan["launch"]["deepspeed"]:
        parts.append(["Settings for DeepSpeed", *_code(plan["launch"]["deepspeed"])])
    parts += [["What is assumed", *_listed(plan["assumed"])],
              ["What it rests on", *_listed(_basis(plan, recommendation))]]
    return "\n\n".join("\n".join(lines) for lines in parts if len(lines) > 1)


def _basis(plan, recommendation):
    yield (f"{len(plan['basis'])} published rates, of which {len(plan['stand_ins'])} stand in for "
           "a shape, a GPU or a link that nobody measured: --json names them all, under basis and "
           "stand_ins.")
    for line in recommendation["unknown"]:
        yield f"{line}."


def duration(seconds: float) -> str:
    """Seconds with three digits: "1.23 s", "45.6 ms"."""
    size, unit = _unit(seconds)
    return f"{seconds / size:,.{_decimals(seconds / size)}f} {unit}"


def _unit(seconds):
    return next((each for each in _SIGNS if seconds >= 0.9995 * each[0]), _SIGNS[-1])


def _decimals(value):
    """How many decimals make three digits."""
    return 2 if value < 9.995 else 1 if value < 99.95 else 0


def _interval(seconds, fast, slow):
    """"1.23 s (1.11 to 1.35)", in the unit of the first."""
    size, _ = _unit(seconds)
    digits = _decimals(seconds / size)
    return f"{duration(seconds)} ({fast / size:,.{digits}f} to {slow / size:,.{digits}f})"


def _strategies(options):
    for each in options:
        mark = "→" if each["best"] else "=" if each["tie"] else " "
        mark += "*" if each["planned"] else " "
        name = each["name"] + (", recomputed" if each["recompute"] == "full" else "")
        if each["fits"]:
            rest = (f"{_interval(each['seconds'], each['fast'], each['slow']):26}"
                    f"{each['mfu']:6.1%} MFU  {each['bound']}")
        else:
            rest = f"{readable(-each['margin'])} too much"
        yield f"{mark} {name:23}{readable(each['bytes']):>9}  {rest}"
    if any(each["best"] for each in options):
        yield "  *: planned; →: recommended; =: as fast, within what this prediction may be off"
    else:
        yield "  *: planned. None of them fits."


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
    if not traffic["parts"]:
        yield "  One GPU sends nothing."
        return
    for part in traffic["parts"]:
        calls = "" if part["calls"] is None else f", {part['calls']:,} calls"
        yield (f"  {part['name']:34}{readable(part['bytes']):>9}  among {part['ranks']:,} "
               f"GPUs{part['where'] and ', '}{part['where']}{calls}")
    yield f"  {'together':34}{readable(traffic['sent_bytes']):>9}"


def _step(step):
    if step is None:
        yield "  No time is predicted for what does not fit."
        return
    yield (f"  {_interval(step['seconds'], step['fast'], step['slow'])}, bound by "
           f"{step['bound']}")
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
    if scaling["stops_paying"] is not None:
        most = scaling["stops_paying"]
        yield (f"  Beyond {most:,} GPU{'s' if most > 1 else ''} more no longer pay: each brings "
               "less than half of what the first ones do.")
    if scaling["most_gpus"]:
        yield f"  The largest useful batch is enough for {scaling['most_gpus']:,} GPUs."
    elif scaling["most_gpus"] == 0:
        yield "  The largest useful batch is smaller than that of one GPU."
    if any(point["fits"] for point in scaling["points"]):
        yield from _wrapped(scaling["note"])


def _wrapped(text):
    return textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")


def _listed(sentences: Iterable[str]):
    for each in sentences:
        yield textwrap.fill(each, WIDTH - 4, initial_indent="- ", subsequent_indent="  ",
                            break_on_hyphens=False)


def _code(text):
    return (f"    {line}" if line else "" for line in text.strip("\n").splitlines())
