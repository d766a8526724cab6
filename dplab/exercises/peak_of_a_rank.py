"""The most that a rank holds of a model that it never holds whole."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def peak_bytes(units, ranks):
    """The most bytes that a rank holds: its chunks' states, and the largest unit whole."""
    chunks = [-(-unit // ranks) for unit in units]
    states = 16 * sum(chunks)  # parameters, gradients, two moments, of 4 bytes each
    whole = ranks * max(chunks)
    return states + 2 * 4 * whole


def unit_by_unit(units, ranks):
    """The same as the largest of all units' backwards."""
    padded = [unit + -unit % ranks for unit in units]
    parameters = gradients = 4 * sum(padded) // ranks
    moments = 2 * parameters
    return max(parameters + gradients + moments + 4 * each + 4 * each for each in padded)


# By what each is about: the elements of each unit, and the ranks.
CASES = (
    ("eight equal units", [1000] * 8, 4),
    ("a large one in the middle", [700, 2300, 500, 900], 4),
    ("units that the ranks do not divide", [1001, 1502, 77, 1499], 4),
    ("many ranks", [1001, 1502, 77, 1499], 64),
    ("one unit", [5003], 3),
    ("one rank", [700, 2300, 500], 1),
    ("the largest is the last", [310, 320, 1331], 2),
)


class PeakOfARank(Calculation):
    number = "9.3"
    title = "The most that a rank holds"
    minutes = 10
    solution = staticmethod(peak_bytes)
    also_right = (unit_by_unit,)

    def trial(self, attempt):
        return of_cases(lambda case, answer: {fact_of(*case): answer}, CASES,
                        lambda _, units, ranks: attempt(list(units), ranks))

    def expected(self, world_size):
        return self.trial(peak_bytes)

    def terms(self):
        found = {}
        for case in CASES:
            _, units, ranks = case
            chunks = [-(-unit // ranks) for unit in units]
            found[fact_of(*case)] = {
                "4 bytes for each element of the chunks": 4 * sum(chunks),
                "4 bytes for each element of the largest unit": 4 * ranks * max(chunks),
                "4 bytes for each element of the model": 4 * sum(units)}
        return {"": found}

    hints = (
        "Two kinds of things. What does a rank hold all through the step, whatever is computed "
        "just then? And what is added while one unit computes?",
        "All through the step: for each element of a chunk, a parameter, a gradient and Adam's two "
        "moments, 4 bytes each. Which is worse for what is added, forward or backward?",
        "`chunks = [-(-unit // ranks) for unit in units]`: 16 bytes for each element of these. In "
        "backward a unit is there as whole parameters and as a whole gradient: 8 bytes for each "
        "of `ranks * max(chunks)` elements.",
    )
    slips = (
        Slip("You leave the whole gradient out. In backward a unit's whole parameters and its "
             "whole gradient are there at once, until the reduce-scatter.",
             {"2 * 4 * whole": "4 * whole"}),
        Slip("You leave the unit that computes out. While it computes, it is whole.",
             {"states + 2 * 4 * whole": "states"}),
        Slip("You add all units whole. They are freed one after another: the largest one counts.",
             {"ranks * max(chunks)": "ranks * sum(chunks)"}),
        Slip("You leave out Adam's two moments, of 4 bytes each.", {"16 * sum": "8 * sum"}),
        Slip("Four values stay for each element of a chunk, of 4 bytes each: parameter, gradient "
             "and Adam's two moments. You count three.", {"16 * sum": "12 * sum"}),
        Slip("You do not divide the states: each rank keeps its chunk of them, and nothing more.",
             {"16 * sum(chunks)": "16 * sum(units)"}),
        Slip("You leave out the padding. A chunk has ⌈n/N⌉ elements, on every rank.",
             {"-(-unit // ranks)": "unit / ranks"}, {"-(-unit // ranks)": "unit // ranks"}),
        Slip("The chunks have their padding, and the unit that computes has not. It is gathered as "
             "N chunks of ⌈n/N⌉ elements, so it is whole with its padding.",
             {"ranks * max(chunks)": "max(units)"},
             {"2 * 4 * whole": "4 * whole + 4 * max(units)"}),
        Slip("You cut the whole model at once. Each unit has chunks of its own, and padding of its "
             "own.", {"16 * sum(chunks)": "16 * -(-sum(units) // ranks)"}),
    )


def fact_of(name, units, ranks):
    return f"the bytes of {units} on {ranks} ranks ({name})"
