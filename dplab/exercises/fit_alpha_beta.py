"""Exercise 3.6: fit latency and bandwidth."""

import math

import numpy

from dplab import RankError
from dplab.checks.exercise import AT_LEAST, Calculation, Mistake
from dplab.exercises.ring_seconds import _as_float


def fit_alpha_beta(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    # α·(1/t) + (1/β)·(n/t) = 1 for each point: linear in α and 1/β.
    rows = numpy.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, inverse_beta = numpy.linalg.lstsq(rows, numpy.ones(len(sizes)))[0]
    return alpha, 1 / inverse_beta


def fits_absolute_errors(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1)
    return intercept, 1 / slope


def weighs_too_much(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(seconds) ** 2)
    return intercept, 1 / slope


def weighs_too_little(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.sqrt(seconds))
    return intercept, 1 / slope


def weighs_the_wrong_way(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=numpy.array(seconds))
    return intercept, 1 / slope


def weighs_by_size(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(sizes))
    return intercept, 1 / slope


def inverse_of_beta(sizes, seconds):
    alpha, beta = fit_alpha_beta(sizes, seconds)
    return alpha, 1 / beta


def beta_first(sizes, seconds):
    return fit_alpha_beta(sizes, seconds)[::-1]


def slope_for_alpha(sizes, seconds):
    alpha, beta = fit_alpha_beta(sizes, seconds)
    return 1 / beta, 1 / alpha


def first_and_last_point(sizes, seconds):
    beta = (sizes[-1] - sizes[0]) / (seconds[-1] - seconds[0])
    return seconds[0] - sizes[0] / beta, beta


def smallest_and_largest(sizes, seconds):
    return seconds[0], sizes[-1] / seconds[-1]


def mean_bandwidth(sizes, seconds):
    return min(seconds), float(numpy.mean(numpy.array(sizes) / numpy.array(seconds)))


def line_of_logarithms(sizes, seconds):
    slope, intercept = numpy.polyfit(numpy.log(sizes), numpy.log(seconds), 1)
    return math.exp(intercept), 1 / slope


def errors_of_logarithms(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    alpha, beta = fit_alpha_beta(sizes, seconds)
    for _ in range(50):  # Gauss and Newton's steps for log(α + n/β) − log t
        times = alpha + sizes / beta
        rows = numpy.stack([1 / times, sizes / times], axis=1)
        step = numpy.linalg.lstsq(rows, numpy.log(seconds / times))[0]
        alpha, beta = alpha + step[0], 1 / (1 / beta + step[1])
    return alpha, beta


def relative_to_the_prediction(sizes, seconds):
    sizes, seconds = numpy.array(sizes, float), numpy.array(seconds, float)
    alpha, beta = fit_alpha_beta(sizes, seconds)
    for _ in range(50):  # Gauss and Newton's steps for t / (α + n/β) − 1
        times = alpha + sizes / beta
        rows = numpy.stack([seconds / times**2, seconds * sizes / times**2], axis=1)
        step = numpy.linalg.lstsq(rows, seconds / times - 1)[0]
        alpha, beta = alpha + step[0], 1 / (1 / beta + step[1])
    return alpha, beta


def weighs_by_the_prediction(sizes, seconds):
    slope, intercept = numpy.polyfit(sizes, seconds, 1, w=1 / numpy.array(seconds))
    for _ in range(50):
        weights = 1 / (intercept + slope * numpy.array(sizes))
        slope, intercept = numpy.polyfit(sizes, seconds, 1, w=weights)
    return intercept, 1 / slope


def without_alpha(sizes, seconds):
    rows = numpy.array(sizes) / numpy.array(seconds)
    return 0.0, (rows @ rows) / rows.sum()


def relative_to_the_mean(sizes, seconds):
    alpha, beta = fits_absolute_errors(sizes, seconds)
    return alpha / numpy.mean(seconds), beta


def in_microseconds(sizes, seconds):
    alpha, beta = fit_alpha_beta(sizes, seconds)
    return 1e6 * alpha, beta

_ONE_TIME = ("You took the time of one message for α. Its bytes took a part of that time: fit α "
             "and β together, to all points.")


class FitAlphaBeta(Calculation):
    number = "3.6"
    title = "Fit latency and bandwidth"
    minutes = 15
    tolerance = 1e-3
    hints = (
        "The relative error is (α + n/β)/t − 1. What do you have to take for the two unknowns, so "
        "that it is linear in both?",
        "With the unknowns α and 1/β: a point (n, t) asks for α·(1/t) + (1/β)·(n/t) = 1. That is "
        "one row of a linear system, and there are more rows than unknowns.",
        "`numpy.linalg.lstsq(rows, ones)` solves it, with a row [1/t, n/t] for each point; or "
        "`numpy.polyfit(sizes, seconds, 1, w=1/t)`, which weighs each point with 1/t.",
    )
    solution = staticmethod(fit_alpha_beta)
    mistakes = (
        Mistake(fits_absolute_errors, "You made the errors in seconds small, and those of the "
                "large messages drown the others. The relative errors count: divide each by the "
                "time that was measured."),
        Mistake(weighs_too_much, "You divide by the square of the time. The relative error is "
                "divided by the time once; squaring comes after."),
        Mistake(weighs_too_little, "You divide by the root of the time. `w` multiplies the errors "
                "before they are squared, so it is 1/t."),
        Mistake(weighs_the_wrong_way, "You multiply the errors by the time, so large messages "
                "count still more. The relative error is divided by it."),
        Mistake(weighs_by_size, "You divide the errors by the size. Relative is to the time that "
                "was measured: small messages take hardly less than twice as large ones."),
        Mistake(inverse_of_beta, "α is right. You return seconds per byte, and β is bytes per "
                "second."),
        Mistake(beta_first, "Both are right, in the wrong order: α comes first."),
        Mistake(slope_for_alpha, "You took the slope for α. α is where the line meets zero bytes; "
                "the slope is 1/β."),
        Mistake(first_and_last_point, "You put a line through two points and leave out the others: "
                "the noise of these two goes into α and β. Use all points."),
        Mistake(smallest_and_largest, "You took the time of the smallest message for α, and n/t of "
                "the largest for β. Each holds some of the other; fit both together."),
        Mistake(mean_bandwidth, "You averaged n/t over all sizes. For a small message that is "
                "nearly all latency, not bandwidth. Fit both together."),
        Mistake(line_of_logarithms, "You fitted a line to the logarithms. α + n/β is a line in n "
                "itself, and bends on logarithmic axes."),
        Mistake(errors_of_logarithms, "You squared the differences of the logarithms. They are "
                "close to the relative errors, and not the same: the contract asks for "
                "(alpha + n/beta) / t - 1."),
        *(Mistake(attempt, "You divide by the predicted time. The contract divides by t, the time "
                  "that was measured: ((alpha + n/beta) / t - 1).")
          for attempt in (relative_to_the_prediction, weighs_by_the_prediction)),
        Mistake(without_alpha, "You left out α: a message of no bytes takes time too."),
        Mistake(relative_to_the_mean, "You divided by one time for all points. Each error is "
                "relative to the time of its own point."),
        Mistake(in_microseconds, "β is right. α is asked in seconds."),
    )

    def explanation(self, attempt, got, world_size):
        """One message's time taken for α is named, whatever stands for β."""
        why = super().explanation(attempt, got, world_size)
        if (why and not why.startswith(AT_LEAST)) or isinstance(got, RankError):
            return why
        alphas = {name: got[0].get(f"α in seconds of {name}") for name in self.given}
        taken = all(isinstance(alpha, float) and alpha in self.given[name][1]
                    for name, alpha in alphas.items())
        return _ONE_TIME if taken else why

    def prepare(self):
        """Known links, as points with noise: (sizes, seconds) of each."""
        found = {}
        for seed, (name, alpha, beta) in enumerate((("a slow link", 4e-4, 1.2e8),
                                                    ("a fast link", 3e-6, 4e10))):
            noise = numpy.random.default_rng(seed)
            sizes = [1024 * 4**power for power in range(7)]
            found[name] = sizes, [float((alpha + n / beta) * (1 + 0.25 * noise.standard_normal()))
                                  for n in sizes]
        return found

    def trial(self, attempt):
        facts = {}
        for name, (sizes, seconds) in self.given.items():
            alpha, beta = attempt(list(sizes), list(seconds))
            facts |= {f"α in seconds of {name}": _as_float(alpha),
                      f"β in bytes/s of {name}": _as_float(beta)}
        return facts

    def expected(self, world_size):
        facts = {}
        for name, (sizes, seconds) in self.given.items():
            alpha, beta = fit_alpha_beta(sizes, seconds)
            facts |= {f"α in seconds of {name}": float(alpha),
                      f"β in bytes/s of {name}": float(beta)}
        return facts
