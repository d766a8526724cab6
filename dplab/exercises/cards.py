"""How outcomes look: an HTML card in JupyterLab, the same words in plain text elsewhere."""

import html
import itertools

from dplab.exercises import record
from dplab.exercises.exercise import CRASHED, NOT_ATTEMPTED, PASSED, WRONG
from dplab.spawn.parent.output import in_notebook

# As the notebooks' headings and README have them; a test compares.
TITLES: dict[int, str] = {
    0: "Start here",
    1: "Split the batch, copy the model",
    2: "Why averaging gradients is right",
    3: "All-reduce",
    4: "DDP by hand",
    5: "Buckets and overlap",
    6: "Where the time goes",
    7: "Training at large batch",
    8: "ZeRO by hand",
    9: "FSDP",
    10: "Choosing and scaling",
}

_COLORS = {PASSED: "#12894D", WRONG: "#C05600", CRASHED: "#D0453C", NOT_ATTEMPTED: "#6B7680"}


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
        detail = (f"{detail}\n(Progress could not be written to {record.folder()}: DPLAB_HOME "
                  "in the environment names another folder.)").strip()
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
    """By chapter: its title, how many are passed, and each exercise with its last outcome."""
    rows = [(exercise, outcomes.get(exercise.id, NOT_ATTEMPTED)) for exercise in exercises]
    head, all_passed = _counted(rows, " exercises passed")
    plain, table = [head], []
    width = max(len(exercise.title) for exercise in exercises)
    for chapter, group in itertools.groupby(rows, lambda row: row[0].chapter):
        group = list(group)
        title, (count, is_done) = f"{chapter:02d} · {TITLES[chapter]}", _counted(group)
        plain += ["", f"{title:<{width + 7}}  {count}"]
        plain += [f"{each.id:>5}  {each.title:<{width}}  {outcome}" for each, outcome in group]
        table.append(_row("font-weight:600;padding-top:10px", "", title, count,
                          _COLORS[PASSED if is_done else NOT_ATTEMPTED]))
        table += [_row("", each.id, each.title, outcome, _COLORS[outcome])
                  for each, outcome in group]
    rich = f'<table style="border-collapse:collapse">{"".join(table)}</table>'
    _display("\n".join(plain), _frame(head, rich, _COLORS[PASSED if all_passed else NOT_ATTEMPTED]))


def _counted(rows, what=""):
    """How many are passed, in words, and whether all are."""
    passed = sum(outcome == PASSED for _, outcome in rows)
    return f"{passed} of {len(rows)}{what}", passed == len(rows)


def _row(style, id, title, outcome, color):
    """A chapter's row has no ``id``: its title begins where the exercises' ids do."""
    cell = f'<td style="text-align:left;padding:2px 12px 2px 0;background:none;{style}'
    first = (f'{cell}">{id}</td>{cell}">{html.escape(title)}' if id
             else f'{cell}" colspan="2">{html.escape(title)}')
    dot = "○" if color == _COLORS[NOT_ATTEMPTED] else "●"
    return (f'<tr style="background:none">{first}</td>'
            f'{cell}"><span style="color:{color}">{dot} </span>{outcome}</td></tr>')


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
    if in_notebook():
        from IPython.display import display

        display({"text/plain": plain, "text/html": rich}, raw=True)
    else:
        print(plain)
