"""Which of several plans to take, when their predicted costs have an error."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def cheapest_that_fits(plans, memory, deadline, tie):
    runs = [plan for plan in plans if plan[1] <= memory and plan[2][2] <= deadline]
    if not runs:
        return None
    least = min(money for _, _, _, money in runs)
    for name, _, _, money in runs:
        if money <= (1 + tie) * least:
            return name


# Plans: name, bytes, days at the fast end, in the middle and at the slow end, money.
PLANS = (("DDP on 8", 128e9, (20.0, 25.0, 30.0), 60e3),
         ("FSDP on 8", 70e9, (23.0, 28.0, 34.0), 68e3),
         ("FSDP on 16", 42e9, (11.5, 14.0, 17.0), 68.5e3),
         ("kept on 16", 56e9, (10.5, 13.0, 16.0), 66e3),
         ("HSDP on 32", 60e9, (6.0, 7.5, 9.0), 74e3))
# By what each is about.
CASES = (
    ("all fit, all in time, no error", PLANS, 200e9, 40.0, 0.0),
    ("all fit, all in time", PLANS, 200e9, 40.0, 0.06),
    ("DDP does not fit", PLANS, 80e9, 40.0, 0.06),
    ("DDP does not fit, no error", PLANS, 80e9, 40.0, 0.0),
    ("one fits exactly", PLANS, 42e9, 40.0, 0.06),
    ("one ends exactly in time", PLANS, 80e9, 9.0, 0.06),
    ("there is less time", PLANS, 80e9, 20.0, 0.02),
    ("a tie that is just one", PLANS[1:], 80e9, 40.0, 2 / 66 + 1e-9),
    ("a tie that is just none", PLANS[1:], 80e9, 40.0, 0.03),
    ("the error is larger", PLANS[1:], 80e9, 40.0, 0.13),
    ("some may be late", PLANS, 80e9, 15.0, 0.02),
    ("nothing fits", PLANS, 40e9, 40.0, 0.06),
    ("nothing is in time", PLANS, 80e9, 8.0, 0.06),
    ("nothing is in time, by far", PLANS, 80e9, 6.5, 0.06),
    ("what fits is late, what is in time does not fit", PLANS, 57e9, 10.0, 0.06),
)
RUNS = "plan[1] <= memory and plan[2][2] <= deadline"


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
        "Every plan whose money is at most (1 + tie) times the least is as cheap, as far as you "
        "can know. Which one of these is the simplest?",
        "`runs = [plan for plan in plans if …]`, with the days at the slow end. `least = "
        "min(…)` over `runs`, then the first of `runs` within `(1 + tie) * least`. If `runs` is "
        "empty: None.",
    )
    slips = (
        Slip("A plan that needs exactly the memory that there is fits. You leave it out.",
             {"plan[1] <= memory": "plan[1] < memory"}),
        Slip("A plan that ends exactly at the deadline is in time. You leave it out.",
             {"plan[2][2] <= deadline": "plan[2][2] < deadline"}),
        Slip("You take the middle of the range. Runs may be as slow as its other end, and the "
             "deadline is promised.", {"plan[2][2]": "plan[2][1]"}),
        Slip("You take the fast end of the range. Hardly any run is so fast, and the deadline is "
             "promised.", {"plan[2][2]": "plan[2][0]"}),
        Slip("You look at the memory alone. Plans that are late are none.",
             {RUNS: "plan[1] <= memory"}),
        Slip("You look at the days alone. A plan that does not fit costs nothing, because it does "
             "not run.", {RUNS: "plan[2][2] <= deadline"}),
        Slip("You return the cheapest. Within the error a simpler plan may be as cheap: take that.",
             {"(1 + tie) * least": "least"}, {"(1 + tie) * least": "tie + least"}),
        Slip("You take the error as a share of each plan's own money. It is one of the cheapest's.",
             {"money <= (1 + tie) * least": "(1 - tie) * money <= least"}),
        Slip("You return the simplest that fits in time, whatever it costs.",
             {"money <= (1 + tie) * least": "True"}),
        Slip("You compare with the cheapest of all plans. It may be one that does not run.",
             {"for _, _, _, money in runs)": "for _, _, _, money in plans)"}),
        Slip("You return the last of those that are as cheap. The simplest comes first.",
             {"for name, _, _, money in runs:": "for name, _, _, money in runs[::-1]:"}),
        Slip("You take the fastest. Asked is the cheapest: the days have only to be in time.",
             {"least = min(money for _, _, _, money in runs)":
              "least = min(days[2] for _, _, days, _ in runs)",
              "for name, _, _, money in runs": "for name, _, (_, _, money), _ in runs"}),
        Slip("You return the plan's money. Asked is its name.", {"return name": "return money"}),
        Slip("You return a whole plan. Asked is its name.",
             {"return name": "return next(plan for plan in runs if plan[0] == name)"}),
    )


def _fact_of(case, answer):
    what, plans, memory, deadline, tie = case
    return {f"the plan where {what} ({len(plans)} plans, {memory / 1e9:g}e9 bytes, "
            f"{deadline:g} days, tie {tie:.3g})": answer}
