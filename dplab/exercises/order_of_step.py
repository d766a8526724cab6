"""What the units of `fully_shard` do in a step, note by note."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip


def order_of_step(blocks, kept=False, ahead=False):
    """The notes of forward, a bar, and the notes of backward, in a list."""
    notes = ["Gr"]
    for block in range(blocks):
        following = block + 1
        if block == 0 or not ahead:
            notes.append(f"G{block}")
        if ahead and following < blocks:
            notes.append(f"G{following}")
        notes.append(f"F{block}")
    notes.append("|")
    if blocks and not kept:
        notes.append(f"G{blocks - 1}")
    for block in reversed(range(blocks)):
        notes.append(f"B{block}")
        if block and not kept:
            notes.append(f"G{block - 1}")
        notes.append(f"R{block}")
    return [*notes, "Rr"]


# By what each is about: the number of blocks, kept, ahead.
CASES = (
    ("six blocks", 6, False, False), ("four blocks, kept", 4, True, False),
    ("five blocks, ahead", 5, False, True), ("three blocks, kept and ahead", 3, True, True),
    ("one block", 1, False, False), ("the root alone", 0, False, False),
)
BACK = 'if block and not kept:\n            notes.append(f"G{block - 1}")'


class OrderOfStep(Calculation):
    number = "10.1"
    title = "One line for a step"
    minutes = 15
    solution = staticmethod(order_of_step)

    def trial(self, attempt):
        facts = {}
        for name, blocks, kept, ahead in CASES:
            notes = list(attempt(blocks, kept, ahead))
            right = order_of_step(blocks, kept, ahead)
            bar = notes.index("|") if "|" in notes else len(notes)
            facts |= {
                f"the number of gathers in forward: {name}": _count("G", notes[:bar]),
                f"the number of gathers in backward: {name}": _count("G", notes[bar:]),
                f"the number of reductions: {name}": _count("R", notes),
                f"the number of notes: {name}": len(notes),
                f"how many notes are right before the first that is not: {name}": next(
                    (place for place, (one, other) in enumerate(zip(notes, right, strict=False))
                     if one != other), min(len(notes), len(right)))}
        return facts

    def expected(self, world_size):
        return self.trial(order_of_step)

    hints = (
        "Write forward and backward as two loops. What does a block do in each of them, from its "
        "gather on? And what does the root do, once?",
        "Look at the line above in pieces of one block. In forward: `G2 F2`. In backward: "
        "`B2 G1 R2`, so block 1's gather stands within block 2's piece. Who gathers block 5, then?",
        "`kept` takes all gathers out of backward. With `ahead`, block b gathers block b+1 just "
        "before its own forward, and was itself gathered by the block before it; block 0 by nobody "
        "else.",
    )
    slips = (
        Slip("The root is gathered again in backward. It is needed from the end of forward on, and "
             "stays whole.", {'notes.append("|")': 'notes += ["|", "Gr"]'}),
        Slip("The root's gradients are missing. They are reduced last.", {', "Rr"]': "]"}),
        Slip("In backward you gather a block when the one before it has been reduced. Prefetching "
             "launches it earlier, while that one computes.",
             {f'{BACK}\n        notes.append(f"R{{block}}")':
              'notes.append(f"R{block}")\nif block and not kept:\n'
              '    notes.append(f"G{block - 1}")'}),
        Slip("Kept units are whole in backward. Nobody gathers them again.",
             {"if blocks and not kept": "if blocks", "if block and not kept": "if block"}),
        Slip("Backward's gathers are missing. A block was freed after forward.",
             {"if blocks and not kept": "if False", "if block and not kept": "if False"}),
        Slip("With `ahead`, a block's forward begins before the gather of the next one is "
             "launched. It is launched first, so that there is something to hide it behind.",
             {'if ahead and following < blocks:\n            notes.append(f"G{following}")\n'
              '        notes.append(f"F{block}")':
              'notes.append(f"F{block}")\nif ahead and following < blocks:\n'
              '    notes.append(f"G{following}")'}),
        Slip("With `ahead`, blocks are gathered twice in forward: by the one before them, and then "
             "by themselves.", {"if block == 0 or not ahead:": "if True:"}),
        Slip("Backward goes through the blocks from the last to the first.",
             {"reversed(range(blocks))": "range(blocks)"}),
    )


def _count(kind, notes):
    return sum(note.startswith(kind) for note in notes)
