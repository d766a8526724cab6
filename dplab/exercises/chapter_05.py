"""Exercises of chapter 05: gradients in buckets, averaged beside backward, and a scheduler.

The solutions stand in `dplab.exercises.stack.parts`, since later parts call them.
"""

import contextlib
import inspect
import itertools
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from dplab.exercises.chapter_04 import AverageGradients
from dplab.exercises.compare import BESIDE, AtMost
from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.stack import parts
from dplab.exercises.stack.parts import (
    average_in_buckets,
    make_buckets,
    pack,
    predict_step,
    ring_all_reduce,
    ring_seconds,
    unpack,
)
from dplab.exercises.trials import gradients, of_cases, seeded
from dplab.measure import CallLog
from dplab.predict.step import Layer
from dplab.spawn.rank import recording

# --- 5.1: which gradients go together ------------------------------------------------------------


def in_forward_order(sizes, bucket_bytes):
    last = len(sizes) - 1
    buckets = make_buckets(sizes[::-1], bucket_bytes)
    return [[last - index for index in bucket] for bucket in buckets]


def buckets_in_forward_order(sizes, bucket_bytes):
    return make_buckets(sizes, bucket_bytes)[::-1]


def indices_in_forward_order(sizes, bucket_bytes):
    return [sorted(bucket) for bucket in make_buckets(sizes, bucket_bytes)]


