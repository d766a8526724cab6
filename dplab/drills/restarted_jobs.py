"""Chapter 12's drills: a job that lost its power in the night, and went on with fewer ranks.

Two jobs on real ranks train on digits. The first one dies while it saves, the second one goes on
from what is left, with fewer ranks, and may stand still. A part of them has a fault, which need not
have to do with the restart. The instruments compare both with one process that nothing ever
happened to.
"""

import contextlib
import pickle
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab import RankError, run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, draw, instrument, print_table
from dplab.workloads.digits import TRAIN_SIZE, load_digits

EVERY, DIES, END, BATCH, IN_A_NODE = 4, 16, 20, 24, 2
TIMEOUT = 4.0  # seconds, after which the ranks are asked where they are
MATCHED = 1e-5  # losses that differ by less are the same
TIMES = 2  # what is slow, beside the median rank


class PowerCut(Exception):
    """The first job dies here."""


@dataclass(frozen=True)
class Night:
    """What the seed decides: on how many ranks both jobs run, and what they train on."""

    ranks: int
    ranks_after: int
    seed: int


# The parts


def own_samples(step, night):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(TRAIN_SIZE, generator=torch.Generator().manual_seed(night.seed + step))
    return order[:BATCH][rank::ranks]


def forward(model, images):
    time.sleep(0.01)  # in place of a larger model
    return model(images)


def update(model, optimizer, step):
    optimizer.step()
    optimizer.zero_grad()


def write(folder, step, state, put):
    part = folder / f"part-{step}"
    put(state, part)
    part.rename(folder / f"step-{step}")


def newest(folder):
    found = list(folder.glob("step-*"))
    return max(found, key=lambda path: int(path.name.split("-")[1]))


@dataclass(frozen=True)
class Parts:
    """What the two jobs are made of."""

    own_samples: Callable = own_samples
    forward: Callable = forward
    update: Callable = update
    write: Callable = write
    newest: Callable = newest


# The jobs


@dataclass
class Recording:
    """What one rank did, step by step, from the step with which it began."""

    begin: int = 0
    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


def job(parts: Parts, night: Night, folder: Path, name: str) -> None:
    """Trains from the newest that is there. In the first job the power fails at step `DIES`."""
    digits, record = load_digits(), Recording()
    model = nn.Linear(64, 10)
    torch.manual_seed(night.seed)
    nn.init.normal_(model.weight, std=0.1)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "second":
        record.begin = load(parts.newest(folder), model, optimizer)
    for step in range(record.begin, END):
        mine = parts.own_samples(step, night)
        begin = time.perf_counter()
        logits = parts.forward(model, digits.train_images[mine].flatten(1))
        loss = F.cross_entropy(logits, digits.train_labels[mine], reduction="sum") / BATCH
        loss.backward()
        record.seconds.append(time.perf_counter() - begin)
        record.losses.append(average(model, loss.detach()))
        parts.update(model, optimizer, step)
        record.samples.append(mine.tolist())
        record.sums.append(checksum(model))
        # In a file, because a job that stands still returns nothing.
        (folder / f"{name} {dist.get_rank()}").write_bytes(pickle.dumps(record))
        done = step + 1
        if done % EVERY == 0 and name == "first" and dist.get_rank() == 0:
            with contextlib.suppress(PowerCut):
                parts.write(folder, done, {"step": done, "model": model.state_dict(),
                                           "optimizer": optimizer.state_dict()},
                            put_half if done == DIES else put)
        if done == DIES and name == "first":
            break
    dist.barrier()


def put(state, path):
    """Into an open file: of a path `torch.save` stores the name too, and the sizes would differ."""
    with path.open("wb") as file:
        torch.save(state, file)


def put_half(state, path):
    """Saves as `put` does, until the power fails."""
    put(state, path)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    raise PowerCut


def load(path, model, optimizer):
    """The step to go on with: 0, and all as it was, where the file cannot be read."""
    try:
        state = torch.load(path)
    except (RuntimeError, OSError, EOFError):
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def average(model, loss):
    """Sums the ranks' gradients and losses, each of them already a part of the mean."""
    gradients = [parameter.grad for parameter in model.parameters()]
    vector = torch.cat([parameters_to_vector(gradients), loss.view(1)])
    dist.all_reduce(vector)
    vector_to_parameters(vector[:-1], gradients)
    return vector[-1].item()


def checksum(model):
    return zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy().tobytes())


# Readings


