"""Chapter 06's drills: training that is slow, or stands still.

The job is that of `workloads.slept_steps`: real ranks, real collectives on an emulated link, and
computing that is slept. One of its parts has a fault. The instruments read the spans, the calls,
and where each rank is, as a profiler and NCCL's flight recorder show them. One rank alone, with
healthy parts, stands beside it.
"""

import pickle
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist

from dplab import RankError, run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument
from dplab.measure import EmulatedLink, aligned, from_last_launch, split_time
from dplab.spawn.parent.output import in_notebook
from dplab.spawn.rank.recording import recorder_here
from dplab.workloads import slept_steps as healthy
from dplab.workloads.slept_steps import Parts, Sizes, Worker

LINK = EmulatedLink(bandwidth=2e6, latency=0.4e-3)
SKIPPED = 1  # steps at the beginning, in which connections are made


# Faults. Each has the signature of the part that it replaces.


def load_in_the_step(worker):
    time.sleep(0.200)  # num_workers=0: reads and decodes the batch now


def load_from_a_slow_disk(worker):
    own = dist.get_rank() == dist.get_world_size() - 1
    time.sleep(0.220 if own else 0.0005)  # this rank's files lie on the old file server


def forward_on_a_hot_card(worker):
    hot = dist.get_rank() == dist.get_world_size() - 1
    for _ in worker.buckets:
        worker.kernel("forward", worker.sizes.forward * (8 if hot else 1))  # its clock is low


def backward_with_long_samples(worker):
    works = []
    longest = dist.get_rank() == 0  # the samples are sorted by their length
    for bucket in worker.buckets:
        worker.kernel("backward", worker.sizes.backward * (4 if longest else 1))
        works.append(dist.all_reduce(bucket, async_op=True))
    return works


def backward_that_waits(worker):
    works = []
    for bucket in worker.buckets:
        worker.kernel("backward", worker.sizes.backward)
        works.append(dist.all_reduce(bucket, async_op=True))
        works[-1].wait()
    return works


def backward_in_small_pieces(worker):
    works = []
    for bucket in worker.buckets:
        worker.kernel("backward", worker.sizes.backward)
        for piece in bucket.chunk(24):
            works.append(dist.all_reduce(piece, async_op=True))
    return works


def backward_with_debug_kernels(worker):
    works = []
    for bucket in worker.buckets:
        worker.kernel("backward", 4 * worker.sizes.backward)  # deterministic kernels
        works.append(dist.all_reduce(bucket, async_op=True))
    return works


def forward_in_float64(worker):
    for _ in worker.buckets:
        worker.kernel("forward", 9 * worker.sizes.forward)


def count_all_batches(rank, ranks, batches):
    return len(range(rank, batches, ranks))


def count_without_the_broken(rank, ranks, batches):
    broken = 1 if rank == ranks - 1 else 0  # found in this rank's files
    return batches // ranks - broken


def count_dealt_out_anew(rank, ranks, batches):
    readable = batches - 1  # one was found broken, in whichever rank's files
    return readable // ranks


def save_and_meet(number):
    if number % 4 == 3 and dist.get_rank() == 0:
        time.sleep(0.002)  # writes the checkpoint
        dist.barrier()


def save_unless_last(number):
    if number % 4 == 3:
        if dist.get_rank() == dist.get_world_size() - 1:
            return
        time.sleep(0.002)  # writes its part of the checkpoint
        dist.barrier()


# Recording


@dataclass
class Recording:
    """What one rank did, until it left its training or the job was ended."""

    steps: list  # the spans of each step that is over
    calls: list  # operation, values, step and part of each collective, in the order of launch
    done: int  # of those, how many are complete
    begun: int  # steps
    finished: bool  # whether the rank has left its training


