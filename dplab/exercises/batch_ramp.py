"""A batch that grows with the measured critical batch."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def batch_ramp(measured, batch, rate, most):
    ramp, size = [(0, batch, rate)], batch
    for samples, critical in measured:
        while 2 * size <= min(critical, most):
            size *= 2
        if size > ramp[-1][1]:
            ramp.append((samples, size, rate * math.sqrt(size / batch)))
    return ramp


CASES = (
    (((500, 12), (1000, 70), (4000, 300)), 8, 0.001, 1024),
    (((600, 25), (2000, 15), (3000, 26), (9000, 210)), 6, 0.004, 768),  # it falls for a while
    (((100, 90), (400, 40), (800, 2000), (5000, 4000)), 20, 0.0005, 160),  # up to a limit
    (((64, 10), (128, 11), (256, 31)), 16, 0.01, 512),  # one batch all along
    (((50, 3), (300, 48), (700, 96), (900, 192)), 3, 0.02, 100),
)


class BatchRamp(Calculation):
    number = "7.5"
    title = "A batch that grows"
    minutes = 15
    solution = staticmethod(batch_ramp)

    def trial(self, attempt):
        return of_cases(_facts_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_facts_of, CASES, batch_ramp)

    hints = (
        "Go through the moments in order, with the batch of the moment in a variable. When does it "
        "change, and when does it stay?",
        "Double the batch as often as the doubled one is still at most the critical batch and "
        "`most`. Where nothing changes, there is no new row.",
        "`while 2 * size <= min(critical, most): size *= 2`, and then a row `(samples, size, "
        "rate * math.sqrt(size / batch))` if the size is another one than in the last row.",
    )
    slips = (
        # The batch.
        Slip("Your batch doubles at most once at a moment. If the critical batch has grown "
             "fourfold, so can the batch.", {"while 2 * size": "if 2 * size"}),
        Slip("Your batch goes above the critical one: it doubles while it is below. Ask whether "
             "the *doubled* batch still fits.", {"while 2 * size": "while size"}),
        Slip("Your batch takes any size. It is the first batch, times a power of two.",
             {"while 2 * size <= min(critical, most):": "if min(critical, most) > size:",
              "size *= 2": "size = min(critical, most)"}),
        Slip("Your batch falls again where a measured critical batch is smaller. Once grown, it "
             "stays.", {"while 2 * size": "size = batch\nwhile 2 * size", "size > ": "size != "}),
        Slip("Your batch stops at less than the critical batch: where the doubled one is equal to "
             "it, it fits.", {"<= min(": "< min("}),
        Slip("Your batch is larger than `most`.", {"min(critical, most)": "critical"}),
        Slip("Your batch does not stop at the critical one: `most` is only the largest that may "
             "be.", {"min(critical, most)": "most"}),
        # The rows.
        Slip("You have a row for each moment. Asked is one where the batch changes.",
             {"if size > ramp[-1][1]:": "if True:"}),
        Slip("The first row is missing: the run begins at 0 samples.",
             {"return ramp": "return ramp[1:]"}),
        # The rate.
        Slip("The rate stays. For Adam it follows the square root of the batch.",
             {"rate * math.sqrt(size / batch)": "rate"}),
        Slip("The rate follows the batch itself. For Adam it is the square root.",
             {"math.sqrt(size / batch)": "size / batch"}),
        Slip("The rate is that of one doubling in every row. Take the batch beside the first one.",
             {"math.sqrt(size / batch)": "math.sqrt(2)"}),
        Slip("The rate is multiplied by √2 for each row. Where the batch grows more than twofold, "
             "so does the rate by more than √2.",
             {"math.sqrt(size / batch)": "math.sqrt(2) ** len(ramp)"}),
        Slip("The rate is counted from the last row's batch, but begins anew each time.",
             {"math.sqrt(size / batch)": "math.sqrt(size / ramp[-1][1])"}),
    )


def _facts_of(case, answer):
    measured, batch, rate, most = case
    of = f"for {measured}, batch {batch}, rate {rate:g}, at most {most}"
    if not isinstance(answer, list | tuple) or not all(
            isinstance(row, list | tuple) and len(row) == 3 for row in answer):
        return {f"rows of three numbers {of}": type(answer).__name__}
    facts = {f"rows of three numbers {of}": "list",
             f"where the batch changes, and to what, {of}": str([tuple(row[:2]) for row in answer])}
    return facts | {f"the rate at {row[0]} samples {of}": float(row[2]) for row in answer}
