"""Attempts at an exercise that both its verdicts and its cards are tested with."""


def stub(model):
    """All-reduce the gradients."""
    raise NotImplementedError("write me")


def raises(model):
    return model.no_such_thing