def recorded(parts: Parts, sizes: Sizes, folder: str) -> None:
    """Trains, and notes each call in a file as it is launched, as a flight recorder does."""
    worker = Worker(sizes)
    starts: list[float] = []
    calls: list = []
    names = {getattr(parts, part).__name__: part for part in vars(parts)}
    path = Path(folder, str(dist.get_rank()))

    def begin(number):
        starts.append(time.monotonic())
        note("step")
        keep_spans(starts)

    def keep_spans(borders):
        """Those of all steps that are over. Each collective in them is complete, but its span may
        come a moment later.
        """
        while sum(span.lane == "communication" for span in worker.trace.spans) < len(calls):
            time.sleep(0.0005)
        spans = list(worker.trace.spans)
        path.with_suffix(".new").write_bytes(pickle.dumps(
            [[span for span in spans if start <= span.start < end]
             for start, end in pairwise(borders)]))
        path.with_suffix(".new").replace(path.with_suffix(".spans"))

    def launched(call, work):
        part = next((names[name] for name in functions(sys._getframe()) if name in names), "train")
        calls.append(call)
        note(f"{call.operation} {call.shape[0] if call.shape else 0} {len(starts)} {part}")
        work.get_future().then(lambda _: note("done"))

    dist.barrier()
    with open(path.with_suffix(".log"), "w", buffering=1) as file, worker.trace:
        def note(line):
            file.write(line + "\n")

        recorder_here().work_listeners.append(launched)
        healthy.train(parts, worker, begin)
        recorder_here().work_listeners.remove(launched)
        note("end")
        keep_spans([*starts, time.monotonic()])
        dist.barrier()  # so that nobody's file is closed while another rank is stuck


