"""The tensor size at which fewer messages and fewer bytes are worth as much."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def crossover_bytes(one, other, alpha, beta):
    # m₁·α + c₁·M/β = m₂·α + c₂·M/β, solved for M.
    (messages, carried), (other_messages, other_carried) = one, other
    more, fewer = other_messages - messages, carried - other_carried
    if fewer == 0:
        return None
    size = more * alpha * beta / fewer
    return size if size > 0 else None


def asking_first_who_wins(one, other, alpha, beta):
    (messages, carried), (other_messages, other_carried) = one, other
    more, fewer = other_messages - messages, carried - other_carried
    if more * fewer <= 0:  # one is faster for every tensor
        return None
    return more * alpha * beta / fewer


# one, other, alpha, beta; in the last three, one is faster for every tensor
CASES = (((5, 5.0), (6, 1.5), 25e-3, 20e6), ((14, 1.75), (9, 9.0), 14e-6, 50e9),
         ((2, 3.0), (5, 0.5), 3e-6, 1e11), ((3, 3.0), (6, 6.0), 1e-5, 1e9),
         ((6, 1.5), (4, 1.5), 1e-5, 1e9), ((4, 2.0), (4, 1.0), 1e-5, 1e9))


class CrossoverBytes(Calculation):
    number = "3.7"
    title = "Where two algorithms take equally long"
    minutes = 10
    solution = staticmethod(crossover_bytes)
    also_right = (asking_first_who_wins,)

    def trial(self, attempt):
        return of_cases(size_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(size_of, CASES, crossover_bytes)

    hints = (
        "Write down the seconds of each algorithm for a tensor of M bytes. Where are they equal?",
        "With four ranks, a tree takes 5α + 5M/β and a ring 6α + 1.5M/β. Bring M to one side "
        "first; then write letters for the numbers.",
        "M = (difference of the messages) · α · β / (difference of the bytes), the second minus "
        "the first above and the first minus the second below. No size where it is not above 0.",
    )
    slips = (
        # The size.
        Slip("Your size has the wrong sign, be it returned or turned into None: where one "
             "difference is the first minus the second, the other one is the second minus the "
             "first.", {"other_messages - messages": "messages - other_messages"},
             {"return more": "return -more"}),
        Slip("You added, where each side is taken from the other: bring α to one side of the "
             "equation and M to the other.",
             {"other_messages - messages": "other_messages + messages",
              "carried - other_carried": "carried + other_carried"},
             {"return more": "return (messages + other_messages)",
              "/ fewer": "/ (carried + other_carried)"}),
        Slip("The fraction is upside down. More messages make the size larger, a larger difference "
             "in bytes makes it smaller.",
             {"return more * alpha * beta / fewer": "return fewer * alpha * beta / more"},
             {"fewer == 0": "more == 0",
              "size = more * alpha * beta / fewer": "size = fewer * alpha * beta / more"}),
        Slip("You divide by β, and have to multiply: on a faster link more bytes fit into one "
             "latency.", {"alpha * beta": "alpha / beta"}),
        Slip("β is missing: what you return is in seconds. Multiply by bytes per second.",
             {"alpha * beta": "alpha"}),
        Slip("α is missing: without latency nobody would save messages.", {"alpha * beta": "beta"}),
        Slip("You return how long both take there. The size is asked, in bytes.",
             {"return size if": "return messages * alpha + carried * size / beta if"}),
        Slip("You left out how many bytes the algorithms send. Divide by the difference of these.",
             {" / fewer": ""}, {"more * alpha * beta / fewer": "abs(more) * alpha * beta"}),
        Slip("You left out how many messages the algorithms have. Multiply by the difference of "
             "these.", {"more * alpha": "alpha"},
             {"more * alpha * beta / fewer": "alpha * beta / abs(fewer)"}),
        Slip("The second number is what all messages in the sequence carry together, not each of "
             "them. Do not multiply by the messages again.",
             {"= one, other": "= [(count, count * each) for count, each in (one, other)]"}),
        # Where there is none.
        Slip("Where the lines meet below 0 bytes or at 0, one algorithm is faster for every "
             "tensor: return None.", {"return size if size > 0 else None": "return size"}),
        Slip("A size below 0 is no size, and its absolute value is none either: there one "
             "algorithm is faster for every tensor. Return None.",
             {"return size if size > 0 else None": "return abs(size)"},
             {"return size if size > 0": "return abs(size) if size"}),
        Slip("With as many messages on both sides, the lines meet at 0 bytes, and no tensor has 0 "
             "bytes: one is faster for every tensor. Return None.", {"size > 0": "size >= 0"}),
        Slip("You divide by zero where both send as many bytes, or as many messages. There is no "
             "size then: return None.", {"fewer == 0": "False"}),
        Slip("No size is infinite. Where both carry as many bytes, the lines run side by side and "
             "never meet: return None.", {"return None": "return math.inf"}),
        Slip("Where one algorithm is faster for every tensor there is no size, not 0: return "
             "None.", {"return None": "return 0.0", "else None": "else 0.0"},
             {"return None": "return 0.0"}),
    )


def size_of(case, size):
    one, other, alpha, beta = case
    size = float(size) if type(size) is int else size  # 0 and 0.0 are the same answer
    return {f"the size for (messages, bytes) of {one} and {other}, α = {alpha:g} s and "
            f"β = {beta:g} bytes/s": "infinite" if size == math.inf else size}
