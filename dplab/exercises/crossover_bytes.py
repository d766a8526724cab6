"""Exercise 3.7: where two algorithms take equally long."""

import math

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases
from dplab.exercises.ring_seconds import _as_float


def crossover_bytes(one, other, alpha, beta):
    # m₁·α + c₁·M/β = m₂·α + c₂·M/β, solved for M.
    (messages, carried), (other_messages, other_carried) = one, other
    if carried == other_carried:
        return None
    size = (other_messages - messages) * alpha * beta / (carried - other_carried)
    return size if size > 0 else None


def wrong_sign(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return None if size is None else -size


def wrong_sign_and_none(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return -size if size is not None and size < 0 else None


def never_none(one, other, alpha, beta):
    return _crossing(one, other, alpha, beta)


def without_its_sign(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return None if size is None else abs(size)


def divides_by_zero(one, other, alpha, beta):
    return (other[0] - one[0]) * alpha * beta / (one[1] - other[1])


def upside_down(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else (alpha * beta) ** 2 / size


def alpha_over_beta(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else size / beta**2


def without_beta(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else size / beta


def without_alpha_in_it(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else size / alpha


def seconds_for_bytes(one, other, alpha, beta):
    size = crossover_bytes(one, other, alpha, beta)
    return None if size is None else one[0] * alpha + one[1] * size / beta


def counts_messages_alone(one, other, alpha, beta):
    if one[1] == other[1] or (other[0] - one[0]) / (one[1] - other[1]) <= 0:
        return None
    return abs(other[0] - one[0]) * alpha * beta


def counts_bytes_alone(one, other, alpha, beta):
    if one[1] == other[1] or (other[0] - one[0]) / (one[1] - other[1]) <= 0:
        return None
    return alpha * beta / abs(one[1] - other[1])


def sums_for_differences(one, other, alpha, beta):
    if crossover_bytes(one, other, alpha, beta) is None:
        return None
    return (one[0] + other[0]) * alpha * beta / (one[1] + other[1])


def bytes_of_each_message(one, other, alpha, beta):
    return crossover_bytes((one[0], one[0] * one[1]), (other[0], other[0] * other[1]), alpha, beta)


def zero_for_as_many_messages(one, other, alpha, beta):
    size = _crossing(one, other, alpha, beta)
    return size if size is not None and size >= 0 else None


def infinite_for_as_many_bytes(one, other, alpha, beta):
    return math.inf if one[1] == other[1] else crossover_bytes(one, other, alpha, beta)


def zero_where_one_wins(one, other, alpha, beta):
    return crossover_bytes(one, other, alpha, beta) or 0.0


def _crossing(one, other, alpha, beta):
    """Where the two lines meet, also where no tensor is."""
    if one[1] == other[1]:
        return None
    return (other[0] - one[0]) * alpha * beta / (one[1] - other[1])


class CrossoverBytes(Calculation):
    number = "3.7"
    title = "Where two algorithms take equally long"
    minutes = 10
    hints = (
        "Write down the seconds of each algorithm for a tensor of M bytes. Where are they equal?",
        "With four ranks, a tree takes 5α + 5M/β and a ring 6α + 1.5M/β. Bring M to one side "
        "first; then write letters for the numbers.",
        "M = (difference of the messages) · α · β / (difference of the bytes), the second minus "
        "the first above and the first minus the second below. No size where it is not above 0.",
    )
    solution = staticmethod(crossover_bytes)
    mistakes = (
        Mistake(wrong_sign, "The sign is wrong: where one difference is the first minus the "
                "second, the other one is the second minus the first."),
        Mistake(wrong_sign_and_none, "You return None where there is such a size, and a size where "
                "there is none: the sign is wrong. Where one difference is the first minus the "
                "second, the other one is the second minus the first."),
        Mistake(never_none, "Where the lines meet below 0 bytes or at 0, one algorithm is faster "
                "for every tensor: return None."),
        Mistake(without_its_sign, "A size below 0 is no size, and its absolute value is none "
                "either: there one algorithm is faster for every tensor. Return None."),
        Mistake(divides_by_zero, "You divide by zero where both send equally much. There is no "
                "size then: return None."),
        Mistake(upside_down, "The fraction is upside down. More messages make the size larger, a "
                "larger difference in bytes makes it smaller."),
        Mistake(alpha_over_beta, "You divide by β, and have to multiply: on a faster link more "
                "bytes fit into one latency."),
        Mistake(without_beta, "β is missing: what you return is in seconds. Multiply by bytes per "
                "second."),
        Mistake(without_alpha_in_it, "α is missing: without latency nobody would save messages."),
        Mistake(seconds_for_bytes, "You return how long both take there. The size is asked, in "
                "bytes."),
        Mistake(counts_messages_alone, "You left out how many bytes the algorithms send. Divide "
                "by the difference of these."),
        Mistake(counts_bytes_alone, "You left out how many messages the algorithms have. Multiply "
                "by the difference of these."),
        Mistake(sums_for_differences, "You added, where each side is taken from the other: bring "
                "α to one side of the equation and M to the other."),
        Mistake(bytes_of_each_message, "The second number is what all messages in the sequence "
                "carry together, not each of them. Do not multiply by the messages again."),
        Mistake(zero_for_as_many_messages, "With as many messages on both sides, the lines meet at "
                "0 bytes, and no tensor has 0 bytes: one is faster for every tensor. Return None."),
        Mistake(infinite_for_as_many_bytes, "Where both carry as many bytes, the lines run side by "
                "side and never meet. No size is infinite: return None."),
        Mistake(zero_where_one_wins, "Where one algorithm is faster for every tensor there is no "
                "size, not 0: return None."),
    )
    CASES = (((5, 5.0), (6, 1.5), 25e-3, 20e6), ((14, 1.75), (9, 9.0), 14e-6, 50e9),
             ((2, 3.0), (5, 0.5), 3e-6, 1e11), ((3, 3.0), (6, 6.0), 1e-5, 1e9),
             ((6, 1.5), (4, 1.5), 1e-5, 1e9), ((4, 2.0), (4, 1.0), 1e-5, 1e9))

    def trial(self, attempt):
        return of_cases(_crossover_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_crossover_facts, self.CASES, crossover_bytes)


def _crossover_facts(case, size):
    one, other, alpha, beta = case
    return {f"the size for (messages, bytes) of {one} and {other}, α = {alpha:g} s and "
            f"β = {beta:g} bytes/s": "infinite" if size == math.inf else _as_float(size)}
