"""Chapter 00's drills: a job that fails or hangs, and one function in which six lines may be why.

The reader has the code, as on call, and says in which line one rank took another path than the
others. The losses decide that, and are not shown. The first instrument, torchrun's log, is there
already; torch's DETAIL costs a rerun of the job, and what only `run` tells costs two. A wrong
answer costs one, and shows of the latter one rank's line.
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from dplab import RankError, run
from dplab.desk import cards
from dplab.desk.edits import source_of
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument
from dplab.measure import torchrun_log
from dplab.spawn.between.errors import RankReport

BATCH = 4  # losses
RERUNS = {"log": 0, "detail": 1, "ranks": 2}  # that the instruments cost
PATIENCE = 8  # seconds until gloo gives up under torchrun; by default it waits for 30 minutes


def report(losses):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    large = losses[losses > 7.5][0]
    dist.all_reduce(large, op=dist.ReduceOp.MIN)
    for batch in losses.split(4):
        total, worst = batch.sum(), batch.max()
        if total.isfinite():
            dist.all_reduce(total)
        counts = batch[batch.isfinite()].long().bincount()
        dist.all_reduce(counts)
        if worst > 7.9:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    final, before = losses[-1], torch.zeros(())
    if rank > 0:
        dist.recv(before, rank - 1)
    if rank < last and final > before:
        dist.send(final, rank + 1)
    dist.reduce(losses.sum(), dst=0)


CODE = inspect.getsource(report).splitlines()


def line_of(text: str) -> int:
    """The number of the one line of `report` that has this text in it; the first is 1."""
    [number] = [number for number, line in enumerate(CODE, 1) if text in line]
    return number


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
    def log(self):
        return torchrun_log(self.script, self.world_size)

    @cached_property
    def detail(self):
        return torchrun_log(self.script, self.world_size, TORCH_DISTRIBUTED_DEBUG="DETAIL")

    def words(self, rank: int) -> str:
        """Where a rank was, with the line of `report` in the place of the drill's own."""
        each = self.ranks[rank]
        doing = each.doing
        if each.state == "called":  # in words without its number
            doing = doing.replace(" of ", f" number {each.number} of ", 1)
        if self.error and each.state == "raised":
            doing = f"raised {self.error.error}"
        return f"rank {rank} {doing}: line {line_of(each.source)}, {each.source}"

    @property
    def between_two(self) -> dict[int, int]:
        """The ranks that wait in a send or receive, each with the rank that it waits for."""
        return {each.rank: each.peer for each in self.ranks if each.peer is not None}

    @property
    def usual(self) -> str:
        """What most ranks do."""
        return Counter(each.doing for each in self.ranks).most_common(1)[0][0]

    def against(self, name: str, rank: int) -> int:
        """A rank whose reading cannot be if this rank broke the promise there: first itself."""
        own, others = COULD_BE[name]
        odd = self.ranks[rank]
        if not own(odd):
            return rank
        return next(each.rank for each in self.ranks if each is not odd and not others(each, odd))

    def to_blame(self) -> int:
        """The rank whose code took another way than that of the others."""
        raised = [each.rank for each in self.ranks if each.state == "raised"]
        waiting = self.between_two
        if len(waiting) > 1:  # a chain, of which one rank did not send
            odd = [peer for peer in waiting.values() if peer not in waiting]
        else:
            odd = list(waiting) or [each.rank for each in self.ranks if each.doing != self.usual]
        [rank] = raised or odd
        return rank

    def line(self) -> int:
        """The line that sent it there."""
        odd = self.ranks[self.to_blame()]
        if odd.state == "raised":
            return line_of(odd.source)
        if self.between_two:
            return LINES["no send"] if odd.peer is None else LINES["batches"]
        if "int64" in self.usual and "int64" in odd.doing:
            return LINES["width"]
        # Where the maximum was taken for a sum, its rank is a call later in a sum.
        return LINES["limit" if "MAX" in odd.doing or "int64" in self.usual else "finite"]


LINES = {"none": line_of("[0]"), "batches": line_of("for batch"), "finite": line_of("if total"),
         "width": line_of("bincount"), "limit": line_of("if worst"), "no send": line_of("final >")}
# What the reports show where this line is to blame.
WOULD_SHOW = {
    "none": "a rank that has no such loss raises an IndexError, and the others wait in line 4",
    "batches": "a rank with fewer batches is past the loop, in a send or a receive, while all "
               "others are in a collective of the loop",
    "finite": "its rank leaves out a sum, so it is one call ahead: it gives its counts, int64, "
              "while the others give a sum, float32",
    "width": "all ranks are in line 10 with int64, and one has another number of counts",
    "limit": "its rank makes one call more, so it is one call behind: it gives a maximum, float32, "
             "and with plain gloo goes on to a sum while the others give counts, int64",
    "no send": "the next rank waits in its receive for a rank that is already in line 18",
}


