"""Chapter 05's drills: training whose gradients travel in buckets, and whose overlap is sick.

The job runs on two or three real ranks over an emulated link. Computing is emulated: backward
sleeps in each stage. The last two stages lie side by side, and a rank's data decide which of them
comes first. So ranks need not agree on what is ready first.
"""

import random
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab import run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, draw, instrument, print_table
from dplab.measure import EmulatedLink, Trace
from dplab.parallel.bucketed_ddp import filled_in_reverse
from dplab.parallel.overlapped_ddp import OverlappedBuckets
from dplab.predict.step import COMMUNICATION, COMPUTE, Span

WIDTH, STEPS = 64, 3


def make_buckets(model):
    parameters = list(model.parameters())
    bucket_bytes = sum(parameter.nbytes for parameter in model.stages[0].parameters())
    return filled_in_reverse(parameters, bucket_bytes)


@dataclass(frozen=True)
class Settings:
    stages: int
    seconds: float  # of a stage's backward
    latency: float
    samples: int


# The job


class _Computes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model, stage):
        ctx.model, ctx.stage = model, stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        with ctx.model.trace.phase(f"backward {ctx.stage}"):
            time.sleep(ctx.model.seconds)
        return gradient, None, None


class Model(nn.Module):
    def __init__(self, settings, trace):
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            for _ in range(settings.stages))
        self.seconds, self.trace = settings.seconds, trace

    def forward(self, x):
        """The last two stages side by side, in an order that the data decide."""
        *chain, last, other = range(len(self.stages))
        for stage in chain:
            x = self.run(stage, x)
        pair = (last, other) if x.sum() < 0 else (other, last)
        return sum(self.run(stage, x) for stage in pair)

    def run(self, stage, x):
        return torch.tanh(_Computes.apply(self.stages[stage](x), self, stage))


@dataclass
class Message:
    """An all-reduce: its bucket, the stages of the bucket's parameters, and when it was sent."""

    bucket: int
    stages: list[int]
    span: Span


@dataclass
class Recording:
    """Of the last step on one rank, with times in seconds since backward began."""

    messages: list[Message]
    computed: list[Span]  # of each stage, as `backward 7`
    backward: float
    step: float
    own: torch.Tensor  # gradients as backward left them, a row for each stage
    after: torch.Tensor  # and when the step was over


def train(parts, settings):
    """Runs the job on this rank and records its last step."""
    trace, own = Trace(), {}
    model = Model(settings, trace)
    for parameter in model.parameters():  # before the buckets' own hooks
        parameter.register_post_accumulate_grad_hook(
            lambda each: own.update({each: each.grad.clone()}))
    buckets = parts["OverlappedBuckets"](parts["make_buckets"](model))
    torch.manual_seed(1 + dist.get_rank())
    x = torch.rand(settings.samples, WIDTH)
    for _ in range(STEPS):
        model.zero_grad()
        trace.spans.clear()
        with torch.no_grad():  # the data of even ranks and of odd ranks choose different orders
            model.stages[-3][1].bias.fill_(3.0 if dist.get_rank() % 2 else -3.0)
        loss = model(x).square().mean()
        dist.barrier()
        begin = time.monotonic()
        with trace:
            loss.backward()
            backward, sent = time.monotonic() - begin, [bucket for bucket, *_ in buckets.under_way]
            buckets.finish()
        end = time.monotonic() - begin
    spans = [replace(span, start=span.start - begin, end=span.end - begin)
             for span in sorted(trace.spans, key=lambda span: span.start)]
    number_of = {id(bucket): number for number, bucket in enumerate(buckets.buckets)}
    stage_of = {parameter: number for number, stage in enumerate(model.stages)
                for parameter in stage.parameters()}
    messages = [Message(number_of[id(bucket)], sorted({stage_of[each] for each in bucket}), span)
                for bucket, span in zip(
                    sent, [span for span in spans if span.lane == COMMUNICATION], strict=True)]
    return Recording(messages, [span for span in spans if span.lane == COMPUTE], backward, end,
                     _by_stage(model, own),
                     _by_stage(model, {each: each.grad for each in model.parameters()}))


def _by_stage(model, gradients):
    return torch.stack([parameters_to_vector([gradients[each] for each in stage.parameters()])
                        for stage in model.stages])


# Readings


