"""A plan as a page of text, at most 100 columns wide, from what `plan.answer` gives."""

import itertools
import textwrap
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from dplab.predict.precision import readable

_WIDTH = 100
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_AGAIN = {"none": "", "selective": ", partly recomputed", "full": ", recomputed"}


def page(answer: Mapping[str, Any]) -> str:
    """The page of an answer without errors, whose plan and recommendation are both there.

    Or that of a model that is no transformer.
    """
    if answer["alone"]:
        return "\n".join(_alone(answer["alone"]))
    plan, recommendation = answer["plan"], answer["recommendation"]
    launch, memory = plan["launch"], plan["memory"]
    basis = (f"{len(plan['basis'])} published rates, of which {len(plan['stand_ins'])} stand in "
             "for a shape, a GPU or a link that nobody measured: --json names them all, under "
             "basis and stand_ins.")
    parts = {
        f"{plan['title']} (prediction)": _head(plan),
        "Strategies": _strategies(recommendation["options"]),
        "Advice": _listed([*plan["warnings"], *recommendation["advice"]]),
        "Published nearby": _published(plan),
        "The same global batch on other numbers of GPUs": _scaling(recommendation["scaling"]),
        "The run": _run(plan["rent"]),
        f"Memory of a GPU, at its highest: {memory['moment']}": _memory(memory),
        "Sent by a GPU in a step": _traffic(plan["traffic"]),
        "Time of a step, as kernels allow": _step(plan["step"]),
        "Start it": [*_code(launch["torchrun"]), *_listed(launch["notes"])],
        "Settings for torch": _code(launch["torch"]),
        "Settings for DeepSpeed": _code(launch["deepspeed"] or ""),
        "What is assumed": _listed(plan["assumed"]),
        "What it rests on": _listed([plan["range"], basis, *(
            f"{each}." for each in recommendation["unknown"])])}
    pages = ((title, [*lines]) for title, lines in parts.items())
    return "\n\n".join("\n".join([title, *lines]) for title, lines in pages if lines)


def duration(seconds: float) -> str:
    """Seconds with three digits: "1.23 s", "45.6 ms"."""
    size, unit = next((each for each in _UNITS if seconds >= 0.9995 * each[0]), _UNITS[-1])
    decimals = 2 if seconds / size < 9.995 else 1 if seconds / size < 99.95 else 0
    return f"{seconds / size:,.{decimals}f} {unit}"


