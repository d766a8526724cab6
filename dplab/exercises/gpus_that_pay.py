"""Steps times the seconds of a step, and for how many GPUs that is least."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def gpus_that_pay(parameters, tokens, flops, bandwidth, latency, budget, critical, most, slower):
    forward = 2 * parameters * tokens / flops
    backward = 2 * forward
    runs, ranks = [], 1
    while ranks <= most:
        messages = 2 * (ranks - 1)
        all_reduce = messages * latency + messages / ranks * 2 * parameters / bandwidth
        step = forward + max(backward, all_reduce)
        steps = budget / critical * (1 + critical / (ranks * tokens))
        runs.append((ranks, steps * step, ranks * steps * step))
        ranks *= 2
    fastest = min(runs, key=lambda run: run[1])
    fewest = next(run for run in runs if run[1] <= slower * fastest[1])
    return fastest, fewest


# parameters, tokens, flops, bandwidth, latency, budget, critical, most, slower
CASES = (
    (8e9, 8_192, 6e14, 50e9, 20e-6, 3e11, 4e6, 4_096, 1.25),
    (1.3e9, 4_096, 3e14, 12e9, 60e-6, 4e10, 3e5, 1_024, 1.1),
    (3e8, 2_048, 1e14, 1.2e9, 3e-4, 8e9, 4e5, 512, 1.5),  # exposed from two ranks on
    (7e7, 16_384, 5e13, 3e9, 2e-3, 5e9, 9e5, 256, 1.3),  # latency turns it round
    (2e8, 1_024, 2e14, 1e8, 1e-5, 1e9, 2e4, 64, 1.2),  # on such a link one GPU is the fastest
)
STEPS = "budget / critical * (1 + critical / (ranks * tokens))"
ALL_REDUCE = "messages * latency + messages / ranks * 2 * parameters / bandwidth"


class GpusThatPay(Calculation):
    number = "7.3"
    title = "How many GPUs still pay"
    minutes = 25
    solution = staticmethod(gpus_that_pay)

    def trial(self, attempt):
        return of_cases(_facts_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_facts_of, CASES, gpus_that_pay)

    hints = (
        "A run is a number of steps times the seconds of one. Which of the two falls with N, and "
        "which grows?",
        "The steps: S_min · (1 + B_crit / B), with S_min = least samples / B_crit and B = N · "
        "tokens. The step: forward, and then the longer of backward and the all-reduce.",
        "forward = 2PT/C, backward = 2 · forward, all-reduce = 2(N−1) · latency + 2(N−1)/N · 2P / "
        "bandwidth. Take the least run over N = 1, 2, 4, …; then the first N whose run is at most "
        "`slower` times that.",
    )
    slips = (
        # The steps.
        Slip("You let N GPUs need an N-th of the steps. Beyond the critical batch they need more: "
             "S_min · (1 + B_crit / B).", {STEPS: "budget / (ranks * tokens)"}),
        Slip("Your fraction is upside down: small batches need many steps.",
             {"critical / (ranks * tokens)": "ranks * tokens / critical"}),
        Slip("`budget` is the least *samples*. The least steps are these divided by the critical "
             "batch.", {"budget / critical *": "budget *"}),
        Slip("You divide the least samples by the micro-batch of one rank. S_min is the budget "
             "divided by the critical batch.", {"budget / critical *": "budget / tokens *"}),
        # The step.
        Slip("You add the all-reduce to the whole step. Backward hides it as far as it lasts: "
             "take the longer of the two.",
             {"max(backward, all_reduce)": "backward + all_reduce"}),
        Slip("You let forward hide communication too. There are no gradients to send yet.",
             {"forward + max(backward, all_reduce)": "max(forward + backward, all_reduce)"}),
        Slip("Your latency comes on top of the step. It is a part of the all-reduce, and backward "
             "hides that part as well as the bytes.",
             {"max(backward, all_reduce)": "max(backward, all_reduce - messages * latency) + "
              "messages * latency"}),
        Slip("Your step has no communication, so it never grows, and the most ranks always win.",
             {"max(backward, all_reduce)": "backward"}),
        Slip("Your backward takes as long as forward. It has two products for each of forward's.",
             {"2 * forward": "forward"}),
        Slip("A number of the gradient has 2 bytes, and you took another size, or left out a "
             "factor of 2 of the ring's 2(N−1)/N.",
             {"ranks * 2 * parameters": "ranks * parameters"},
             {"ranks * 2 * parameters": "ranks * 4 * parameters"}),
        Slip("The latency counts once in your all-reduce. A ring has 2(N−1) messages, one after "
             "the other.", {"messages * latency": "latency"}),
        Slip("You left out the latency. With many ranks it is what makes the step long.",
             {"messages * latency + ": ""}),
        Slip("Each of your messages carries the whole gradient. A ring's carry an N-th of it.",
             {"messages / ranks": "messages"}),
        # The choice.
        Slip("For you one GPU is always the fastest. Is N missing in the global batch of your "
             "steps, does each rank compute the micro-batches of all, or do you compare "
             "GPU-seconds?", {"critical / (ranks * tokens)": "critical / tokens"},
             {"forward + max(backward, all_reduce)":
              "ranks * forward + max(ranks * backward, all_reduce)"},
             {"lambda run: run[1]": "lambda run: run[2]"}),
        Slip("The GPU-seconds are the seconds of the run times its GPUs.",
             {"ranks * steps * step": "steps * step"}),
        Slip("You return the seconds of a step. Asked are those of the run.",
             {"(ranks, steps * step, ranks": "(ranks, step, ranks"}),
        Slip("`slower` is a factor of the fastest run's time, not of its GPU-seconds.",
             {"run[1] <= slower * fastest[1]": "run[2] <= slower * fastest[2]"}),
        Slip("You return the *most* ranks within the factor. Asked are the fewest.",
             {"for run in runs if": "for run in runs[::-1] if"}),
        Slip("You leave out `most` itself: try 1, 2, 4, … up to and with it.",
             {"ranks <= most": "ranks < most"}),
        Slip("You exchanged the two results: the fastest run first.",
             {"return fastest, fewest": "return fewest, fastest"}),
        Slip("You return the fastest run alone. Asked is the one of the fewest ranks, too.",
             {"return fastest, fewest": "return fastest"}),
    )


def _facts_of(case, answer):
    parameters, tokens, *_, most, slower = case
    of = f"(P = {parameters:g}, T = {tokens:,}, up to {most:,} ranks"
    rows = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (answer, None)
    facts = {}
    for what, row in zip((f"of the fastest run {of})", f"of the fewest ranks {of}, {slower:g})"),
                         rows, strict=True):
        three = isinstance(row, tuple | list) and len(row) == 3
        for name, number in zip(("the ranks", "the seconds", "the GPU-seconds"),
                                row if three else (row, None, None), strict=True):
            facts[f"{name} {what}"] = (float(number) if isinstance(number, int | float)
                                       else type(number).__name__)
    return facts