def counts_from_the_end(sizes, bucket_bytes):
    last = len(sizes) - 1
    return [[last - index for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]


def sizes_for_indices(sizes, bucket_bytes):
    return [[sizes[index] for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]


def closes_before_it_is_exceeded(sizes, bucket_bytes):
    buckets, held = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or held + sizes[index] > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def goes_on_at_the_size(sizes, bucket_bytes):
    return make_buckets(sizes, bucket_bytes + 1)


def forgets_the_last_bucket(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes:
            buckets.append(bucket)
            bucket, held = [], 0
    return buckets


def adds_an_empty_bucket(sizes, bucket_bytes):
    buckets, held = [[]], 0
    for index in reversed(range(len(sizes))):
        buckets[-1].append(index)
        held += sizes[index]
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
    return buckets


def begins_with_an_empty_bucket(sizes, bucket_bytes):
    return [[], *make_buckets(sizes, bucket_bytes)]


def goes_on_counting(sizes, bucket_bytes):
    buckets, held = [], bucket_bytes
    for index in reversed(range(len(sizes))):
        if held >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(index)
        held = sum(sizes[index:])
    return buckets


def keeps_the_excess(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes or index == 0:
            buckets.append(bucket)
            bucket = []
            held -= bucket_bytes
    return buckets


def keeps_its_indices(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes or index == 0:
            buckets.append(list(bucket))
            held = 0
    return buckets


def one_list_for_all(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes or index == 0:
            buckets.append(bucket)
            bucket.clear()
            held = 0
    return buckets


def one_by_one(sizes, bucket_bytes):
    return [[index] for index in reversed(range(len(sizes)))]


class MakeBuckets(Calculation):
    slug = "make-buckets"
    number = "5.1"
    title = "Which gradients go together"
    name = "make_buckets"
    minutes = 5
    hints = (
        "Go through the indices from the last one to the first. What do you have to remember "
        "from one to the next?",
        "Remember the open bucket and the bytes in it. When does a new bucket begin: before you "
        "put an index in, or after? What is left when the indices are used up?",
        "Start a new, empty list as soon as the one before it holds `bucket_bytes` or more *and* "
        "there is an index to put in. Set the count of bytes back to zero at the same place.",
    )
    solution = staticmethod(make_buckets)
    mistakes = (
        Mistake(in_forward_order, "You filled the buckets from the first index on. Backward "
                "computes the last layer's gradients first: go from the last index to the first."),
        Mistake(buckets_in_forward_order, "The buckets are right and stand in the wrong order. "
                "The one with the last index comes first: its gradients are ready first."),
        Mistake(indices_in_forward_order, "Within a bucket the indices ascend. Here they go from "
                "the last to the first too."),
        Mistake(counts_from_the_end, "You count indices from the end, as `enumerate(reversed("
                "sizes))` does. An index says where the size stands in `sizes`."),
        Mistake(sizes_for_indices, "You return sizes. Return their indices in `sizes`."),
        Mistake(closes_before_it_is_exceeded, "You close a bucket before it would exceed "
                "`bucket_bytes`. Here, as in DDP, the size is a threshold: the gradient that "
                "reaches it still belongs to the bucket, which closes after it."),
        Mistake(goes_on_at_the_size, "A bucket that holds exactly `bucket_bytes` is full, and you "
                "go on filling it: close it at `>=`, not at `>`."),
        Mistake(forgets_the_last_bucket, "The last bucket is missing: it is not full when the "
                "indices run out. What is left over is a bucket too."),
        Mistake(adds_an_empty_bucket, "The last of your buckets is empty where the one before it "
                "came out full: begin a bucket only when there is an index to put in."),
        Mistake(begins_with_an_empty_bucket, "Your first bucket is empty."),
        Mistake(goes_on_counting, "From the second bucket on, each index is alone: set the count "
                "of bytes back to zero when a bucket is closed."),
        Mistake(keeps_the_excess, "When a bucket closes, you take `bucket_bytes` off the count. "
                "What it held beyond that then counts for the next bucket, too. Set it back to "
                "zero."),
        Mistake(keeps_its_indices, "A bucket keeps its indices after it was closed, so they are in "
                "the next one again: start an empty list."),
        Mistake(one_list_for_all, "All your buckets are one and the same list, which you empty. "
                "Start a new list (`bucket = []`) where you call `clear()`."),
        Mistake(one_by_one, "Each index has a bucket of its own. Collect indices until a bucket "
                "holds `bucket_bytes`."),
    )
    SIZES = (196, 28, 140, 20, 60, 12)
    CASES = ((SIZES, 80), (SIZES, 72), (SIZES, 1), (SIZES, 200), (SIZES, 456), (SIZES, 10**9),
             ((7,), 7), ((), 20))

    def trial(self, attempt):
        return of_cases(_bucket_facts, [(list(sizes), limit) for sizes, limit in self.CASES],
                        attempt)

    def expected(self, world_size):
        return of_cases(_bucket_facts, [(list(sizes), limit) for sizes, limit in self.CASES],
                        make_buckets)


def _bucket_facts(case, buckets):
    if isinstance(buckets, list | tuple):
        buckets = [list(each) if isinstance(each, tuple | range) else each for each in buckets]
    sizes, limit = case
    return {f"the buckets of {limit} bytes for the sizes {sizes}": buckets}


# --- 5.2: the gradients of a bucket travel together ----------------------------------------------


def sums_in_buckets(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        total = ring_all_reduce(pack(gradients, ranks), group)
        for gradient, part in zip(gradients, unpack(total, gradients), strict=True):
            gradient.copy_(part)


def divides_twice(buckets, group=None):
    average_in_buckets(buckets, group)
    for bucket in buckets:
        for parameter in bucket:
            parameter.grad /= dist.get_world_size(group)


def divides_by_the_parameters(buckets, group=None):
    sums_in_buckets(buckets, group)
    for bucket in buckets:
        for parameter in bucket:
            parameter.grad /= len(bucket)


def leaves_the_gradients(buckets, group=None):
    ranks, means = dist.get_world_size(group), []
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)
        means += unpack(mean, gradients)
    return means


def drops_what_the_ring_returns(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        flat = pack(gradients, ranks) / ranks
        ring_all_reduce(flat, group)
        for gradient, part in zip(gradients, unpack(flat, gradients), strict=True):
            gradient.copy_(part)


def each_gradient_alone(buckets, group=None):
    for bucket in buckets:
        average_in_buckets([[parameter] for parameter in bucket], group)


def all_in_one(buckets, group=None):
    for dtype in (torch.float32, torch.float64):
        average_in_buckets([[parameter for bucket in buckets for parameter in bucket
                             if parameter.dtype == dtype]], group)


def all_in_one_dtype(buckets, group=None):
    average_in_buckets([[parameter for bucket in buckets for parameter in bucket]], group)


def puts_views_in_their_place(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        mean = ring_all_reduce(pack([each.grad for each in bucket], ranks) / ranks, group)
        for parameter, part in zip(bucket, unpack(mean, bucket), strict=True):
            parameter.grad = part


def leaves_out_the_last(buckets, group=None):
    average_in_buckets(buckets[:-1], group)


def writes_the_first_part(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        mean = ring_all_reduce(pack([each.grad for each in bucket], ranks) / ranks, group)
        for parameter in bucket:
            parameter.grad.copy_(mean[: parameter.numel()].view_as(parameter))


def writes_in_another_order(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        mean = ring_all_reduce(pack([each.grad for each in bucket], ranks) / ranks, group)
        gradients = [parameter.grad for parameter in reversed(bucket)]
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)


def packs_the_parameters(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        mean = ring_all_reduce(pack(bucket, ranks) / ranks, group)
        for parameter, part in zip(bucket, unpack(mean, bucket), strict=True):
            parameter.grad.copy_(part)


def averages_the_weights(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        mean = ring_all_reduce(pack(bucket, ranks) / ranks, group)
        for parameter, part in zip(bucket, unpack(mean, bucket), strict=True):
            parameter.data.copy_(part)


def without_padding(buckets, group=None):
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        mean = ring_all_reduce(flat / ranks, group)
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)


def ring_of_all_ranks(buckets, group=None):
    average_in_buckets(buckets)


def divides_by_all_ranks(buckets, group=None):
    ranks = dist.get_world_size()
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)


_SUM = "You summed and did not divide by the world size: every rank has to end with the mean."
_TWICE = "You divided by the world size twice."
_COPIES = ("The sum over the ranks does not come back into `.grad`. `pack` makes a copy, and the "
           "ring returns a new tensor: write each part of what it returns into its `.grad`.")
_WITHOUT_GROUP = ("You left out the group. Pass it on to `dist.get_world_size` and to your ring: "
                  "where only some of the ranks call, they are all that there are.")


class AverageInBuckets(Exercise):
    slug = "gradient-buckets"
    number = "5.2"
    title = "The gradients of a bucket travel together"
    name = "average_in_buckets"
    minutes = 6
    with_groups = True
    too_long = AverageGradients.too_long
    world_sizes = (2, 3, 4, 1)  # one rank last: a ring of one sends nothing
    seconds = 8.0
    hints = (
        "What does `pack` make of the gradients of one bucket, and where must the numbers be when "
        "your function returns?",
        "For one bucket: pack its gradients, divide, run your ring on the flat tensor. The ring "
        "returns a *new* flat tensor. `unpack` gives a view into that for each gradient.",
        "`mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)`; then, for each gradient "
        "and its part in `unpack(mean, gradients)`, `gradient.copy_(part)`.",
    )
    solution = staticmethod(average_in_buckets)
    mistakes = (
        Mistake(sums_in_buckets, _SUM),
        Mistake(divides_twice, _TWICE),
        Mistake(divides_by_the_parameters, "You divided by the number of parameters in the bucket. "
                "The mean is over the ranks."),
        *(Mistake(attempt, _COPIES)
          for attempt in (leaves_the_gradients, drops_what_the_ring_returns)),
        Mistake(each_gradient_alone, "Each gradient travels by itself: there is one all-reduce "
                "for each parameter. Send a bucket as one flat tensor."),
        *(Mistake(attempt, "You made fewer buckets than you were given. Send each bucket by "
                  "itself, in the order of the list.")
          for attempt in (all_in_one, all_in_one_dtype)),
        Mistake(puts_views_in_their_place, "The means are right, and each `.grad` is a new tensor. "
                "Who kept the tensor from before, as an optimizer or a bucket may, does not see "
                "them. Write into it: `parameter.grad.copy_(part)`."),
        Mistake(leaves_out_the_last, "The last bucket is never sent."),
        Mistake(writes_the_first_part, "Each parameter of a bucket gets the first numbers of it: "
                "its part begins where the one before it ends."),
        Mistake(writes_in_another_order, "The parts are written back in another order than they "
                "were put together: parameters get the gradients of others."),
        Mistake(packs_the_parameters, "The bucket holds the parameters' values; what has to "
                "be averaged are their gradients, `.grad`."),
        Mistake(averages_the_weights, "You averaged the parameters, and the gradients are as they "
                "were. What has to be averaged is `.grad`."),
        Mistake(without_padding, "The ring cuts the flat tensor into N equal chunks, and N does "
                "not divide the length of every bucket. `pack` adds the zeros that it takes."),
        *(Mistake(attempt, _WITHOUT_GROUP)
          for attempt in (ring_of_all_ranks, divides_by_all_ranks)),
    )

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        facts = _averaged("", attempt, [rank], None)
        if ranks == 4 and self.with_groups:
            pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
            facts |= _averaged(_IN_A_PAIR, attempt, [rank], pair)
        return facts

    def expected(self, world_size):
        facts = []
        for rank in range(world_size):
            facts.append(_of_buckets("", *_with_gradients(range(world_size)), 3))
            if world_size == 4:
                pair = [rank % 2, rank % 2 + 2]
                facts[-1] |= _of_buckets(_IN_A_PAIR, *_with_gradients(pair), 3)
        for each in facts if world_size == 1 else ():
            del each[_NUMBER]  # a ring of one rank sends nothing
        return facts


_NUMBER = "the number of all-reduces"
_IN_A_PAIR = ", in a group of two ranks"


def _averaged(where, attempt, ranks, group):
    buckets, before = _with_gradients(ranks)
    gradients_before = [parameter.grad for bucket in buckets for parameter in bucket]
    memory = [gradient.data_ptr() for gradient in gradients_before]
    with CallLog() as log:
        attempt(buckets, group)
    now = [parameter.grad for bucket in buckets for parameter in bucket]
    kept = all(gradient is old and gradient.data_ptr() == address for gradient, old, address
               in zip(now, gradients_before, memory, strict=True))
    number = _all_reduces(log.calls, dist.get_world_size(group))
    return _of_buckets(where, buckets, before, number, kept)


def _of_buckets(where, buckets, before, number, kept=True):
    same = all(torch.equal(parameter, old) for bucket, values in zip(buckets, before, strict=True)
               for parameter, old in zip(bucket, values, strict=True))
    facts = {f"that the parameters are as they were{where}": same}
    for index, bucket in enumerate(buckets):
        for place, parameter in enumerate(bucket):
            name = f"of parameter {place} in bucket {index}{where}"
            facts |= {f"the gradient {name}": parameter.grad.clone()}
    return facts | {f"{_NUMBER}{where}": number,
                    f"that each `.grad` is the tensor that it was{where}": kept}


def _all_reduces(calls, ranks):
    """How many all-reduces these calls make up; a ring of N ranks has 2(N-1) sends on each."""
    rings = sum(call.operation == "send" for call in calls) / max(1, 2 * (ranks - 1))
    number = sum(call.operation == "all_reduce" for call in calls) + rings
    return int(number) if number == int(number) else number


def _with_gradients(ranks):
    """Three buckets of parameters with the mean of these ranks' gradients, and their values."""
    buckets = [[nn.Parameter(seeded(f"{shape} of rank {ranks[0]} of {len(ranks)}", *shape,
                                    dtype=dtype)) for shape in shapes]
               for shapes, dtype in ((((3, 5), (1, 4)), torch.float32),
                                     (((2, 2), (1, 1), (4, 3)), torch.float32),
                                     (((1, 7), (1, 3)), torch.float64))]
    for number, parameter in enumerate(each for bucket in buckets for each in bucket):
        own = [seeded(f"gradient {number} of rank {rank}", *parameter.shape, dtype=parameter.dtype)
               for rank in ranks]
        parameter.grad = sum(own) / len(own)
    return buckets, [[parameter.detach().clone() for parameter in bucket] for bucket in buckets]


# --- 5.3: buckets leave while backward computes --------------------------------------------------
# A learner's class differs from the solution in one method or two, and so do these.

Overlapped = parts.OverlappedGradients


class TakesTheParameterForTheGradient:
    def __init__(self, buckets, group):
        self.group, self.thread, self.launched = group, ThreadPoolExecutor(1), []
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, gradient):
        self.launched.append(self.thread.submit(self.average, gradient.data))

    def average(self, gradient):
        ranks = dist.get_world_size(self.group)
        mean = ring_all_reduce(pack([gradient], ranks) / ranks, self.group)
        gradient.copy_(*unpack(mean, [gradient]))

    def finish(self):
        for averaging in self.launched:
            averaging.result()
        self.launched = []


class LaunchesInFinish(Overlapped):
    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1

    def finish(self):
        for bucket in self.buckets:
            if not any(self.missing[each] for each in bucket):
                self.launch(bucket)
        super().finish()


class WaitsInTheHook(Overlapped):
    def launch(self, bucket):
        super().launch(bucket)
        self.launched[-1].result()


class AveragesInTheHook(Overlapped):
    def launch(self, bucket):
        averaging = Future()
        averaging.set_result(average_in_buckets([bucket], self.group))
        self.launched.append(averaging)


class WaitsForTheFirst(Overlapped):
    def finish(self):
        self.launched = self.launched[:1]
        super().finish()


class WaitsForNone(Overlapped):
    def finish(self):
        self.launched = []
        super().finish()


class LaunchesAtEachGradient(Overlapped):
    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1
        self.launch(self.buckets[_number_of(parameter, self.buckets)])


class LaunchesWhatIsFull(Overlapped):
    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1
        bucket = self.buckets[_number_of(parameter, self.buckets)]
        if not any(self.missing[each] for each in bucket):
            self.launch(bucket)


class LaunchesOneAtMost(Overlapped):
    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1
        for bucket in self.buckets[len(self.launched):][:1]:
            if not any(self.missing[each] for each in bucket):
                self.launch(bucket)


class CountsForBuckets(Overlapped):
    """Counts what a bucket misses, and not what each parameter does."""

    def start_over(self):
        self.left = [len(bucket) for bucket in self.buckets]
        self.launched = []

    def gradient_is_ready(self, parameter):
        self.left[_number_of(parameter, self.buckets)] -= 1
        while len(self.launched) < len(self.left) and self.left[len(self.launched)] == 0:
            self.launch(self.buckets[len(self.launched)])

    def finish(self):
        launched, left = self.launched, self.left
        self.start_over()
        if any(left):
            raise RuntimeError("not every bucket is full")
        for averaging in launched:
            averaging.result()


class LaunchesWhatHasItsCount(CountsForBuckets):
    def gradient_is_ready(self, parameter):
        number = _number_of(parameter, self.buckets)
        self.left[number] -= 1
        if self.left[number] == 0:
            self.launch(self.buckets[number])


class EachGradientAlone(Overlapped):
    def __init__(self, buckets, group):
        super().__init__([[parameter] for bucket in buckets for parameter in bucket], group)


class CountsOnce(Overlapped):
    def finish(self):
        for averaging in self.launched:
            averaging.result()
        self.launched = []


class CountsOnceAndRaises(Overlapped):
    def finish(self):
        missing = self.missing
        super().finish()
        self.missing = missing


class CountsOnceAndRaisesAgain(Overlapped):
    def finish(self):
        missing = self.missing
        try:
            super().finish()
        finally:
            self.missing = missing


class LaunchesWhatEverCame(Overlapped):
    """Counts gradients for ever, and launches where each parameter of a bucket has had one."""

    def start_over(self):
        self.came = getattr(self, "came", {each: 0 for bucket in self.buckets for each in bucket})
        self.launched = []

    def gradient_is_ready(self, parameter):
        self.came[parameter] += 1
        for bucket in self.buckets[len(self.launched):]:
            if not all(self.came[each] for each in bucket):
                break
            self.launch(bucket)

    def finish(self):
        for averaging in self.launched:
            averaging.result()
        self.start_over()


class CountsBucketsOnce(Overlapped):
    """Counts the buckets that it has sent, and never sets that back."""

    sent = 0

    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1
        for bucket in self.buckets[self.sent:]:
            if any(self.missing[each] for each in bucket):
                break
            self.launch(bucket)
            self.sent += 1


class RaisesBeforeItStartsOver(Overlapped):
    def finish(self):
        if any(self.missing.values()):
            raise RuntimeError("not every parameter got one gradient")
        super().finish()


class _WithItsOwnAverage(Overlapped):
    """Averages a bucket with another function."""

    average: staticmethod

    def launch(self, bucket):
        self.launched.append(self.thread.submit(self.average, [bucket], self.group))


class Sums(_WithItsOwnAverage):
    average = staticmethod(sums_in_buckets)


class DividesTwice(_WithItsOwnAverage):
    average = staticmethod(divides_twice)


class AveragesCopies(_WithItsOwnAverage):
    average = staticmethod(leaves_the_gradients)


class SeveralThreads(Overlapped):
    def __init__(self, buckets, group):
        super().__init__(buckets, group)
        self.thread = ThreadPoolExecutor(max_workers=len(buckets))


class AThreadForEachBucket(Overlapped):
    def launch(self, bucket):
        self.launched.append(
            ThreadPoolExecutor(1).submit(average_in_buckets, [bucket], self.group))


class InTheGroupOfAll(Overlapped):
    def __init__(self, buckets, group):
        super().__init__(buckets, None)


class TakesWhatItGets(Overlapped):
    def finish(self):
        launched = self.launched
        self.start_over()
        for averaging in launched:
            averaging.result()


class AllowsASecondBackward(Overlapped):
    def finish(self):
        launched, missing = self.launched, self.missing
        self.start_over()
        for averaging in launched:
            averaging.result()
        if any(count > 0 for count in missing.values()):
            raise RuntimeError("a parameter got no gradient")


class Asserts(Overlapped):
    def finish(self):
        complete = not any(self.missing.values())
        launched = self.launched
        self.start_over()
        for averaging in launched:
            averaging.result()
        assert complete


def _number_of(parameter, buckets):
    return next(number for number, bucket in enumerate(buckets)
                if any(each is parameter for each in bucket))


_WAITS = ("You wait in the hook, so backward stands still until the other ranks have come: nothing "
          "overlaps. Hand the bucket to the thread, keep what `submit` returns, and wait in "
          "`finish`.")
_ALL_HANDLES = ("`finish` does not wait for every bucket. An earlier `.grad` may be the mean while "
                "a later one is not yet: wait for all that was launched.")
_COUNTS = ("The first step is right, the second is not: `finish` has to set the counts back, those "
           "of gradients and, if you keep one, that of buckets.")
_ORDER = ("You send whatever is full. Where gradients become ready in another order on another "
          "rank, the ranks send different buckets at the same time: numbers of one bucket are "
          "added to those of another one, and nobody is told. Every rank has to send the buckets "
          "in the order of the list: a full one waits for those before it.")
_ONE_THREAD = ("Two of your threads send at the same time, in one group. Their messages are "
               "mixed up: nothing says which bucket one belongs to. One thread, with a queue, "
               "averages one bucket after another.")


class OverlapGradients(Exercise):
    slug = "overlapped-gradients"
    number = "5.3"
    title = "Send buckets while backward computes"
    name = "OverlappedGradients"
    minutes = 30
    world_sizes = (2, 3, 4, 1)
    seconds = 15.0
    hints = (
        "`parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` when backward has "
        "added up that parameter's `.grad`. How does a hook know that its bucket is complete?",
        "Count the gradients of each parameter, and submit `average_in_buckets` of a full bucket "
        "to the thread. On one rank the third bucket may be full before the second, and on "
        "another rank after it. When may it leave?",
        "In the hook: while the next bucket of the list is full, submit it and keep the future. In "
        "`finish`: keep the counts for a look at the end, make everything ready for the next step "
        "(all counts, an empty list), wait for each future with `result()`; and raise if a count "
        "was not one.",
    )
    solution = Overlapped
    mistakes = (
        Mistake(TakesTheParameterForTheGradient, "You sent the parameters, not their gradients. "
                "The hook is called with the *parameter*, when its gradient is ready: what has to "
                "be averaged is `parameter.grad`."),
        Mistake(LaunchesInFinish, "You launch when backward is over: nothing overlaps. "
                "Launch a bucket in the hook of its last missing gradient."),
        *(Mistake(attempt, _WAITS) for attempt in (WaitsInTheHook, AveragesInTheHook)),
        *(Mistake(attempt, _ALL_HANDLES) for attempt in (WaitsForTheFirst, WaitsForNone)),
        Mistake(LaunchesAtEachGradient, "A bucket leaves before its last gradient is there: "
                "another one's `.grad` is still None, or old. Count what is missing; and use "
                "`register_post_accumulate_grad_hook`, since `register_hook` runs before `.grad` "
                "is written. (A lambda in a loop sees the loop's last values: write "
                "`lambda p, number=number: …`.)"),
        *(Mistake(attempt, _ORDER) for attempt in (LaunchesWhatIsFull, LaunchesWhatHasItsCount)),
        Mistake(LaunchesOneAtMost, "A bucket that was full early is never sent. It has waited for "
                "those before it, and when the last of these has left, it may leave at once: look "
                "further, until you meet a bucket that is not full."),
        Mistake(CountsForBuckets, "One parameter got two gradients, another one of the same bucket "
                "got none, and `finish` says nothing. Count for each parameter: in a count for the "
                "whole bucket, one stands in for the other."),
        Mistake(EachGradientAlone, "Each gradient travels by itself as soon as it is there. "
                "That overlaps, and pays a latency for each: one all-reduce for a bucket."),
        *(Mistake(attempt, _COUNTS)
          for attempt in (CountsOnce, CountsOnceAndRaises, CountsOnceAndRaisesAgain)),
        Mistake(LaunchesWhatEverCame, "In step 2: `finish` has to set the counts of gradients "
                "back. With those of step 1 each bucket is full from the beginning, and leaves "
                "before its gradients are there."),
        Mistake(CountsBucketsOnce, "The first step is right, and the second sends nothing: "
                "`finish` has to set back how many buckets were sent, too."),
        Mistake(RaisesBeforeItStartsOver, "After `finish` has raised once, the next step is not "
                "right, and that step has all its gradients. Start over in any case: keep what you "
                "have counted, set it back, and raise then."),
        Mistake(DividesTwice, _TWICE),
        Mistake(Sums, _SUM),
        Mistake(AveragesCopies, _COPIES),
        *(Mistake(attempt, _ONE_THREAD) for attempt in (SeveralThreads, AThreadForEachBucket)),
        Mistake(InTheGroupOfAll, "The buckets travel in the group of all ranks, where other calls "
                "of yours may be under way at the same time. Hand `group` on."),
        Mistake(TakesWhatItGets, "A parameter got no gradient, so its bucket was never sent, and "
                "`finish` says nothing: every rank would step along its own gradients. Raise "
                "RuntimeError."),
        Mistake(AllowsASecondBackward, "Backward ran twice before `finish`. The buckets had left "
                "with the first gradients, so what was added later is each rank's own. Raise "
                "RuntimeError."),
        Mistake(Asserts, "`finish` fails, and not with a RuntimeError. (`assert` is for your own "
                "mistakes, and is left out under `python -O`.)"),
    )

    def trial(self, attempt):
        group, model = dist.new_group(), _Layers()
        overlapped = attempt(model.buckets(), group)
        facts, said = {}, ""
        for step, backward in enumerate((_that_looks_for_sends, _with_a_late_rank), start=1):
            model.zero_grad()
            loss = model.loss(step, [dist.get_rank()])
            with _Watch(group) as watch, _that_names_the_step(step):
                found = backward(model, loss, watch)
                try:
                    overlapped.finish()
                except RuntimeError as error:
                    if step == 1 or not _is_of(attempt, error):
                        raise
                    said = f"  it says    {error}"
                seen, forgotten = gradients(model, f" in step {step}"), watch.forgotten
                watch.settle()
            facts |= _of_step(step, seen, found, watch.all_reduces, watch.elsewhere, forgotten,
                              watch.mixed)
        raised = "RuntimeError" if said else "nothing"
        return {**facts, _SECOND: raised, BESIDE: {_SECOND: said}, **_in_another_order(attempt),
                **_of_a_missing_gradient(attempt), _AGAIN: _raised_by(_twice(attempt)),
                _IN_PLACE_OF: _raised_by(_two_for_one(attempt))}

    def explanation(self, attempt, got, world_size):
        facts = [pair for of_rank in got for pair in of_rank.items()] if isinstance(
            got, list) else []
        if any(fact.startswith(_MIXED) and value is True for fact, value in facts):
            return _ONE_THREAD
        if any(fact.startswith(_FORGOTTEN) and value for fact, value in facts):
            return _ALL_HANDLES
        return super().explanation(attempt, got, world_size)

    def expected(self, world_size):
        model, facts = _Layers(), {_SECOND: "nothing"}
        elsewhere = AtMost(0, "all of them belong into the group that you were given")
        for step, found in ((1, 2), (2, False)):
            model.zero_grad()
            model.loss(step, range(world_size)).backward()
            facts |= _of_step(step, gradients(model, f" in step {step}"), found, 3, elsewhere, 0,
                              False)
        if world_size == 1:  # a ring of one rank sends nothing
            facts = {fact: value for fact, value in facts.items()
                     if fact != _EARLY and not fact.startswith(f"{_NUMBER} in step")}
        for number, where in enumerate((_ON_ALL, _ON_ONE), start=3):
            model = _Branches()
            model.loss(number, range(world_size)).backward()
            facts |= gradients(model, where) | {f"what `finish` raises{where}": "nothing"}
        return facts | {_UNUSED: "RuntimeError", _AFTER: "nothing", _AGAIN: "RuntimeError",
                        _IN_PLACE_OF: "RuntimeError"}


_FORGOTTEN = "the number of all-reduces that nobody waits for"
_MIXED = "whether two threads send at the same time"
_EARLY = "the number of buckets sent before the first layer's gradients are there"
_WAITING = "whether backward waits for other ranks"
_UNUSED = "what `finish` raises when a parameter got no gradient"
_SECOND = "what `finish` raises in the second step, where each gradient came once"
_AFTER = "what `finish` raises in the next step, where each gradient came once"
_AGAIN = "what `finish` raises when backward ran twice before it"
_IN_PLACE_OF = "what `finish` raises when one parameter got two gradients and its neighbour none"
_ON_ALL = " where all ranks' gradients become ready in another order than the list"
_ON_ONE = " where the last rank's gradients become ready in another order"


def _of_step(step, seen, found, number, elsewhere, forgotten, mixed):
    when = f" in step {step}"
    return {f"{_MIXED}{when}": mixed, {1: _EARLY, 2: _WAITING}[step]: found,
            f"{_NUMBER}{when}": number, f"the number of calls in another group{when}": elsewhere,
            f"{_FORGOTTEN}{when}": forgotten, **seen}


@contextlib.contextmanager
def _that_names_the_step(step):
    """What is raised in step 2 says so: it is not the mistake that would raise it in step 1."""
    try:
        yield
    except Exception as error:
        if step > 1:
            error.args = (f"{error} (in step {step})",)
        raise


def _that_looks_for_sends(model, loss, watch):
    """Backward; before the first layer it gives two buckets the time to be sent. How many were."""
    sent = 0

    def wait(_):
        nonlocal sent
        limit = time.monotonic() + 0.6 * (dist.get_world_size() > 1)
        while watch.all_reduces < 2 and time.monotonic() < limit:
            time.sleep(0.002)
        sent = min(2, int(watch.all_reduces))
        time.sleep(3 * watch.pause)  # until they have arrived

    model.before_first_layer = wait
    _back_from(loss, model)
    model.before_first_layer = lambda _: None
    return sent


def _back_from(loss, model):
    """Backward. After its first gradient it gives a thread the time to send what is not full."""
    pauses = [0.05]
    hooks = [parameter.register_post_accumulate_grad_hook(
        lambda _: time.sleep(pauses.pop() if pauses else 0)) for parameter in model.parameters()]
    loss.backward()
    for hook in hooks:
        hook.remove()


def _with_a_late_rank(model, loss, watch):
    """The last rank begins when the others have ended; whether one of them waits for it."""
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    store = _get_default_store()
    keys = [f"backward of rank {other} is done" for other in range(others)]
    waits = "backward waits"
    done = True
    if rank == others > 0:
        limit = time.monotonic() + 1.0
        while not (done := store.check(keys)) and not store.check([waits]) and (
                time.monotonic() < limit):
            time.sleep(0.002)
    elif others:
        watch.on_wait = lambda: store.set(waits, "")
    _back_from(loss, model)
    watch.on_wait = lambda: None
    if rank < others:
        store.set(keys[rank], "")
    return not done


def _is_of(attempt, error):
    """Whether the code of this class raises the error, and not a collective that it calls."""
    own = {method.__code__.co_filename for each in attempt.__mro__
           for method in vars(each).values() if inspect.isfunction(method)}
    return traceback.extract_tb(error.__traceback__)[-1].filename in own


def _in_another_order(attempt):
    """The gradients of two layers that lie side by side, and which are ready in turned order.

    On the last rank alone only if the first try has sent all: else ranks might wait for ever.
    """
    facts, rank, ranks = {}, dist.get_rank(), dist.get_world_size()
    for number, where in enumerate((_ON_ALL, _ON_ONE), start=3):
        group, model = dist.new_group(), _Branches()
        model.turned = where == _ON_ALL or rank == ranks - 1
        overlapped = attempt(model.buckets(), group)
        with _Watch(group) as watch:
            watch.pause = 0
            model.loss(number, [rank]).backward()
            raised = _raised_by(overlapped.finish)
            watch.settle()
            seen = _standing_still(model, where)
        facts |= seen | {f"what `finish` raises{where}": raised}
        if ranks > 1 and watch.all_reduces < len(model.buckets()):
            break
    return dict.fromkeys([*gradients(model, _ON_ONE), f"what `finish` raises{_ON_ONE}"]) | facts


def _standing_still(model, where):
    """The gradients once nobody changes them any more: who does not wait is told so above."""
    before, now = None, gradients(model, where)
    while before is None or any(now[fact] is not None and not torch.equal(value, now[fact])
                                for fact, value in before.items()):
        time.sleep(0.1)
        before, now = now, gradients(model, where)
    return now


def _of_a_missing_gradient(attempt):
    """What `finish` raises after backward through one layer of three, and in the step after."""
    model = _Layers()
    overlapped = attempt(model.buckets(), dist.new_group())
    model[2](torch.ones(1, 5)).sum().backward()
    facts = {_UNUSED: _raised_by(overlapped.finish)}
    _standing_still(model, "")
    model.zero_grad()
    model.loss(5, [dist.get_rank()]).backward()
    return facts | {_AFTER: _raised_by(overlapped.finish)}


def _twice(attempt):
    """A `finish` before which backward ran twice."""
    model = _Layers()
    overlapped = attempt(model.buckets(), dist.new_group())
    for _ in range(2):
        model.loss(4, [dist.get_rank()]).backward()
    return overlapped.finish


def _two_for_one(attempt):
    """A `finish` before which each weight got two gradients, and each bias none, but has old ones.
    """
    model = _Layers()
    overlapped = attempt(model.buckets(), dist.new_group())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        sum(layer.weight.sum() for layer in model).backward()
    return overlapped.finish


def _raised_by(finish):
    try:
        finish()
    except Exception as error:
        return type(error).__name__
    return "nothing"


class _Watch:
    """In this block: this rank's sends and all-reduces, and which handles are waited for.

    ``on_wait`` is called before the thread of backward waits. A send of another thread takes
    ``pause`` seconds longer, so who does not wait for that thread has no mean yet.
    """

    def __init__(self, group):
        self.group, self.calls, self.senders, self.works, self.asked = group, [], [], [], set()
        self.on_wait, self.pause = lambda: None, 0.04 / dist.get_world_size()
        self._patches = [mock.patch.object(dist.Work, name, self._noting(getattr(dist.Work, name)))
                         for name in ("wait", "get_future", "is_completed")]

    @property
    def all_reduces(self):
        return _all_reduces(self.calls, dist.get_world_size())

    @property
    def elsewhere(self):
        return sum(call.group != self.group.group_name for call in self.calls)

    @property
    def mixed(self):
        """Whether a thread sent between two sends of another one."""
        in_turn = [sender for sender, _ in itertools.groupby(self.senders)]
        return len(in_turn) > len(set(in_turn))

    @property
    def forgotten(self):
        return sum(id(work) not in self.asked for work in self.works)

    def settle(self):
        """Waits until nothing is under way, where nobody else has."""
        if self.all_reduces < 3:
            limit = time.monotonic() + 0.5 * (dist.get_world_size() > 1)
            while self.all_reduces < 3 and time.monotonic() < limit:
                time.sleep(0.01)
            time.sleep(5 * self.pause)
        for work in self.works:
            work.wait()

    def _launches(self, call):
        if call.group not in (self.group.group_name, dist.group.WORLD.group_name):
            return  # of a thread that an earlier attempt has left behind
        self.calls.append(call)
        if call.operation == "send":
            self.senders.append(threading.get_ident())
            if threading.current_thread() is not threading.main_thread():
                time.sleep(self.pause)

    def _launched(self, call, work):
        if not call.is_point_to_point:
            self.works.append(work)

    def _noting(self, method):
        def noted(work, *args, **kwargs):
            self.asked.add(id(work))
            if (method.__name__ != "is_completed"
                    and threading.current_thread() is threading.main_thread()):
                self.on_wait()
            return method(work, *args, **kwargs)

        return noted

    def __enter__(self):
        for each in self._patches:
            each.start()
        recording.recorder_here().listeners.append(self._launches)
        recording.recorder_here().work_listeners.append(self._launched)
        return self

    def __exit__(self, *_):
        recording.recorder_here().listeners.remove(self._launches)
        recording.recorder_here().work_listeners.remove(self._launched)
        for each in self._patches:
            each.stop()


class _Layers(nn.ModuleList):
    """Three layers; ``before_first_layer`` is called when backward comes to it.

    Their buckets are equally large, so that messages which are mixed up bring wrong numbers, and
    not the end of the process.
    """

    def __init__(self):
        torch.manual_seed(6)
        super().__init__([nn.Linear(5, 5) for _ in range(3)])

    def buckets(self):
        return [list(layer.parameters()) for layer in reversed(self)]

    def loss(self, step, ranks):
        x = torch.cat([seeded(f"samples of rank {rank} in step {step}", 3, 5) for rank in ranks])
        first = self[0](x)
        first.register_hook(lambda gradient: self.before_first_layer(gradient))
        return self[2](torch.tanh(self[1](torch.tanh(first)))).square().mean()

    def before_first_layer(self, _):
        pass


class _Branches(_Layers):
    """The first two layers lie side by side; ``turned``: the second one is computed first.

    Autograd goes back first through what was computed last.
    """

    turned = False

    def loss(self, step, ranks):
        x = torch.cat([seeded(f"samples of rank {rank} in step {step}", 3, 5) for rank in ranks])
        sides = [torch.tanh(self[index](x)) for index in ((1, 0) if self.turned else (0, 1))]
        return self[2](sides[0] + sides[1]).square().mean()


# --- 5.4: the scheduler --------------------------------------------------------------------------


def _schedule(layers, bucket_bytes):
    """When forward and backward end, and for each bucket when it is ready, and its bytes."""
    forward = now = sum(layer.forward_seconds for layer in layers)
    ready = [0.0] * len(layers)
    for index in reversed(range(len(layers))):
        now += layers[index].backward_seconds
        ready[index] = now
    buckets = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    return forward, now, [(ready[bucket[-1]], sum(layers[index].gradient_bytes for index in bucket))
                          for bucket in buckets]


def counts_the_last_bucket(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    exposed = ring_seconds(buckets[-1][1], ranks, bandwidth, latency)
    return end + exposed, exposed


def counts_all_communication(layers, bucket_bytes, ranks, bandwidth, latency):
    step, _ = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    _, _, buckets = _schedule(layers, bucket_bytes)
    return step, sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)


def sending_less_backward(layers, bucket_bytes, ranks, bandwidth, latency):
    step, sending = counts_all_communication(layers, bucket_bytes, ranks, bandwidth, latency)
    return step, max(0.0, sending - sum(layer.backward_seconds for layer in layers))


def sending_less_computing(layers, bucket_bytes, ranks, bandwidth, latency):
    step, sending = counts_all_communication(layers, bucket_bytes, ranks, bandwidth, latency)
    _, end, _ = _schedule(layers, bucket_bytes)
    return step, max(0.0, sending - end)


def exposes_forward(layers, bucket_bytes, ranks, bandwidth, latency):
    step, exposed = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    return step, exposed + sum(layer.forward_seconds for layer in layers)


def a_ring_for_each_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    indices = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    free = 0.0
    for bucket, (ready, _) in zip(indices, buckets, strict=True):
        free = max(free, ready) + sum(
            ring_seconds(layers[index].gradient_bytes, ranks, bandwidth, latency)
            for index in bucket)
    return free, free - end


def after_backward(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    sending = sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)
    return end + sending, sending


def longer_of_the_two(layers, bucket_bytes, ranks, bandwidth, latency):
    forward, end, buckets = _schedule(layers, bucket_bytes)
    sending = sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)
    step = forward + max(end - forward, sending)
    return step, step - end


def never_waits_for_a_bucket(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    free = buckets[0][0] + sum(ring_seconds(nbytes, ranks, bandwidth, latency)
                               for _, nbytes in buckets)
    return max(end, free), max(0.0, free - end)


def side_by_side(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    free = max(ready + ring_seconds(nbytes, ranks, bandwidth, latency)
               for ready, nbytes in buckets)
    return free, free - end


def exposed_since_the_start(layers, bucket_bytes, ranks, bandwidth, latency):
    step, _ = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    return step, step


def without_forward(layers, bucket_bytes, ranks, bandwidth, latency):
    step, exposed = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    return step - sum(layer.forward_seconds for layer in layers), exposed


def begins_with_the_first_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    return predict_step(layers[::-1], bucket_bytes, ranks, bandwidth, latency)


def each_layer_by_itself(layers, bucket_bytes, ranks, bandwidth, latency):
    return predict_step(layers, 1e-9, ranks, bandwidth, latency)


def ready_with_the_first_gradient(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    _, _, single = _schedule(layers, 1e-9)
    indices = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    free = 0.0
    for bucket, (_, nbytes) in zip(indices, buckets, strict=True):
        ready = single[len(layers) - 1 - bucket[0]][0]
        free = max(free, ready) + ring_seconds(nbytes, ranks, bandwidth, latency)
    return max(end, free), max(0.0, free - end)


def ready_before_its_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    indices = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    free = 0.0
    for bucket, (ready, nbytes) in zip(indices, buckets, strict=True):
        ready -= layers[bucket[-1]].backward_seconds
        free = max(free, ready) + ring_seconds(nbytes, ranks, bandwidth, latency)
    return max(end, free), max(0.0, free - end)


def backward_waits(layers, bucket_bytes, ranks, bandwidth, latency):
    now = sum(layer.forward_seconds for layer in layers)
    sending = 0.0
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        seconds = ring_seconds(nbytes, ranks, bandwidth, latency)
        now += sum(layers[index].backward_seconds for index in bucket) + seconds
        sending += seconds
    return now, seconds


def hidden_for_exposed(layers, bucket_bytes, ranks, bandwidth, latency):
    step, exposed = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    _, _, buckets = _schedule(layers, bucket_bytes)
    sending = sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)
    return step, sending - exposed


def exposed_first(layers, bucket_bytes, ranks, bandwidth, latency):
    return predict_step(layers, bucket_bytes, ranks, bandwidth, latency)[::-1]


def on_a_link(seconds):
    """A scheduler that takes another time for an all-reduce."""

    def predicts(layers, bucket_bytes, ranks, bandwidth, latency):
        _, end, buckets = _schedule(layers, bucket_bytes)
        free = 0.0
        for ready, nbytes in buckets:
            free = max(free, ready) + seconds(nbytes, ranks, bandwidth, latency)
        return max(end, free), max(0.0, free - end)

    return predicts


def one_message(nbytes, ranks, bandwidth, latency):
    return latency + nbytes / bandwidth


def one_latency(nbytes, ranks, bandwidth, latency):
    return latency + 2 * (ranks - 1) / ranks * nbytes / bandwidth


def swaps_the_link(nbytes, ranks, bandwidth, latency):
    return ring_seconds(nbytes, ranks, latency, bandwidth)


class PredictStep(Calculation):
    slug = "predict-step"
    number = "5.4"
    title = "A scheduler: how long will the step take?"
    name = "predict_step"
    minutes = 25
    hints = (
        "Two clocks: one is when backward has computed up to some layer, the other one is when the "
        "link will be free again. Which of the two decides when a bucket leaves?",
        "First walk through the layers from the last to the first and note when each one's "
        "gradient is ready. Then walk through your buckets: which of its gradients completes one?",
        "A bucket starts at `max(free, ready)` of its last index, and `free` is then the start "
        "plus `ring_seconds` of its bytes. The step ends at `free`; exposed is what lies behind "
        "the end of backward.",
    )
    solution = staticmethod(predict_step)
    mistakes = (
        Mistake(counts_the_last_bucket, "You count the last bucket only. Where the link is slow, "
                "those before it are still on their way when backward ends."),
        Mistake(counts_all_communication, "The step is right. You count all of communication as "
                "exposed. What runs before the end of backward is hidden."),
        *(Mistake(attempt, "The step is right. What you return second is all communication less "
                  "what is computed. But the link also stands still while the rank computes. "
                  "Exposed is what is left when backward ends.")
          for attempt in (sending_less_backward, sending_less_computing)),
        Mistake(exposes_forward, "The step is right. You return it less backward, so forward is in "
                "it, too. Exposed is what is left when backward ends."),
        Mistake(a_ring_for_each_layer, "Each layer of your buckets has a ring of its own. A bucket "
                "is one all-reduce: add up its bytes first."),
        Mistake(after_backward, "Your first bucket leaves when backward is over. Each leaves as "
                "soon as its own gradients are there and the link is free; backward begins with "
                "the last layer, whose gradients are there first."),
        Mistake(longer_of_the_two, "You took the longer one of backward and communication. But "
                "nothing can be sent before the first bucket is ready, nor while the link waits "
                "for the next one."),
        Mistake(never_waits_for_a_bucket, "You take it that the link never waits once it has "
                "begun. It does when the next bucket is not ready yet: follow it bucket by "
                "bucket."),
        Mistake(side_by_side, "You let all-reduces run side by side, each at the full bandwidth. "
                "They share one link: a bucket starts when it is ready and the one before it is "
                "done."),
        Mistake(exposed_since_the_start, "You return when the last all-reduce ends. Exposed is "
                "only what comes after the end of backward."),
        Mistake(without_forward, "The step begins with forward, and you begin with backward."),
        Mistake(begins_with_the_first_layer, "You go through the layers from the first to the "
                "last. Backward begins with the last one."),
        Mistake(each_layer_by_itself, "Each layer's gradient travels by itself. Ask "
                "`make_buckets` which ones go together."),
        Mistake(ready_with_the_first_gradient, "A bucket leaves with its first gradient. It is "
                "complete with its last one."),
        Mistake(ready_before_its_layer, "A gradient is there when its layer's backward has ended, "
                "not when it begins."),
        Mistake(backward_waits, "In yours, backward waits for each bucket to arrive. Backward goes "
                "on while the link works."),
        Mistake(hidden_for_exposed, "The step is right. What you return second is hidden. Exposed "
                "is the rest."),
        Mistake(exposed_first, "The order of the two numbers: the step first, then the exposed "
                "part."),
        Mistake(on_a_link(one_message), "You took an all-reduce for one message. A ring "
                "all-reduce has 2(N-1) of them, with n/N bytes each: `ring_seconds`."),
        Mistake(on_a_link(swaps_the_link), "You took the bandwidth for the latency, and the "
                "latency for the bandwidth: `ring_seconds(nbytes, ranks, bandwidth, latency)`."),
        Mistake(on_a_link(one_latency), "The latency counts for each of the ring's 2(N-1) "
                "messages: they go one after another. `ring_seconds` knows."),
    )

    def trial(self, attempt):
        return of_cases(_step_facts, _CASES, lambda name, layers, *rest: attempt(
            list(layers), *rest))

    def expected(self, world_size):
        return of_cases(_step_facts, _CASES, lambda name, layers, *rest: predict_step(
            layers, *rest))


def _layers(*numbers):
    """From (forward ms, backward ms, MB of gradients)."""
    return [Layer(forward / 1e3, backward / 1e3, megabytes * 1e6)
            for forward, backward, megabytes in numbers]


_UNEVEN = _layers((3, 7, 10), (2, 9, 30), (4, 11, 20), (5, 13, 25), (1, 6, 5))
# By what each is about: layers, bytes of a bucket, ranks, bytes/s and s of the link.
_CASES = (
    ("a link that is late at the end", _UNEVEN, 30e6, 4, 5e9, 1e-4),
    ("a link that falls behind", _UNEVEN, 25e6, 3, 1.25e9, 5e-5),
    ("a pause between two buckets", _layers((1, 150, 1), (2, 190, 80), (3, 10, 3)), 3e6, 2, 1e9,
     1e-3),
    ("latency alone", _layers(*[(0.2, 1, 0.004)] * 5), 4e3, 64, 5e10, 1.4e-5),
    ("one bucket", _UNEVEN, 1e12, 8, 2e9, 1e-4),
    ("one rank", _UNEVEN, 30e6, 1, 5e9, 1e-4),
)


def _step_facts(case, answer):
    name, layers, bucket_bytes, ranks, *_ = case
    where = (f"with {name} ({len(layers)} layers, buckets of {bucket_bytes:g} bytes, "
             f"{ranks} rank{'s' * (ranks > 1)})")
    pair = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (None, None)
    return {f"the kind of answer {where}": "two numbers" if pair is answer else
            type(answer).__name__, f"the seconds of the step {where}": _as_float(pair[0]),
            f"the exposed seconds {where}": _as_float(pair[1])}


def _as_float(value):
    """A whole number as a float, and what rounding leaves of nothing as 0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0.0 if abs(value) < 1e-12 else float(value)
    return value


EXERCISES = (MakeBuckets, AverageInBuckets, OverlapGradients, PredictStep)