@dataclass
class Readings:
    ranks: list[Recording]
    settings: Settings

    @property
    def computing(self):
        """Seconds that backward takes where nobody waits in it."""
        return self.settings.stages * self.settings.seconds

    def own(self):
        """On how many stages each rank ends with the gradient that it computed itself."""
        return [int((rank.own == rank.after).all(dim=1).sum()) for rank in self.ranks]

    def orders(self):
        return [[message.bucket for message in rank.messages] for rank in self.ranks]

    def first(self):
        """When the first message leaves, as a share of backward, on the rank that is first."""
        return min(rank.messages[0].span.start / rank.backward for rank in self.ranks)

    def beside(self):
        """Of each rank, how many stages it computed while a message was under way."""
        return [sum(any(message.span.start < (stage.start + stage.end) / 2 < message.span.end
                        for message in rank.messages) for stage in rank.computed)
                for rank in self.ranks]


# Suspects


def late_start(readings):
    first = readings.first()
    return first > 0.5, (f"The first message leaves at {100 * first:.0f} % of backward, and "
                         f"{len(readings.ranks[0].messages)} messages are sent.")


def waiting_hook(readings):
    beside, first = max(readings.beside()), readings.first()
    longest = max(rank.backward for rank in readings.ranks)
    return beside == 0 and first < 0.5, (
        f"While a message was under way, a rank computed {beside} of its "
        f"{readings.settings.stages} stages. Backward took {1e3 * longest:.0f} ms; its computing "
        f"alone takes {1e3 * readings.computing:.0f} ms. The first message left at "
        f"{100 * first:.0f} % of backward.")


def tiny_buckets(readings):
    sizes = [message.span.nbytes for message in readings.ranks[0].messages]
    return len(sizes) >= 2 * readings.settings.stages, (
        f"{len(sizes)} messages for {readings.settings.stages} stages, the smallest of "
        f"{min(sizes):,} bytes.")


def wrong_tensor(readings):
    own, stages = readings.own(), readings.settings.stages
    return own == [stages] * len(own), (
        f"After the step, rank 0 has the gradients that it computed itself in {own[0]} of {stages} "
        "stages.")


def swapped_launches(readings):
    orders = readings.orders()
    differ = [place for place, numbers in enumerate(zip(*orders, strict=True))
              if len(set(numbers)) > 1]
    if not differ:
        return False, f"All ranks send the same {len(orders[0])} messages in the same sequence."
    numbers = " and ".join(f"{order[differ[0]]} on rank {rank}"
                           for rank, order in enumerate(orders))
    return True, f"Message {differ[0]} in the sequence carries bucket {numbers}."


SUSPECTS = (
    Suspect("late start", "The first bucket is complete last, and all others wait for it.",
            "calls", late_start),
    Suspect("waiting hook", "Backward stands still until each bucket has arrived.", "steps",
            waiting_hook),
    Suspect("tiny buckets", "There are many more messages than needed.", "calls", tiny_buckets),
    Suspect("wrong tensor", "The means do not end up in `.grad`.", "gradients",
            wrong_tensor),
    Suspect("swapped launches", "Ranks send their buckets in different orders.", "calls",
            swapped_launches),
)

_LAUNCH = "self.under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))"
CASES = (
    Case("a", "late start", make_buckets, (
        Fault({"list(model.parameters())": "list(model.parameters())[::-1]"},
              "We have sent during backward since last week, on {n} GPUs, and the step is as "
              "slow as it was when we sent everything afterwards.",
              {"slow", "nothing overlaps"}, (2, 3)),
        Fault({"list(model.parameters())":
               "[each for _, each in sorted(model.named_parameters(), reverse=True)]"},
              "Loss is fine. But since our last release nothing overlaps any more on {n} GPUs, "
              "says the profile.", {"slow", "nothing overlaps"}, (2, 3)))),
    Case("b", "waiting hook", OverlappedBuckets, (
        Fault({_LAUNCH: "work = dist.all_reduce(flat, async_op=True)\nwork.wait()\n"
               "self.under_way.append((bucket, flat, work))"},
              "We turned overlap on, for {n} GPUs, and the step did not become faster. No error, "
              "no warning. Is overlap worth the trouble?", {"slow", "nothing overlaps"}, (2, 3)),
        Fault({_LAUNCH: "dist.all_reduce(flat)\ndone = torch.futures.Future()\n"
               "done.set_result(None)\nself.under_way.append((bucket, flat, done))"},
              "Loss is fine. But on {n} GPUs a step takes as long as its computing and its "
              "communication together.", {"slow", "nothing overlaps"}, (2, 3)))),
    Case("c", "tiny buckets", make_buckets, (
        Fault({"stages[0].parameters())": "stages[0].parameters()) / 1024"},
              "Since our last release the step on {n} GPUs takes much longer than its computing. "
              "The loss is what it was.", {"slow"}, (2, 3)),
        Fault({"sum(parameter.nbytes for parameter in model.stages[0].parameters())":
               "next(iter(model.stages[0].parameters())).shape[0] * 4"},
              "The step on {n} GPUs became slower last week, and nobody has made the model "
              "larger. Loss is fine.", {"slow"}, (2, 3)))),
    Case("d", "wrong tensor", OverlappedBuckets, (
        Fault({"each.grad.flatten()": "each.data.flatten()",
               "parameter.grad.copy_": "parameter.data.copy_"},
              "Step time on {n} GPUs is what we had hoped for. The loss goes down, a little worse "
              "than on one GPU. No error, no warning.", {"the ranks end apart"}, (2, 3)),
        Fault({"parameter.grad.copy_": "parameter.grad.clone().copy_"},
              "All messages are sent, early and in few pieces. But the checkpoints of our {n} "
              "ranks are different files. Should they be?", {"the ranks end apart"}, (2, 3)))),
    Case("e", "swapped launches", OverlappedBuckets, (
        Fault({"in self.buckets[len(self.under_way):]:": "in self.buckets:",
               "if not self": "if parameter not in set(bucket) or not self",
               "break  # the buckets behind it wait: every rank launches in the order of the list":
               "continue"},
              "The step on {n} GPUs is fast. The loss goes down, but not as on one GPU. No error, "
              "no warning.", {"the ranks end apart"}, (2, 3)),)),
)


