"""How often a job should save: what saving costs against what a failure destroys."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def plan_checkpoints(failures, days, log_ranks, ranks, save_seconds, restart_minutes):
    of_one_rank = days * 86_400 * log_ranks / failures
    between_failures = of_one_rank / ranks
    interval = (2 * save_seconds * between_failures) ** 0.5
    saving = save_seconds / interval
    repeating = interval / 2 / between_failures
    restarting = 60 * restart_minutes / between_failures
    lost = saving + repeating + restarting
    return between_failures / 3600, interval / 60, lost


# Failures, in days, on ranks; the job's ranks; seconds to save, minutes to restart.
PLANS = ((419, 54, 16_384, 16_384, 60, 10), (419, 54, 16_384, 1_024, 30, 5),
         (3, 30, 256, 2_048, 90, 15))


class PlanCheckpoints(Calculation):
    number = "12.3"
    title = "How often to save"
    minutes = 15
    solution = staticmethod(plan_checkpoints)

    def trial(self, attempt):
        return of_cases(of_plan, PLANS, attempt)

    def expected(self, world_size):
        return of_cases(of_plan, PLANS, plan_checkpoints)

    hints = (
        "Everything in seconds first. One rank fails every `days · log_ranks / failures`; any of "
        "your ranks stops the job, so divide by `ranks`: that is M.",
        "In a long time T, how many saves are there, and how many failures? A failure strikes at "
        "any moment of an interval: how much of it is lost on average? Add all losses, and divide "
        "by T.",
        "The share is δ/τ + (τ/2 + R)/M. It is least where its derivative is zero: "
        "δ/τ² = 1/(2M), so τ = √(2δM). Then convert: hours, minutes, and a share without a unit.",
    )
    slips = (
        # The time between failures.
        Slip("You took the failures of the log for those of your job. With more ranks they come "
             "more often: the time between them is that of one rank, divided by your ranks.",
             {"of_one_rank / ranks": "of_one_rank / log_ranks"}),
        Slip("You divide the job's time between failures by your ranks, as if one rank had failed "
             "so often. Multiply by the ranks of the log first: that is the time of one rank.",
             {" * log_ranks": ""}),
        Slip("With twice the ranks your job fails half as often. It is the reverse: divide by your "
             "ranks, multiply by those of the log.",
             {"* log_ranks": "/ log_ranks", "of_one_rank / ranks": "of_one_rank * ranks"}),
        Slip("You return how long one rank goes without a failure. The first of all your ranks "
             "stops the job: divide by them.", {"of_one_rank / ranks": "of_one_rank"}),
        Slip("A day has 86,400 seconds; you took it for an hour.", {"86_400": "3600"}),
        Slip("The first number is asked in hours, and is in seconds.", {" / 3600": ""}),
        # The interval.
        Slip("The interval is asked in minutes, and is in seconds.", {"interval / 60": "interval"}),
        Slip("The interval is asked in minutes, and is in hours.",
             {"interval / 60": "interval / 3600"}),
        Slip("The 2 is missing under the root. A failure costs *half* an interval on average, so "
             "the interval can be longer.", {"2 * save_seconds": "save_seconds"}),
        Slip("You left `save_seconds` in seconds beside minutes, so that the interval comes out "
             "√60 times too long. First bring everything into one unit.",
             {"2 * save_seconds": "120 * save_seconds"},
             {"2 * save_seconds": "120 * save_seconds",
              "saving = save_seconds": "saving = 60 * save_seconds"}),
        Slip("You count a whole interval as lost at each failure, and so find √(δM). A failure "
             "comes at any moment of an interval: on average half of it is lost.",
             {"2 * save_seconds": "save_seconds", "interval / 2": "interval"}),
        Slip("The 2 belongs under the root: √(2δM).",
             {"(2 * save_seconds": "2 * (save_seconds"}),
        Slip("You save twice between two failures, however long saving takes. Where saving is "
             "cheap, more often is better: weigh δ/τ against τ/2M.",
             {"(2 * save_seconds * between_failures) ** 0.5": "between_failures / 2"}),
        Slip("This interval is Daly's, of a higher order: it is better where failures are "
             "frequent. Asked is the first approximation, √(2δM).",
             {"interval = (2 * save_seconds * between_failures) ** 0.5":
              "ratio = (save_seconds / between_failures / 2) ** 0.5\n"
              "interval = 2 * between_failures * (ratio + ratio**2 / 3 + ratio**3 / 9)\n"
              "interval -= save_seconds"}),
        # The share.
        Slip("You add the save to τ. Here τ counts from the start of one save to the start of the "
             "next, so the save is in it: its share is δ/τ.",
             {"save_seconds / interval": "save_seconds / (interval + save_seconds)"}),
        Slip("The share counts a whole interval as lost at each failure. It strikes at any moment "
             "of it: half of it is lost, on average.", {"interval / 2": "interval"}),
        Slip("The share counts one of two losses: the time to save, or the work since the last "
             "checkpoint, which is done twice. (At the best interval both cost the same.)",
             {"saving + repeating": "saving"}),
        Slip("The share leaves out the restart: at each failure, so long nobody trains.",
             {" + restarting": ""}),
        Slip("You count a restart for each interval. There is one for each failure: R/M.",
             {"restart_minutes / between_failures": "restart_minutes / interval"}),
        Slip("The restart is given in minutes; you added it as seconds.",
             {"60 * restart_minutes": "restart_minutes"}),
        Slip("You return the goodput, the share that is not lost. Asked is what is lost.",
             {"60, lost": "60, 1 - lost"}),
        Slip("You return percent. Asked is a share, between 0 and 1.",
             {"60, lost": "60, 100 * lost"}),
    )


def of_plan(plan, found):
    failures, days, log_ranks, ranks, save_seconds, restart_minutes = plan
    of = (f"for {ranks:,} ranks ({failures} failures in {days} days on {log_ranks:,}, "
          f"{save_seconds} s to save, {restart_minutes} minutes to restart)")
    found = found if isinstance(found, tuple | list) and len(found) == 3 else (found, None, None)
    return dict(zip((f"the hours between failures {of}", f"the minutes between checkpoints {of}",
                     f"the share of time that is lost {of}"), found, strict=True))