def _is_in(report, *lines):
    return line_of(report.source) in lines


# Where the rank to blame can be, and where each other rank can be then.
COULD_BE = {
    "none": (lambda odd: odd.state == "raised", lambda each, _: _is_in(each, 4)),
    "batches": (lambda odd: _is_in(odd, 15, 17, 18), lambda each, _: _is_in(each, 8, 10, 12)),
    "finite": (lambda odd: _is_in(odd, 10), lambda each, _: _is_in(each, 8)),
    "width": (lambda odd: _is_in(odd, 10), lambda each, _: _is_in(each, 10)),
    "limit": (lambda odd: _is_in(odd, 8, 12),
              lambda each, odd: _is_in(each, 10 if _is_in(odd, 8) else 8)),
    "no send": (lambda odd: _is_in(odd, 18), lambda each, _: _is_in(each, 15, 17, 18)),
}


def _suspect(name):
    def finding(readings):
        here = "; ".join(map(readings.words, range(readings.world_size)))
        return (readings.line() == LINES[name],
                f"Where this line is to blame, {WOULD_SHOW[name]}. Here {here}.")

    return Suspect(f"line-{LINES[name]}", CODE[LINES[name] - 1].strip(), "ranks", finding)


# What makes a job's losses bring a line to light, those of the rank ``odd``. They are changed in
# place.


def without_a_large_one(losses, odd, _):
    losses[odd].clamp_(max=7.3)


def of_fewer_batches(losses, odd, _):
    losses[odd] = losses[odd][:-BATCH]


def in_one_batch(change):
    return lambda losses, odd, chances: change(losses[odd].split(BATCH)[chances.randrange(2)])


def smaller_than_before(losses, odd, _):
    """Not of the first rank, which has nothing to compare with, nor of the last, which never sends.
    """
    losses[1 + odd % (len(losses) - 2)][-1] = 4.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Failure(Fault):
    """Edits that mend one line, and ``change``, which makes the losses bring it to light.

    ``price``: what the mended job does not do.
    """

    change: Callable
    price: str = ""


_COMPLAINT = ("Our job on {n} ranks ended with errors in the night. It was fine last week, on "
              "other data. Is it our network, or do we need a longer timeout?")


def _case(slug, name, change, edits, price=""):
    return Case(slug, f"line-{LINES[name]}", report,
                (Failure(edits, _COMPLAINT, {"errors"}, (4,), change=change, price=price),))


CASES = (
    _case("a", "none", without_a_large_one,
          {"large = losses[losses > 7.5][0]":
           'large = torch.cat([losses[losses > 7.5], torch.tensor([float("inf")])])[0]'}),
    _case("b", "batches", of_fewer_batches,
          {"for batch in losses.split(4):":
           "steps = torch.tensor(len(losses.split(4)))\n"
           "dist.all_reduce(steps, op=dist.ReduceOp.MIN)\n"
           "for batch in losses.split(4)[:steps]:"},
          "They leave out each batch that not every rank has. To use all data, give every rank as "
          "many batches."),
    _case("c", "finite", in_one_batch(lambda batch: batch[2].fill_(float("nan"))),
          {"if total.isfinite():\n            dist.all_reduce(total)":
           "dist.all_reduce(total)  # a NaN reaches every rank"}),
    _case("d", "width", in_one_batch(lambda batch: batch.clamp_(max=5.5)),
          {"long().bincount()": "clamp(max=9).long().bincount(minlength=10)"},
          "A loss of 10 or more then counts as a 9."),
    _case("e", "limit", in_one_batch(lambda batch: batch[2].fill_(7.95)),
          {"if worst > 7.9:\n            dist.all_reduce(worst, op=dist.ReduceOp.MAX)":
           "dist.all_reduce(worst, op=dist.ReduceOp.MAX)"}),
    _case("f", "no send", smaller_than_before,
          {"if rank < last and final > before:\n        dist.send(final, rank + 1)":
           "if rank < last:\n    dist.send(final.maximum(before), rank + 1)"}),
)


