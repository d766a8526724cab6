"""Chapter 00's drills: short jobs that fail or hang, read from what each rank was doing.

Every rank calls one function with its own losses. The instruments are those that a reader of
chapter 00 knows: what `dplab.run` says of each rank, without the line that says what happened, and
what plain torchrun prints for the same job.
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

import torch
import torch.distributed as dist

from dplab import RankError, run
from dplab.desk import cards
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument
from dplab.measure import torchrun_log
from dplab.spawn.between.errors import RankReport

BATCH = 4  # losses
PATIENCE = 8  # seconds until gloo gives up under torchrun; by default it waits for 30 minutes


# Each rank calls one of these with the losses of its own samples.


def largest_loss(losses):
    largest = losses.max() if len(losses) else torch.tensor(float("-inf"))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)


def totals(losses):
    for batch in losses.split(4):
        total = batch.sum()
        dist.all_reduce(total)  # a NaN reaches every rank


def histogram(losses):
    for batch in losses.split(4):
        counts = batch.long().bincount(minlength=10)
        dist.all_reduce(counts)


def totals_and_largest(losses):
    for batch in losses.split(4):
        total, largest = batch.sum(), batch.max()
        dist.reduce(total, dst=0)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)


def swap(losses):
    rank, partner = dist.get_rank(), dist.get_rank() ^ 1
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_single(lengths, torch.tensor([len(losses)]))
    mine, theirs = losses[:2].clone(), torch.zeros(2)
    if (lengths[rank], rank) >= (lengths[partner], partner):
        dist.send(mine, partner)
        dist.recv(theirs, partner)
    else:
        dist.recv(theirs, partner)
        dist.send(mine, partner)


def largest_so_far(losses):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    largest, so_far = losses.max(), torch.zeros(())
    if rank > 0:
        dist.recv(so_far, rank - 1)
    if rank < last:
        dist.send(largest.maximum(so_far), rank + 1)
    dist.all_reduce(losses.sum())


# What makes one job's losses bring the fault to light, those of the rank ``odd``. They are changed
# in place.


def are_none(losses, odd, _):
    losses[odd] = losses[odd][:0]


def in_one_batch(change):
    return lambda losses, odd, chances: change(losses[odd].split(BATCH)[chances.randrange(3)])


def are_as_many_as_the_partner_s(losses, odd, _):
    for rank in range(0, len(losses), 2):
        if rank != odd // 2 * 2:
            losses[rank] = losses[rank][:-BATCH]


def are_smaller_than_before(losses, odd, _):
    """Not of the first rank, which has nothing to compare with, nor of the last, which never sends.
    """
    for rank, each in enumerate(losses):
        each[1] = 8.0 + rank
    losses[1 + odd % (len(losses) - 2)].clamp_(max=6.5)


# Readings


@dataclass
class Readings:
    """What became of a job. ``error``: what `run` raised; None where no rank failed."""

    error: RankError | None
    world_size: int
    script: str

    @property
    def ranks(self) -> list[RankReport]:
        return self.error.ranks if self.error else []

    @cached_property
    def torchrun(self):
        return torchrun_log(self.script, self.world_size)

    def words(self, rank: int) -> str:
        """Where a rank was, as the reader sees it: without the file, which is the drill's."""
        each = self.ranks[rank]
        if self.error and each.state == "raised":
            return f"rank {rank} raised {self.error.error} in {each.source}"
        if each.state == "called":
            return f"rank {rank} is in {each.operation} number {each.number} of {each.tensor}"
        return ": ".join(filter(None, [f"rank {rank} {each.doing}", each.source]))

    def in_state(self, state) -> list[int]:
        return [each.rank for each in self.ranks if each.state == state]

    @property
    def in_a_call(self) -> list[RankReport]:
        return [each for each in self.ranks if each.state in ("waiting", "called")]

    @property
    def between_two(self) -> dict[int, int]:
        """The ranks that wait in a send or receive, each with the rank that it waits for."""
        return {each.rank: each.peer for each in self.in_a_call if each.peer is not None}

    def values(self, name) -> Counter:
        """How many of the ranks in a call have which ``"operation"``, or which ``"tensor"``."""
        return Counter(getattr(each, name) for each in self.in_a_call)

    @property
    def each_for_the_other(self) -> list[int]:
        """The ranks that wait for a rank that waits for them."""
        peers = self.between_two
        return [rank for rank, peer in peers.items() if peers.get(peer) == rank]

    @property
    def passed_by(self) -> dict[int, list[int]]:
        """The ranks that are in no send or receive, by rank those that wait for them in one."""
        peers = self.between_two
        return {passed: [rank for rank, peer in peers.items() if peer == passed]
                for passed in peers.values() if passed not in peers}

    def rare(self, name) -> list[int]:
        """The ranks in a call that differ from most in their operation, or in their tensor."""
        usual = self.values(name).most_common(1)
        return [each.rank for each in self.in_a_call if getattr(each, name) != usual[0][0]]

    def to_blame(self) -> list[int]:
        """The ranks whose code took another way than that of the others."""
        if self.between_two:
            return self.each_for_the_other or list(self.passed_by)
        return (self.in_state("raised") or self.in_state("returned") or self.rare("operation")
                or self.rare("tensor"))


