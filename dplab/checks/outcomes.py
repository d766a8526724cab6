"""What a reader sees of an exercise: a running check, verdicts, hints, solutions, progress."""

import html
import itertools

from dplab.checks.exercise import CRASHED, NOT_ATTEMPTED, PASSED, WRONG, Exercise, Verdict
from dplab.desk import cards, record
from dplab.desk.course import heading, link_to
from dplab.spawn.parent.display import is_live
from dplab.spawn.parent.output import in_notebook

COLORS = {PASSED: cards.GREEN, WRONG: cards.ORANGE, CRASHED: cards.RED, NOT_ATTEMPTED: cards.GREY}


_BAR = ('<div style="color:var(--jp-ui-font-color2,#6B7680)">'
        '<progress value="{done}" max="{of}" aria-label="the check"></progress> {words}</div>')


def watched(exercise: Exercise, objects: tuple) -> Verdict:
    """Judges the attempt. Meanwhile a bar in the notebook moves from one world size to the next."""
    if not in_notebook() or not is_live():
        return exercise.judge(*objects)
    from IPython.display import display

    nothing = {"text/plain": "", "text/html": ""}
    handle = display(nothing, raw=True, display_id=True)
    steps = list(exercise.world_sizes)

    def tell(world_size: int | None) -> None:
        if world_size is None:
            done, words = len(steps), "Comparing with known mistakes …"
        else:
            done, words = steps.index(world_size), f"World size {world_size} of {steps[-1]} …"
            if not exercise.on_ranks:
                words = "Running your code …"
        rich = _BAR.format(done=done, of=len(steps), words=words)
        handle.update({"text/plain": words, "text/html": rich}, raw=True)

    try:
        return exercise.judge(*objects, tell=tell)
    finally:
        handle.update(nothing, raw=True)


def show_verdict(exercise, verdict, *, following, saved=True, note=""):
    """``following``: the exercise after this one, or None. ``note`` is a sentence more."""
    why, detail = verdict.why, verdict.detail
    if verdict.outcome == PASSED:
        why = why or _where_right(verdict.world_sizes)
    elif verdict.outcome == NOT_ATTEMPTED:
        task = "Write" if exercise.stub is None else "This is still the code as it was. Change"
        then = " above, run its cell, and then run this one" if in_notebook() else ""
        why = why or f"{task} `{exercise.name}`{then}."
    elif verdict.outcome == WRONG and not why:
        why = "Not right yet."
    why = f"{why} {note}".strip()
    if not saved:
        detail = (f"{detail}\n(Progress could not be written to {record.folder()}: DPLAB_HOME "
                  "in the environment names another folder.)").strip()
    links = {}
    if verdict.outcome == PASSED and following and (
            address := link_to(following.chapter, following.slug)):
        links = {f"Next: {following.number} {following.title}": address}
    cards.card(f"Exercise {exercise.number}: {verdict.outcome}", why, detail,
               COLORS[verdict.outcome], links=links)


def _where_right(world_sizes):
    if not world_sizes:
        return "Right."
    *sizes, last = map(str, world_sizes)
    return f"Right on {', '.join(sizes)} and {last} ranks." if sizes else f"Right on {last} ranks."


def show_hint(exercise, number):
    """Behind the last one, where ``number`` is their count, all of them once more."""
    count = len(exercise.hints)
    last = f'`dplab.solution("{exercise.slug}")` shows a solution.'
    if number == count:
        text = " ".join(f"({at}) {hint}" for at, hint in enumerate(exercise.hints, 1))
        cards.card(f"Exercise {exercise.number}: no more hints", f"You have had all: {text} {last}")
        return
    text = exercise.hints[number]
    if number == count - 1:
        text += f" That was the last hint; {last}"
    cards.card(f"Exercise {exercise.number}: hint {number + 1} of {count}", text)


def show_solution(exercise, own: str | None):
    """``own`` is what the reader passed with; it stands first."""
    from pygments import formatters, highlight, lexers  # which ranks do not need

    # A light block with dark letters, which can be read in JupyterLab's dark theme too.
    html_in_color = formatters.HtmlFormatter(noclasses=True, style="xcode", cssstyles=(
        "color:#111;padding:1px 10px;overflow-x:auto;line-height:1.4"))
    head = f"Exercise {exercise.number}: a solution"
    sources = {"Yours": own} if own else {}
    sources["The course's"] = exercise.solution_source()
    plain = "\n\n".join([head, *(f"{whose}:\n\n{source}" for whose, source in sources.items())])
    folds = "".join(
        f'<details><summary style="cursor:pointer">{html.escape(whose)}</summary>'
        f"{highlight(source, lexers.PythonLexer(), html_in_color)}</details>"
        for whose, source in sources.items())
    cards.show(plain, cards.frame(head, folds, cards.GREY))