def functions(frame):
    """The names of the functions in which a thread is, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def recording_in(folder, rank) -> Recording:
    """What this rank has noted so far."""
    path = Path(folder, str(rank))
    lines = path.with_suffix(".log").read_text(encoding="utf-8").splitlines()
    calls = [(operation, int(values), int(step), part) for operation, values, step, part in (
        line.split() for line in lines if line.count(" ") == 3)]
    return Recording(pickle.loads(path.with_suffix(".spans").read_bytes()), calls,
                     lines.count("done"), lines.count("step"), "end" in lines)


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

    def of_kernels(self, name="") -> list[float]:
        """By rank: the median over the steps of the seconds in kernels, of one name or of all."""
        return self._medians(lambda spans: sum(
            span.seconds for span in spans
            if span.lane == "compute" and span.name.startswith(name)), self.steps)

    @property
    def alone_kernels(self) -> float:
        return self._medians(lambda spans: sum(
            span.seconds for span in spans if span.lane == "compute"), self.alone)[0]

    @property
    def data(self) -> list[float]:
        return self._medians(lambda spans: sum(
            span.seconds for span in spans if span.name == "data"), self.steps)

    @cached_property
    def split(self) -> list[dict]:
        """By rank: the median over the steps of each kind of seconds."""
        splits = [split_time(step) for step in self.steps]
        return [{kind: statistics.median(split[rank][kind] for split in splits)
                 for kind in splits[0][rank]} for rank in range(len(self.ranks))]

    @property
    def link_seconds(self) -> float:
        """How long the link works in a step, at its own speed."""
        return sum(span.seconds for span in LINK.carried(self.steps[0])[0]
                   if span.lane == "communication")

    @property
    def least_unhidden(self) -> float:
        """The share of the link's time in which a rank computes nothing, of all ranks and steps
        the least. On a busy machine threads wake late; the link's own times do not depend on it.
        """
        return min(kinds["exposed"] / self.link_seconds
                   for step in self.steps for kinds in split_time(LINK.carried(step)))

    @property
    def differing(self) -> int | None:
        """The number of the first call that is not the same on all ranks that have it."""
        longest = max(len(each.calls) for each in self.ranks)
        for number in range(longest):
            if len({each.calls[number][:2] for each in self.ranks if number < len(each.calls)}) > 1:
                return number
        return None

    def _medians(self, of_spans, steps):
        return [statistics.median(of_spans(step[rank]) for step in steps)
                for rank in range(len(steps[0]))]


def length(step):
    return max(span.end for spans in step for span in spans)


def ms(seconds):
    return f"{1e3 * seconds:.0f} ms"


# Suspects


def one_computes_longer(readings):
    kernels = readings.of_kernels()
    return max(kernels) > 2 * min(kernels), (
        f"In a step, rank {kernels.index(max(kernels))} computes for {ms(max(kernels))}, and rank "
        f"{kernels.index(min(kernels))} for {ms(min(kernels))}.")


def waits_for_data(readings):
    least, longest = min(readings.data), max(readings.data)
    much = 0.5 * readings.alone_kernels
    who = (f"Each rank waits {ms(least)} or more" if least > much else
           f"Rank {readings.data.index(longest)} waits {ms(longest)}")
    return longest > much, (f"{who} for its data in a step, in which one rank alone computes for "
                            f"{ms(readings.alone_kernels)}.")


def link_alone(readings):
    least = readings.least_unhidden  # with one bucket of six at the end, a sixth
    link = f"At its own speed the link works for {ms(readings.link_seconds)} in each step."
    if least > 0.45:
        return True, (f"{link} In each step, and on each rank, {100 * least:.0f} % of that time or "
                      "more is beside no computing.")
    return False, f"{link} In one, a rank computes for {100 * (1 - least):.0f} % of that time."


def all_compute_longer(readings):
    least = min(readings.of_kernels())
    return least > 1.7 * readings.alone_kernels, (
        f"Each rank computes for {ms(least)} or more in a step, and one rank alone for "
        f"{ms(readings.alone_kernels)}.")


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
    Suspect("late input", "Ranks wait for their data.", "split", waits_for_data),
    Suspect("unhidden traffic", "The link works while nobody computes.", "split", link_alone),
    Suspect("slower everywhere", "Every rank computes longer than one rank alone.", "kernels",
            all_compute_longer),
    Suspect("unequal loops", "The ranks do not all take the same number of steps.", "where",
            some_are_done),
    Suspect("lone collective", "Some ranks make a call that the others do not make.", "dump",
            calls_differ),
)

# What the complaints say of their jobs. The tests hold each to it.


def takes_a_third_longer(readings):
    """By the shortest steps: other programs on the machine only make steps longer."""
    here, alone = (min(map(length, steps)) for steps in (readings.steps, readings.alone))
    return all(each.finished for each in readings.ranks) and here > 4 / 3 * alone


def stands_still(readings):
    return not all(each.finished for each in readings.ranks)


CASES = (
    Case("a", "straggler", "forward", (
        Fault(forward_on_a_hot_card, healthy.forward, "On {n} GPUs a step takes more than twice as "
              "long as on one, with the same local batch. The profile of rank 0 is full of "
              "all_reduce. Do we need a faster network?", takes_a_third_longer),)),
    Case("b", "late input", "load", (
        Fault(load_in_the_step, healthy.load, "With {n} GPUs each step takes much longer than on "
              "one, at the same local batch. The profile shows gaps. Can bigger buckets close "
              "them?", takes_a_third_longer),
        Fault(load_from_a_slow_disk, healthy.load, "We went from one GPU to {n}, with the same "
              "local batch, and now most of a step on rank 0 is all_reduce. The network team finds "
              "nothing.", takes_a_third_longer))),
    Case("c", "unhidden traffic", "backward", (
        Fault(backward_that_waits, healthy.backward, "Since last week's refactoring the steps on "
              "{n} GPUs take a good third longer. The loss is the same to the last digit.",
              takes_a_third_longer),
        Fault(backward_in_small_pieces, healthy.backward, "On {n} GPUs a step takes far longer "
              "than on one with the same local batch. The bytes that we send are what they should "
              "be: I have added them up.", takes_a_third_longer, world_sizes=(2, 3)))),
    Case("d", "slower everywhere", "backward", (
        Fault(backward_with_debug_kernels, healthy.backward, "On one GPU the script is fast. "
              "Started on {n} by our new launcher, a step takes more than twice the time, and I "
              "suspect the all-reduce.", takes_a_third_longer),)),
    Case("e", "unequal loops", "count_batches", (
        Fault(count_all_batches, healthy.count_batches, "The job on {n} GPUs trains well, and then,"
              " near the end of the epoch, it stands still. All GPUs show a load of 100 %.",
              stands_still),
        Fault(count_without_the_broken, count_dealt_out_anew, "We threw some unreadable files "
              "away. Since then the job on {n} GPUs stands still at the end of each epoch.",
              stands_still)),
        to_repair=True),
    Case("f", "lone collective", "save", (
        Fault(save_and_meet, healthy.save, "After some steps the job on {n} GPUs stands still, "
              "always at the same one. A smaller batch changes nothing.", stands_still),
        Fault(save_unless_last, healthy.save, "The job on {n} GPUs ran for weeks. Then we made it "
              "save more often, and now it stands still after a few steps.", stands_still,
              world_sizes=(3, 4)))),
    Case("g", "straggler", "backward", (
        Fault(backward_with_long_samples, healthy.backward, "A step on {n} GPUs takes far longer "
              "than on one with the same local batch. On the last rank the all_reduce is most of "
              "it. Which setting of NCCL do we change?", takes_a_third_longer),)),
    Case("h", "slower everywhere", "forward", (
        Fault(forward_in_float64, healthy.forward, "Somebody tidied up the training on {n} GPUs, "
              "and a step takes much longer than our old one-GPU script at the same local "
              "batch.", takes_a_third_longer),)),
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
        parts = replace(Parts(), **{self._case.part: part})
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
            return [recording_in(folder, rank) for rank in range(ranks)]

    def _is_healthy(self, readings):
        begun = [each.begun for each in readings.ranks]
        wanted = self._settings.batches // self._world_size
        # Who lets all ranks stop with the one that has the fewest leaves out no more than it must.
        least = wanted - (self._fault.sick is count_without_the_broken)
        healthy = (not any(suspect.finding(readings)[0] for suspect in SUSPECTS)
                   and not stands_still(readings) and len(set(begun)) == 1
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
        readings = self._readings
        kinds = ("forward", "backward", "optimizer", "")
        rows = [[f"rank {rank}", *(ms(readings.of_kernels(kind)[rank]) for kind in kinds)]
                for rank in range(self._world_size)]
        print("Median over the steps")
        print_table(["", "forward", "backward", "optimizer", "together"], *rows,
                    ["one rank alone", "", "", "", ms(readings.alone_kernels)])

    @instrument
    def split(self) -> None:
        """What each rank does with its time in a step, as `split_time` has it."""
        readings = self._readings
        print("Median over the steps; what is spent on data is a part of what is idle")
        print_table(["", *readings.split[0], "for data"], *(
            [f"rank {rank}", *(ms(seconds) for seconds in split.values()),
             ms(readings.data[rank])] for rank, split in enumerate(readings.split)))
        print(f"at its own speed the link works for {ms(readings.link_seconds)} of a step; beside "
              "no computing, in each step and on each rank: "
              f"{100 * readings.least_unhidden:.0f} % of that or more\n"
              f"one rank alone computes for {ms(readings.alone_kernels)}")

    @instrument
    def timeline(self) -> None:
        """A drawing of the step in the middle; outside of a notebook, its spans."""
        steps = self._readings.steps
        step = steps[len(steps) // 2]
        if in_notebook():
            from IPython.display import display

            display(show.timeline(from_last_launch(step), title="One step of the job",
                                  note="Real ranks, emulated link, computing is slept."))
            return
        for rank, spans in enumerate(step):
            for span in spans:
                print(f"rank {rank}  {ms(span.start):>7} to {ms(span.end):>7}  {span.name}")

    @instrument
    def calls(self) -> None:
        """How many calls a step has on rank 0, and how much they carry."""
        spans = [span for span in self._readings.steps[-1][0] if span.lane == "communication"]
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


def print_table(head, *rows):
    """Columns as wide as they must be, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for first, *others in (head, *rows):
        print(f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(
            others, widths[1:], strict=True)), sep="  ")
