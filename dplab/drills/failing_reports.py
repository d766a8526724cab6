"""Chapter 00's drills: short jobs that fail or hang, read from what each rank was doing.

Every rank calls one function with its own losses. The instruments are those that a reader of
chapter 00 knows: what `dplab.run` says of each rank, without the line that says what happened, and
what plain torchrun prints for the same job.
"""

import inspect
import random
import re
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

BATCH = 4  # losses
PATIENCE = 8  # seconds until gloo gives up under torchrun; by default it waits for 30 minutes


# Faults and the same functions mended. Each rank calls one with the losses of its own samples.


def largest_of_own(losses):
    largest = losses.max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)


def largest_of_own_mended(losses):
    largest = losses.max() if len(losses) else torch.tensor(float("-inf"))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)


def totals_of_the_finite(losses):
    for batch in losses.split(4):
        total = batch.sum()
        if total.isfinite():
            dist.all_reduce(total)


def totals_of_the_finite_mended(losses):
    for batch in losses.split(4):
        total = batch.sum()
        dist.all_reduce(total)  # a NaN reaches every rank


def histogram_as_long_as_needed(losses):
    for batch in losses.split(4):
        counts = batch.long().bincount()
        dist.all_reduce(counts)


def histogram_as_long_as_needed_mended(losses):
    for batch in losses.split(4):
        counts = batch.long().bincount(minlength=10)
        dist.all_reduce(counts)


def outliers_first(losses):
    for batch in losses.split(4):
        total, largest = batch.sum(), batch.max()
        if largest > 9:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.reduce(total, dst=0)
        else:
            dist.reduce(total, dst=0)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)


def outliers_first_mended(losses):
    for batch in losses.split(4):
        total, largest = batch.sum(), batch.max()
        dist.reduce(total, dst=0)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)


def the_longer_one_sends(losses):
    rank, partner = dist.get_rank(), dist.get_rank() ^ 1
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_single(lengths, torch.tensor([len(losses)]))
    mine, theirs = losses[:2].clone(), torch.zeros(2)
    if lengths[rank] >= lengths[partner]:
        dist.send(mine, partner)
        dist.recv(theirs, partner)
    else:
        dist.recv(theirs, partner)
        dist.send(mine, partner)


def the_longer_one_sends_mended(losses):
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
    if rank < last and largest > so_far:
        dist.send(largest, rank + 1)
    dist.all_reduce(losses.sum())


def largest_so_far_mended(losses):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    largest, so_far = losses.max(), torch.zeros(())
    if rank > 0:
        dist.recv(so_far, rank - 1)
    if rank < last:
        dist.send(largest.maximum(so_far), rank + 1)
    dist.all_reduce(losses.sum())


# What the ranks are given. ``odd``: the rank whose losses bring the fault to light.


def losses_of(world_size, chances):
    """Three batches on each rank. The largest loss of each batch is between 7 and 8."""
    draw = torch.Generator().manual_seed(chances.randrange(1_000_000))
    batches = 7 * torch.rand(world_size, 3, BATCH, generator=draw)
    batches[..., 1] = 7 + batches[..., 1] / 7
    return list(batches.flatten(1))


def without_losses(world_size, odd, chances):
    losses = losses_of(world_size, chances)
    losses[odd] = losses[odd][:0]
    return losses


def changed(world_size, odd, chances, change):
    """``change`` is applied to one batch of the odd rank, in place."""
    losses = losses_of(world_size, chances)
    change(losses[odd].split(BATCH)[chances.randrange(3)])
    return losses


def with_a_nan(world_size, odd, chances):
    return changed(world_size, odd, chances, lambda batch: batch[2].fill_(float("nan")))


def with_small_losses(world_size, odd, chances):
    return changed(world_size, odd, chances, lambda batch: batch.clamp_(max=5.5))


def with_an_outlier(world_size, odd, chances):
    return changed(world_size, odd, chances, lambda batch: batch[2].fill_(40.0))


def equally_long_in_one_pair(world_size, odd, chances):
    losses = losses_of(world_size, chances)
    for rank in range(0, world_size, 2):
        if rank != odd // 2 * 2:
            losses[rank] = losses[rank][:-BATCH]
    return losses


def larger_on_each_rank_but_one(world_size, odd, chances):
    """Not the first rank, which has nothing to compare with, nor the last, which never sends."""
    losses = losses_of(world_size, chances)
    for rank, each in enumerate(losses):
        each[1] = 8.0 + rank
    losses[1 + odd % (world_size - 2)].clamp_(max=6.5)
    return losses


