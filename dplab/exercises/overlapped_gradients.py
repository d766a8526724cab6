"""Exercise 5.3: send buckets while backward computes."""

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

from dplab.checks.compare import BESIDE, AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import gradients, seeded
from dplab.exercises.average_gradients import pack, unpack
from dplab.exercises.gradient_buckets import (
    _COPIES,
    _NUMBER,
    _SUM,
    _TWICE,
    _all_reduces,
    average_in_buckets,
    divides_twice,
    leaves_the_gradients,
    sums_in_buckets,
)
from dplab.exercises.ring_all_reduce import ring_all_reduce
from dplab.spawn.rank import recording


class OverlappedGradients:
    """Averages each bucket's gradients while backward computes those of the next ones.

    A bucket leaves when it is full and the buckets before it have left. So all ranks launch the
    same buckets in the same order. One thread averages them, one after another.
    """

    def __init__(self, buckets, group):
        self.buckets, self.group = buckets, group
        self.thread = ThreadPoolExecutor(max_workers=1)  # one thread, with a queue before it
        self.start_over()
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def start_over(self):
        self.missing = {parameter: 1 for bucket in self.buckets for parameter in bucket}
        self.launched = []

    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1
        for bucket in self.buckets[len(self.launched):]:
            if any(self.missing[each] for each in bucket):
                break  # the buckets behind it wait, full or not
            self.launch(bucket)

    def launch(self, bucket):
        self.launched.append(self.thread.submit(average_in_buckets, [bucket], self.group))

    def finish(self):
        launched, missing = self.launched, self.missing
        self.start_over()
        for averaging in launched:
            averaging.result()  # waits, and raises what went wrong on the thread
        wrong = [number for number, bucket in enumerate(self.buckets)
                 if any(missing[each] for each in bucket)]  # -1: a second gradient came
        if wrong:
            raise RuntimeError(f"not every parameter of the buckets {wrong} got one gradient: "
                               "leave out what no loss uses, call finish() after each backward")

# A learner's class differs from the solution in one method or two, and so do these.

Overlapped = OverlappedGradients


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
    number = "5.3"
    title = "Send buckets while backward computes"
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