# Suspects


def exception(readings):
    if raised := readings.in_state("raised"):
        return True, f"{_capital(readings.words(*raised))}. The others wait for it."
    return False, "No rank raised anything by itself."


def early_end(readings):
    returned = readings.in_state("returned")
    if not returned:
        return False, "No rank had returned: each is in a call, or raised."
    ranks = _ranks(returned)
    if readings.between_two:
        return False, (f"{ranks} had returned, and nobody waits for them: each rank that waits "
                       "names the rank that it waits for.")
    waits = readings.words(readings.in_a_call[0].rank).partition(":")[0]
    return True, f"{ranks} had returned, while {waits}. So it made fewer calls than the others."


def wrong_shape(readings):
    tensors = readings.values("tensor")
    if len(tensors) > 1 and len(readings.values("operation")) == 1:
        return True, f"The ranks are in one call, with tensors {_listed(tensors)}."
    return False, f"The tensors of all ranks that are in a call are {_listed(tensors)}."


def other_collective(readings):
    operations = readings.values("operation")
    collectives = Counter(each.operation for each in readings.in_a_call if each.peer is None)
    if len(collectives) > 1:
        return True, f"The ranks are in different collectives: {_listed(collectives)}."
    if len(operations) > 1:
        return False, f"All ranks that are in a collective are in {_listed(collectives)}."
    return False, f"All ranks that are in a call are in {_listed(operations)}."


def deadlock(readings):
    if readings.each_for_the_other:
        ranks = _ranks(readings.each_for_the_other)
        return True, f"{ranks} each wait in a send to the other, and nobody receives."
    if readings.passed_by:
        waits = ", ".join(f"rank {rank} waits for rank {peer}"
                          for rank, peer in readings.between_two.items())
        return False, f"No two ranks wait for each other: {waits}."
    return False, (f"The ranks that are in a call are in {_listed(readings.values('operation'))}, "
                   "not in a send or receive of two ranks.")


def missing_transfer(readings):
    if not readings.between_two:
        return False, "No rank waits in a send or a receive of two ranks."
    if not readings.passed_by:
        return False, "Each rank in a send or a receive waits for a rank that is in one too."
    [(rank, waiting)] = readings.passed_by.items()
    waits = "wait" if len(waiting) > 1 else "waits"
    there = readings.words(rank).partition(":")[0]
    return True, f"{_ranks(waiting)} {waits} for rank {rank}, and {there}."


def _listed(counts):
    return ", ".join(f"{what} ({count} rank{'s' * (count > 1)})"
                     for what, count in counts.most_common())


def _ranks(ranks):
    *first, last = ranks
    return f"Ranks {', '.join(map(str, first))} and {last}" if first else f"Rank {last}"


def _capital(text):
    return text[:1].upper() + text[1:]


SUSPECTS = (
    Suspect("exception", "A rank raised before its call, and the others wait.", "ranks", exception),
    Suspect("early end", "A rank returned after fewer calls than the others make.", "ranks",
            early_end),
    Suspect("wrong shape", "A rank is in the same call as the others, with a tensor that does not "
            "fit.", "ranks", wrong_shape),
    Suspect("other collective", "A rank is in another collective than the others: it left one out, "
            "or calls them in another order.", "ranks", other_collective),
    Suspect("deadlock", "Two ranks each wait for the other.", "ranks", deadlock),
    Suspect("missing transfer", "A rank went past a send or a receive that another rank waits for.",
            "ranks", missing_transfer),
)


# Jobs


@dataclass(frozen=True, eq=False, kw_only=True)
class Failure(Fault):
    """A fault, and ``change(losses, odd, chances)``, which makes the losses bring it to light."""

    change: Callable


_NETWORK = ("Our job on {n} ranks ends with an error: a connection was closed or reset “by peer”. "
            "It was fine last week. Is our network broken?", {"a connection is lost"})
_HANGS = ("Our job on {n} ranks stands still. Nothing is printed, until gloo gives up. Do I need a "
          "longer timeout?", {"gloo gives up"})