# Readings


@dataclass(frozen=True)
class Place:
    """Where a rank was when the job had failed: in a call, or ``operation`` is empty."""

    rank: int
    text: str  # as the reader sees it
    operation: str = ""
    tensor: str = ""  # dtype and shape
    peer: int | None = None  # of a send or receive

    @property
    def is_between_two(self):
        return self.operation in ("send", "recv")


@dataclass
class Readings:
    """What became of a job. ``error``: the report of `run`; None where no rank failed."""

    error: RankError | None
    world_size: int
    script: str

    @cached_property
    def places(self) -> list[Place]:
        """Where each rank was, in rank order."""
        text = "" if self.error is None else str(self.error).partition("\n")[2]
        number = re.match(r"collective (number \d+)", self.head)
        found = [_place(int(rank), doing.strip(), number[1] if number else "")
                 for rank, doing in re.findall(r"^  rank (\d+) (.*)$", text, re.MULTILINE)]
        if self.error is not None and self.error.kind == "raised":
            found.append(self._raised(text))
        return sorted(found, key=lambda place: place.rank)

    @cached_property
    def torchrun(self):
        return torchrun_log(self.script, self.world_size)

    @property
    def head(self):
        """The first line of the report."""
        return str(self.error).partition("\n")[0]

    @property
    def raised(self) -> list[int]:
        return [place.rank for place in self.places if " raised " in place.text]

    @property
    def returned(self) -> list[int]:
        return [place.rank for place in self.places if "returned" in place.text]

    @property
    def waiting(self) -> list[Place]:
        return [place for place in self.places if place.operation]

    def values(self, name) -> Counter:
        """How many of the ranks in a call have which operation, or which tensor."""
        return Counter(getattr(place, name) for place in self.waiting)

    @property
    def each_for_the_other(self) -> list[int]:
        """The ranks that wait for a rank that waits for them."""
        peers = {place.rank: place.peer for place in self.waiting if place.peer is not None}
        return [rank for rank, peer in peers.items() if peers.get(peer) == rank]

    @property
    def passed_by(self) -> dict[int, list[int]]:
        """The ranks that are in no send or receive, by rank those that wait for them in one."""
        between = [place for place in self.waiting if place.is_between_two]
        found: dict[int, list[int]] = {}
        for place in between:
            if place.peer is not None and place.peer not in [other.rank for other in between]:
                found.setdefault(place.peer, []).append(place.rank)
        return found

    def rare(self, name) -> list[int]:
        """The ranks in a call that differ from most in their operation, or in their tensor."""
        [(usual, _), *others] = self.values(name).most_common() or [("", 0)]
        return [place.rank for place in self.waiting if getattr(place, name) != usual] if (
            others) else []

    def to_blame(self) -> list[int]:
        """The ranks whose code took another way than that of the others."""
        if any(place.is_between_two for place in self.waiting):
            return self.each_for_the_other or list(self.passed_by)
        return self.raised or self.returned or self.rare("operation") or self.rare("tensor")

    def _raised(self, text):
        *_, line = re.findall(r"→ +\d+ +(.*)", text)
        return Place(self.error.rank, f"rank {self.error.rank} raised {self.error.error} in {line}")


def _place(rank, doing, number):
    """A rank's place, from its line in a report, and from the number in the report's first line."""
    call = re.match(r"(waits in|called) (\w+)(?: number \d+)? of (\w+\[.*?\])", doing)
    if call is None:
        return Place(rank, f"rank {rank} {doing}")
    if call[1] == "called":
        doing = f"is in {call[2]} {number} of {call[3]}"
    doing = re.sub(r": [^:]+, line \d+", "", doing)  # the file is the drill's
    peer = re.search(r"\] (?:to|from) rank (\d+)", doing)
    return Place(rank, f"rank {rank} {doing}", call[2], call[3], int(peer[1]) if peer else None)


# Suspects


def exception(readings):
    if readings.raised:
        [rank] = readings.raised
        return True, f"{_capital(readings.places[rank].text)}. The others wait for it."
    return False, "No rank raised anything by itself."


