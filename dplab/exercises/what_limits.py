"""Into how many slices a local batch is cut to fit, and what limits the step then."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def what_limits(ranks, batch, parameters, states, row, memory, flops, bandwidth):
    room = memory - states * parameters
    if room <= 0:
        return None, "memory"
    local = batch / ranks
    slices = math.ceil(local * row / room)
    needed = 2 * (ranks - 1) / ranks * flops / bandwidth  # 4 P bytes beside 4 P operations a row
    if local / slices >= needed:
        return slices, "nothing"
    return slices, "memory" if local >= needed else "link"


# ranks, batch, parameters, states, row, memory, flops, bandwidth
CASES = (
    (1, 9_000, 4e8, 16, 1e6, 24e9, 1e14, 1e10),  # nothing to send
    (8, 2**20, 7e9, 18, 3e6, 80e9, 9e14, 4e11),  # no room for the states
    (16, 320_000, 1e9, 16, 5e5, 24e9, 3e14, 1e10),
    (6, 120_000, 3e9, 8, 3e6, 40e9, 3e14, 5e10),
    (256, 15_360_000, 2e9, 16, 1e6, 40e9, 9e14, 4e11),
    (64, 3_840_000, 4e8, 18, 3e6, 40e9, 3e14, 1e10),
    (5, 300_000, 2e9, 8, 3e6, 24e9, 1e14, 5e10),
    (256, 2**20, 2.5e9, 18, 4e6, 80e9, 1e15, 4e11),  # too many ranks for this batch
    (8, 2**18, 2.7e9, 18, 1e6, 80e9, 9e14, 6e10),  # enough rows fit, and equal slices have fewer
)
BLAME = '"memory" if local >= needed else "link"'
FACTOR = "2 * (ranks - 1) / ranks * flops"


class WhatLimits(Calculation):
    number = "1.5"
    title = "What limits first"
    minutes = 20
    solution = staticmethod(what_limits)

    def trial(self, attempt):
        return of_cases(_facts_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_facts_of, CASES, what_limits)

    hints = (
        "Begin with memory. What is left of it once the model's states lie there, and how many "
        "rows fit into the rest? Into how many slices must the local batch be cut, so that each "
        "has no more rows than that?",
        "The gradient is complete only in the last slice's backward, so only that one can hide the "
        "message. How many rows must it have? Exercise 1.3 says it for one layer; for a model of "
        "P parameters the message has 4·P bytes, and backward 4·P operations for each row.",
        "`room = memory - states * parameters`; slices: `batch / ranks * row / room`, rounded up; "
        "rows needed: `2 * (ranks - 1) / ranks * flops / bandwidth`. Compare the rows of one slice "
        "with the rows needed; where they are too few, compare those of the whole local batch.",
    )
    slips = (
        # What fits.
        Slip("You let one rank compute the whole batch. The ranks share it: each has `batch / "
             "ranks` rows.", {"batch / ranks": "batch"}),
        Slip("You gave all of the memory to the rows. The states lie there too, `states` bytes for "
             "each parameter, and no slice makes them smaller.",
             {"memory - states * parameters": "memory"}),
        Slip("You took the model's parameters for its bytes. Each parameter has `states` bytes in "
             "memory.", {"states * parameters": "parameters"}),
        Slip("You divided the states among the ranks. Each rank holds a whole replica.",
             {"states * parameters": "states * parameters / ranks"}),
        Slip('Where the states alone fill the memory, no slice is small enough: (None, "memory").',
             {"room <= 0": "False"}, {'return None, "memory"': 'return 0, "memory"'},
             {'return None, "memory"': 'return 1, "memory"'}),
        Slip("You rounded the slices down, so a slice has more rows than fit.",
             {"math.ceil(local * row / room)": "max(1, int(local * row / room))"}),
        Slip("You did not round the slices up to a whole number.",
             {"math.ceil(local * row / room)": "max(1, local * row / room)"}),
        Slip("You return one slice too many: a local batch that fits uncut is one slice.",
             {"math.ceil(local * row / room)": "math.ceil(local * row / room) + 1"}),
        # What hides.
        Slip("You let the whole local batch hide the message. The gradient is complete only in the "
             "last slice's backward, so only the rows of one slice count.",
             {"local / slices >= needed": "local >= needed"}),
        Slip("You compare the rows that *fit* with the rows needed. A slice can have fewer than "
             "fit: where 10 fit, a local batch of 12 is cut into two slices of 6.",
             {"local / slices >= needed": "min(local, room / row) >= needed"},
             {"local / slices >= needed": "room / row >= needed"}),
        Slip("You counted forward's product too, or compared with the whole step. Before backward "
             "there is no gradient to send.", {FACTOR: f"{FACTOR} * 2 / 3"}),
        Slip("Your rows that hide the message are half of the right ones. Did you take 2 bytes for "
             "each number of the gradient, or (N−1)/N for what an all-reduce sends? It is 4 "
             "bytes, and 2(N−1)/N.", {FACTOR: f"{FACTOR} / 2"}),
        Slip("Your rows that hide the message are twice the right ones. Backward has two products "
             "for each layer, and each multiplies *and* adds: 4 operations for each parameter and "
             "row.", {FACTOR: f"2 * {FACTOR}"}),
        Slip("Your rows that hide the message are four times the right ones. Backward has two "
             "products, and each multiplies *and* adds: 4 operations for each parameter and row.",
             {FACTOR: f"4 * {FACTOR}"}),
        Slip("Your rows that hide the message do not depend on the number of ranks. A rank sends "
             "2(N−1)/N times the gradient: once with 2 ranks, and nothing with 1.",
             {FACTOR: "2 * flops"}, {FACTOR: "flops"}),
        Slip("You let each rank send its whole gradient to every other one. An all-reduce sends "
             "2(N−1)/N times the gradient.", {FACTOR: "2 * (ranks - 1) * flops"},
             {FACTOR: "(ranks - 1) * flops"}),
        Slip("Your fraction is upside down: a faster link needs fewer rows.",
             {"flops / bandwidth": "bandwidth / flops"}),
        # The answer.
        Slip("You exchanged the two walls. If the whole local batch has rows enough, it is memory "
             "that cuts it into slices that are too small. If not, there are too many ranks for "
             "this batch, and the link limits.",
             {BLAME: '"link" if local >= needed else "memory"'}),
        Slip("You blame the link whenever something stays exposed. Would the local batch hide the "
             "message if memory did not cut it into slices?", {BLAME: '"link"'}),
        Slip("You blame memory whenever something stays exposed. Where the whole local batch has "
             "too few rows, more memory would not help.", {BLAME: '"memory"'}),
        Slip("You blame memory whenever there are slices. Slices limit nothing as long as each of "
             "them hides the message.",
             {"local / slices >= needed": "slices == 1 and local >= needed"}),
        Slip("You exchanged the two results: the slices first.",
             {'return None, "memory"': 'return "memory", None',
              'return slices, "nothing"': 'return "nothing", slices',
              f"return slices, {BLAME}": f"return ({BLAME}), slices"}),
    )


def _facts_of(case, answer):
    ranks, batch, parameters, *_ = case
    of = f"(N = {ranks}, {batch:,} rows, {parameters:g} parameters)"
    both = isinstance(answer, tuple | list) and len(answer) == 2
    slices, limit = answer if both else (answer, None)
    return {f"the slices {of}": float(slices) if isinstance(slices, int) else said(slices),
            f"what limits {of}": said(limit)}


def said(value):
    """What is compared where it should be a word, or None."""
    return value if isinstance(value, str | float) else str(value)