CASES = (
    Case("a", "exception", largest_loss, (Failure(
        {' if len(losses) else torch.tensor(float("-inf"))': ""},
        *_NETWORK, (3, 4), change=are_none),)),
    Case("b", "early end", totals, (Failure(
        {"dist.all_reduce(total)  # a NaN reaches every rank":
         "if total.isfinite():\n    dist.all_reduce(total)"},
        *_NETWORK, (3, 4),
        change=in_one_batch(lambda batch: batch[2].fill_(float("nan")))),)),
    Case("c", "wrong shape", histogram, (Failure(
        {"minlength=10": ""}, *_NETWORK, (3, 4),
        change=in_one_batch(lambda batch: batch.clamp_(max=5.5))),)),
    Case("d", "other collective", totals_and_largest, (Failure(
        {"dist.reduce(total, dst=0)\n        dist.all_reduce(largest, op=dist.ReduceOp.MAX)":
         "if largest > 9:\n"
         "    dist.all_reduce(largest, op=dist.ReduceOp.MAX)\n"
         "    dist.reduce(total, dst=0)\n"
         "else:\n"
         "    dist.reduce(total, dst=0)\n"
         "    dist.all_reduce(largest, op=dist.ReduceOp.MAX)"},
        *_HANGS, (3, 4), change=in_one_batch(lambda batch: batch[2].fill_(40.0))),)),
    Case("e", "deadlock", swap, (Failure(
        {"(lengths[rank], rank) >= (lengths[partner], partner)":
         "lengths[rank] >= lengths[partner]"},
        *_HANGS, (4,), change=are_as_many_as_the_partner_s),)),
    Case("f", "missing transfer", largest_so_far, (Failure(
        {"rank < last:": "rank < last and largest > so_far:", ".maximum(so_far)": ""},
        *_HANGS, (4,), change=are_smaller_than_before),)),
)


class FailingReport(SickJob):
    """A short job that fails or hangs: which rank is to blame, and what did it do?"""

    chapter = 0
    minutes = 5
    suspects_known = SUSPECTS
    cases = CASES
    answer = 'job.diagnose("…", rank=...)'

    def _draw_settings(self, chances: random.Random) -> list[torch.Tensor]:
        """Each rank's losses, in three batches. The largest of each batch is between 7 and 8."""
        odd = chances.randrange(self._world_size)
        draw = torch.Generator().manual_seed(chances.randrange(1_000_000))
        batches = 7 * torch.rand(self._world_size, 3, BATCH, generator=draw)
        batches[..., 1] = 7 + batches[..., 1] / 7
        losses = list(batches.flatten(1))
        assert isinstance(self._fault, Failure)
        self._fault.change(losses, odd, chances)
        return losses

    def _description(self):
        return (f"The job runs on {self._world_size} ranks. Each calls one function with the "
                "losses of its own samples, and the function makes all the calls.")

    def _run(self, part):
        error = None
        try:
            run(_call, self._world_size, part, self._settings, timeout=5, backend="gloo")
        except RankError as failed:
            if failed.kind not in ("raised", "stuck", "mismatched"):
                raise  # the machine's own failure, not the job's
            error = failed
        return Readings(error, self._world_size, self._script(part))

    def diagnose(self, suspect: str = "", rank: "int | EllipsisType | None" = None) -> None:
        """Says whether this is what went wrong, and whether on this rank, with the reading."""
        known = self._suspect_named(suspect)
        if known is None or not self._has_run():
            return
        to_blame = self._readings.to_blame()
        if not known.finding(self._readings)[0] or rank in to_blame:
            super().diagnose(suspect)
        elif rank is None or rank is ...:
            cards.card("On which rank?", f'`job.diagnose("{known.name}", rank=...)`')
        elif isinstance(rank, bool) or rank not in range(self._world_size):
            cards.card(f"There is no rank {rank!r}", f"The ranks are 0 to {self._world_size - 1}.")
        else:
            self._counted(False)
            # Other innocent ranks may be in the call that the guilty one is in.
            sought = ("a rank that another one waits for, and that is itself in no send or receive"
                      if self._readings.passed_by else "the rank that did something else")
            cards.card(f"Job {self.seed}: “{known.name}” is right, but not rank {rank}",
                       f"{_capital(self._readings.words(rank))}. Look for {sought}. "
                       "(`job.ranks()` shows it.)", color=cards.ORANGE)

    @instrument
    def ranks(self) -> None:
        """Where each rank was in the end: the report of `run`, without its first line."""
        print(*map(self._readings.words, range(self._world_size)), sep="\n")

    @instrument
    def torchrun(self) -> None:
        """What plain torchrun prints for the same job, where gloo gives up after 8 s."""
        print(f"Starting {self._world_size} processes with torchrun …", flush=True)
        print(self._readings.torchrun)

    def _script(self, part):
        """The same job as a script for torchrun, with gloo's patience cut short."""
        losses = [each.tolist() for each in self._settings]
        return "\n".join([
            "from datetime import timedelta",
            "import torch",
            "import torch.distributed as dist",
            inspect.getsource(part),
            f'dist.init_process_group("gloo", timeout=timedelta(seconds={PATIENCE}))',
            'nan = float("nan")',
            f"{part.__name__}(torch.tensor({losses}[dist.get_rank()]))",
            "dist.destroy_process_group()"])


def _call(part, losses):
    part(losses[dist.get_rank()])