# The jobs


class LateBuckets(SickJob):
    """A step whose gradients travel in buckets, over an emulated link."""

    chapter = 5
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Settings:
        return Settings(stages=chances.randrange(8, 11), seconds=chances.uniform(0.018, 0.024),
                        latency=chances.uniform(0.014, 0.016), samples=chances.randrange(3, 9))

    def _link(self):
        messages = 2 * (self._world_size - 1)
        return EmulatedLink(bandwidth=1e9, latency=self._settings.latency / messages)

    def _description(self):
        settings = self._settings
        return (f"The job runs on {self._world_size} ranks. The model has {settings.stages} "
                "stages of four parameters each. The last two are parallel branches: backward "
                "begins with them. Backward computes "
                f"{1e3 * settings.seconds:.0f} ms in each stage. "
                f"One all-reduce takes {1e3 * settings.latency:.0f} ms on this link, whatever its "
                "size. A bucket should hold one stage.")

    def _run(self, part):
        parts = {each.__name__: each for each in (make_buckets, OverlappedBuckets)}
        return Readings(run(train, self._world_size, parts | {self._part_name: part},
                            self._settings, link=self._link(), backend="gloo"), self._settings)

    @instrument
    def steps(self) -> None:
        """How long one step took each rank, and its parts."""
        print(f"Computing alone: {1e3 * self._readings.computing:.0f} ms")
        beside = self._readings.beside()
        print_table(
            ["", "step ms", "backward ms", "after it ms", "stages computed beside a message"],
            *([f"rank {rank}", *_ms(each.step, each.backward, each.step - each.backward),
               beside[rank]] for rank, each in enumerate(self._readings.ranks)))

    @instrument
    def calls(self) -> None:
        """The all-reduces of each rank in sequence, with bytes, stages and times."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}, whose backward took {1e3 * each.backward:.0f} ms:")
            print_table(["", "bucket", "bytes", "stages", "leaves at ms", "arrives at ms"], *(
                [number, message.bucket, f"{message.span.nbytes:,}",
                 " ".join(map(str, message.stages)), *_ms(message.span.start, message.span.end)]
                for number, message in enumerate(each.messages)))

    @instrument
    def timeline(self) -> None:
        """What each rank computed, and what was under way."""
        ranks = self._readings.ranks
        draw(show.timeline, [[*(replace(stage, name="backward") for stage in each.computed),
                              *(replace(message.span, name=f"all_reduce {number}", queued=0)
                                for number, message in enumerate(each.messages))]
                             for each in ranks],
             title="Backward and the all-reduces of one step",
             note="Real ranks, emulated link; computing emulated by sleeping")
        for rank, each in enumerate(ranks):
            print(f"rank {rank} computes the stages", " ".join(
                f"{stage.name.split()[1]} ({1e3 * stage.start:.0f} ms)" for stage in each.computed))

    @instrument
    def gradients(self) -> None:
        """The norm of each stage's gradient: as computed, as the step left it, and the mean."""
        ranks = self._readings.ranks
        mean = (sum(rank.own for rank in ranks) / len(ranks)).norm(dim=1)
        print_table(["stage", *(f"rank {rank}{when}" for rank in range(len(ranks))
                                for when in (" computed", " has")), "mean"],
                    *([stage, *(f"{each[stage].norm():.3e}" for rank in ranks
                                for each in (rank.own, rank.after)), f"{mean[stage]:.3e}"]
                      for stage in range(len(mean))))


def _ms(*seconds):
    return [f"{1e3 * each:.0f}" for each in seconds]