def early_end(readings):
    if not readings.returned:
        return False, "No rank had returned: each is in a call, or raised."
    ranks = _ranks(readings.returned)
    if readings.values("operation").keys() & {"send", "recv"}:
        return False, (f"{ranks} had returned, and nobody waits for them: each rank that waits "
                       "names the rank that it waits for.")
    waits = readings.waiting[0].text.partition(":")[0]
    return True, f"{ranks} had returned, while {waits}. So it made fewer calls than the others."


def wrong_shape(readings):
    tensors = readings.values("tensor")
    if len(tensors) > 1 and len(readings.values("operation")) == 1:
        return True, f"The ranks are in one call, with tensors {_listed(tensors)}."
    return False, f"The tensors of all ranks that are in a call are {_listed(tensors)}."


def other_collective(readings):
    operations = readings.values("operation")
    collectives = Counter({name: count for name, count in operations.items()
                           if name not in ("send", "recv")})
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
        waits = ", ".join(f"rank {place.rank} waits for rank {place.peer}"
                          for place in readings.waiting if place.is_between_two)
        return False, f"No two ranks wait for each other: {waits}."
    return False, (f"The ranks that are in a call are in {_listed(readings.values('operation'))}, "
                   "not in a send or receive of two ranks.")


def missing_transfer(readings):
    if not any(place.is_between_two for place in readings.waiting):
        return False, "No rank waits in a send or a receive of two ranks."
    if not readings.passed_by:
        return False, "Each rank in a send or a receive waits for a rank that is in one too."
    [(rank, waiting)] = readings.passed_by.items()
    there = readings.places[rank].text.partition(":")[0]
    waits = "wait" if len(waiting) > 1 else "waits"
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


@dataclass(frozen=True)
class Failure(Fault):
    """A fault, and ``data(world_size, odd, chances)``: each rank's losses, which bring it out."""

    data: Callable = losses_of


def a_connection_is_lost(readings):
    return "by peer" in str(readings.torchrun)


def gloo_gives_up(readings):
    return "Timed out" in str(readings.torchrun)


_NETWORK = ("Our job on {n} ranks ends with an error: a connection was closed or reset “by peer”. "
            "It was fine last week. Is our network broken?")
_HANGS = ("Our job on {n} ranks stands still. Nothing is printed, until gloo gives up. Do I need a "
          "longer timeout?")
CASES = (
    Case("a", "exception", "of_all_ranks", (Failure(
        largest_of_own, largest_of_own_mended, _NETWORK, a_connection_is_lost, (3, 4),
        without_losses),)),
    Case("b", "early end", "of_all_ranks", (Failure(
        totals_of_the_finite, totals_of_the_finite_mended, _NETWORK, a_connection_is_lost, (3, 4),
        with_a_nan),)),
    Case("c", "wrong shape", "of_all_ranks", (Failure(
        histogram_as_long_as_needed, histogram_as_long_as_needed_mended, _NETWORK,
        a_connection_is_lost, (3, 4), with_small_losses),)),
    Case("d", "other collective", "of_all_ranks", (Failure(
        outliers_first, outliers_first_mended, _HANGS, gloo_gives_up, (3, 4),
        with_an_outlier),)),
    Case("e", "deadlock", "of_all_ranks", (Failure(
        the_longer_one_sends, the_longer_one_sends_mended, _HANGS, gloo_gives_up, (4,),
        equally_long_in_one_pair),)),
    Case("f", "missing transfer", "of_all_ranks", (Failure(
        largest_so_far, largest_so_far_mended, _HANGS, gloo_gives_up, (4,),
        larger_on_each_rank_but_one),)),
)


class FailingReport(SickJob):
    """A short job that fails or hangs: which rank is to blame, and what did it do?"""

    chapter = 0
    minutes = 5
    suspects_known = SUSPECTS
    cases = CASES
    answer = 'job.diagnose("…", rank=...)'

    def _draw_settings(self, chances: random.Random) -> list[torch.Tensor]:
        """Each rank's losses."""
        odd = chances.randrange(self._world_size)
        assert isinstance(self._fault, Failure)
        return self._fault.data(self._world_size, odd, chances)

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

    def _is_healthy(self, readings):
        healthy = readings.error is None
        return healthy, "All ranks returned." if healthy else readings.head

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
                       f"{_capital(self._readings.places[rank].text)}. Look for {sought}. "
                       "(`job.ranks()` shows it.)", color=cards.ORANGE)

    @instrument
    def ranks(self) -> None:
        """Where each rank was in the end: the report of `run`, without its first line."""
        print("\n".join(place.text for place in self._readings.places))

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
