"""What a colleague may say truly of a sick job, by its readings: complaints are held to it."""

import torch

from dplab.drills import (
    failing_reports,
    flawed_plans,
    gathered_layers,
    late_buckets,
    rare_meetings,
    restarted_jobs,
    sharded_training,
    silent_failures,
    slow_jobs,
    wrapped_transformer,
    wrong_gradients,
    wrong_steps,
)

MATCHED = 1e-5  # losses that differ by less are the same: far above what the order changes


def symptoms_of(readings) -> set[str]:
    holds = _OF[type(readings)](readings)
    return {symptom for symptom, is_seen in holds.items() if is_seen}


def of_failing(readings):
    return {"errors": readings.error is not None}


def of_sliced_step(ranks):
    wrong = (any(share != 1 for rank in ranks for share in rank.shares),
             any(rank.held == len(rank.rows) for rank in ranks),
             any(len(rank.sent) > 1 for rank in ranks))
    return {"one of three": wrong.count(True) == 1}


def of_silent(readings):
    losses, goal = readings.losses, readings.one_process.steps
    gaps = [abs(loss - step.loss) for loss, step in zip(losses, goal, strict=False)]
    parts = next((step for gap, step in zip(gaps, goal, strict=False) if gap > MATCHED), None)
    epoch, batch = (parts.epoch, parts.batch) if parts else (-1, -1)
    alone = readings.right(0).float().mean().item()
    return {"from step 1": (epoch, batch) == (0, 0), "from step 2": (epoch, batch) == (0, 1),
            "in epoch 1": epoch == 1, "in its middle": epoch == 1 and batch > 0,
            "falls": sum(losses[-5:]) / 5 < losses[0] / 2,
            "near": sum(gaps) < 0.1 * sum(step.loss for step in goal),
            "only in the accuracy": parts is None and abs(readings.accuracies()[0] - alone) > 1e-6}


def of_late(readings):
    ranks = readings.ranks
    share = max(rank.step for rank in ranks) / readings.computing
    return {"slow": share > 1.5,
            "nothing overlaps": max(readings.beside()) == 0,
            "the ranks end apart": not all(
                torch.allclose(rank.after, ranks[0].after, rtol=1e-4) for rank in ranks)}


def of_gathered(readings):
    means = [sum(losses) / len(losses)
             for losses in zip(*(rank.losses for rank in readings.ranks), strict=True)]
    gaps = [abs(mean - loss) for mean, loss in zip(means, readings.losses, strict=True)]
    right = gaps[0] < MATCHED
    return {"apart": max(gaps) > 100 * MATCHED, "from step 1": not right, "right in step 1": right}


def of_slow(readings):
    """By the shortest steps: other programs on the machine only make steps longer."""
    if readings.stands_still:
        return {"stands still": True}
    here, alone = (min(map(slow_jobs.length, steps)) for steps in (readings.steps, readings.alone))
    return {"slow": here > 4 / 3 * alone}


def of_wrong_steps(readings):
    here, alone = readings.ranks[0].losses, readings.one_rank.losses
    apart = [abs(a - b) > MATCHED for a, b in zip(here, alone, strict=False)]
    return {"after a few steps": not apart[0] and any(apart[1:6]),
            "fewer steps": len(here) < len(alone)}


def of_wrong_gradient(readings):
    error, ratio, _ = readings.against_one(readings.single)
    gap = abs(sum(rank.loss for rank in readings.ranks) / len(readings.ranks) - readings.one.loss)
    return {"close": 1e-5 < error < 1e-2, "shorter": ratio < 0.5, "right loss": gap < MATCHED,
            "other loss": gap > 1e-3}


def of_sharded_training(readings):
    gaps = [abs(here - there) for here, there in zip(readings.losses, readings.one_process,
                                                     strict=True)]
    rank = readings.ranks[0]
    share = (rank.adam + rank.behind) / (12 * rank.own)  # of two moments and a gradient
    apart = [rank.apart for rank in readings.ranks]
    return {"equal losses": max(gaps) < MATCHED, "too much": share > 1.2,
            "from step 2": gaps[0] < MATCHED < gaps[1],
            "grows": readings.growth > sharded_training.GROWTH,
            "equal ranks": all(each == apart[0] for each in apart)}


def of_wrapped(readings):
    gap = max(abs(here - planned) for here, planned in zip(
        readings.losses(), readings.planned_losses, strict=True))
    return {"more memory": readings.here.peak > 1.05 * readings.planned.peak,
            "equal losses": gap < MATCHED, "a little apart": MATCHED < gap < 0.1}


def of_plan(readings):
    page, right, seen = readings.page, readings.right, flawed_plans.SEEN
    return {"late": right.days > seen * page.days, "in time": right.days < seen * page.days,
            "holds more": right.held > seen * page.held,
            "dearer": right.money > seen * page.money,
            "other steps": page.sequences != right.sequences}


def of_rare(readings):
    now, before = ([each.loss for each in ranks[0]] for ranks in (readings.ranks, readings.before))
    gaps = [here - there for here, there in zip(now, before, strict=True)]
    return {"slower": sum(gaps[3:]) > 0.2,
            "apart": max(abs(each) for each in gaps) > 0.05,
            "first is right": abs(gaps[0]) < MATCHED}


def of_restarted(readings):
    apart, dies = readings.apart(), restarted_jobs.DIES
    begin = readings.second[0].begin
    slow = max(readings.pace()) > restarted_jobs.TIMES * min(readings.pace())
    return {"stands still": bool(readings.waits), "apart early": bool(apart) and apart[0] < dies,
            "apart late": bool(apart) and apart[0] > begin >= dies - restarted_jobs.EVERY,
            "far back": begin < dies - restarted_jobs.EVERY and not apart,
            "slow": slow and not apart}


_OF = {failing_reports.Readings: of_failing, list: of_sliced_step,
       wrong_gradients.Readings: of_wrong_gradient, silent_failures.Readings: of_silent,
       late_buckets.Readings: of_late, slow_jobs.Readings: of_slow,
       wrong_steps.Readings: of_wrong_steps,
       sharded_training.Readings: of_sharded_training,
       gathered_layers.Readings: of_gathered,
       wrapped_transformer.Readings: of_wrapped, flawed_plans.Readings: of_plan,
       restarted_jobs.Readings: of_restarted, rare_meetings.Readings: of_rare}
