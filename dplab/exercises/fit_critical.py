"""The critical batch of a target, from the steps that a sweep of batches took."""

import numpy
import torch

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip


def fit_critical(steps):
    batches, measured = numpy.array(list(steps), float), numpy.array(list(steps.values()), float)
    # S_min·(1/S) + S_min·B_crit·(1/(B·S)) = 1 for each batch: linear in S_min and the product.
    rows = numpy.stack([1 / measured, 1 / (batches * measured)], axis=1)
    least, product = numpy.linalg.lstsq(rows, numpy.ones(len(steps)))[0]
    return least, product / least


def by_weights(steps):
    batches, measured = numpy.array(list(steps), float), numpy.array(list(steps.values()), float)
    slope, intercept = numpy.polyfit(1 / batches, measured, 1, w=1 / measured)
    return intercept, slope / intercept


def by_search(steps):
    batches, measured = numpy.array(list(steps), float), numpy.array(list(steps.values()), float)
    found = []
    for critical in 1.002 ** numpy.arange(6000):
        shape = (1 + critical / batches) / measured
        least = shape.sum() / (shape**2).sum()
        found.append((((least * shape - 1) ** 2).sum(), least, critical))
    return min(found)[1:]


# S_min and B_crit of each sweep, and the batches that were tried.
SWEEPS = {"a sweep that bends": (40, 300, [2**power for power in range(4, 13)]),
          "a sweep of small batches": (900, 5_000, [64, 96, 256, 1024, 4096]),
          "a sweep of large batches": (15, 70, [32, 64, 128, 256, 1024, 2048, 8192])}


class FitCritical(Calculation):
    number = "7.2"
    title = "Fit the critical batch"
    minutes = 15
    tolerance = 1e-2  # of a search
    solution = staticmethod(fit_critical)
    also_right = (by_weights, by_search)

    def prepare(self):
        """Known sweeps, with noise: the steps by batch, of each."""
        noise = numpy.random.default_rng(7)
        return {name: {batch: round(float(least * (1 + critical / batch)
                                          * (1 + 0.15 * noise.standard_normal())))
                       for batch in batches}
                for name, (least, critical, batches) in SWEEPS.items()}

    def trial(self, attempt):
        return self._facts(attempt)

    def expected(self, world_size):
        return self._facts(fit_critical)

    def _facts(self, function):
        facts = {}
        for name, steps in self.given.items():
            found = function(dict(steps))
            pair = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
            for what, number in zip(("S_min", "B_crit"), pair, strict=True):
                is_number = isinstance(number, int | float | numpy.number | torch.Tensor)
                facts[f"{what} of {name}"] = float(number) if is_number else type(number).__name__
        return facts

    hints = (
        "Draw S over 1/B instead of B. What does the formula look like there?",
        "It is a line: S_min + (S_min · B_crit) · (1/B). Exercise 3.5 fitted a line by relative "
        "errors. Which of its two numbers is which here?",
        "With the unknowns u = S_min and v = S_min · B_crit, a point asks for u·(1/S) + "
        "v·(1/(B·S)) = 1. `numpy.linalg.lstsq(rows, ones)` solves it, with a row [1/S, 1/(B·S)] "
        "for each batch; then B_crit = v / u.",
    )
    slips = (
        # The errors.
        Slip("You made the errors in steps small, so the small batches, which take the most steps, "
             "drown the others. Divide each error by the steps that were measured.",
             {", w=1 / measured": ""}),
        Slip("You divide by the square of the steps. The relative error is divided by the steps "
             "once; squaring comes after.", {"w=1 / measured": "w=1 / measured**2"}),
        Slip("You divide by the root of the steps. `w` multiplies the errors before they are "
             "squared, so it is 1/S.", {"w=1 / measured": "w=1 / numpy.sqrt(measured)"}),
        Slip("You multiply the errors by the steps. The relative error is divided by them.",
             {"w=1 / measured": "w=measured"}),
        Slip("You squared the differences of the logarithms. They are close to the relative "
             "errors, and not the same: the contract asks for fit / S − 1.",
             {"shape.sum() / (shape**2).sum()": "numpy.exp(-numpy.log(shape).mean())",
              "(least * shape - 1)": "numpy.log(least * shape)"}),
        Slip("You fitted the samples B · S over B, and made the errors in samples small, so the "
             "large batches, which take the most samples, drown the others. Divide each error by "
             "what was measured.",
             {"slope, intercept = numpy.polyfit(1 / batches, measured, 1, w=1 / measured)":
              "intercept, slope = numpy.polyfit(batches, batches * measured, 1)"}),
        # The form.
        Slip("You fitted a line in B. The formula is a line in 1/B.",
             {"polyfit(1 / batches,": "polyfit(batches,"}),
        Slip("You fitted a line to the logarithms, which is a power of B and has no bend.",
             {"polyfit(1 / batches, measured, 1, w=1 / measured)":
              "polyfit(numpy.log(batches), numpy.log(measured), 1)",
              "return intercept, slope / intercept":
              "return numpy.exp(intercept), -slope"}),
        # From single points.
        Slip("You took the fewest measured steps for S_min. Even the largest batch takes more than "
             "S_min: fit both numbers together, to all points.",
             {"return intercept, slope / intercept":
              "return min(measured), slope / min(measured)"},
             {"return intercept,": "return min(measured),"}),
        Slip("You solve for two points and leave out the others, so the noise of these two goes "
             "into both numbers. Use all points.",
             {"1 / batches, measured, 1, w=1 / measured":
              "1 / batches[[0, -1]], measured[[0, -1]], 1"}),
        # What is returned.
        Slip("Your second number is S_min · B_crit, the least *samples*. Divide it by S_min.",
             {"product / least": "product"}, {"slope / intercept": "slope"}),
        Slip("Your second number is turned around: B_crit is the slope over 1/B divided by S_min.",
             {"slope / intercept": "intercept / slope"}),
        Slip("Both numbers are right, in the wrong order: S_min comes first.",
             {"least, product / least": "product / least, least"}),
        Slip("You took the slope for S_min. S_min is where the line meets 1/B = 0.",
             {"slope, intercept = numpy": "intercept, slope = numpy"}),
    )