def show_unknown(id, exercises):
    cards.card("Which exercise?", unknown(id, exercises), color=cards.RED)


def unknown(id, exercises):
    """A sentence that says what to write in place of this id."""
    if not isinstance(id, str):
        return ("The exercise's name comes first, in quotes: "
                '`dplab.check("global-mean", global_mean)`.')
    named = {word: each.slug for each in exercises for word in (each.slug, each.name, each.title)}
    listed = ", ".join(f"`{each.slug}`" for each in exercises)
    return f"There is no exercise `{id}`. " + (
        cards.did_you_mean(id, named) or f"There are {listed}.")


def show_progress(exercises, outcomes, guesses, drills):
    """By chapter: how many exercises are passed; which is next; where the reader has begun, each
    exercise with its last outcome, how good the guesses are, and the sick jobs.

    ``outcomes`` are by slug; ``guesses`` and ``drills`` are by chapter, as their ``scores()``.
    """
    rows = [(exercise, outcomes.get(exercise.slug, NOT_ATTEMPTED)) for exercise in exercises]
    head, all_passed = _counted(rows, " exercises passed")
    plain, table, rich = [head], [], ""
    if following := _next(rows):
        words = f"Next: {following.number} {following.title}"
        plain.append(f"{words} ({following.slug})")
        rich = html.escape(words)
        if address := link_to(following.chapter, following.slug):
            rich = f'<a href="{html.escape(address)}">{rich}</a>'
    width = max(len(exercise.title) for exercise in exercises)
    for chapter, group in itertools.groupby(rows, lambda row: row[0].chapter):
        group = list(group)
        title, (count, is_done) = heading(chapter), _counted(group)
        plain += ["", f"{title:<{width + 7}}  {count}"]
        beside = list(_beside_exercises(guesses.get(chapter), drills.get(chapter)))
        if not any(outcome != NOT_ATTEMPTED for _, outcome in group) and not any(
                begun for *_, begun in beside):
            group, beside = [], []
        plain += [f"{each.number:>5}  {each.title:<{width}}  {outcome}" for each, outcome in group]
        table.append(cards.row([title, count], indent=False,
                               color=cards.GREEN if is_done else cards.GREY,
                               style="font-weight:600;padding-top:10px"))
        table += [cards.row([each.number, each.title, outcome], indent=True, color=COLORS[outcome])
                  for each, outcome in group]
        for what, count, is_good, _ in beside:
            plain.append(f"{'':5}  {what:<{width}}  {count}")
            table.append(cards.row(["", what, count], indent=True,
                                   color=cards.GREEN if is_good else cards.GREY))
    rich += f'<table style="border-collapse:collapse">{"".join(table)}</table>'
    cards.show("\n".join(plain),
               cards.frame(head, rich, cards.GREEN if all_passed else cards.GREY))


def _next(rows):
    """The first exercise to pass in a chapter that is begun, or else in any; or None."""
    begun = {exercise.chapter for exercise, outcome in rows if outcome != NOT_ATTEMPTED}
    return min((exercise for exercise, outcome in rows if outcome != PASSED),
               key=lambda exercise: exercise.chapter not in begun, default=None)


def _beside_exercises(guesses, drills):
    """Of a chapter's guesses and of its sick jobs: what it is, the count in words, whether all are
    good, and whether the reader has begun with them.
    """
    if guesses:
        answered = f"{guesses.good} of {guesses.revealed} good" if guesses.revealed else "none yet"
        yield "Guesses", answered, guesses.good == guesses.asked, bool(guesses.answered)
    if drills:
        at_first = f", {drills.first_try} at the first try" if drills.solved else ""
        yield ("Sick jobs", f"{drills.solved} of {drills.total} solved{at_first}",
               drills.solved == drills.total, bool(drills.solved))


def _counted(rows, what=""):
    """How many are passed, in words, and whether all are."""
    passed = sum(outcome == PASSED for _, outcome in rows)
    return f"{passed} of {len(rows)}{what}", passed == len(rows)
