"""From the seconds of a micro-batch to the days and the money of a run."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def days_and_money(tokens, sequences, length, gpus, micro, seconds, update, share, price):
    accumulation = sequences // (gpus * micro)
    if accumulation == 0:
        return None
    steps = math.ceil(tokens / (accumulation * gpus * micro * length))
    predicted = steps * (accumulation * seconds + update)
    hours = predicted / share / 3600
    return accumulation, hours / 24, gpus * hours * price


# Tokens, sequences of a step, their length, GPUs, sequences of a micro-batch, its seconds, those of
# the update, the share that is reached, the price.
CASES = (
    (1e12, 512, 8192, 64, 2, 1.8, 0.1, 0.8, 2.0),  # four micro-batches
    (3e11, 256, 4096, 256, 1, 0.45, 0.05, 0.7, 2.5),  # one
    (2e9, 100, 1024, 8, 3, 0.3, 0.2, 0.9, 1.1),  # 96 of the 100 sequences
    (5e8, 17, 2048, 16, 1, 0.2, 0.05, 0.5, 3.0),  # one sequence is left over
    (1e12, 100, 8192, 128, 1, 0.9, 0.1, 0.8, 2.0),  # fewer sequences than GPUs
    (7e6, 24, 512, 3, 8, 0.7, 0.6, 0.6, 0.5),
)
STEP = "(accumulation * seconds + update)"
STEPS = "math.ceil(tokens / (accumulation * gpus * micro * length))"


class DaysAndMoney(Calculation):
    number = "11.3"
    title = "Days and money"
    minutes = 15
    solution = staticmethod(days_and_money)

    def trial(self, attempt):
        return of_cases(_facts_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_facts_of, CASES, days_and_money)

    hints = (
        "In one micro-batch all GPUs together compute `gpus * micro` sequences. How many whole "
        "micro-batches have room in a step? And if not one has?",
        "A step has `accumulation * gpus * micro` sequences, which may be fewer than allowed. It "
        "takes `accumulation` micro-batches and one update. The steps of a run are a whole number.",
        "`steps = math.ceil(tokens / (accumulation * gpus * micro * length))`. Seconds as "
        "predicted, divided by `share`, are those of the run. All GPUs are paid for all of them.",
    )
    slips = (
        Slip("You return no None where the step has fewer sequences than the GPUs compute in one "
             "micro-batch. Some GPUs would have nothing to do.",
             {"sequences // (gpus * micro)": "max(1, sequences // (gpus * micro))"}),
        Slip("You return None where one micro-batch is all that a step has. That is allowed: it "
             "accumulates nothing.", {"accumulation == 0": "accumulation <= 1"}),
        Slip("Your micro-batches are more than a step may have. Round down.",
             {"sequences // (gpus * micro)": "-(-sequences // (gpus * micro))"}),
        Slip("Your number of micro-batches is not whole.",
             {"sequences // (gpus * micro)": "sequences / (gpus * micro)"}),
        Slip("You forget that each GPU computes `micro` sequences at a time.",
             {"sequences // (gpus * micro)": "sequences // gpus"},
             {"(accumulation * gpus * micro * length)": "(accumulation * gpus * length)"}),
        Slip("You give the sequences of a step to each GPU. They are those of all GPUs together.",
             {"sequences // (gpus * micro)": "sequences // micro"}),
        Slip("Your steps have as many sequences as they may have. They have those that the GPUs "
             "compute, a whole number of micro-batches on each.",
             {"accumulation * gpus * micro * length": "sequences * length"},
             {STEPS: "tokens / (sequences * length)"}),
        Slip("You leave the accumulation out of the tokens of a step.",
             {"(accumulation * gpus * micro * length)": "(gpus * micro * length)"},
             {STEPS: "tokens / (gpus * micro * length)"}),
        Slip("The last step counts whole: round the steps up.",
             {STEPS: "tokens / (accumulation * gpus * micro * length)"}),
        Slip("Your step takes as long as one micro-batch. Those of a step run one after the other.",
             {STEP: "(seconds + update)"}),
        Slip("You update after each micro-batch. Accumulation means that there is one update in a "
             "step.", {STEP: "accumulation * (seconds + update)"}),
        Slip("You leave the update out.", {STEP: "accumulation * seconds"}),
        Slip("You multiply the time by `share`. That is of the *speed*: runs are slower than "
             "predicted, so they take longer.", {"predicted / share": "predicted * share"}),
        Slip("You divide the micro-batches by `share`, and not the update. It is of the whole "
             "speed.", {STEP: "(accumulation * seconds + share * update)"}),
        Slip("You leave `share` out: that is the run as predicted, and not as runs go.",
             {"predicted / share": "predicted"}),
        Slip("Your first number is right and your days are hours, or your hours seconds.",
             {"hours / 24": "hours"}, {"share / 3600": "share"}),
        Slip("You pay for one GPU.", {"gpus * hours * price": "hours * price"}),
        Slip("The price is that of an hour. You took it for a day's.",
             {"gpus * hours * price": "gpus * hours / 24 * price"}),
        Slip("You return the GPU-hours, and not what they cost.",
             {"gpus * hours * price": "gpus * hours"}),
    )


def _facts_of(case, answer):
    tokens, sequences, length, gpus, micro, seconds, update, share, price = case
    of = (f"({tokens:g} tokens, steps of at most {sequences} × {length:,}, {gpus} GPUs, "
          f"micro-batches of {micro}, {seconds:g} + {update:g} s, share {share:g}, ${price:g})")
    three = isinstance(answer, tuple | list) and len(answer) == 3
    return {f"{name} {of}": float(number) if isinstance(number, int) else number
            for name, number in zip(("the accumulation", "the days", "the money"),
                                    answer if three else [answer] * 3, strict=True)}