class FailingReport(SickJob):
    """A job that fails or hangs: in which line did which rank take its own path?"""

    chapter = 0
    minutes = 8
    suspects_known = tuple(map(_suspect, LINES))
    cases = CASES
    answer = "job.diagnose(line=…, rank=…)"

    def __init__(self, seed: int):
        super().__init__(seed)
        self._reruns = 0  # that wrong answers cost
        self._mended = source_of(report).edited(self._fault.edits) or ""
        self._healthy = source_of(report).compiled(self._mended)

    def _draw_settings(self, chances: random.Random) -> list[torch.Tensor]:
        """Each rank's losses, in three batches. The largest of each batch is from 7.6 to 7.8."""
        odd = chances.randrange(self._world_size)
        draw = torch.Generator().manual_seed(chances.randrange(1_000_000))
        batches = 7 * torch.rand(self._world_size, 3, BATCH, generator=draw)
        batches[..., 1] = 7.6 + batches[..., 1] / 35
        batches[..., 3] = 5 + torch.arange(self._world_size)[:, None] / 2
        losses = list(batches.flatten(1))
        assert isinstance(self._fault, Failure)
        self._fault.change(losses, odd, chances)
        return losses

    def _description(self):
        return f"Each of the {self._world_size} ranks calls `report` with its own losses."

    def _guide(self):
        code = "\n".join(f"{number:2}  {line}" for number, line in enumerate(CODE, 1))
        instruments, _, rest = super()._guide().partition("\n\nSuspects")
        rows = instruments.replace("one of the suspects below", "the line, and the rank to blame")
        return "\n\n".join([code, rows, rest.rpartition("\n\n")[2]])

    def _run(self, part):
        error = None
        try:
            run(_call, self._world_size, part, self._settings, timeout=5, backend="gloo")
        except RankError as failed:
            if failed.kind not in ("raised", "stuck", "mismatched"):
                raise  # the machine's own failure, not the job's
            error = failed
        return Readings(error, self._world_size, self._script())

    def _sick_part(self):
        return source_of(report).compiled("\n".join(CODE))

    def _difference(self):
        return self._as_patch("\n".join(CODE), self._mended)

    @property
    def _legend(self):
        return f"{super()._legend} {self._fault.price}".strip()

    def diagnose(self, line=..., rank=...) -> None:
        """Says whether this line is to blame, and whether it was so on this rank."""
        if isinstance(line, bool) or line not in range(1, len(CODE) + 1):
            cards.card("Which line?", f"`{self.answer}`, with a line from 1 to {len(CODE)}.")
        elif line not in LINES.values():
            cards.card(f"Line {line} is none of the six",
                       "No rank's own losses decide there which call it makes next, or with how "
                       "many elements. Look for such a line. (This is no try.)")
        elif isinstance(rank, bool) or rank not in range(self._world_size):
            cards.card("Which rank?", f"Line {line} is one of the six. The ranks are 0 to "
                       f"{self._world_size - 1}. (This is no try.)")
        elif self._has_run():
            self._judge(line, rank)

    def _judge(self, line, rank):
        readings, [name] = self._readings, [each for each in LINES if LINES[each] == line]
        if line != readings.line():
            self._is_wrong(f"not line {line} on rank {rank}",
                           f"Where line {line} is to blame, {WOULD_SHOW[name]}. But "
                           f"{readings.words(readings.against(name, rank))}.")
        elif rank != readings.to_blame():
            self._is_wrong(f"line {line} is right, but not rank {rank}",
                           f"{readings.words(rank)}, and it did as its losses say. Which rank "
                           "did what no other did?")
        else:
            _, sentence = self.suspects_known[list(LINES).index(name)].finding(readings)
            self._is_right(f": line {line}, rank {rank}", sentence)

    def _counted(self, fits):
        self._reruns += not fits
        return super()._counted(fits)

    def _is_solved(self, head, sentence):
        reruns = self._reruns + sum(map(RERUNS.__getitem__, self._asked))
        super()._is_solved(head, f"{sentence} It took {reruns} rerun{'s' * (reruns != 1)} of the "
                                 "job.")

    @instrument
    def log(self) -> None:
        """Line and error of each rank that wrote one, from torchrun's log: it is there already."""
        print(self._readings.log)

    @instrument
    def detail(self) -> None:
        """The same with TORCH_DISTRIBUTED_DEBUG=DETAIL: one rerun."""
        print(self._readings.detail)
        if "Detected mismatch" in str(self._readings.detail):
            print("\nBelieve what a rank says of itself. What it says of another may be wrong, as "
                  "an OpType=GATHER\nthat is nowhere in the code. SequenceNumber counts from 0, "
                  "job.ranks() from 1.")

    @instrument
    def ranks(self) -> None:
        """Each rank's line and call, with a collective's number, under `dplab.run`: two reruns."""
        print(*map(self._readings.words, range(self._world_size)), sep="\n")

    def _script(self):
        """The same job as a script for torchrun, with gloo's patience cut short."""
        losses = [each.tolist() for each in self._settings]
        return "\n".join([
            *CODE,  # first, so that a traceback has its lines' numbers
            "from datetime import timedelta",
            "import torch",
            "import torch.distributed as dist",
            f'dist.init_process_group("gloo", timeout=timedelta(seconds={PATIENCE}))',
            'nan = float("nan")',
            f"report(torch.tensor({losses}[dist.get_rank()]))",
            "dist.destroy_process_group()"])


def _call(part, losses):
    part(losses[dist.get_rank()])
