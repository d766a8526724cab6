"""Chapter 06's drills: training that is slow, or stands still.

The job is that of `workloads.slept_steps`: real ranks, real collectives on an emulated link, and
computing that is slept. One of its parts has a fault. The instruments read the spans, the calls,
and where each rank is, as a profiler and NCCL's flight recorder show them. One rank alone, with
healthy parts, stands beside it.
"""

import contextlib
import pickle
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path

import torch.distributed as dist

from dplab import RankError, run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, draw, instrument, print_table
from dplab.measure import EmulatedLink, aligned, from_last_launch, split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, Span
from dplab.spawn.rank.recording import recorder_here
from dplab.workloads import slept_steps as healthy
from dplab.workloads.slept_steps import Parts, Sizes, Worker

LINK = EmulatedLink(bandwidth=2e6, latency=0.4e-3)
KERNELS, TOGETHER = ("forward", "backward", "optimizer"), "together"
END = "end"
SKIPPED = 1  # steps at the beginning, in which connections are made


# A part of one job, in the place of `slept_steps.count_batches`


def count_dealt_out_anew(rank, ranks, batches):
    readable = batches - 1  # one was found broken, in whichever rank's files
    return readable // ranks


# Recording


@dataclass
class Recording:
    """What one rank did, until it left its training or the job was ended."""

    steps: list  # the spans of each step that is over
    calls: list  # operation, values, step and part of each collective, in the order of launch
    done: int  # of those, how many are complete
    begun: int  # steps
    finished: bool  # whether the rank has left its training


class Recorder(list):
    """A list whose items stand in a file too, as a flight recorder's: a job may have to be ended.

    Its items are spans that are over; the calls; and numbers, the times at which steps begin and
    the last one ends.
    """

    def __init__(self, path: Path):
        self.file = open(path, "wb", buffering=0)

    def append(self, item):
        super().append(item)
        self.file.write(pickle.dumps(item))


def recorded(parts: Parts, sizes: Sizes, folder: str) -> None:
    """Trains, and notes in a file what happens."""
    worker, begun = Worker(sizes), 0
    events = worker.trace.spans = Recorder(Path(folder, str(dist.get_rank())))
    names = {getattr(parts, part).__name__: part for part in vars(parts)}

    def begin(number):
        nonlocal begun
        begun += 1
        events.append(time.monotonic())

    def launched(call, _):
        part = next((names[name] for name in functions(sys._getframe()) if name in names), "train")
        events.append((call.operation, call.shape[0] if call.shape else 0, begun, part))

    dist.barrier()
    with worker.trace:
        recorder_here().work_listeners.append(launched)
        healthy.train(parts, worker, begin)
        recorder_here().work_listeners.remove(launched)
    events.append(time.monotonic())
    events.append(END)
    dist.barrier()  # so that nobody's connection is closed while another rank is stuck


