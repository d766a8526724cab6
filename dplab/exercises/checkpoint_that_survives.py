"""Exercise 10.3: a checkpoint that survives."""

import contextlib
import functools
import io
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab import RankError
from dplab.checks import observe
from dplab.checks.compare import COMMUNICATED
from dplab.checks.exercise import Exercise, Mistake

SAVED, KILLED, END, BATCH = 3, 5, 8, 12

RANKS_OF_LAST_JOB = {1: 2, 2: 3, 3: 1, 4: 2}

BEGINS = "the step at which the first job begins"

IS_THERE = "that the checkpoint is there, under its path, when `save` returns"

WRITES = "how often all ranks together call `torch.save` in a `save`"

GOES_ON, AT_THE_END = "the step that goes on", "the weights at the end"


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


def _write_bytes(saved, path):
    whole = io.BytesIO()
    torch.save(saved, whole)
    path.write_bytes(whole.getvalue())


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


class SurvivingCheckpoint(Exercise):
    number = "10.3"
    title = "A checkpoint that survives"
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
        *(Mistake(_checkpoint(write), "The job was killed while it saved, and half a file is all "
                  "that is left under this name. Write to another name in the folder, and "
                  "`replace` the old file when the new one is whole.")
          for write in (_write_in_place, _write_bytes)),
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

    def _observe(self, attempt, world_size, *, quiet=False):
        """Three jobs: one that saves, one that dies while it saves, and one on other ranks."""
        with tempfile.TemporaryDirectory() as folder:
            how = {"seconds": self._limit, "quiet": quiet}
            given, others = (attempt, folder), RANKS_OF_LAST_JOB[world_size]
            first = observe.alone(_first_job, given, world_size, **how)
            if isinstance(first, RankError) or not any(facts[IS_THERE] for facts in first):
                return first  # and the other jobs tell no more
            died = observe.alone(_killed_job, given, world_size, **how)
            if isinstance(died, RankError) and died.kind != "died":
                return died
            last = observe.alone(_last_job, given, others, **how)
            return last if isinstance(last, RankError) else _of_jobs(first, last)

    def _failure(self, error, world_size):
        """As of any attempt, but the job that failed may have had another number of ranks."""
        verdict = super()._failure(error, world_size)
        of = re.match(r"rank \d+ of (\d+) ", verdict.detail)
        if of and int(of[1]) != world_size:
            said = f"saved on {_ranks(world_size)}, and gone on with on {_ranks(int(of[1]))}"
            verdict.why = verdict.why.replace(f"on {_ranks(world_size)}", said, 1)
        return verdict

    def _observe_all(self, attempts, world_size):
        """The same three jobs for all; who is killed here is only stopped there."""
        with tempfile.TemporaryDirectory() as folder:
            given = [(attempt, os.path.join(folder, str(number)))
                     for number, attempt in enumerate(attempts)]
            for _, own in given:
                os.mkdir(own)
            outcomes = observe.in_turn(_first_job, given, world_size, seconds=self._limit)
            open_ones = [number for number, first in enumerate(outcomes)
                         if first and any(facts[IS_THERE] for facts in first)]
            for task, ranks in ((_stopped_job, world_size),
                                (_last_job, RANKS_OF_LAST_JOB[world_size])):
                found = observe.in_turn(task, [given[number] for number in open_ones], ranks,
                                        seconds=self._limit)
                for number, facts in zip(open_ones, found, strict=True):
                    if facts is None:
                        outcomes[number] = None
                    elif task is _last_job:
                        outcomes[number] = _of_jobs(outcomes[number], facts)
                open_ones = [number for number in open_ones if outcomes[number]]
            return outcomes

    def expected(self, world_size):
        others, (model, optimizer, generator) = RANKS_OF_LAST_JOB[world_size], _fresh(1)
        for step in range(END):
            _train(model, optimizer, generator, step)
        end = {GOES_ON: SAVED, AT_THE_END: parameters_to_vector(model.parameters()).detach()}
        first = {BEGINS: 0, IS_THERE: True, WRITES: 1}
        return _of_jobs([first] * world_size, [end] * others)


def _ranks(count):
    return f"{count} rank{'s' * (count > 1)}"


