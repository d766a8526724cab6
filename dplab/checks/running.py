"""A check while it runs: a bar that moves from one world size to the next, and vanishes."""

from dplab.checks.exercise import Exercise, Verdict
from dplab.spawn.parent.display import is_live
from dplab.spawn.parent.output import in_notebook

_BAR = ('<div style="color:var(--jp-ui-font-color2,#6B7680)">'
        '<progress value="{done}" max="{of}" aria-label="the check"></progress> {words}</div>')


def watched(exercise: Exercise, objects: tuple) -> Verdict:
    """Judges the attempt, and meanwhile shows in a notebook how far the check is."""
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
