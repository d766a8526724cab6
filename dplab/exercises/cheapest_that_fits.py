"""Which of several plans to take, when their predicted costs have an error."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def cheapest_that_fits(plans, memory, deadline, gpus_tie, strategy_tie):
    runs = [plan for plan in plans if plan[2] <= memory and plan[3][2] <= deadline]
    if not runs:
        return None
    best = min(runs, key=lambda plan: plan[4])
    for strategy, gpus, _, _, money in runs:
        tie = gpus_tie if strategy == best[0] else strategy_tie
        if money <= (1 + tie) * best[4]:
            return strategy, gpus


# Plans: strategy, GPUs, bytes, days at the fast end, in the middle and at the slow end, money.
PLANS = (("DDP", 8, 128e9, (20.0, 25.0, 30.0), 60e3),
         ("FSDP", 8, 70e9, (23.0, 28.0, 34.0), 68e3),
         ("FSDP", 16, 42e9, (11.5, 14.0, 17.0), 68.5e3),
         ("FSDP, kept", 16, 56e9, (10.5, 13.0, 16.0), 66e3),
         ("HSDP", 32, 60e9, (6.0, 7.5, 9.0), 74e3))
# On more GPUs one strategy is cheaper, and the other is not.
GROWING = (("FSDP", 16, 60e9, (22.0, 27.0, 33.0), 63e3),
           ("HSDP", 16, 66e9, (21.0, 26.0, 32.0), 62e3),
           ("FSDP", 32, 50e9, (11.0, 13.5, 16.5), 61.5e3),
           ("FSDP", 64, 46e9, (5.4, 6.6, 8.1), 60e3))
# By what each is about.
CASES = (
    ("all fit, all in time, no error", PLANS, 200e9, 40.0, 0.0, 0.0),
    ("all fit, all in time", PLANS, 200e9, 40.0, 0.02, 0.06),
    ("DDP does not fit", PLANS, 80e9, 40.0, 0.02, 0.06),
    ("DDP does not fit, no error", PLANS, 80e9, 40.0, 0.0, 0.0),
    ("one fits exactly", PLANS, 42e9, 40.0, 0.02, 0.06),
    ("one ends exactly in time", PLANS, 80e9, 9.0, 0.02, 0.06),
    ("there is less time", PLANS, 80e9, 20.0, 0.01, 0.02),
    ("a tie that is just one", PLANS[1:], 80e9, 40.0, 0.01, 2 / 66 + 1e-9),
    ("a tie that is just none", PLANS[1:], 80e9, 40.0, 0.02, 0.03),
    ("the errors are larger", PLANS[1:], 80e9, 40.0, 0.05, 0.13),
    ("the strategies differ, and the GPUs too", PLANS[1:4], 80e9, 40.0, 0.001, 0.031),
    ("the GPUs alone differ", (GROWING[0], *GROWING[2:]), 80e9, 40.0, 0.03, 0.12),
    ("the GPUs alone differ, by just more than the error", GROWING[::3], 80e9, 40.0, 0.049, 0.12),
    ("only a strategy with a larger error is a tie", GROWING, 80e9, 40.0, 0.02, 0.12),
    ("some may be late", PLANS, 80e9, 15.0, 0.02, 0.06),
    ("nothing fits", PLANS, 40e9, 40.0, 0.02, 0.06),
    ("nothing is in time", PLANS, 80e9, 8.0, 0.02, 0.06),
    ("nothing is in time, by far", PLANS, 80e9, 6.5, 0.02, 0.06),
    ("what fits is late, what is in time does not fit", PLANS, 57e9, 10.0, 0.02, 0.06),
)
RUNS = "plan[2] <= memory and plan[3][2] <= deadline"
TIE = "gpus_tie if strategy == best[0] else strategy_tie"


class CheapestThatFits(Calculation):
    number = "11.4"
    title = "The cheapest that fits"
    minutes = 10
    solution = staticmethod(cheapest_that_fits)

    def trial(self, attempt):
        return of_cases(_fact_of, CASES, lambda _, plans, *numbers: attempt(list(plans), *numbers))

    def expected(self, world_size):
        return self.trial(cheapest_that_fits)

    hints = (
        "First leave out what cannot be taken at all. Which of the three days decides, if you have "
        "promised? Then find the cheapest. Is it the answer?",
        "Go through the plans, the simplest first. Has this one the strategy of the cheapest? That "
        "says which error the comparison has. Money of at most (1 + error) times the least is a "
        "tie.",
        "`runs = [plan for plan in plans if …]`, with the days at the slow end. `best = min(runs, "
        "key=lambda plan: plan[4])`, then the first of `runs` within `(1 + tie) * best[4]`, where "
        "`tie` is `gpus_tie` if the strategy is that of `best`. If `runs` is empty: None.",
    )
    slips = (
        Slip("A plan that needs exactly the memory that there is fits. You leave it out.",
             {"plan[2] <= memory": "plan[2] < memory"}),
        Slip("A plan that ends exactly at the deadline is in time. You leave it out.",
             {"plan[3][2] <= deadline": "plan[3][2] < deadline"}),
        Slip("You take the middle of the range. Runs may be as slow as its other end, and the "
             "deadline is promised.", {"plan[3][2]": "plan[3][1]"}),
        Slip("You take the fast end of the range. Hardly any run is so fast, and the deadline is "
             "promised.", {"plan[3][2]": "plan[3][0]"}),
        Slip("You look at the memory alone. Plans that are late are none.",
             {RUNS: "plan[2] <= memory"}),
        Slip("You look at the days alone. A plan that does not fit costs nothing, because it does "
             "not run.", {RUNS: "plan[3][2] <= deadline"}),
        Slip("You return the cheapest. Within the error a simpler plan may be as cheap: take that.",
             {"(1 + tie) * best[4]": "best[4]"}, {"(1 + tie) * best[4]": "tie + best[4]"}),
        Slip("You take the error of strategies for each pair. Two plans of one strategy differ in "
             "GPUs alone, and that comparison is surer.", {TIE: "strategy_tie"}),
        Slip("You take the error of GPUs for each pair. Between two strategies it is larger.",
             {TIE: "gpus_tie"}),
        Slip("You take the error of GPUs wherever GPUs differ. If the strategies differ, too, the "
             "larger one counts.", {TIE: "strategy_tie if gpus == best[1] else gpus_tie"}),
        Slip("You take each error for the other: plans of one strategy differ in GPUs alone.",
             {TIE: "strategy_tie if strategy == best[0] else gpus_tie"}),
        Slip("Where strategy and GPUs differ, you add the errors. The larger one counts.",
             {TIE: "(strategy != best[0]) * strategy_tie + (gpus != best[1]) * gpus_tie"}),
        Slip("You take the error as a share of each plan's own money. It is one of the cheapest's.",
             {"money <= (1 + tie) * best[4]": "(1 - tie) * money <= best[4]"}),
        Slip("You return the simplest that fits in time, whatever it costs.",
             {"money <= (1 + tie) * best[4]": "True"}),
        Slip("You compare with the cheapest of all plans. It may be one that does not run.",
             {"min(runs, key": "min(plans, key"}),
        Slip("You return the last of those that are as cheap. The simplest comes first.",
             {"in runs:": "in runs[::-1]:"}),
        Slip("You take the fastest. Asked is the cheapest: the days have only to be in time.",
             {"lambda plan: plan[4]": "lambda plan: plan[3][2]",
              "gpus, _, _, money in": "gpus, _, (_, _, money), _ in",
              "best[4]": "best[3][2]"}),
        Slip("You return the plan's money. Asked are its strategy and its GPUs.",
             {"return strategy, gpus": "return money"}),
        Slip("You return the strategy without the GPUs.",
             {"return strategy, gpus": "return strategy"}),
        Slip("You return a whole plan. Asked are its strategy and its GPUs.",
             {"return strategy, gpus": "return next(plan for plan in runs "
              "if plan[:2] == (strategy, gpus))"}),
    )


def _fact_of(case, answer):
    what, plans, memory, deadline, gpus_tie, strategy_tie = case
    named = " on ".join(map(str, answer)) if isinstance(answer, tuple | list) else answer
    return {f"the plan where {what} ({len(plans)} plans, {memory / 1e9:g}e9 bytes, "
            f"{deadline:g} days, ties {gpus_tie:.3g} and {strategy_tie:.3g})": named}
