"""How outcomes look: an HTML card in JupyterLab, the same words in plain text elsewhere."""

import html

from dplab.exercises import record
from dplab.exercises.exercise import CRASHED, NOT_ATTEMPTED, PASSED, WRONG
from dplab.spawn.output import ipython

_COLORS = {PASSED: "#0B7A43", WRONG: "#C05600", CRASHED: "#B3261E", NOT_ATTEMPTED: "#6B7680"}


def show_verdict(exercise, verdict, *, saved=True):
    head = f"Exercise {exercise.id}: {verdict.outcome}"
    why, detail = verdict.why, verdict.detail
    if verdict.outcome == PASSED:
        sizes = ", ".join(map(str, verdict.world_sizes[:-1]))
        why = f"Right on {sizes} and {verdict.world_sizes[-1]} ranks."
    elif verdict.outcome == NOT_ATTEMPTED:
        task = "Write" if exercise.stub is None else "This is the loop as it was. Repair"
        why = (f"{task} `{exercise.name}` above, run its cell, and then run this one. "
               f'dplab.hint("{exercise.id}") gives a hint.')
    elif verdict.outcome == WRONG and not why:
        why = "Not right yet."
    if not saved:
        detail = f"{detail}\n(Progress could not be written to {record.folder()}.)".strip()
    _card(head, why, detail, _COLORS[verdict.outcome])


def show_hint(exercise, number):
    head = f"Exercise {exercise.id}: hint {number + 1} of {len(exercise.hints)}"
    last = number == len(exercise.hints) - 1
    more = (f'That was the last hint; dplab.solution("{exercise.id}") shows the solution.'
            if last else "")
    _card(head, exercise.hints[number], more, _COLORS[NOT_ATTEMPTED])


def show_solution(exercise):
    _card(f"Exercise {exercise.id}: a solution", "", exercise.solution_source(),
          _COLORS[NOT_ATTEMPTED])


def show_unknown(id, exercises):
    known = ", ".join(exercise.id for exercise in exercises)
    _card(f"There is no exercise {id}", f"The exercises are {known}.", "", _COLORS[CRASHED])


def show_progress(exercises, outcomes):
    rows = [(exercise.id, exercise.title, outcomes.get(exercise.id, NOT_ATTEMPTED))
            for exercise in exercises]
    passed = sum(outcome == PASSED for _, _, outcome in rows)
    head = f"{passed} of {len(rows)} exercises passed"
    width = max(len(title) for _, title, _ in rows)
    color = _COLORS[PASSED if passed == len(rows) else NOT_ATTEMPTED]
    plain = "\n".join(f"{id:>5}  {title:<{width}}  {outcome}" for id, title, outcome in rows)
    cells = "".join(
        f'<tr><td style="text-align:right">{id}</td>'
        f'<td style="text-align:left">{html.escape(title)}</td>'
        f'<td style="text-align:left;color:{_COLORS[outcome]};font-weight:600">{outcome}</td></tr>'
        for id, title, outcome in rows)
    _display(f"{head}\n\n{plain}", _frame(head, f"<table>{cells}</table>", color))


def _card(head, text, block, color):
    """``text`` is a sentence, in which `names` stand in backquotes; ``block`` is preformatted."""
    body = f"<div>{_inline(text)}</div>" if text else ""
    if block:
        body += ('<pre style="margin:8px 0 0;padding:8px 10px;border-radius:4px;line-height:1.4;'
                 "overflow-x:auto;background:var(--jp-layout-color2,#f0f2f4);"
                 f'color:inherit">{html.escape(block)}</pre>')
    plain = "\n".join(filter(None, [head, text, block]))
    _display(plain, _frame(head, body, color))


def _frame(head, body, color):
    return (f'<div style="border-left:4px solid {color};padding:6px 14px;margin:4px 0">'
            f'<div style="font-weight:700"><span style="color:{color}">● </span>'
            f"{html.escape(head)}</div>{body}</div>")


def _inline(text):
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part
                   for index, part in enumerate(parts))


def _display(plain, rich):
    if hasattr(ipython(), "kernel"):
        from IPython.display import display

        display({"text/plain": plain, "text/html": rich}, raw=True)
    else:
        print(plain)
