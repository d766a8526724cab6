"""A checkpoint that is whole wherever a job dies, and from which any number of ranks goes on."""

import contextlib
import functools
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
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip


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


SAVED, KILLED, END, BATCH = 3, 5, 8, 12
RANKS_OF_LAST_JOB = {1: 2, 2: 3, 3: 1, 4: 2}

BEGINS = "the step at which the first job begins"
IS_THERE = "that the checkpoint is there, under its path, when `save` returns"
WRITES = "how often all ranks together call `torch.save` in a `save`"
GOES_ON, AT_THE_END = "the step that goes on", "the weights at the end"


class SurvivingCheckpoint(Exercise):
    number = "12.1"
    title = "A checkpoint that survives"
    minutes = 25
    communicates = False
    solution = Checkpoint

    def observe(self, attempt, world_size, *, quiet=False):
        """Three jobs: one that saves, one that dies while it saves, and one on other ranks."""
        with tempfile.TemporaryDirectory() as folder:
            how = {"seconds": self._limit, "quiet": quiet}
            given, others = (attempt, folder), RANKS_OF_LAST_JOB[world_size]
            first = observe.alone(first_job, given, world_size, **how)
            if isinstance(first, RankError) or not any(facts[IS_THERE] for facts in first):
                return first  # and the other jobs tell no more
            died = observe.alone(killed_job, given, world_size, **how)
            if isinstance(died, RankError) and died.kind != "died":
                return died
            last = observe.alone(last_job, given, others, **how)
            return last if isinstance(last, RankError) else of_jobs(first, last)

    def on_failure(self, error, world_size):
        """As of any attempt, but the job that failed may have had another number of ranks."""
        verdict = super().on_failure(error, world_size)
        of = re.match(r"rank \d+ of (\d+) ", verdict.detail)
        if of and int(of[1]) != world_size:
            here, there = number_of_ranks(world_size), number_of_ranks(int(of[1]))
            verdict.why = verdict.why.replace(
                f"on {here}", f"saved on {here}, and gone on with on {there}", 1)
        return verdict

    def observe_all(self, attempts, world_size):
        """The same three jobs for all; who is killed here is only stopped there."""
        with tempfile.TemporaryDirectory() as folder:
            given = [(attempt, os.path.join(folder, str(number)))
                     for number, attempt in enumerate(attempts)]
            for _, own in given:
                os.mkdir(own)
            outcomes = observe.in_turn(first_job, given, world_size, seconds=self._limit)
            open_ones = [number for number, first in enumerate(outcomes)
                         if first and any(facts[IS_THERE] for facts in first)]
            for task, ranks in ((stopped_job, world_size),
                                (last_job, RANKS_OF_LAST_JOB[world_size])):
                found = observe.in_turn(task, [given[number] for number in open_ones], ranks,
                                        seconds=self._limit)
                for number, facts in zip(open_ones, found, strict=True):
                    if facts is None:
                        outcomes[number] = None
                    elif task is last_job:
                        outcomes[number] = of_jobs(outcomes[number], facts)
                open_ones = [number for number in open_ones if outcomes[number]]
            return outcomes

    def expected(self, world_size):
        others, (model, optimizer, generator) = RANKS_OF_LAST_JOB[world_size], fresh(1)
        for step in range(END):
            train(model, optimizer, generator, step)
        end = {GOES_ON: SAVED, AT_THE_END: parameters_to_vector(model.parameters()).detach()}
        first = {BEGINS: 0, IS_THERE: True, WRITES: 1}
        return of_jobs([first] * world_size, [end] * others)

    hints = (
        "Go through all that a step uses: weights, optimizer state, where in the sequence of "
        "batches, which step. All of it is the same on every rank, so one rank writes one file.",
        "Stop your `save` in thought after each of its lines, and in the middle of the write: "
        "what can be read under `path` then? If the answer is ever nothing, look for an operation "
        "on files that is done wholly or not at all. And what do the other ranks do meanwhile?",
        "`torch.save(..., new)` to another name in the same folder, then `new.replace(path)`, and "
        "a barrier for all ranks. `load` of the first job finds no file. `generator.get_state()` "
        "and `set_state` are the place in the data.",
    )
    slips = (
        # The file.
        Slip("The job was killed while it saved, and half a file is all that is left under this "
             "name. Write to another name in the folder, and `replace` the old file when the new "
             "one is whole.",
             {'self.path.with_name("new")': "self.path"},
             {'self.path.with_name("new")': 'self.path.open("wb")',
              "new.replace(self.path)": "new.close()"}),
        Slip("The job died while it saved. The next one found no checkpoint that it could read, "
             "the old one removed or overwritten, and began anew. `replace` puts a new file, once "
             "whole, in the old one's place in one step.",
             {"new = ": "self.path.unlink(missing_ok=True)\nnew = "}),
        Slip("Every rank writes a checkpoint, and the last one to finish decides which is there; "
             "if all write to one name, into each other's. One rank writes, the others wait.",
             {"dist.get_rank() == 0": "True"}),
        Slip("The other ranks go on before rank 0 has written: a job that ends now leaves no "
             "checkpoint. All have to wait *behind* the writing, at a barrier at the end of "
             "`save`.", {"dist.barrier()": ""}),
        Slip("Only rank 0 comes to the barrier, and meets the others' next collective. The barrier "
             "stands outside the `if`.", {"dist.barrier()": "    dist.barrier()"}),
        Slip("In the first job there is no file yet. `load` returns 0 then, and changes nothing; "
             "so the same script starts and restarts.", {"not self.path.exists()": "False"}),
        # What is in it.
        Slip("The weights are not restored: the job goes on from a new model.",
             {'model.load_state_dict(saved["model"])': ""}),
        Slip("The optimizer's state is not restored: Adam goes on without its moments, and counts "
             "its steps from 0.", {'optimizer.load_state_dict(saved["optimizer"])': ""}),
        Slip("The batches begin anew: the state of `generator` is not restored. "
             "(`torch.get_rng_state()` is that of another one.)",
             {'generator.set_state(saved["generator"])': ""},
             {"generator.get_state()": "torch.get_rng_state()",
              "generator.set_state(": "torch.set_rng_state("}),
        Slip("You keep one random state for each rank, and the next job may have more ranks. All "
             "ranks draw the same batches here: save one state.",
             {"if dist.get_rank() == 0:": "states = [None] * dist.get_world_size()\n"
              "dist.all_gather_object(states, generator.get_state())\nif dist.get_rank() == 0:",
              '"generator": generator.get_state()': '"generator": states',
              'saved["generator"]': 'saved["generator"][dist.get_rank()]'}),
        Slip("`load` returns 0 although there is a checkpoint, so the job does its first steps "
             "twice. Save the step, too.", {'return saved["step"]': "return 0"}),
        Slip("The step is off by one. `step` counts the steps that are done; the loop goes on with "
             "`range(step, ...)`.", {'return saved["step"]': 'return saved["step"] + 1'},
             {'return saved["step"]': 'return saved["step"] - 1'}),
        Slip("Only rank 0 loads. The gradients are averaged, weights and moments are not, so the "
             "replicas stay different: every rank loads.",
             {"model.load": 'if dist.get_rank() > 0:\n    return saved["step"]\nmodel.load'},
             {"model.load": 'generator.set_state(saved["generator"])\nif dist.get_rank() > 0:\n'
                            '    return saved["step"]\nmodel.load'}),
    )


