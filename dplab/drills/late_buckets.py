"""Chapter 05's drills: training whose gradients travel in buckets, and whose overlap is sick.

The job runs on two or three real ranks over an emulated link. Computing is emulated: backward
sleeps in each stage. The last two stages lie side by side, and
a rank's data decide which of them comes first. So ranks need not agree on what is ready first.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab import run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument
from dplab.measure import EmulatedLink, Trace
from dplab.predict.step import COMMUNICATION, COMPUTE, Span
from dplab.spawn.parent.output import in_notebook

WIDTH, STEPS = 64, 3


# The parts


def ready_order(model):
    return list(reversed(list(model.parameters())))


def bucket_bytes(model):
    return sum(parameter.nbytes for parameter in model.stages[0].parameters())


def to_average(bucket):
    return [parameter.grad for parameter in bucket]


def start(message):
    return dist.all_reduce(message, async_op=True)


def leaving(full, left):
    """Which of the full buckets leave now; ``left``: how many have left."""
    now = []
    while left + len(now) in full:
        now.append(left + len(now))
    return now


# Faults. Each has the signature of the part that it replaces.


def ready_order_of_forward(model):
    return list(model.parameters())


def ready_order_by_name(model):
    return [parameter for _, parameter in sorted(model.named_parameters())]


def start_and_finish(message):
    work = dist.all_reduce(message, async_op=True)
    work.wait()
    return work


def start_one_by_one(message):
    dist.all_reduce(message)
    done = torch.futures.Future()
    done.set_result(None)
    return done


def bucket_bytes_in_kib(model):
    return sum(parameter.nbytes for parameter in model.stages[0].parameters()) / 1024


def bucket_bytes_of_a_bias(model):
    return next(iter(model.stages[0].parameters())).shape[0] * 4


def average_what_the_hook_gets(bucket):
    return [parameter.data for parameter in bucket]


def average_detached_copies(bucket):
    return [parameter.grad.clone() for parameter in bucket]


def leaving_at_once(full, left):
    return sorted(full)


@dataclass(frozen=True)
class Parts:
    ready_order: Callable = ready_order
    bucket_bytes: Callable = bucket_bytes
    to_average: Callable = to_average
    start: Callable = start
    leaving: Callable = leaving


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
        begin = time.monotonic()
        time.sleep(ctx.model.seconds)
        ctx.model.computed.append((ctx.stage, begin, time.monotonic()))
        return gradient, None, None


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            for _ in range(settings.stages))
        self.seconds, self.computed = settings.seconds, []

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
    """An all-reduce: its parameters, bytes, and when it was launched and over, in seconds."""

    bucket: int
    stages: list[int]
    nbytes: int
    launched: float
    done: float


@dataclass
class Recording:
    """Of the last step on one rank, with times since backward began."""

    messages: list[Message]
    computed: list[tuple[int, float, float]]  # stage, begin, end
    backward: float
    step: float
    own: torch.Tensor  # gradients as backward left them, a row for each stage
    after: torch.Tensor  # and when the step was over


class _Buckets:
    def __init__(self, model, parts):
        self.parts, self.works, self.own = parts, [], {}
        limit, held = parts.bucket_bytes(model), 0
        self.buckets = [[]]
        for parameter in parts.ready_order(model):
            if held >= limit:
                self.buckets.append([])
                held = 0
            self.buckets[-1].append(parameter)
            held += parameter.nbytes
        self.number = {parameter: number for number, bucket in enumerate(self.buckets)
                       for parameter in bucket}
        for parameter in self.number:
            parameter.register_post_accumulate_grad_hook(self.is_ready)
        self.begin()

    def begin(self):
        self.missing, self.left = [len(bucket) for bucket in self.buckets], set()
        self.works = []

    def is_ready(self, parameter):
        self.own[parameter] = parameter.grad.clone()
        self.missing[self.number[parameter]] -= 1
        full = {number for number, count in enumerate(self.missing)
                if count == 0 and number not in self.left}
        for number in self.parts.leaving(full, len(self.left)):
            self.left.add(number)
            tensors = self.parts.to_average(self.buckets[number])
            message = parameters_to_vector(tensors) / dist.get_world_size()
            launched = time.monotonic()
            work = self.parts.start(message)
            self.works.append((number, tensors, message, launched, work))

    def finish(self):
        for _, tensors, message, _, work in self.works:
            work.wait()
            vector_to_parameters(message, tensors)


def train(parts, settings):
    """Runs the job on this rank and records its last step."""
    model = Model(settings)
    buckets, trace = _Buckets(model, parts), Trace()
    stage_of = {parameter: number for number, stage in enumerate(model.stages)
                for parameter in stage.parameters()}
    sign = 1 - 2 * (dist.get_rank() % 2)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.rand(settings.samples, WIDTH)
    for _ in range(STEPS):
        model.zero_grad()
        model.computed.clear()
        trace.spans.clear()
        buckets.begin()
        _turn(model, x, sign)
        loss = model(x).square().mean()
        dist.barrier()
        begin = time.monotonic()
        with trace:
            loss.backward()
            backward = time.monotonic() - begin
            buckets.finish()
        end = time.monotonic() - begin
    spans = sorted((span for span in trace.spans if span.name == "all_reduce"),
                   key=lambda span: span.start)
    messages = [Message(number, sorted({stage_of[each] for each in buckets.buckets[number]}),
                        message.nbytes, span.start - begin, span.end - begin)
                for (number, _, message, *_), span in zip(buckets.works, spans, strict=True)]
    return Recording(messages, [(stage, first - begin, last - begin)
                                for stage, first, last in model.computed], backward, end,
                     _by_stage(model, buckets.own),
                     _by_stage(model, {each: each.grad for each in model.parameters()}))


def _turn(model, x, sign):
    """Shifts a bias so that the data of even ranks and of odd ranks choose different orders."""
    with torch.no_grad():
        model.stages[-3][1].bias.fill_(-sign * 3.0)


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
        return min(rank.messages[0].launched / rank.backward for rank in self.ranks)

    def beside(self):
        """Of each rank, how many stages it computed while a message was under way."""
        return [sum(any(message.launched < begin + 0.5 * (end - begin) < message.done
                        for message in rank.messages) for _, begin, end in rank.computed)
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
    number, stages = len(readings.ranks[0].messages), readings.settings.stages
    return number >= 2 * stages, (f"{number} messages for {stages} stages, the smallest of "
                                  f"{min(m.nbytes for m in readings.ranks[0].messages):,} bytes.")


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

# What the complaints say of their jobs. The tests hold each to it.


def is_slow(readings):
    """A step takes half as long again as its computing at least."""
    return max(rank.step for rank in readings.ranks) > 1.5 * readings.computing


def is_very_slow(readings):
    return max(rank.step for rank in readings.ranks) > 2 * readings.computing


def ends_apart(readings):
    """The ranks end the step with different gradients."""
    return any(not torch.allclose(rank.after, readings.ranks[0].after, rtol=1e-4)
               for rank in readings.ranks[1:])


def none_beside(readings):
    return is_slow(readings) and max(readings.beside()) == 0


CASES = (
    Case("a", "late start", "ready_order", (
        Fault(ready_order_of_forward, ready_order, "We have sent during backward since last "
              "week, on {n} GPUs, and the step is as slow as it was when we sent everything "
              "afterwards.", none_beside, world_sizes=(2, 3)),
        Fault(ready_order_by_name, ready_order, "Loss is fine. But since our last release nothing "
              "overlaps any more on {n} GPUs, says the profile.", none_beside,
              world_sizes=(2, 3)))),
    Case("b", "waiting hook", "start", (
        Fault(start_and_finish, start, "We turned overlap on, for {n} GPUs, and the step did not "
              "become faster. No error, no warning. Is overlap worth the trouble?", none_beside,
              world_sizes=(2, 3)),
        Fault(start_one_by_one, start, "Loss is fine. But on {n} GPUs a step takes as long as "
              "its computing and its communication together.",
              none_beside, world_sizes=(2, 3)))),
    Case("c", "tiny buckets", "bucket_bytes", (
        Fault(bucket_bytes_in_kib, bucket_bytes, "Since our last release the step on {n} GPUs "
              "takes more than twice as long as its computing. The loss is what it was.",
              is_very_slow, world_sizes=(2, 3)),
        Fault(bucket_bytes_of_a_bias, bucket_bytes, "The step is far too long on {n} GPUs, and "
              "nobody has made the model larger. Loss is fine.", is_very_slow,
              world_sizes=(2, 3)))),
    Case("d", "wrong tensor", "to_average", (
        Fault(average_what_the_hook_gets, to_average, "Step time on {n} GPUs is what we had "
              "hoped for. The loss goes down, a little worse than on one GPU. No error, no "
              "warning.", ends_apart, world_sizes=(2, 3)),
        Fault(average_detached_copies, to_average, "All messages are sent, early and in few "
              "pieces. But the checkpoints of our {n} ranks are different files. Should they be?",
              ends_apart, world_sizes=(2, 3)))),
    Case("e", "swapped launches", "leaving", (
        Fault(leaving_at_once, leaving, "The step on {n} GPUs is fast. The loss goes down, but "
              "not as on one GPU. No error, no warning.", ends_apart,
              world_sizes=(2, 3)),)),
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
                "begins with them, in either order. Backward computes "
                f"{1e3 * settings.seconds:.0f} ms in each stage. "
                f"One all-reduce takes {1e3 * settings.latency:.0f} ms on this link, whatever its "
                "size. A bucket should hold one stage.")

    def _run(self, part):
        parts = replace(Parts(), **{self._case.part: part})
        return Readings(run(train, self._world_size, parts, self._settings, link=self._link(),
                            backend="gloo"), self._settings)

    def _is_healthy(self, readings):
        mean = sum(rank.own for rank in readings.ranks) / len(readings.ranks)
        off = max((rank.after - mean).abs().max().item() for rank in readings.ranks)
        healthy = off < 1e-5 and not any(suspect.finding(readings)[0] for suspect in SUSPECTS)
        longest = max(rank.step for rank in readings.ranks)
        return healthy, (f"The gradients are within {off:.1g} of the mean, and the step takes "
                         f"{1e3 * longest:.0f} ms.")

    @instrument
    def steps(self) -> None:
        """How long one step took each rank, and its parts."""
        print(f"Computing alone: {1e3 * self._readings.computing:.0f} ms")
        _table(["", "step ms", "backward ms", "after it ms", "stages computed beside a message"], *(
            [f"rank {rank}", f"{1e3 * each.step:.0f}", f"{1e3 * each.backward:.0f}",
             f"{1e3 * (each.step - each.backward):.0f}", str(beside)]
            for rank, (each, beside) in enumerate(zip(
                self._readings.ranks, self._readings.beside(), strict=True))))

    @instrument
    def calls(self) -> None:
        """The all-reduces of each rank in sequence, with bytes, stages and times."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}, whose backward took {1e3 * each.backward:.0f} ms:")
            _table(["", "bucket", "bytes", "stages", "leaves at ms", "arrives at ms"], *(
                [str(number), str(message.bucket), f"{message.nbytes:,}",
                 " ".join(map(str, message.stages)), f"{1e3 * message.launched:.0f}",
                 f"{1e3 * message.done:.0f}"] for number, message in enumerate(each.messages)))

    @instrument
    def timeline(self) -> None:
        """What each rank computed, and what was under way."""
        rows = [[*(Span("backward", COMPUTE, begin, end) for _, begin, end in each.computed),
                 *(Span(f"all_reduce {number}", COMMUNICATION, message.launched, message.done)
                   for number, message in enumerate(each.messages))]
                for each in self._readings.ranks]
        if in_notebook():
            from IPython.display import display

            display(show.timeline(rows, title="Backward and the all-reduces of one step",
                                  note="Real ranks, emulated link; computing emulated by sleeping"))
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank} computes the stages", " ".join(
                f"{stage} ({1e3 * begin:.0f} ms)" for stage, begin, _ in each.computed))

    @instrument
    def gradients(self) -> None:
        """The norm of each stage's gradient: as computed, as the step left it, and the mean."""
        ranks = self._readings.ranks
        mean = (sum(rank.own for rank in ranks) / len(ranks)).norm(dim=1)
        _table(["stage", *(f"rank {rank}{when}" for rank in range(len(ranks))
                           for when in (" computed", " has")), "mean"],
               *([str(stage), *(f"{each[stage].norm():.6f}" for rank in ranks
                                for each in (rank.own, rank.after)), f"{mean[stage]:.6f}"]
                 for stage in range(len(mean))))


def _table(head, *rows):
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print(*(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)), sep="  ")