def few(value: float) -> str:
    """A number with three digits, or all that stand before the point."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _alone(found):
    yield f"{found['title']} (prediction)"
    yield f"  {'strategy':24}{'states':>10}{'left':>12}{'sent in a step':>16}{'for':>10}"
    for each in found["rows"]:
        left = readable(each["left"]) if each["left"] > 0 else "too much"
        sent = f"{readable(each['sent']):>16}{duration(each['seconds']):>10}"
        yield (f"  {each['name']:24}{readable(each['bytes']):>10}{left:>12}"
               f"{sent if each['sent'] else f'{0:16}'}")
    yield ""
    yield from _listed([*found["not_said"], *(f"Published: {each}." for each in
                                              found["published"])])


def _head(plan):
    batch, speeds, rent = plan["batch"], plan["speeds"], plan["rent"]
    how = f"{plan['name']}{_AGAIN[plan['recompute']]}"
    yield f"  {plan['model']['parameters']:,} parameters; {how}"
    yield (f"  {batch['accumulation']:,} micro-batches of {batch['micro']:,} × "
           f"{batch['sequence']:,} tokens on each GPU")
    if not plan["runs"]:
        why = "too few sequences" if plan["memory"]["fits"] else "not enough memory"
        yield f"  Does not run: {why}."
        return
    yield f"  {'':25}{'tokens/s':>16}{'days':>14}{'GPU-hours':>16}{'cost':>16}"
    rows = {"allowed": "what kernels allow", "middle": "runs like yours reached",
            "high": "  at best", "low": "  at worst"}
    for name, words in rows.items():
        if speeds[name]:
            found = rent[name]
            money = "" if found["money"] is None else few(found["money"])
            yield (f"  {words:25}{few(speeds[name]):>16}{few(found['days']):>14}"
                   f"{few(found['gpu_hours']):>16}{money:>16}")
    if not speeds["middle"]:
        yield from _wrapped(plan["outside"] or plan["range"])
    yield f"  for {rent['tokens']:,.4g} tokens" + (
        "" if rent["price"] is not None else "; --price gives the cost")


def _strategies(options):
    yield f"   {'+ recomputation':22}{'micro-batches':>13}{'memory':>9}"
    for each in options:
        mark = "→" if each["best"] else "=" if each["mark"] else " "
        mark += "*" if each["planned"] else " "
        again = "" if each["recompute"] == "none" else f" + {each['recompute']}"
        name = f"{each['name']}{again}"
        size = f"{each['accumulation']} × {each['micro']}"
        rest = (f"{each['tokens_per_second']:13,.0f} tokens/s {each['mfu']:5.1%} MFU  "
                f"{each['bound']}" if each["seconds"]
                else f"{readable(-each['margin'])} too much" if not each["fits"]
                else "too few sequences")
        yield f"{mark} {name:24}{size:>11}{readable(each['bytes']):>10}  {rest}"
    best = next((each["mark"] for each in options if each["best"]), "")
    yield (f"  *: planned; →: {best}; =: as fast, within what this prediction may be off"
           if best else "  *: planned. None of them runs.")


def _published(plan):
    yield from _wrapped(plan["settings"])
    ways = plan["other_ways"]
    rows = [("", plan["nearest"])] + ([(ways["why"], ways["rows"])] if ways else [])
    for why, found in rows:
        yield from _wrapped(why)
        for each in found:
            yield from _wrapped(
                f"{each['what']}, {each['ranks']:,} × {each['gpu']}, {each['how']}: "
                f"{each['rate']:,.0f} tokens/s of a GPU ({each['source']})")


def _run(rent):
    if rent is None:
        return
    often = f"{rent['failures_a_day']:.2g}"
    yield from _wrapped(
        f"{often} failures a day; a checkpoint has {readable(rent['checkpoint_bytes'])} and holds "
        f"training up for {duration(rent['save_seconds'])}; save every "
        f"{few(rent['save_every'] / 60)} minutes: {rent['goodput']:.1%} of the time trains.")


def _memory(memory):
    parts = ", ".join(f"{part['name']} {readable(part['bytes'])}" for part in memory["parts"]
                      if part["bytes"])
    verdict = "fits" if memory["fits"] else f"{readable(-memory['margin'])} too much"
    if memory["uncertain"]:
        verdict += ", but by less than this prediction may be off"
    return _wrapped(f"{parts}: together {readable(memory['total'])} of "
                    f"{readable(memory['limit'])}: {verdict}. A tenth of the GPU's "
                    f"{readable(memory['gpu'])} is left to the allocator and the libraries.")


def _traffic(traffic):
    for part in traffic["parts"]:
        calls = "" if part["calls"] is None else f", {part['calls']:,} calls"
        yield (f"  {part['name']:34}{readable(part['bytes']):>9}  among {part['ranks']:,} "
               f"GPUs{part['where'] and ', '}{part['where']}{calls}")
    if not traffic["parts"]:
        yield "  One GPU sends nothing."


def _step(step):
    if step is None:
        yield "  No time is predicted for what does not run."
        return
    yield (f"  {duration(step['seconds'])}, bound by {step['bound']}: "
           f"{duration(step['compute_seconds'])} computing, "
           f"{duration(step['exposed_seconds'])} only sending; MFU {step['mfu']:.1%}")
    saved = ", ".join(f"{each['resource']} {each['seconds'] / step['seconds']:.0%}"
                      for each in step["savings"] if each["seconds"] >= 0.005 * step["seconds"])
    if saved:
        yield from _wrapped("If one of these took no time, the step would be so much shorter: "
                            f"{saved}.")


def _scaling(scaling):
    yield f"  {'GPUs':>7}  {'tokens/s':>14}  {'from':>14}  {'to':>14}  {'GPU-hours':>12}"
    for runs, points in itertools.groupby(scaling["points"], key=itemgetter("runs")):
        points = list(points)
        if not runs:
            until = f" to {points[-1]['gpus']:,}" if len(points) > 1 else ""
            yield f"  {points[0]['gpus']:7,}{until}: does not run"
            continue
        for each in points:
            speed = each["middle"] or each["allowed"]
            ends = "  ".join(f"{each[end]:14,.0f}" if each[end] else f"{'–':>14}"
                             for end in ("low", "high"))
            yield f"  {each['gpus']:7,}  {speed:14,.0f}  {ends}  {few(each['gpu_hours']):>12}"
    stops = scaling["stops_paying"]
    if stops is not None:
        yield (f"  Beyond {stops:,} GPU{'s' if stops > 1 else ''} more no longer pay: each brings "
               "less than half of what the first ones do.")


def _wrapped(text):
    return textwrap.wrap(text, _WIDTH - 2, initial_indent="  ", subsequent_indent="  ")


def _listed(sentences):
    return [textwrap.fill(each, _WIDTH - 4, initial_indent="- ", subsequent_indent="  ",
                          break_on_hyphens=False) for each in sentences]


def _code(text):
    return [line and f"    {line}" for line in text.strip("\n").splitlines()]