def number_of_ranks(count):
    return f"{count} rank{'s' * (count > 1)}"


def first_job(given):
    """Trains from the beginning, and saves."""
    job = Job(given, number=1)
    begun = job.train(until=SAVED)
    write = mock.Mock(side_effect=functools.partial(write_slowly, torch.save))
    with mock.patch.object(torch, "save", write):
        job.save(SAVED)
    is_there, writes = job.path.exists(), torch.tensor(write.call_count)
    dist.all_reduce(writes)
    return {BEGINS: begun, IS_THERE: is_there, WRITES: writes.item()}


def killed_job(given):
    """Goes on, and is killed at the worst moment of its `save`."""
    job = Job(given, number=2)
    job.train(until=KILLED)
    with death(job.path, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        job.save(KILLED)
    return {}


class Stopped(BaseException):
    """In place of the end of a rank, where the ranks go on with another attempt."""


def stopped_job(given):
    """As `killed_job`, for an attempt that clears up nothing behind it."""
    def stop(*_):
        raise Stopped

    job = Job(given, number=2)
    job.train(until=KILLED)
    # Who waits for a rank that is dead ends there, too.
    with (contextlib.suppress(Stopped), death(job.path, stop),
          mock.patch.object(dist, "barrier", stop)):
        job.save(KILLED)
    return {}


def last_job(given):
    """Goes on to the end, on another number of ranks."""
    job = Job(given, number=3)
    begun = job.train(until=END)
    return {GOES_ON: begun, AT_THE_END: parameters_to_vector(job.model.parameters()).detach()}


class Job:
    def __init__(self, given, number):
        attempt, folder = given
        os.chdir(folder)  # so that errors name the file alike in every attempt
        self.path = Path("checkpoint.pt")
        self.model, self.optimizer, self.generator = fresh(number)
        self.checkpoint = attempt(self.path)

    def train(self, until):
        """Loads, and takes the steps that are left; returns what `load` did."""
        begun = self.checkpoint.load(self.model, self.optimizer, self.generator)
        for step in range(begun if isinstance(begun, int) else 0, until):
            train(self.model, self.optimizer, self.generator, step, dist.get_rank(),
                   dist.get_world_size())
        return begun

    def save(self, step):
        self.checkpoint.save(step, self.model, self.optimizer, self.generator)


def write_slowly(save, *arguments, **options):
    if dist.get_world_size() > 1:  # who does not wait is back first; who all write, do so in turn
        time.sleep(0.1 + 0.3 * dist.get_rank())
    save(*arguments, **options)


@contextlib.contextmanager
def death(path, die):
    """In this block the rank dies when ``path`` is half written, or has just been removed or moved;
    or else right before another file replaces it.
    """
    whole_save = torch.save

    def save(saved, file, **options):
        if is_checkpoint(file):
            end(halve)
        whole_save(saved, file, **options)

    deaths.append((Path(path).absolute(), die))
    hear_of_files()
    try:
        with mock.patch.object(torch, "save", save):
            yield
    finally:
        deaths.clear()

deaths: list[tuple] = []  # where this rank dies: the checkpoint's path, and what ends it


def is_checkpoint(file):
    return (bool(deaths) and isinstance(file, str | Path)
            and Path(file).absolute() == deaths[0][0])


@functools.cache
def hear_of_files():
    sys.addaudithook(at_a_file)  # which stays to the end of the process


def at_a_file(event, arguments):
    if event == "open":
        if is_checkpoint(arguments[0]) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            end(halve)
    elif event in ("os.remove", "os.rename") and is_checkpoint(arguments[0]):
        end(remove)
    elif event == "os.rename" and is_checkpoint(arguments[1]):
        end(lambda path: None)


def end(last_change):
    path, die = deaths.pop()  # of what follows, nothing is heard
    last_change(path)
    die()


def halve(path):
    whole = path.read_bytes()
    # Of whatever length it was, so short that reading it fails in one way.
    path.write_bytes(whole[: min(512, len(whole) // 2)])


def remove(path):
    path.unlink()


def fresh(job):
    """As each job makes them: new weights, and the data's generator at its beginning."""
    torch.manual_seed(job)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return (model, torch.optim.Adam(model.parameters(), lr=0.02, eps=0.01),
            torch.Generator().manual_seed(0))


def train(model, optimizer, generator, step, rank=0, ranks=1):
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


def of_jobs(first, last):
    """The facts of a rank of the first job, and below them those of all ranks of the last one."""
    ends = {f"{fact} on rank {rank} of {len(last)} of the last job": value
            for rank, facts in enumerate(last)
            for fact, value in facts.items() if fact != COMMUNICATED}
    return [{**facts, **ends} for facts in first]