@dataclass
class Readings:
    """What both jobs did, and one process. ``waits``: where the second job stands still, where each
    rank is; ``files``: of what lies in the folder, the size.
    """

    night: Night
    first: list[Recording]
    second: list[Recording]
    one: Recording
    files: dict[str, int]
    waits: dict[int, str]

    def losses(self) -> list[float]:
        """As the log has them: of a step that was done twice, the second time."""
        losses = list(self.first[0].losses)
        losses[self.second[0].begin:] = self.second[0].losses
        return losses

    def apart(self) -> list[int]:
        """The steps, counted from 1, whose loss is not that of one process."""
        return [step for step, (here, there) in enumerate(zip(
            self.losses(), self.one.losses, strict=False), 1) if abs(here - there) > MATCHED]

    def pace(self) -> list[float]:
        """The median seconds that each rank of the first job computes in a step."""
        return [statistics.median(each.seconds) for each in self.first]

    def whole(self) -> list[int]:
        """The steps under whose names a file of the usual size lies."""
        named = {int(name.split("-")[1]): size for name, size in self.files.items()
                 if name.startswith("step-")}
        return sorted(step for step, size in named.items() if size > 0.9 * max(named.values()))

    def torn(self) -> list[str]:
        return [name for name in self.files
                if name.startswith("step-") and int(name.split("-")[1]) not in self.whole()]


def recordings(folder, name, ranks):
    return [pickle.loads((folder / f"{name} {rank}").read_bytes()) for rank in range(ranks)]


# Suspects


def absentee(readings):
    if not readings.waits:
        return False, "Both jobs came to their ends: nobody waited for ever."
    away = [rank for rank, where in readings.waits.items() if "number" not in where]
    return bool(away), f"While the others wait in a call, rank {away[0]} is in none."


def bit_flip(readings):
    for step, sums in enumerate(zip(*(each.sums for each in readings.first), strict=False), 1):
        if len(set(sums)) > 1:
            odd = next(rank for rank, each in enumerate(sums) if sums.count(each) < 2)
            return True, f"After step {step} rank {odd} has weights that no other rank has."
    return False, "After each step of the night all ranks had equal weights, to the last digit."


def shrunken_batch(readings):
    taken = len({sample for each in readings.second for sample in each.samples[0]})
    return taken < BATCH, (f"In a step of the morning its {readings.night.ranks_after} ranks "
                           f"take {taken} samples; it was {BATCH}.")


def torn_save(readings):
    torn = readings.torn()
    if torn:
        return True, (f"`{torn[0]}` has {readings.files[torn[0]]:,} bytes, which is half of the "
                      "others, and a name as if it were whole.")
    return False, "Each file with a step's name is whole."


def stale_restart(readings):
    if readings.torn():
        return False, f"The newest checkpoint, `{readings.torn()[-1]}`, is not whole."
    begin, newest = readings.second[0].begin, readings.whole()[-1]
    return begin < newest, (
        f"The morning began with step {begin}; the newest whole file is that of step {newest}.")