def _first_job(given):
    """Trains from the beginning, and saves."""
    job = _Job(given, number=1)
    begun = job.train(until=SAVED)
    write = mock.Mock(side_effect=functools.partial(_write_slowly, torch.save))
    with mock.patch.object(torch, "save", write):
        job.save(SAVED)
    is_there, writes = job.path.exists(), torch.tensor(write.call_count)
    dist.all_reduce(writes)
    return {BEGINS: begun, IS_THERE: is_there, WRITES: writes.item()}


def _killed_job(given):
    """Goes on, and is killed at the worst moment of its `save`."""
    job = _Job(given, number=2)
    job.train(until=KILLED)
    with _death(job.path, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        job.save(KILLED)
    return {}


class _Stopped(BaseException):
    """In place of the end of a rank, where the ranks go on with another attempt."""


def _stopped_job(given):
    """As `_killed_job`, for an attempt that clears up nothing behind it."""
    def stop(*_):
        raise _Stopped

    job = _Job(given, number=2)
    job.train(until=KILLED)
    # Who waits for a rank that is dead ends there, too.
    with (contextlib.suppress(_Stopped), _death(job.path, stop),
          mock.patch.object(dist, "barrier", stop)):
        job.save(KILLED)
    return {}


def _last_job(given):
    """Goes on to the end, on another number of ranks."""
    job = _Job(given, number=3)
    begun = job.train(until=END)
    return {GOES_ON: begun, AT_THE_END: parameters_to_vector(job.model.parameters()).detach()}


class _Job:
    def __init__(self, given, number):
        attempt, folder = given
        os.chdir(folder)  # so that errors name the file alike in every attempt
        self.path = Path("checkpoint.pt")
        self.model, self.optimizer, self.generator = _fresh(number)
        self.checkpoint = attempt(self.path)

    def train(self, until):
        """Loads, and takes the steps that are left; returns what `load` did."""
        begun = self.checkpoint.load(self.model, self.optimizer, self.generator)
        for step in range(begun if isinstance(begun, int) else 0, until):
            _train(self.model, self.optimizer, self.generator, step, dist.get_rank(),
                   dist.get_world_size())
        return begun

    def save(self, step):
        self.checkpoint.save(step, self.model, self.optimizer, self.generator)


def _write_slowly(save, *arguments, **options):
    if dist.get_world_size() > 1:  # who does not wait is back first; who all write, do so in turn
        time.sleep(0.1 + 0.3 * dist.get_rank())
    save(*arguments, **options)


@contextlib.contextmanager
def _death(path, die):
    """In this block the rank dies when ``path`` is half written, or has just been removed or moved;
    or else right before another file replaces it.
    """
    whole_save = torch.save

    def save(saved, file, **options):
        if _is_checkpoint(file):
            _end(_halve)
        whole_save(saved, file, **options)

    _deaths.append((Path(path).absolute(), die))
    _hear_of_files()
    try:
        with mock.patch.object(torch, "save", save):
            yield
    finally:
        _deaths.clear()

_deaths: list[tuple] = []  # where this rank dies: the checkpoint's path, and what ends it


def _is_checkpoint(file):
    return (bool(_deaths) and isinstance(file, str | Path)
            and Path(file).absolute() == _deaths[0][0])


@functools.cache
def _hear_of_files():
    sys.addaudithook(_at_a_file)  # which stays to the end of the process


def _at_a_file(event, arguments):
    if event == "open":
        if _is_checkpoint(arguments[0]) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            _end(_halve)
    elif event in ("os.remove", "os.rename") and _is_checkpoint(arguments[0]):
        _end(_remove)
    elif event == "os.rename" and _is_checkpoint(arguments[1]):
        _end(lambda path: None)


def _end(last_change):
    path, die = _deaths.pop()  # of what follows, nothing is heard
    last_change(path)
    die()


def _halve(path):
    whole = path.read_bytes()
    # Of whatever length it was, so short that reading it fails in one way.
    path.write_bytes(whole[: min(512, len(whole) // 2)])


def _remove(path):
    path.unlink()


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


def _of_jobs(first, last):
    """The facts of a rank of the first job, and below them those of all ranks of the last one."""
    ends = {f"{fact} on rank {rank} of {len(last)} of the last job": value
            for rank, facts in enumerate(last)
            for fact, value in facts.items() if fact != COMMUNICATED}
    return [{**facts, **ends} for facts in first]
