"""Exercises of chapter 05: gradients in buckets, sent during backward, and what stays exposed."""

import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.trials import gradients
from dplab.measure import CallLog
from dplab.spawn.rank import recording

_SUM = "You summed and did not divide by the world size: every rank has to end with the mean."
_TWICE = "You divided by the world size twice (`ReduceOp.AVG` divides already)."
_COPIES = ("Every rank still has its own gradients. What you reduce is a copy: fill the bucket "
           "from `.grad`, and write each part of the result back into its parameter's `.grad`.")


def _write_back(flat, bucket):
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


# 5.1

# By the limit: the buckets' bytes. In reverse, the gradients have 12, 60, 20, 140, 28, 196 bytes.
BUCKETS = {20: [72, 20, 140, 28, 196], 80: [92, 140, 224], 230: [232, 224]}


def average_in_buckets(model, bucket_bytes):
    buckets, nbytes = [[]], 0
    for parameter in reversed([each for each in model.parameters() if each.grad is not None]):
        if nbytes >= bucket_bytes:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(parameter)
        nbytes += parameter.grad.numel() * parameter.grad.element_size()
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        parts = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))


def _write_first_part(flat, bucket):
    for parameter in bucket:
        parameter.grad.copy_(flat[:parameter.numel()].view_as(parameter))


def _write_from_the_end(flat, bucket):
    _write_back(flat, bucket[::-1])


def _in_buckets(*, order=reversed, number_bytes=4, early=False, more=0, limit=None, flush=True,
                reset=True, recount=True, frozen=False, power=1, write=_write_back, source="grad"):
    """Averages in buckets with one thing wrong; ``limit`` overrules the one that is given."""

    def attempt(model, bucket_bytes):
        most, closed, bucket, size = limit or bucket_bytes, [], [], 0
        for parameter in order(list(model.parameters())):
            if parameter.grad is None and not frozen:
                continue
            nbytes = number_bytes * parameter.numel()
            if bucket and (size + nbytes > most if early else size >= most + more):
                closed.append(list(bucket))
                bucket, size = [] if reset else bucket, 0 if recount else size
            bucket.append(parameter)
            size += nbytes
        if flush or size >= most:
            closed.append(bucket)
        for bucket in closed:
            flat = torch.cat([getattr(each, source).flatten() for each in bucket])
            flat /= dist.get_world_size() ** power
            dist.all_reduce(flat)
            write(flat, bucket)

    return attempt


class AverageInBuckets(Exercise):
    slug = "gradient-buckets"
    number = "5.1"
    title = "All-reduce the gradients in buckets"
    name = "average_in_buckets"
    minutes = 20
    hints = (
        "Two loops: the first sorts the parameters into buckets (lists of parameters), the second "
        "sends each bucket. Only the first needs `bucket_bytes`.",
        "Walk through `reversed(list(model.parameters()))`, skip what has no gradient, and count "
        "bytes with `numel() * element_size()`. What is left at the end is a bucket, too.",
        "`torch.cat` of the flattened gradients makes one tensor; after the all-reduce, "
        "`flat.split([numel of each])` takes it apart in the same order.",
    )
    solution = staticmethod(average_in_buckets)
    mistakes = (
        Mistake(_in_buckets(flush=False), "The last bucket is never sent: it is not full when the "
                "parameters run out. Send what is left over *after* the loop: inside it, the last "
                "parameter may be a frozen one that you pass over."),
        *(Mistake(_in_buckets(order=list, **other), "You filled the buckets in forward order. "
                  "Backward computes the last layer's gradients first: go through the parameters "
                  "in reverse.")
          for other in ({}, {"early": True}, {"recount": False}, {"flush": False})),
        Mistake(_in_buckets(write=lambda *_: None), _COPIES),
        Mistake(_in_buckets(limit=1), "Each gradient travels by itself: there is one all-reduce "
                "for each parameter. Collect them until the bucket reaches `bucket_bytes`."),
        Mistake(_in_buckets(limit=1e9), "Everything is in one bucket: it has to close when it "
                "reaches `bucket_bytes` (bytes, not MiB)."),
        Mistake(_in_buckets(early=True), "You close a bucket before it would exceed "
                "`bucket_bytes`. Here, as in DDP, the size is a threshold: the gradient that "
                "reaches it still belongs to the bucket, which closes after it."),
        Mistake(_in_buckets(number_bytes=1), "You counted the gradients' numbers where "
                "`bucket_bytes` counts bytes: a number has `element_size()` of them."),
        Mistake(_in_buckets(reset=False), "A bucket keeps its parameters after it was sent, so "
                "they travel again with the next one: start an empty bucket."),
        Mistake(_in_buckets(recount=False), "From the second bucket on, each gradient travels by "
                "itself: set the count of bytes back to zero when a bucket is closed."),
        Mistake(_in_buckets(more=1), "A bucket that holds exactly `bucket_bytes` is full, and you "
                "go on filling it: close it at `>=`, not at `>`."),
        Mistake(_in_buckets(write=_write_first_part), "Each parameter of a bucket gets the first "
                "numbers of it: its part begins where the one before it ends."),
        Mistake(_in_buckets(write=_write_from_the_end), "The parts are written back in another "
                "order than they were put together: parameters get the gradients of others."),
        Mistake(_in_buckets(power=0), _SUM),
        Mistake(_in_buckets(power=2), _TWICE),
        Mistake(_in_buckets(source="data"), "The bucket holds the parameters' values; what has to "
                "be averaged are their gradients, `.grad`."),
        Mistake(_in_buckets(frozen=True), "A parameter's gradient is `None`: it is frozen. Leave "
                "such parameters out of the buckets."),
    )

    def trial(self, attempt):
        facts = {}
        for limit in BUCKETS:
            model = _with_gradients([dist.get_rank()])
            with CallLog() as log:
                attempt(model, limit)
            facts |= _named(limit, model, [call.bytes for call in log.calls])
        return facts

    def expected(self, world_size):
        return {fact: value for limit, sent in BUCKETS.items() for fact, value in _named(
            limit, _with_gradients(range(world_size)), sent).items()}


