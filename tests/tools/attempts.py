"""Attempts at exercises: two that many tests use, and ranks that known mistakes share."""


def stub(model):
    """All-reduce the gradients."""
    raise NotImplementedError("write me")


def raises(model, group=None):
    return model.no_such_thing


def on_shared_ranks(exercise, monkeypatch):
    """From here on, a known mistake that is judged has no ranks of its own.

    It takes what the exercise has found for the other mistakes to be compared with; only what hangs
    or fails is run, once.
    """
    observe, failed, under_way = exercise.observe, {}, []

    def shared(attempt, world_size, *, quiet=False):
        mistake = next((each for each in exercise.known_mistakes.all
                        if each.attempt is attempt), None)
        in_groups = exercise.with_groups == type(exercise).with_groups
        if mistake and in_groups and not mistake.hangs and not under_way:
            under_way.append(mistake)
            found = exercise.known_mistakes.outcomes(
                exercise.known_mistakes.all, world_size)[mistake]
            under_way.clear()
            if isinstance(found, list):
                return found
        place = attempt, world_size, in_groups
        if place not in failed:
            failed[place] = observe(attempt, world_size, quiet=True)
        return failed[place]

    monkeypatch.setattr(exercise, "observe", shared)
