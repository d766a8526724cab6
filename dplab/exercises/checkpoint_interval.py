"""Exercise 10.4: how often to save."""

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases

# Failures, in days, on ranks; the job's ranks; seconds to save, minutes to restart.
PLANS = ((419, 54, 16_384, 16_384, 60, 10), (419, 54, 16_384, 1_024, 30, 5),
         (3, 30, 256, 2_048, 90, 15))


def plan_checkpoints(failures, days, log_ranks, ranks, save_seconds, restart_minutes):
    between_failures = days * 86_400 * log_ranks / failures / ranks
    interval = (2 * save_seconds * between_failures) ** 0.5
    lost = save_seconds / interval + (interval / 2 + 60 * restart_minutes) / between_failures
    return between_failures / 3600, interval / 60, lost


def _plan(*, mtbf=lambda of_log, log_ranks, ranks: of_log * log_ranks / ranks,
          interval=lambda saving, between: (2 * saving * between) ** 0.5, work=0.5, second=1,
          saved=lambda saving, apart: saving / apart,
          lost=lambda saving, work, restart: saving + work + restart,
          per=lambda apart, between: between,
          day=86_400, minute=60, hours=3600, minutes=60):
    """A plan with one thing wrong."""

    def attempt(failures, days, log_ranks, ranks, save_seconds, restart_minutes):
        between = mtbf(days * day / failures, log_ranks, ranks)
        saving = save_seconds * second
        apart = interval(saving, between)
        shares = (saved(saving, apart), work * apart / between,
                  restart_minutes * minute / per(apart, between))
        return between / hours, apart / minutes, lost(*shares)

    return attempt


def _daly(saving, between):
    ratio = (saving / (2 * between)) ** 0.5
    return (2 * saving * between) ** 0.5 * (1 + ratio / 3 + ratio**2 / 9) - saving

_OF_LOG = ("You took the failures of the log for those of your job. With more ranks they come more "
           "often: the time between them is that of one rank, divided by your ranks.")


class PlanCheckpoints(Calculation):
    number = "10.4"
    title = "How often to save"
    minutes = 15
    hints = (
        "Everything in seconds first. One rank fails every `days · log_ranks / failures`; any of "
        "your ranks stops the job, so divide by `ranks`: that is M.",
        "With an interval τ the job loses δ/τ of its time to saving, and at each failure the "
        "restart R and on average half an interval: δ/τ + (τ/2 + R)/M.",
        "That is least where its derivative is zero: δ/τ² = 1/(2M), so τ = √(2δM). Then convert: "
        "hours, minutes, and a share without a unit.",
    )
    solution = staticmethod(plan_checkpoints)
    mistakes = (
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log), _OF_LOG),
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log / ranks), "You divide the "
                "job's time between failures by your ranks, as if one rank had failed so often. "
                "Multiply by the ranks of the log first: that is the time of one rank."),
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log * ranks / log_ranks), "With "
                "twice the ranks your job fails half as often. It is the reverse: divide by your "
                "ranks, multiply by those of the log."),
        Mistake(_plan(mtbf=lambda of_log, log_ranks, ranks: of_log * log_ranks), "You return how "
                "long one rank goes without a failure. The first of all your ranks stops the job: "
                "divide by them."),
        Mistake(_plan(day=3600), "A day has 86,400 seconds; you took it for an hour."),
        Mistake(_plan(hours=1), "The first number is asked in hours, and is in seconds."),
        Mistake(_plan(minutes=1), "The interval is asked in minutes, and is in seconds."),
        Mistake(_plan(minutes=3600), "The interval is asked in minutes, and is in hours."),
        Mistake(_plan(interval=lambda saving, between: (saving * between) ** 0.5), "The 2 is "
                "missing under the root. A failure costs *half* an interval on average, so the "
                "interval can be longer."),
        *(Mistake(_plan(**units), "You left `save_seconds` in seconds beside minutes, so that the "
                  "interval comes out √60 times too long. First bring everything into one unit.")
          for units in (dict(second=60),
                        dict(interval=lambda saving, between: (120 * saving * between) ** 0.5))),
        Mistake(_plan(work=1, interval=lambda saving, between: (saving * between) ** 0.5), "You "
                "count a whole interval as lost at each failure, and so find √(δM). A failure "
                "comes at any moment of an interval: on average half of it is lost."),
        Mistake(_plan(saved=lambda saving, apart: saving / (apart + saving)), "You add the save to "
                "τ. Here τ counts from the start of one save to the start of the next, so the "
                "save is in it: its share is δ/τ."),
        Mistake(_plan(interval=lambda saving, between: 2 * (saving * between) ** 0.5),
                "The 2 belongs under the root: √(2δM)."),
        Mistake(_plan(interval=lambda saving, between: between / 2), "You save twice between two "
                "failures, however long saving takes. Where saving is cheap, more often is better: "
                "weigh δ/τ against τ/2M."),
        Mistake(_plan(interval=_daly), "This interval is Daly's, of a higher order: it is better "
                "where failures are frequent. Asked is the first approximation, √(2δM)."),
        Mistake(_plan(work=1), "The share counts a whole interval as lost at each failure. It "
                "strikes at any moment of it: half of it is lost, on average."),
        Mistake(_plan(work=0), "The share counts one of two losses: the time to save, or the work "
                "since the last checkpoint, which is done twice. (At the best interval both cost "
                "the same.)"),
        Mistake(_plan(lost=lambda saving, work, restart: saving + work), "The share leaves out the "
                "restart: at each failure, so long nobody trains."),
        Mistake(_plan(per=lambda apart, between: apart), "You count a restart for each interval. "
                "There is one for each failure: R/M."),
        Mistake(_plan(minute=1), "The restart is given in minutes; you added it as seconds."),
        Mistake(_plan(lost=lambda *shares: 1 - sum(shares)), "You return the goodput, the share "
                "that is not lost. Asked is what is lost."),
        Mistake(_plan(lost=lambda *shares: 100 * sum(shares)), "You return percent. Asked is a "
                "share, between 0 and 1."),
    )

    def trial(self, attempt):
        return of_cases(_of_plan, PLANS, attempt)

    def expected(self, world_size):
        return of_cases(_of_plan, PLANS, plan_checkpoints)


def _of_plan(plan, found):
    failures, days, log_ranks, ranks, save_seconds, restart_minutes = plan
    of = (f"for {ranks:,} ranks ({failures} failures in {days} days on {log_ranks:,}, "
          f"{save_seconds} s to save, {restart_minutes} minutes to restart)")
    found = found if isinstance(found, tuple | list) and len(found) == 3 else (found, None, None)
    return dict(zip((f"the hours between failures {of}", f"the minutes between checkpoints {of}",
                     f"the share of time that is lost {of}"), found, strict=True))