def _named(limit, model, sent):
    when = f" with buckets of {limit} bytes"
    return {f"the bytes of each all-reduce{when}": sent, **gradients(model, when)}


def _with_gradients(ranks):
    """A model with the mean of these ranks' gradients."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.LayerNorm(7, bias=False), nn.Linear(7, 7), nn.LayerNorm(7, bias=False),
                          nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    for frozen in (model[0], model[2]):  # the last one that backward would come to, and another
        frozen.weight.requires_grad_(False)
    numbers = torch.arange(21.0).reshape(3, 7)
    whole = torch.cat([torch.sin(1.7 * numbers + 5 * rank) for rank in ranks])
    model(whole).square().mean().backward()
    return model


# 5.2


class OverlappedGradients:
    def __init__(self, buckets):
        self.buckets = buckets
        self.number = {}
        for number, bucket in enumerate(buckets):
            for parameter in bucket:
                self.number[parameter] = number
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.start_over()

    def start_over(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.under_way = []

    def gradient_is_ready(self, parameter):
        number = self.number[parameter]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            flat = torch.cat([each.grad.flatten() for each in bucket])
            flat /= dist.get_world_size()
            self.under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, flat, work in self.under_way:
            work.wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        self.start_over()


def _overlapped(*, launch="full", waits=False, awaited=slice(None), power=1, reset=True,
                clear=True, alone=False, write=_write_back):
    """Overlapped gradients with one thing wrong; ``launch``: when a bucket leaves; ``awaited``:
    which of the handles `finish` waits for."""

    class Attempt:
        def __init__(self, buckets):
            self.buckets = [[each] for bucket in buckets for each in bucket] if alone else buckets
            self.under_way, self.missing = [], list(map(len, self.buckets))
            for number, bucket in enumerate(self.buckets):
                for parameter in bucket:
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, number=number: self.ready(number))

        def ready(self, number):
            self.missing[number] -= 1
            if launch == "each" or (launch == "full" and self.missing[number] == 0):
                self.send(self.buckets[number])

        def send(self, bucket):
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            flat /= dist.get_world_size() ** power
            self.under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            if waits:
                self.under_way[-1][-1].wait()

        def finish(self):
            if launch == "finish":
                for bucket in self.buckets:
                    self.send(bucket)
            for *_, work in self.under_way[awaited]:
                work.wait()
            for bucket, flat, _ in self.under_way:
                write(flat, bucket)
            if clear:
                self.under_way = []
            if reset:
                self.missing = list(map(len, self.buckets))

    return Attempt


class _AverageParameters:
    """The hook takes what it is given for the gradient."""

    def __init__(self, buckets):
        for parameter in (each for bucket in buckets for each in bucket):
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, gradient):
        gradient.data /= dist.get_world_size()
        dist.all_reduce(gradient.data)

    def finish(self):
        pass


_ALL_HANDLES = ("`finish` does not wait for every all-reduce. An earlier one may end after a later "
                "one, and until its own `wait()` its tensor is not the mean: wait for each handle.")


class OverlapGradients(Exercise):
    slug = "overlapped-gradients"
    number = "5.2"
    title = "Send buckets while backward computes"
    name = "OverlappedGradients"
    minutes = 30
    hints = (
        "`parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` when backward has "
        "added up that parameter's `.grad`. Each bucket has to know how many it still misses.",
        "When the last gradient of a bucket is there: make the flat tensor, divide, launch "
        "`dist.all_reduce(flat, async_op=True)`, and keep bucket, tensor and handle together.",
        "In `finish`: for each one under way wait, and write the parts back into `.grad`. Then "
        "make everything ready for the next step: all counts, and an empty list.",
    )
    solution = OverlappedGradients
    mistakes = (
        Mistake(_AverageParameters, "You sent the parameters, not their gradients. The hook is "
                "called with the *parameter*, when its gradient is ready: what has to be averaged "
                "is `parameter.grad`."),
        Mistake(_overlapped(launch="finish"), "You launch when backward is over: nothing overlaps. "
                "Launch a bucket in the hook of its last missing gradient."),
        Mistake(_overlapped(waits=True), "You wait in the hook, so backward stands still until the "
                "other ranks have come: nothing overlaps. Launch with `async_op=True`, keep the "
                "handle, and wait in `finish`."),
        Mistake(_overlapped(awaited=slice(-1, None)), _ALL_HANDLES),
        Mistake(_overlapped(awaited=slice(0)), _ALL_HANDLES),
        Mistake(_overlapped(launch="each"), "A bucket leaves before its last gradient is there: "
                "another one's `.grad` is still None, or old. Count what is missing; and use "
                "`register_post_accumulate_grad_hook`, since `register_hook` runs before `.grad` "
                "is written. (A lambda in a loop sees the loop's last values: write "
                "`lambda p, number=number: …`.)"),
        Mistake(_overlapped(alone=True), "Each gradient travels by itself as soon as it is there. "
                "That overlaps, and pays a latency for each: one all-reduce for a bucket."),
        Mistake(_overlapped(reset=False), "The first step is right, the second is not: "
                "`finish` has to set the counts of missing gradients back."),
        Mistake(_overlapped(reset=False, clear=False), "In the second step nothing is launched, "
                "and `finish` writes the first step's means again: it has to set the counts back, "
                "and to empty the list of what is under way."),
        Mistake(_overlapped(power=2), _TWICE),
        Mistake(_overlapped(power=0), _SUM),
        Mistake(_overlapped(write=lambda *_: None), _COPIES),
    )

    def trial(self, attempt):
        model = _Layers()
        overlapped = attempt(model.buckets())
        facts = {}
        for step in (1, 2):
            model.zero_grad()
            loss = model.loss(step, [dist.get_rank()])
            with CallLog() as log, _Handles() as handles:
                others_are_done = _backward_with_a_late_rank(loss, step, handles)
                overlapped.finish()
            early = sum(call.time < model.last_layer for call in log.calls)
            if handles.forgotten:
                model.zero_grad()  # what they would hold is chance
            facts |= _of_step(step, model, [call.bytes for call in log.calls], early,
                              not others_are_done, handles.forgotten)
            for work in handles.launched:
                work.wait()
        return facts

    def expected(self, world_size):
        model, facts = _Layers(), {}
        for step in (1, 2):
            model.zero_grad()
            model.loss(step, range(world_size)).backward()
            facts |= _of_step(step, model, [4 * 35, 4 * 28, 4 * 42], 2, False, 0)
        return facts


def _of_step(step, model, sent, early, waits, forgotten):
    when = f" in step {step}"
    return {f"the number of all-reduces launched before the last layer's gradients{when}": early,
            f"the bytes of each all-reduce{when}": sent,
            f"whether backward waits for other ranks{when}": waits,
            f"the number of all-reduces that nobody waits for{when}": forgotten,
            **gradients(model, when)}


class _Handles:
    """In this block: which handles are waited for, and ``on_wait`` is called before each time."""

    def __init__(self):
        self.launched, self.asked = [], set()
        self.on_wait = lambda: None
        self._patches = [mock.patch.object(dist.Work, name, self._noting(getattr(dist.Work, name)))
                         for name in ("wait", "get_future", "is_completed")]

    def _noting(self, method):
        def noted(work, *args, **kwargs):
            self.asked.add(id(work))
            if method.__name__ != "is_completed":
                self.on_wait()
            return method(work, *args, **kwargs)

        return noted

    def _add(self, call, work):
        self.launched.append(work)

    @property
    def forgotten(self):
        return sum(id(work) not in self.asked for work in self.launched)

    def __enter__(self):
        for each in self._patches:
            each.start()
        recording.recorder_here().work_listeners.append(self._add)
        return self

    def __exit__(self, *_):
        recording.recorder_here().work_listeners.remove(self._add)
        for each in self._patches:
            each.stop()


class _Layers(nn.ModuleList):
    """Three layers; ``last_layer`` is when backward came to the first of them, its last one."""

    def __init__(self):
        torch.manual_seed(6)
        super().__init__([nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 7)])

    def buckets(self):
        return [list(layer.parameters()) for layer in reversed(self)]

    def loss(self, step, ranks):
        numbers = torch.arange(18.0).reshape(3, 6)
        x = torch.cat([torch.sin(1.3 * numbers + 5 * rank + step) for rank in ranks])
        first = self[0](x)
        first.register_hook(self._comes_to_the_last_layer)
        return self[2](torch.tanh(self[1](torch.tanh(first)))).square().mean()

    def _comes_to_the_last_layer(self, _):
        self.last_layer = time.monotonic()


def _backward_with_a_late_rank(loss, step, handles):
    """The last rank begins when the others have ended; returns whether they did so without it."""
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    store = _get_default_store()
    keys = [f"backward {step} of rank {other} is done" for other in range(others)]
    waits = f"backward {step} waits"
    done = True
    if rank == others > 0:
        limit = time.monotonic() + 1.0
        while not (done := store.check(keys)) and not store.check([waits]) and (
                time.monotonic() < limit):
            time.sleep(0.002)
    elif others:
        handles.on_wait = lambda: store.set(waits, "")
    loss.backward()
    handles.on_wait = lambda: None
    if rank < others:
        store.set(keys[rank], "")
    return done


# 5.3

# Of each bucket: when it is ready, and its bytes; then ranks, bytes/s and s. In order: hidden but
# for the last one, a link that is always behind, latency, and two buckets with a pause between.
CASES = (
    (((0.010, 25e6), (0.030, 25e6), (0.050, 10e6)), 4, 12.5e9, 1e-5),
    (((0.010, 25e6), (0.030, 50e6), (0.050, 1e6)), 4, 1.25e9, 5e-5),
    (((0.001, 4e3), (0.002, 4e3), (0.003, 4e3), (0.004, 4e3)), 64, 50e9, 1.4e-5),
    (((0.010, 1e6), (0.200, 80e6)), 2, 1e9, 1e-3),
)


def exposed_communication(buckets, world_size, bandwidth, latency):
    free, communication = 0.0, 0.0
    for ready, nbytes in buckets:
        seconds = 2 * (world_size - 1) * (latency + nbytes / world_size / bandwidth)
        free = max(free, ready) + seconds
        communication += seconds
    end_of_backward = buckets[-1][0]
    return communication, free - end_of_backward


def _ring(ranks, nbytes, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def _one_after_another(ready, times):
    free = 0.0
    for start, seconds in zip(ready, times, strict=True):
        free = max(free, start) + seconds
    return free - ready[-1]


def _predict(seconds=_ring, exposed=_one_after_another, returned=lambda *pair: pair):
    def attempt(buckets, world_size, bandwidth, latency):
        times = [seconds(world_size, nbytes, bandwidth, latency) for _, nbytes in buckets]
        return returned(sum(times), exposed([ready for ready, _ in buckets], times))

    return attempt


class ExposedCommunication(Calculation):
    slug = "exposed-communication"
    number = "5.3"
    title = "Predict what overlap cannot hide"
    name = "exposed_communication"
    minutes = 15
    hints = (
        "First the time of each all-reduce, as in chapter 03: 2(N-1) messages of n/N bytes each.",
        "A bucket starts when it is ready *and* the link is free: `start = max(free, ready)`, and "
        "then `free = start + seconds`.",
        "After the end of backward nothing is computed. What is exposed is the time from there to "
        "the end of the last all-reduce.",
    )
    solution = staticmethod(exposed_communication)
    mistakes = (
        Mistake(_predict(exposed=lambda ready, times: times[-1]), "You count the last bucket only. "
                "Where the link is slow, those before it are still on their way when backward "
                "ends."),
        Mistake(_predict(exposed=lambda ready, times: sum(times)), "You count all of communication "
                "as exposed. What runs before the end of backward is hidden."),
        Mistake(_predict(exposed=lambda ready, times: max(0.0, sum(times) - ready[-1])),
                "You subtract all of backward from all of communication. But nothing can be sent "
                "before the first bucket is ready, nor while the link waits for the next one."),
        Mistake(_predict(exposed=lambda ready, times: max(0.0, ready[0] + sum(times) - ready[-1])),
                "You take it that the link never waits once it has begun. It does when the next "
                "bucket is not ready yet: follow `free` bucket by bucket."),
        Mistake(_predict(exposed=lambda ready, times: max(
                    start + seconds for start, seconds in zip(ready, times, strict=True))
                    - ready[-1]),
                "You let all-reduces run side by side, each at the full bandwidth. They share one "
                "link: a bucket starts when it is ready and the one before it is done."),
        Mistake(_predict(exposed=lambda ready, times: _one_after_another(ready, times) + ready[-1]),
                "You return when the last all-reduce ends. Exposed is only what comes after the "
                "end of backward."),
        Mistake(_predict(lambda n, nbytes, bandwidth, latency:
                         latency + 2 * (n - 1) / n * nbytes / bandwidth),
                "The latency counts for each of the ring's 2(N-1) messages: they go one after "
                "another."),
        Mistake(_predict(lambda n, nbytes, bandwidth, latency: latency + nbytes / bandwidth),
                "You took an all-reduce for one message. A ring all-reduce has 2(N-1) of them, "
                "with n/N bytes each."),
        Mistake(_predict(lambda n, nbytes, *link: _ring(n, nbytes / 2 * n / (n - 1), *link)),
                "The bytes are counted once. In a ring each rank sends 2(N-1)/N times as many."),
        Mistake(_predict(lambda n, nbytes, bandwidth, latency:
                         (n - 1) * (latency + nbytes / bandwidth)), "Whole tensors go round in "
                "yours. In a ring each message is an N-th of one, and there are 2(N-1) of them."),
        Mistake(_predict(lambda n, nbytes, *link: _ring(n, 8 * nbytes, *link)), "You count bits: "
                "the bandwidth is in bytes per second already."),
        Mistake(_predict(lambda *ring: _ring(*ring) / 2), "A ring all-reduce goes round twice: N-1 "
                "messages to add up, and as many again to bring the sums to all ranks."),
        Mistake(_predict(returned=lambda everything, exposed: (exposed, everything)),
                "The order of the two numbers: all communication first, then the exposed part."),
        Mistake(_predict(returned=lambda everything, exposed: (everything, everything - exposed)),
                "What you return second is hidden. Exposed is the rest."),
    )

    def trial(self, attempt):
        facts = {}
        for number, case in enumerate(CASES, start=1):
            answer = attempt(list(case[0]), *case[1:])
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                return {"the kind of answer": type(answer).__name__}
            facts |= _of_case(number, *answer)
        return {"the kind of answer": "two numbers"} | facts

    def expected(self, world_size):
        return {"the kind of answer": "two numbers"} | {
            fact: value for number, case in enumerate(CASES, start=1)
            for fact, value in _of_case(number, *exposed_communication(*case)).items()}


def _of_case(number, communication, exposed):
    buckets, ranks, bandwidth, latency = CASES[number - 1]
    where = (f"for {len(buckets)} buckets, {ranks} ranks, {bandwidth / 1e9:g} GB/s and "
             f"{1e6 * latency:g} µs")
    return {f"the seconds of communication {where}": communication,
            f"the exposed seconds {where}": exposed}


EXERCISES = (AverageInBuckets, OverlapGradients, ExposedCommunication)