def functions(frame):
    """The names of the functions in which a thread is, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def recording_in(file: Path) -> Recording:
    """What a rank has noted so far."""
    events = []
    with open(file, "rb") as noted, contextlib.suppress(EOFError):
        while True:
            events.append(pickle.load(noted))
    spans = [event for event in events if isinstance(event, Span)]
    borders = [event for event in events if isinstance(event, float)]
    steps = [[span for span in spans if start <= span.start < end]
             for start, end in pairwise(borders)]
    return Recording(steps, [event for event in events if isinstance(event, tuple)],
                     sum(span.lane == COMMUNICATION for span in spans),
                     len(borders) - (END in events), END in events)


# Readings


@dataclass
class Readings:
    """What the ranks of a job did, and what one rank does alone."""

    ranks: list[Recording]
    one_rank: Recording

    @cached_property
    def steps(self) -> list[list]:
        """The spans of all ranks of each step that all have done, but for the first one."""
        whole = min(len(each.steps) for each in self.ranks)
        return [aligned([each.steps[step] for each in self.ranks])
                for step in range(SKIPPED, whole)]

    @cached_property
    def alone(self) -> list[list]:
        return [aligned([spans]) for spans in self.one_rank.steps[SKIPPED:]]

    @property
    def alone_seconds(self) -> float:
        return statistics.median(map(length, self.alone))

    @cached_property
    def seconds(self) -> list[dict[str, float]]:
        return medians(self.steps)

    def of(self, what: str) -> list[float]:
        """By rank: one of these medians."""
        return [seconds[what] for seconds in self.seconds]

    @cached_property
    def alone_computes(self) -> float:
        """The seconds in which one rank alone computes in a step."""
        return medians(self.alone)[0][TOGETHER]

    @property
    def link_seconds(self) -> float:
        """How long the link works in a step, at its own speed."""
        return sum(span.seconds for span in LINK.carried(self.steps[0])[0]
                   if span.lane == COMMUNICATION)

    @property
    def least_unhidden(self) -> float:
        """The share of the link's time in which a rank computes nothing: of all ranks the least,
        and of the steps the median, since a busy machine may hold a rank up in any of them.
        """
        return statistics.median(min(kinds["exposed"] for kinds in split_time(LINK.carried(step)))
                                 for step in self.steps) / self.link_seconds

    @property
    def differing(self) -> int | None:
        """The number of the first call that is not the same on all ranks that have it."""
        for number, calls in enumerate(zip_longest(*(each.calls for each in self.ranks))):
            if len({call[:2] for call in calls if call}) > 1:
                return number
        return None

    @property
    def stands_still(self) -> bool:
        return not all(each.finished for each in self.ranks)


def medians(steps) -> list[dict[str, float]]:
    """By rank: over the steps, the medians of its seconds in each kind of kernel, in all together,
    for its data, and in each kind that `split_time` knows.
    """
    def seconds(spans, split):
        kernels = [span for span in spans if span.lane == COMPUTE]
        of_kind = {kind: [span for span in kernels if span.name == kind] for kind in KERNELS}
        of_kind |= {TOGETHER: kernels, "for data": [span for span in spans if span.name == "data"]}
        return split | {kind: sum(span.seconds for span in each) for kind, each in of_kind.items()}

    ranks = zip(*(map(seconds, step, split_time(step)) for step in steps), strict=True)
    return [{kind: statistics.median(step[kind] for step in rank) for kind in rank[0]}
            for rank in ranks]


def length(step):
    return max(span.end for spans in step for span in spans)


def ms(seconds):
    return f"{1e3 * seconds:.0f} ms"


# Suspects


def one_computes_longer(readings):
    computes = readings.of(TOGETHER)
    least, longest = min(computes), max(computes)
    return longest > 2 * least, (
        f"In a step, rank {computes.index(longest)} computes for {ms(longest)}, and rank "
        f"{computes.index(least)} for {ms(least)}.")


def waits_for_data(readings):
    waits = readings.of("for data")
    least, longest = min(waits), max(waits)
    much = 0.5 * readings.alone_computes
    who = (f"Each rank waits {ms(least)} or more" if least > much else
           f"Rank {waits.index(longest)} waits {ms(longest)}")
    return longest > much, (f"{who} for its data in a step, in which one rank alone computes for "
                            f"{ms(readings.alone_computes)}.")


def link_alone(readings):
    least = readings.least_unhidden  # with one bucket of six at the end, a sixth
    link = f"At its own speed the link works for {ms(readings.link_seconds)} in each step."
    if least > 0.45:
        return True, (f"{link} In half of the steps or more, on each rank, {100 * least:.0f} % of "
                      "that time or more is beside no computing.")
    return False, (f"{link} In half of the steps or more, a rank computes for "
                   f"{100 * (1 - least):.0f} % of that time or more.")


def all_compute_longer(readings):
    least = min(readings.of(TOGETHER))
    return least > 1.7 * readings.alone_computes, (
        f"Each rank computes for {ms(least)} or more in a step, and one rank alone for "
        f"{ms(readings.alone_computes)}.")


def some_are_done(readings):
    done = [rank for rank, each in enumerate(readings.ranks) if each.finished]
    begun = ", ".join(str(each.begun) for each in readings.ranks)
    fits = 0 < len(done) < len(readings.ranks)
    return fits, (f"The ranks have begun {begun} steps, and {len(done)} of {len(readings.ranks)} "
                  "have left their training.")


def calls_differ(readings):
    number = readings.differing
    if number is None:
        return False, ("All calls that several ranks have made are the same, in the same order, "
                       f"up to number {max(len(each.calls) for each in readings.ranks)}.")
    calls = [f"{each.calls[number][0]} on rank {rank}" for rank, each in enumerate(readings.ranks)
             if number < len(each.calls)]
    return True, f"Call number {number + 1} is {', '.join(calls)}."


SUSPECTS = (
    Suspect("straggler", "One rank computes longer than the others, which wait for it.", "kernels",
            one_computes_longer),
    Suspect("late input", "Ranks wait for their data.", "timeline", waits_for_data),
    Suspect("unhidden traffic", "The link works while nobody computes.", "split", link_alone),
    Suspect("slower everywhere", "Every rank computes longer than one rank alone.", "kernels",
            all_compute_longer),
    Suspect("unequal loops", "The ranks do not all take the same number of steps.", "where",
            some_are_done),
    Suspect("lone collective", "Some ranks make a call that the others do not make.", "dump",
            calls_differ),
)

_SLEEP = "time.sleep(0.0005)  # the loader has the batch ready"
_LAUNCH = "works.append(dist.all_reduce(bucket, async_op=True))"
CASES = (
    Case("a", "straggler", healthy.forward, (
        Fault({"for _ in": "hot = dist.get_rank() == dist.get_world_size() - 1\nfor _ in",
               "worker.sizes.forward)":
               "worker.sizes.forward * (8 if hot else 1))  # its clock is low"},
              "On {n} GPUs a step takes more than twice as long as on one, with the same local "
              "batch. The profile of rank 0 is full of all_reduce. Do we need a faster network?",
              {"slow"}),)),
    Case("b", "late input", healthy.load, (
        Fault({_SLEEP: "time.sleep(0.200)  # num_workers=0: reads and decodes the batch now"},
              "With {n} GPUs each step takes much longer than on one, at the same local batch. The "
              "profile shows gaps. Can bigger buckets close them?", {"slow"}),
        Fault({_SLEEP: "own = dist.get_rank() == dist.get_world_size() - 1\n"
               "time.sleep(0.220 if own else 0.0005)  # this rank's files lie on the old file "
               "server"},
              "We went from one GPU to {n}, with the same local batch, and now most of a step on "
              "rank 0 is all_reduce. The network team finds nothing.", {"slow"}))),
    Case("c", "unhidden traffic", healthy.backward, (
        Fault({_LAUNCH: f"{_LAUNCH}\nworks[-1].wait()"},
              "Since last week's refactoring the steps on {n} GPUs take a good third longer. The "
              "loss is the same to the last digit.", {"slow"}),
        Fault({_LAUNCH: "for piece in bucket.chunk(24):\n"
               "    works.append(dist.all_reduce(piece, async_op=True))"},
              "On {n} GPUs a step takes far longer than on one with the same local batch. The "
              "bytes that we send are what they should be: I have added them up.", {"slow"},
              (2, 3)))),
    Case("d", "slower everywhere", healthy.backward, (
        Fault({"worker.sizes.backward)": "4 * worker.sizes.backward)  # deterministic kernels"},
              "On one GPU the script is fast. Started on {n} by our new launcher, a step takes "
              "more than twice the time, and I suspect the all-reduce.", {"slow"}),)),
    Case("e", "unequal loops", healthy.count_batches, (
        Fault({"batches // ranks": "len(range(rank, batches, ranks))"},
              "The job on {n} GPUs trains well, and then, near the end of the epoch, it stands "
              "still. All GPUs show a load of 100 %.", {"stands still"}),
        Fault({"readable = batches - 1  # one was found broken, in whichever rank's files":
               "broken = 1 if rank == ranks - 1 else 0  # found in this rank's files",
               "readable // ranks": "batches // ranks - broken"},
              "We threw some unreadable files away. Since then the job on {n} GPUs stands still at "
              "the end of each epoch.", {"stands still"}, part=count_dealt_out_anew)),
        to_repair=True),
    Case("f", "lone collective", healthy.save, (
        Fault({"# writes the checkpoint": "# writes the checkpoint\ndist.barrier()"},
              "After some steps the job on {n} GPUs stands still, always at the same one. A "
              "smaller batch changes nothing.", {"stands still"}),
        Fault({" and dist.get_rank() == 0:": ":\n"
               "    if dist.get_rank() == dist.get_world_size() - 1:\n        return",
               "# writes the checkpoint": "# writes its part of the checkpoint\ndist.barrier()"},
              "The job on {n} GPUs ran for weeks. Then we made it save more often, and now it "
              "stands still after a few steps.", {"stands still"}, (3, 4)))),
    Case("g", "straggler", healthy.backward, (
        Fault({"for bucket in": "longest = dist.get_rank() == 0  # the samples are sorted by their "
               "length\nfor bucket in",
               "worker.sizes.backward)": "worker.sizes.backward * (4 if longest else 1))"},
              "A step on {n} GPUs takes far longer than on one with the same local batch. On the "
              "last rank the all_reduce is most of it. Which setting of NCCL do we change?",
              {"slow"}),)),
    Case("h", "slower everywhere", healthy.forward, (
        Fault({"worker.sizes.forward)": "9 * worker.sizes.forward)"},
              "Somebody tidied up the training on {n} GPUs, and a step takes much longer than our "
              "old one-GPU script at the same local batch.", {"slow"}),)),
)


# The jobs


class SlowJob(SickJob):
    """A training job that takes too long, or never ends."""

    chapter = 6
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Sizes:
        steps, hops = chances.choice([6, 7]), 2 * (self._world_size - 1)
        bucket = chances.uniform(0.011, 0.013)  # seconds of its all-reduce on the emulated link
        values = (bucket - hops * LINK.latency) * LINK.bandwidth * self._world_size / hops / 4
        return Sizes(layers=6, forward=0.004, backward=0.014, optimizer=0.004,
                     bucket_bytes=4 * round(values),
                     batches=steps * self._world_size + chances.randrange(1, self._world_size))

    def _description(self):
        sizes = self._settings
        return (f"The job trains a model of {sizes.layers} layers on {self._world_size} ranks, "
                "with one bucket for each layer. The link is emulated, and so is computing: a rank "
                f"sleeps in place of it. There are {sizes.batches} batches, and a checkpoint "
                "after every fourth step. One rank alone has run with the healthy script.")

    def _run(self, part):
        parts = replace(Parts(), **{self._part_name: part})
        [one_rank] = self._dumps(1, Parts(), replace(
            self._settings, batches=self._settings.batches // self._world_size))
        return Readings(self._dumps(self._world_size, parts, self._settings), one_rank)

    def _dumps(self, ranks, parts, sizes):
        """What each rank has dumped; a job that stands still is ended."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(recorded, ranks, parts, sizes, folder, backend="gloo", link=LINK, timeout=20)
            except RankError as error:
                if error.kind not in ("stuck", "mismatched"):
                    raise
            return [recording_in(Path(folder, str(rank))) for rank in range(ranks)]

    def _is_healthy(self, readings):
        begun = [each.begun for each in readings.ranks]
        wanted = self._settings.batches // self._world_size
        # Who lets all ranks stop with the one that has the fewest leaves out no more than it must.
        least = wanted - (self._fault.part is count_dealt_out_anew)
        healthy = (not any(suspect.finding(readings)[0] for suspect in SUSPECTS)
                   and not readings.stands_still and len(set(begun)) == 1
                   and least <= begun[0] <= wanted)
        enough = f"{least} or {wanted}" if least < wanted else wanted
        return healthy, (f"The ranks have begun {', '.join(map(str, begun))} steps, and "
                         f"{sum(each.finished for each in readings.ranks)} of {len(begun)} have "
                         f"left their training. There are batches for {enough} steps on each.")

    @instrument
    def steps(self) -> None:
        """How long each step takes, and how many steps each rank has begun."""
        readings = self._readings
        print("From the first start of any rank to the last end, in each step but the first one "
              "(it makes connections)")
        numbers = range(SKIPPED + 1, SKIPPED + 1 + len(readings.steps))
        print_table(["", *map(str, numbers)],
                    ["these ranks", *(ms(length(step)) for step in readings.steps)])
        print(f"one rank alone: {ms(readings.alone_seconds)} (median)\n")
        for rank, each in enumerate(readings.ranks):
            print(f"rank {rank} has begun {each.begun} steps")

    @instrument
    def kernels(self) -> None:
        """How long each rank computes in a step, by kind of kernel."""
        print("Median over the steps")
        self._print_seconds([*KERNELS, TOGETHER],
                            ["one rank alone", "", "", "", ms(self._readings.alone_computes)])

    @instrument
    def split(self) -> None:
        """What each rank does with its time in a step, as `split_time` has it."""
        readings = self._readings
        print("Median over the steps")
        self._print_seconds([*split_time(readings.steps[0])[0]])
        print(f"at its own speed the link works for {ms(readings.link_seconds)} of a step; "
              "the rank whose computing hides most of that hides "
              f"{100 * (1 - readings.least_unhidden):.0f} %\n"
              f"one rank alone computes for {ms(readings.alone_computes)}")

    def _print_seconds(self, kinds, *rows):
        print_table(["", *kinds], *([f"rank {rank}", *(ms(seconds[kind]) for kind in kinds)]
                                    for rank, seconds in enumerate(self._readings.seconds)), *rows)

    @instrument
    def timeline(self) -> None:
        """A drawing of the step in the middle; outside of a notebook, its spans."""
        steps = self._readings.steps
        step = steps[len(steps) // 2]
        if not draw(show.timeline, from_last_launch(step), title="One step of the job",
                    note="Real ranks, emulated link, computing is slept."):
            for rank, spans in enumerate(step):
                for span in spans:
                    print(f"rank {rank}  {ms(span.start):>7} to {ms(span.end):>7}  {span.name}")

    @instrument
    def calls(self) -> None:
        """How many calls a step has on rank 0, and how much they carry."""
        spans = [span for span in self._readings.steps[-1][0] if span.lane == COMMUNICATION]
        sizes = [span.nbytes for span in spans]
        print(f"One step: {len(spans)} calls, {sum(sizes) / 1e3:,.0f} kB together, "
              f"{min(sizes) / 1e3:,.1f} to {max(sizes) / 1e3:,.1f} kB each")

    @instrument
    def dump(self) -> None:
        """Each rank's calls around the first that is not complete; if all are, the last ones."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}: {len(each.calls)} calls, {each.done} of them complete")
            first = max(0, min(each.done - 2, len(each.calls) - 4))
            for number in range(first, min(first + 4, len(each.calls))):
                operation, values, step, part = each.calls[number]
                state = "complete" if number < each.done else "launched"
                print(f"  {number + 1:5}  {operation} of {values:,} values, step {step}, in "
                      f"`{part}`: {state}")

    @instrument
    def where(self) -> None:
        """Where each rank was when the job ended or was ended."""
        for rank, each in enumerate(self._readings.ranks):
            where = ("has left its training" if each.finished
                     else f"is in its step {each.begun}")
            print(f"rank {rank} has begun {each.begun} steps and {where}")
