"""A line through noisy points, by least squares of relative errors."""

import numpy

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip


def fit_alpha_beta(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    # α·(1/t) + (1/β)·(n/t) = 1 for each point: linear in α and 1/β.
    rows = numpy.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, inverse_beta = numpy.linalg.lstsq(rows, numpy.ones(len(sizes)))[0]
    return alpha, 1 / inverse_beta


def by_weights(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(seconds))
    return intercept, 1 / slope


def by_newton(sizes, seconds):
    """Gauss and Newton's steps, which make the squares of any errors small."""
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    intercept, slope = min(seconds), min(seconds / sizes)
    for _ in range(50):
        times = intercept + slope * sizes
        errors, growth = times / seconds - 1, 1 / seconds  # growth: with `times`
        steps = numpy.polyfit(sizes, -errors / growth, 1, w=growth)
        slope, intercept = slope + steps[0], intercept + steps[1]
    return intercept, 1 / slope


class FitAlphaBeta(Calculation):
    number = "3.5"
    title = "Fit latency and bandwidth"
    minutes = 15
    tolerance = 1e-3
    solution = staticmethod(fit_alpha_beta)
    also_right = (by_weights, by_newton)

    def prepare(self):
        """Known links, as points with noise: (sizes, seconds) of each."""
        found = {}
        links = (("noisy times over a link of 0.0004 s and 1.2e8 bytes/s", 4e-4, 1.2e8),
                 ("noisy times over a link of 3e-06 s and 4e10 bytes/s", 3e-6, 4e10))
        for seed, (name, alpha, beta) in enumerate(links):
            noise = numpy.random.default_rng(seed)
            sizes = [1024.0 * 4**power for power in range(7)]
            found[name] = sizes, [float((alpha + n / beta) * (1 + 0.25 * noise.standard_normal()))
                                  for n in sizes]
        return found

    def trial(self, attempt):
        return self._facts(attempt)

    def expected(self, world_size):
        return self._facts(fit_alpha_beta)

    def _facts(self, function):
        facts = {}
        for name, (sizes, seconds) in self.given.items():
            alpha, beta = function(list(sizes), list(seconds))
            facts |= {f"that α of {name} comes from all points, and is no message's own time":
                      alpha not in seconds,
                      f"α in seconds, fitted to {name}": alpha,
                      f"β in bytes/s, fitted to {name}": beta}
        return facts

    hints = (
        "The relative error is (α + n/β)/t − 1. What do you have to take for the two unknowns, so "
        "that it is linear in both?",
        "With the unknowns α and 1/β: a point (n, t) asks for α·(1/t) + (1/β)·(n/t) = 1. That is "
        "one row of a linear system, and there are more rows than unknowns.",
        "`numpy.linalg.lstsq(rows, ones)` solves it, with a row [1/t, n/t] for each point; or "
        "`numpy.polyfit(sizes, seconds, 1, w=1/t)`, which weighs each point with 1/t.",
    )
    slips = (
        # The errors whose squares are small.
        Slip("You made the errors in seconds small, and those of the large messages drown the "
             "others. The relative errors count: divide each by the time that was measured.",
             {", w=1 / numpy.array(seconds)": ""}),
        Slip("You divide by the square of the time. The relative error is divided by the time "
             "once; squaring comes after.", {"w=1 / numpy.array(seconds)":
                                             "w=1 / numpy.array(seconds) ** 2"}),
        Slip("You divide by the root of the time. `w` multiplies the errors before they are "
             "squared, so it is 1/t.", {"1 / numpy.array(s": "1 / numpy.sqrt(s"}),
        Slip("You multiply the errors by the time, so large messages count still more. The "
             "relative error is divided by it.", {"w=1 / numpy": "w=numpy"}),
        Slip("You divide the errors by the size. Relative is to the time that was measured: small "
             "messages take hardly less than twice as large ones.",
             {"1 / numpy.array(seconds)": "1 / numpy.array(sizes)"}),
        Slip("You divide by the predicted time. The contract divides by t, the time that was "
             "measured: ((alpha + n/beta) / t - 1).",
             {"times / seconds - 1, 1 / seconds": "1 - seconds / times, seconds / times**2"},
             {"times / seconds - 1, 1 / seconds": "1 - seconds / times, 1 / times"}),
        Slip("You squared the differences of the logarithms. They are close to the relative "
             "errors, and not the same: the contract asks for (alpha + n/beta) / t - 1.",
             {"times / seconds - 1, 1 / seconds": "numpy.log(times / seconds), 1 / times"}),
        Slip("You fitted a line to the logarithms. α + n/β is a line in n itself, and bends on "
             "logarithmic axes.",
             {"sizes, seconds, 1, w=1 / numpy.array(seconds)":
              "numpy.log(sizes), numpy.log(seconds), 1", "return intercept":
              "return numpy.exp(intercept)"}),
        Slip("You divided by one time for all points. Each error is relative to the time of its "
             "own point.",
             {"seconds, 1, w=1 / numpy.array(seconds)": "seconds / numpy.mean(seconds), 1"},
             {", w=1 / numpy.array(seconds)": "",
              "return intercept": "return intercept / numpy.mean(seconds)"}),
        Slip("You left out α: a message of no bytes takes time too.",
             {"[1 / seconds,": "[0 / seconds,"}),
        # What is taken from single points.
        Slip("You put a line through two points and leave out the others: the noise of these two "
             "goes into α and β. Use all points.",
             {"array(sizes,": "array(sizes[::len(sizes) - 1],",
              "array(seconds,": "array(seconds[::len(seconds) - 1],"}),
        Slip("You took the time of one message for α, and n/t of one for β. Each holds some of the "
             "other; fit both together, to all points.",
             {"return alpha, 1 / inverse_beta": "return seconds[0], sizes[-1] / seconds[-1]"},
             {"return alpha, 1 / inverse_beta": "return min(seconds), max(sizes / seconds)"}),
        Slip("You averaged n/t over all sizes. For a small message that is nearly all latency, not "
             "bandwidth. Fit both together.",
             {"return alpha, 1 / inverse_beta": "return min(seconds), numpy.mean(sizes / seconds)"},
             {"1 / inverse_beta": "numpy.mean(sizes / seconds)"}),
        Slip("You took the time of one message for α. Its bytes took a part of that time: fit α "
             "and β together, to all points.", {"return alpha": "return seconds[0]"},
             {"return alpha": "return min(seconds)"}),
        # What is returned.
        Slip("You return seconds per byte, and β is bytes per second.", {"1 / slope": "slope"}),
        Slip("Both are right, in the wrong order: α comes first.",
             {"intercept, 1 / slope": "1 / slope, intercept"}),
        Slip("You took the slope for α. α is where the line meets zero bytes; the slope is 1/β.",
             {"slope, intercept = numpy": "intercept, slope = numpy"}),
        Slip("α is asked in seconds, and this is a million times as many.",
             {"return intercept": "return 1e6 * intercept"}),
    )
