"""Exercises 10.3, a checkpoint that survives, with the jobs that judge it, and 10.4: how often."""

import functools
import io
import os
import signal
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab import RankError, run
from dplab.exercises.compare import COMMUNICATED
from dplab.exercises.exercise import Mistake
from dplab.exercises.facts import of_cases
from dplab.exercises.first_fault import FirstFault

SAVED, KILLED, END, BATCH = 3, 5, 8, 12
RANKS_OF_LAST_JOB = {1: 2, 2: 3, 3: 1, 4: 2}
IS_THERE = "that the checkpoint is there, under its path, when `save` returns"


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == 0:
            new = self.path.with_name("new")
            torch.save({"step": step, "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "generator": generator.get_state()}, new)
            new.replace(self.path)
        dist.barrier()

    def load(self, model, optimizer, generator):
        if not self.path.exists():
            return 0
        saved = torch.load(self.path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        return saved["step"]


def _replace(saved, path):
    torch.save(saved, f"{path}.new")
    os.replace(f"{path}.new", path)


def _write_in_place(saved, path):
    torch.save(saved, path)  # which the check replaces: the function itself would escape it


def _remove_first(saved, path):
    path.unlink(missing_ok=True)
    _replace(saved, path)


def _all_states(generator):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, generator.get_state())
    return states


def _checkpoint(write=_replace, *, writers=lambda rank: rank == 0, wait=lambda rank: True,
                readers=lambda rank: True, forget=(), counted=0, asks=True,
                state=lambda generator: generator.get_state(),
                restore=lambda generator, saved: generator.set_state(saved)):
    """A checkpoint with one thing wrong."""

    class Attempt:
        def __init__(self, path):
            self.path = path

        def save(self, step, model, optimizer, generator):
            saved = {"step": step, "model": model.state_dict(),
                     "optimizer": optimizer.state_dict(), "generator": state(generator)}
            if writers(dist.get_rank()):
                write(saved, self.path)
            if wait(dist.get_rank()):
                dist.barrier()

        def load(self, model, optimizer, generator):
            if asks and not self.path.exists():
                return 0
            saved = torch.load(self.path)
            if readers(dist.get_rank()):
                for name, part in (("model", model), ("optimizer", optimizer)):
                    if name not in forget:
                        part.load_state_dict(saved[name])
            restore(generator, saved["generator"])
            return 0 if "step" in forget else saved["step"] + counted

    return Attempt


class SurvivingCheckpoint(FirstFault):
    id = "10.3"
    title = "A checkpoint that survives"
    name = "Checkpoint"
    minutes = 25
    communicates = False
    hints = (
        "Go through all that a step uses: weights, optimizer state, where in the sequence of "
        "batches, which step. All of it is the same on every rank, so one rank writes one file.",
        "`torch.save(..., new)` to another name in the same folder, then `new.replace(path)`: at "
        "each moment `path` is a whole checkpoint, the old one or the new. And `save` ends for "
        "nobody before that: a barrier for all ranks.",
        "`load` of the first job finds no file. `generator.get_state()` and `set_state` are the "
        "place in the data.",
    )
    solution = Checkpoint
    mistakes = (
        Mistake(_checkpoint(_write_in_place), "The job was killed while it saved, and half a file "
                "is all that is left under this name. Write to another name in the folder, and "
                "`replace` the old file when the new one is whole."),
        Mistake(_checkpoint(_remove_first), "The job died while it saved. The next one found no "
                "checkpoint that it could read, the old one removed or overwritten, and began "
                "anew. `replace` puts a new file, once whole, in the old one's place in one step."),
        Mistake(_checkpoint(writers=lambda rank: True), "Every rank writes the same file, and they "
                "write into each other's. One rank writes, the others wait."),
        Mistake(_checkpoint(wait=lambda rank: False), "The other ranks go on before rank 0 has "
                "written: a job that ends now leaves no checkpoint. All have to wait *behind* the "
                "writing, at a barrier at the end of `save`."),
        Mistake(_checkpoint(wait=lambda rank: rank == 0), "Only rank 0 comes to the barrier, and "
                "meets the others' next collective. The barrier stands outside the `if`."),
        Mistake(_checkpoint(asks=False), "In the first job there is no file yet. `load` returns 0 "
                "then, and changes nothing; so the same script starts and restarts."),
        Mistake(_checkpoint(forget=("model",)), "The weights are not restored: the job goes on "
                "from a new model."),
        Mistake(_checkpoint(forget=("optimizer",)), "The optimizer's state is not restored: Adam "
                "goes on without its moments, and counts its steps from 0."),
        *(Mistake(_checkpoint(state=state, restore=restore), "The batches begin anew: the state of "
                  "`generator` is not restored. (`torch.get_rng_state()` is that of another one.)")
          for state, restore in (
              (lambda generator: 0, lambda generator, saved: None),
              (lambda generator: torch.get_rng_state(),
               lambda generator, saved: torch.set_rng_state(saved)))),
        Mistake(_checkpoint(state=_all_states, restore=lambda generator, saved: generator.set_state(
                saved[dist.get_rank()])), "You keep one random state for each rank, and the next "
                "job may have more ranks. All ranks draw the same batches here: save one state."),
        Mistake(_checkpoint(forget=("step",)), "`load` returns 0 although there is a checkpoint, "
                "so the job does its first steps twice. Save the step, too."),
        *(Mistake(_checkpoint(counted=one), "The step is off by one. `step` counts the steps that "
                  "are done; the loop goes on with `range(step, ...)`.") for one in (1, -1)),
        *(Mistake(_checkpoint(readers=lambda rank: rank == 0, restore=restore), "Only rank 0 "
                  "loads. The gradients are averaged, weights and moments are not, so the replicas "
                  "stay different: every rank loads.") for restore in (
            lambda generator, saved: generator.set_state(saved),
            lambda generator, saved: dist.get_rank() or generator.set_state(saved))),
    )

    def _observe(self, attempt, world_size, **how):
        """Three jobs: one that saves, one that dies while it saves, and one on other ranks."""
        others = RANKS_OF_LAST_JOB[world_size]
        with tempfile.TemporaryDirectory() as folder:
            job = functools.partial(run, _job, timeout=self.seconds, backend="gloo")
            try:
                first = job(world_size, attempt, folder, 1)
                if not any(begun[IS_THERE] for begun in first):  # so the others tell no more
                    return [{**begun, COMMUNICATED: True} for begun in first]
                try:
                    job(world_size, attempt, folder, 2)
                except RankError as error:
                    if error.kind != "died":
                        raise
                last = job(others, attempt, folder, 3)
            except RankError as error:
                return error
        return [{**begun, **_of_last(others, last), COMMUNICATED: True} for begun in first]

    def expected(self, world_size):
        others, (model, optimizer, generator) = RANKS_OF_LAST_JOB[world_size], _fresh(1)
        for step in range(END):
            _train(model, optimizer, generator, step)
        end = SAVED, parameters_to_vector(model.parameters()).detach()
        return [_of_first(0, True, int(rank == 0)) | _of_last(others, [end] * others)
                for rank in range(world_size)]


def _job(attempt, folder, number):
    os.chdir(folder)  # so that errors name the file alike in every attempt
    path = Path("checkpoint.pt")
    model, optimizer, generator = _fresh(number)
    checkpoint = attempt(path)
    begun = checkpoint.load(model, optimizer, generator)
    until = {1: SAVED, 2: KILLED, 3: END}[number]
    for step in range(begun if isinstance(begun, int) else 0, until):
        _train(model, optimizer, generator, step, dist.get_rank(), dist.get_world_size())
    if number == 3:
        return begun, parameters_to_vector(model.parameters()).detach()
    write = mock.Mock(side_effect=functools.partial(_write_slowly if number == 1 else
                                                    _die_writing, torch.save))
    with mock.patch.object(torch, "save", write):
        checkpoint.save(until, model, optimizer, generator)
    facts = _of_first(begun, path.exists(), write.call_count)
    dist.all_reduce(torch.zeros(1))
    return facts


def _write_slowly(save, *arguments, **options):
    if dist.get_world_size() > 1:  # who does not wait is back first; who all write, do so in turn
        time.sleep(0.3 * (1 + dist.get_rank()))
    save(*arguments, **options)


def _die_writing(save, saved, file, **options):
    whole = io.BytesIO()
    save(saved, whole, **options)
    half = whole.getvalue()[: len(whole.getvalue()) // 2]
    if hasattr(file, "write"):
        file.write(half)
        file.flush()
    else:
        Path(file).write_bytes(half)
    os.kill(os.getpid(), signal.SIGKILL)


def _fresh(job):
    """As each job makes them: new weights, and the data's generator at its beginning."""
    torch.manual_seed(job)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return (model, torch.optim.Adam(model.parameters(), lr=0.02, eps=0.01),
            torch.Generator().manual_seed(0))


def _train(model, optimizer, generator, step, rank=0, ranks=1):
    """One step of this rank: the same global batch is drawn by all."""
    x = torch.randn(BATCH, 4, generator=generator)[rank::ranks]
    optimizer.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 6)
    optimizer.zero_grad()
    (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
    for parameter in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()


def _of_first(begun, is_there, writes):
    return {"the step at which the first job begins": begun,
            IS_THERE: is_there,
            "how often this rank calls `torch.save` in a `save`": writes}


def _of_last(ranks, ends):
    return {f"{what} on rank {rank} of {ranks} of the last job": value
            for rank, end in enumerate(ends)
            for what, value in zip(("the step that goes on", "the weights at the end"), end,
                                   strict=True)}


# 10.4

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


class PlanCheckpoints(FirstFault):
    id = "10.4"
    title = "How often to save"
    name = "plan_checkpoints"
    minutes = 15
    communicates = False
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