def sluggish_host(readings):
    pace = readings.pace()
    slow = [rank for rank, seconds in enumerate(pace) if seconds > TIMES * min(pace)]
    of_a_node = bool(slow) and len({rank // IN_A_NODE for rank in slow}) == 1
    return of_a_node, (f"The slowest rank of the night computes {max(pace) / min(pace):.1f} "
                       "times as long in a step as the fastest.")


SUSPECTS = (
    Suspect("absentee", "A rank never makes a call in which the others wait for it.", "calls",
            absentee),
    Suspect("bit flip", "A weight changes on one rank alone.", "sums", bit_flip),
    Suspect("shrunken batch", "With fewer ranks, a step has fewer samples.", "samples",
            shrunken_batch),
    Suspect("torn save", "A checkpoint gets its name before it is whole.", "folder", torn_save),
    Suspect("stale restart", "The newest checkpoint is whole, and the restart takes an older one.",
            "folder", stale_restart),
    Suspect("sluggish host", "All ranks of one node compute slowly.", "clocks", sluggish_host),
)

CASES = (
    Case("a", "absentee", own_samples, (
        Fault({"order = ": "while rank == 1 and step == 17:\n    time.sleep(0.1)\norder = "},
              "What the log has is right. But the job that our {n} ranks began should have been "
              "done hours ago, and we pay for each of them.", {"stands still"},
              world_sizes=(3, 4)),)),
    Case("b", "bit flip", update, (
        Fault({"optimizer.zero_grad()":
               "optimizer.zero_grad()\nif step == 6 and dist.get_rank() == 1:\n"
               "    model.weight.data.view(torch.int32)[3, 20] ^= 1 << 22"},
              "Same seed, same data, and yet the losses on {n} ranks leave those of one process "
              "in the first night. Not by much. The morning's job carries it on.", {"apart early"},
              world_sizes=(3, 4)),)),
    Case("c", "shrunken batch", own_samples, (
        Fault({"[rank::ranks]": "[rank::night.ranks]"},
              "The {n} ranks of the night did all that one process does. In the morning fewer "
              "came back, and since then the losses are other ones.", {"apart late"},
              world_sizes=(3, 4)),)),
    Case("d", "torn save", write, (
        Fault({"part = folder / f\"part-{step}\"\n    ": "",
               "put(state, part)\n    part.rename(folder / f\"step-{step}\")":
               "put(state, folder / f\"step-{step}\")"},
              "We lost power in step 16, and the morning's job did a good part of the night once "
              "more. Its losses are right. On {n} ranks that is money.", {"far back"},
              world_sizes=(3, 4)),)),
    Case("e", "stale restart", newest, (
        Fault({"int(path.name.split(\"-\")[1])": "path.name"},
              "The power failed at step 16. Why were more steps done twice than four? The {n} "
              "ranks of the night had done them well.", {"far back"}, world_sizes=(3, 4)),
        Fault({"max(found, key=": "min(found, key="},
              "Each morning the job does more of the night's steps again than it should, and the "
              "curve is fine. Last night it ran on {n} ranks.", {"far back"},
              world_sizes=(3, 4)))),
    Case("f", "sluggish host", forward, (
        Fault({"time.sleep(0.01)": "time.sleep(0.01 if dist.get_rank() < 2 else 0.04)"},
              "The losses are those of one process. But a night on {n} ranks is three times as "
              "long as planned, and the morning, with fewer of them, is fine.", {"slow"},
              world_sizes=(3, 4)),)),
)


class RestartedJob(SickJob):
    """A job that lost its power, and went on."""

    chapter = 12
    running = "Running the night on {n} ranks, and the morning after …"
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Night:
        # Both ranks of a night's node with more than one come back: ranks 0 and 1.
        return Night(self._world_size, 2, chances.randrange(1000, 1_000_000))

    def _description(self):
        return (f"The night: {self._settings.ranks} ranks, {IN_A_NODE} to a node, and a checkpoint "
                f"every {EVERY} steps. Planned are {END} steps. While the one of step {DIES} is "
                f"written, the power fails. The morning: {self._settings.ranks_after} ranks start "
                "the same script, which is to load the newest checkpoint, and to begin anew if it "
                "cannot read that one.")

    def _run(self, part):
        parts, night = replace(Parts(), **{self._part_name: part}), self._settings
        with tempfile.TemporaryDirectory() as name:
            alone, folder = Path(name, "alone"), Path(name, "job")
            alone.mkdir()
            folder.mkdir()
            run(job, 1, Parts(), night, alone, "one", backend="gloo")
            [one] = recordings(alone, "one", 1)
            waits = {}
            run(job, night.ranks, parts, night, folder, "first", backend="gloo")
            try:
                run(job, night.ranks_after, parts, night, folder, "second", backend="gloo",
                    timeout=TIMEOUT)
            except RankError as error:
                if error.kind != "stuck":
                    raise
                waits = {each.rank: f"in {each.operation} number {each.number}"
                         if each.state in ("waiting", "called") else "in no call"
                         for each in error.ranks}
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())
                     if "-" in path.name}
            return Readings(night, recordings(folder, "first", night.ranks),
                            recordings(folder, "second", night.ranks_after), one, files, waits)

    @instrument
    def losses(self) -> None:
        """The log: each step's loss, and that of one process; what was done twice."""
        readings = self._readings
        curves = {"one process": readings.one.losses, "night and morning": readings.losses()}
        draw(show.loss_curves, curves, title="Loss of each step", note="")
        steps = range(0, END, 2)
        print_table(["step", *(step + 1 for step in steps)], *(
            [name, *(f"{losses[step]:.4f}" if step < len(losses) else "" for step in steps)]
            for name, losses in curves.items()))
        print(f"the morning began with step {readings.second[0].begin}")

    @instrument
    def folder(self) -> None:
        """What the night left in the folder, and with what the morning began."""
        for name, size in sorted(self._readings.files.items()):
            print(f"{name:8}  {size:6,} bytes")
        print(f"the morning began with step {self._readings.second[0].begin}")

    @instrument
    def samples(self) -> None:
        """How many samples each rank takes in a step, in the night and in the morning."""
        for name, ranks in (("night", self._readings.first), ("morning", self._readings.second)):
            for rank, each in enumerate(ranks):
                print(f"{name:8} rank {rank}: {len(each.samples[0])} samples in a step")
            print(f"{name:8} different ones, of all: "
                  f"{len({sample for each in ranks for sample in each.samples[0]})}")

    @instrument
    def clocks(self) -> None:
        """How long each rank computes in a step of the night."""
        pace = self._readings.pace()
        print_table(["ms", "median step"], *([f"rank {rank}", f"{1e3 * seconds:.0f}"]
                                             for rank, seconds in enumerate(pace)))

    @instrument
    def sums(self) -> None:
        """A checksum of each rank's weights, after some steps of the night."""
        first = self._readings.first
        steps = [step for step in range(1, DIES, 2) if step < len(first[0].sums)]
        print_table(["after step", *(step + 1 for step in steps)], *(
            [f"rank {rank}", *(f"{each.sums[step]:08x}" if step < len(each.sums) else ""
                               for step in steps)] for rank, each in enumerate(first)))

    @instrument
    def calls(self) -> None:
        """Where each rank was in the end, of the night and of the morning."""
        readings = self._readings
        for name, ranks in (("night", readings.first), ("morning", readings.second)):
            waits = readings.waits if name == "morning" else {}
            for rank, each in enumerate(ranks):
                end = f"at its end, after step {each.begin + len(each.losses)}"
                print(f"{name:8} rank {rank} {waits.get(rank, end)}")
