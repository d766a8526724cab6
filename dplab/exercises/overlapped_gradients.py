"""Hooks send full buckets while backward goes on: in the same order on every rank, and early."""

import contextlib
import inspect
import itertools
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from dplab import RankError
from dplab.checks.compare import BESIDE, AtMost, agree
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import gradients, seeded
from dplab.exercises.gradient_buckets import all_reduces, average_in_buckets
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
        averaging = self.thread.submit(average_in_buckets, [bucket], self.group)
        self.launched.append(averaging)

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


# Where a fact was seen. Each is also the name of the samples of that step.
FIRST, SECOND = " in step 1", " in step 2"
ON_ALL = " where all ranks' gradients become ready in another order than the list"
ON_ONE = " where the last rank's gradients become ready in another order"
BESIDE_ANOTHER = " where two objects of the class are at work at once"
IN_A_PAIR = f"{BESIDE_ANOTHER}, in the second (of four ranks, two are its group)"

EARLY = "the number of buckets sent before the first layer's gradients are there"
NUMBER = "the number of all-reduces"
ELSEWHERE = "the number of calls in another group"
APART = "that no two threads send at the same time"
GOES_ON = "that backward waits for no other rank"
WAITS = "that `finish` waits for all that was launched"
UNCHANGED = "that the parameters are as they were"
RAISES = "what `finish` raises"
UNUSED = f"{RAISES} when a parameter got no gradient"
AFTER = f"{RAISES} in the next step, where each gradient came once"
TWICE = f"{RAISES} when backward ran twice before it"
IN_PLACE_OF = f"{RAISES} when one parameter got two gradients and its neighbour none"


class Seen(Slip):
    """A sentence, when an attempt's facts say that it is so, and edits that bring it about.

    ``apart``: it has nothing to do with what else is wrong, and is said in any case.
    """

    def __init__(self, when, why, *ways, apart=False):
        super().__init__(why, *ways)
        self.when, self.apart = when, apart


class Facts:
    """What all ranks saw of an attempt."""

    def __init__(self, expected, got, ranks):
        self.ranks = ranks
        self.failure = str(got) if isinstance(got, RankError) else ""
        self.of_ranks = [] if self.failure else list(zip(expected, got, strict=True))

    def some(self, fact, test):
        """Whether it was tried, and on some rank this is so of what was found."""
        return any(fact in found and test(found[fact]) for _, found in self.of_ranks)

    def missed(self, *facts):
        """Whether some rank did not find what the exercise asks for."""
        return any(fact in right and not agree(right[fact], found.get(fact), 1e-5)
                   for right, found in self.of_ranks for fact in facts)

    def gradients(self, where, factor):
        """Whether all gradients are this factor times what they should be."""
        pairs = [(value, found.get(fact)) for right, found in self.of_ranks
                 for fact, value in right.items()
                 if fact.startswith("the gradient of") and fact.endswith(where)]
        return bool(pairs) and all(agree(factor * value, mine, 1e-5) for value, mine in pairs)

    def none_met(self):
        """Whether a tensor was expected, and there was None."""
        name = self.failure.partition("'NoneType' object has no attribute '")[2].partition("'")[0]
        return bool(name) and hasattr(torch.Tensor, name)

    def fails(self, where):
        return f"({where.strip()})" in self.failure


class OverlapGradients(Exercise):
    number = "5.3"
    title = "Send buckets while backward computes"
    minutes = 30
    world_sizes = (2, 3, 4, 1)
    seconds = 15.0
    solution = OverlappedGradients

    def trial(self, attempt):
        overlapped, layers, group = at_work(attempt)
        facts = step(overlapped, layers, group, FIRST, until_two_are_sent)
        facts |= step(overlapped, layers, group, SECOND, with_a_late_rank)
        if facts[f"{NUMBER}{FIRST}"] == len(layers) > facts[f"{NUMBER}{SECOND}"]:
            return facts  # with such counts a later step may meet None
        overlapped, layers, group = at_work(attempt)
        for where in ON_ALL, ON_ONE:
            layers.turned = where == ON_ALL or dist.get_rank() == dist.get_world_size() - 1
            facts |= step(overlapped, layers, group, where, until_two_are_sent)
            if dist.get_world_size() > 1 and facts[f"{NUMBER}{where}"] < len(layers):
                return facts  # ranks that send different buckets might wait for ever
        return facts | side_by_side(attempt) | of_wrong_steps(attempt)

    def expected(self, world_size):
        every = range(world_size)
        facts = right_step(FIRST, every) | right_step(SECOND, every)
        facts |= right_step(ON_ALL, every) | right_step(ON_ONE, every)
        facts |= right_result(BESIDE_ANOTHER, every)
        raised = {UNUSED: "RuntimeError", AFTER: "nothing", TWICE: "RuntimeError",
                  IN_PLACE_OF: "RuntimeError"}
        return [facts | right_result(IN_A_PAIR, own_pair(rank, world_size)) | raised
                for rank in every]

    def parts(self, world_size, rank):
        """In each gradient may be what any rank has for this parameter, or for its like."""
        found = {}
        for where in FIRST, SECOND, ON_ALL, ON_ONE, BESIDE_ANOTHER, IN_A_PAIR:
            of_ranks = [own_gradients(each, where) for each in range(world_size)]
            for fact in of_ranks[0]:
                kind = fact.split("`")[1].partition(".")[2]
                found[fact] = {f"rank {each}'s gradient of `{layer}.{kind}`":
                               of_ranks[each][f"the gradient of `{layer}.{kind}`{where}"]
                               for each in range(world_size) for layer in range(3)}
        return found

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    def explanation(self, attempt, got, world_size):
        """Facts say what an attempt does: nothing has to be run beside it."""
        facts = Facts(self.expected_of_all(world_size), got, world_size)
        found = [slip for slip in self.slips if slip.when(facts)]
        apart = [slip for slip in found if slip.apart and not found[0].apart]
        return " And: ".join(slip.why for slip in found[:1] + apart[:1])

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
    slips = (
        Seen(lambda facts: facts.none_met() and facts.fails(SECOND),
             "In step 2: `finish` has to set the counts of gradients back. With those of step 1 "
             "each bucket is full from the beginning, and leaves before its gradients are there.",
             {"if any(self.missing[each] for": "if any(self.missing[each] > 0 for",
              "        self.start_over()\n        for averaging":
                  "        self.launched = []\nfor averaging"}),
        Seen(lambda facts: facts.none_met() or facts.some(
            f"{RAISES}{ON_ALL}", lambda raised: raised in ("AttributeError", "TypeError")),
             "A bucket leaves before its last gradient is there: another one's `.grad` is still "
             "None, or old. Count what is missing; and use `register_post_accumulate_grad_hook`, "
             "since `register_hook` runs before `.grad` is written. (A lambda in a loop sees the "
             "loop's last values: write `lambda p, number=number: …`.)",
             {"self.buckets[len(self.launched):]": "self.buckets",
              "any(self.missing[each] for each in bucket):\n                break":
                  "all(each is not parameter for each in bucket):\n    continue"}),
        Seen(lambda facts: facts.fails(BESIDE_ANOTHER) and facts.ranks < 4,
             "With one object of your class all is right, and with a second one at work it fails: "
             "the two share what they keep. What stands in the class body, or is global, is the "
             "same for all objects. Set it in `__init__`, as `self.name = …`.",
             {"self.missing = {": "type(self).missing = {"}),
        Seen(lambda facts: facts.missed(*(f"{APART}{where}" for where in (FIRST, SECOND))),
             "Two of your threads send at the same time, in one group. Their messages are mixed "
             "up: nothing says which bucket one belongs to. One thread, with a queue, averages "
             "one bucket after another.",
             {"max_workers=1": "max_workers=3"},
             {"self.thread.submit(": "ThreadPoolExecutor(1).submit("}),
        Seen(lambda facts: facts.missed(f"{WAITS}{FIRST}", f"{WAITS}{SECOND}"),
             "`finish` does not wait for every bucket. An earlier `.grad` may be the mean while a "
             "later one is not yet: wait for all that was launched.",
             {"in launched:": "in launched[:1]:"}, {"in launched:": "in launched[:0]:"}),
        Seen(lambda facts: facts.missed(f"{UNCHANGED}{FIRST}"),
             "You sent the parameters, not their gradients. The hook is called with the "
             "*parameter*, when its gradient is ready: what has to be averaged is "
             "`parameter.grad`.",
             {"[bucket], self": "[[mock.Mock(grad=each.data) for each in bucket]], self"}),
        Seen(lambda facts: facts.missed(f"{GOES_ON}{SECOND}"),
             "You wait in the hook, so backward stands still until the other ranks have come: "
             "nothing overlaps. Hand the bucket to the thread, keep what `submit` returns, and "
             "wait in `finish`.",
             {"self.launched.append(averaging)": "self.launched.append(averaging)\n"
                                                 "averaging.result()"},
             {"averaging = self.thread.submit(average_in_buckets, [bucket], self.group)":
              "average_in_buckets([bucket], self.group)\naveraging = self.thread.submit(int)"}),
        Seen(lambda facts: facts.ranks > 1 and facts.some(f"{EARLY}{FIRST}", lambda sent: sent == 0)
             and facts.some(f"{NUMBER}{FIRST}", lambda number: number > 0),
             "You launch when backward is over, or has come to its last gradients: nothing "
             "overlaps. Launch a bucket in the hook of its last missing gradient.",
             {"    def gradient_is_ready(self, parameter):\n        self.missing[parameter] -= 1":
              "    def gradient_is_ready(self, parameter):\n    self.missing[parameter] -= 1\n\n"
              "def launch_all(self):",
              "launched, missing =": "self.launch_all()\nlaunched, missing ="}),
        Seen(lambda facts: facts.some(f"{NUMBER}{FIRST}", lambda number: number == 6),
             "Each gradient travels by itself as soon as it is there. That overlaps, and pays a "
             "latency for each: one all-reduce for a bucket.",
             {"self.buckets, self.group = buckets":
              "buckets = [[each] for bucket in buckets for each in bucket]\n"
              "self.buckets, self.group = buckets"}),
        Seen(lambda facts: facts.some(f"{ELSEWHERE}{FIRST}", lambda number: number > 0),
             "The buckets travel in the group of all ranks, where other calls of yours may be "
             "under way at the same time. Hand `group` on.",
             {"= buckets, group": "= buckets, None"}),
        Seen(lambda facts: facts.ranks > 1 and facts.gradients(FIRST, facts.ranks),
             "You summed and did not divide by the world size: every rank has to end with the "
             "mean.",
             {"average_in_buckets, [bucket], self.group":
              "lambda: (average_in_buckets([bucket], self.group), [\n"
              "    each.grad.mul_(dist.get_world_size(self.group)) for each in bucket])"}),
        Seen(lambda facts: facts.ranks > 1 and facts.gradients(FIRST, 1 / facts.ranks),
             "You divided by the world size twice.",
             {"average_in_buckets, [bucket], self.group":
              "lambda: (average_in_buckets([bucket], self.group), [\n"
              "    each.grad.div_(dist.get_world_size(self.group)) for each in bucket])"}),
        Seen(lambda facts: keeps_its_own(facts, FIRST),
             "The sum over the ranks does not come back into `.grad`. `pack` makes a copy, and the "
             "ring returns a new tensor: write each part of what it returns into its `.grad`.",
             {"[bucket], self": "[[mock.Mock(grad=each.grad.clone()) for each in bucket]], "
                                "self"}),
        Seen(lambda facts: facts.missed(f"{NUMBER}{SECOND}", f"{RAISES}{SECOND}")
             and not facts.missed(f"{NUMBER}{FIRST}"),
             "The first step is right, the second is not: `finish` has to set the counts back, "
             "those of gradients and, if you keep one, that of how many buckets were sent.",
             {"        self.start_over()\n        for averaging":
              "        self.launched = []\nfor averaging"},
             {"self.thread = ": "self.sent = 0\nself.thread = ",
              "len(self.launched):]": "self.sent:]",
              "self.launch(bucket)": "self.launch(bucket)\nself.sent += 1"}),
        Seen(lambda facts: facts.missed(f"{EARLY}{ON_ALL}", f"{EARLY}{ON_ONE}")
             and not facts.missed(f"{EARLY}{FIRST}"),
             "A bucket that was full early leaves too late, or never. It has waited for those "
             "before it, and when the last of these has left, it may leave at once: look further, "
             "until you meet a bucket that is not full.",
             {"self.launch(bucket)": "self.launch(bucket)\nbreak"}),
        Seen(lambda facts: facts.some(f"{NUMBER}{ON_ONE}", lambda number: number == 3)
             and facts.gradients(ON_ALL, 1) and not facts.gradients(ON_ONE, 1),
             "You send whatever is full. Where gradients become ready in another order on another "
             "rank, the ranks send different buckets at the same time: numbers of one bucket are "
             "added to those of another one, and nobody is told. Every rank has to send the "
             "buckets in the order of the list: a full one waits for those before it.",
             {"self.buckets[len(self.launched):]": "self.buckets",
              "if any(self.missing[each] for each in bucket):\n                break":
                  "if (any(self.missing[each] for each in bucket)\n"
                  "        or all(each is not parameter for each in bucket)):\n    continue"}),
        Seen(lambda facts: facts.ranks == 4 and (facts.fails(BESIDE_ANOTHER) or (
            facts.gradients(BESIDE_ANOTHER, 1) and not facts.gradients(IN_A_PAIR, 1))),
             "Where all ranks are the group this is right; where two of four are, it is not. They "
             "are then all that there are: pass `group` on to each call, and to "
             "`dist.get_world_size`, by which the sum is divided.",
             {"average_in_buckets, [bucket], self.group":
              "lambda: (average_in_buckets([bucket], self.group), [each.grad.mul_(\n"
              "    dist.get_world_size(self.group) / dist.get_world_size()) for each in bucket])"}),
        Seen(lambda facts: facts.gradients(ON_ONE, 1) and (
            facts.missed(f"{RAISES}{BESIDE_ANOTHER}", f"{RAISES}{IN_A_PAIR}")
            or not facts.gradients(BESIDE_ANOTHER, 1) or not facts.gradients(IN_A_PAIR, 1)),
             "With one object of your class all is right, and with a second one at work it is not: "
             "the two share what they keep. What stands in the class body, or is global, is the "
             "same for all objects. Set it in `__init__`, as `self.name = …`.",
             {"self.launched = []": "type(self).launched = []"}),
        Seen(lambda facts: facts.missed(AFTER) and not facts.missed(UNUSED),
             "After `finish` has raised once, the next step is not right, and that step has all "
             "its gradients. Start over in any case: keep what you have counted, set it back, and "
             "raise then.",
             {"launched, missing =": "if any(self.missing.values()):\n"
                                     "    raise RuntimeError(\"a gradient is missing\")\n"
                                     "launched, missing ="}),
        Seen(lambda facts: facts.some(UNUSED, lambda raised: raised == "nothing"),
             "A parameter got no gradient, so its bucket was never sent, and `finish` says "
             "nothing: every rank would step along its own gradients. Raise RuntimeError.",
             {"if wrong:": "if False:"}, apart=True),
        Seen(lambda facts: facts.some(TWICE, lambda raised: raised == "nothing"),
             "Backward ran twice before `finish`. The buckets had left with the first gradients, "
             "so what was added later is each rank's own. Raise RuntimeError.",
             {"any(missing[each] for": "any(missing[each] > 0 for"}, apart=True),
        Seen(lambda facts: facts.some(IN_PLACE_OF, lambda raised: raised == "nothing"),
             "One parameter got two gradients, another one of the same bucket got none, and "
             "`finish` says nothing. Count for each parameter: in a count for the whole bucket, "
             "one stands in for the other.",
             {"self.missing[parameter] -= 1":
              "bucket = next(bucket for bucket in self.buckets\n"
              "              if any(each is parameter for each in bucket))\n"
              "first = next((each for each in bucket if self.missing[each]), parameter)\n"
              "self.missing[first] -= 1"}, apart=True),
        Seen(lambda facts: facts.missed(UNUSED, TWICE, IN_PLACE_OF),
             "`finish` fails, and not with a RuntimeError. (`assert` is for your own mistakes, and "
             "is left out under `python -O`.)", {"raise RuntimeError(": "raise AssertionError("}),
    )


def keeps_its_own(facts, where):
    """Whether buckets were sent, and each rank still has its own gradients."""
    return facts.ranks > 1 and not facts.missed(f"{NUMBER}{where}") and all(
        agree(own, found[fact], 1e-5) for rank, (_, found) in enumerate(facts.of_ranks)
        for fact, own in own_gradients(rank, where).items())


class Layers(nn.ModuleList):
    """A layer and, behind it, two that lie side by side; each rank has weights of its own.

    Their buckets are equally large, so that messages which are mixed up bring wrong numbers, and
    not the end of the process. Autograd goes back first through what was computed last: through
    layer 2, then 1, or, if ``turned``, through 1, then 2. Before it comes to layer 0 it calls
    ``before_first_layer``.
    """

    turned = False

    def __init__(self, rank):
        torch.manual_seed(6 + rank)
        super().__init__([nn.Linear(9, 9) for _ in range(3)])
        self.rank = rank

    def buckets(self):
        return [list(layer.parameters()) for layer in reversed(self)]

    def loss(self, where):
        first = self[0](seeded(f"samples of rank {self.rank}{where}", 3, 9))
        first.register_hook(lambda _: self.before_first_layer())
        first = torch.tanh(first)
        sides = [torch.tanh(self[index](first)) for index in ((2, 1) if self.turned else (1, 2))]
        return (sides[0] + sides[1]).square().mean()

    def before_first_layer(self):
        pass


def own_gradients(rank, where):
    layers = Layers(rank)
    layers.loss(where).backward()
    return gradients(layers, where)


def own_pair(rank, world_size):
    """The ranks of this one's group beside the group of all: two of four, and else all."""
    return [rank % 2, rank % 2 + 2] if world_size == 4 else range(world_size)


def right_result(where, ranks):
    own = [own_gradients(rank, where) for rank in ranks]
    means = {fact: sum(each[fact] for each in own) / len(own) for fact in own[0]}
    return {f"{RAISES}{where}": "nothing", **means}


def right_step(where, ranks):
    found = {APART: True, EARLY: 2, GOES_ON: True, NUMBER: 3, WAITS: True, UNCHANGED: True,
             ELSEWHERE: AtMost(0, "all of them belong into the group that you were given")}
    found.pop(EARLY if where == SECOND else GOES_ON)
    if len(ranks) == 1:  # a ring of one rank sends nothing
        found.pop(NUMBER)
        found.pop(EARLY, None)
    return {f"{fact}{where}": value for fact, value in found.items()} | right_result(where, ranks)


def at_work(attempt):
    """An object of the class with layers and a group of its own."""
    group, layers = dist.new_group(), Layers(dist.get_rank())
    return attempt(layers.buckets(), group), layers, group


def step(overlapped, layers, group, where, backward):
    """What is seen of one step."""
    layers.zero_grad()
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    with Watch(group, slowly=where in (FIRST, SECOND)) as watch, naming(where):
        fact, seen = backward(layers, layers.loss(where), watch)
        raised, words = raised_by(overlapped.finish, where)
        now, forgotten = gradients(layers, where), watch.forgotten
        watch.settle()
        later = gradients(layers, where)
    waited = not forgotten and all(
        value is later[fact] or torch.equal(value, later[fact]) for fact, value in now.items())
    found = {APART: not watch.mixed, fact: seen, NUMBER: watch.all_reduces, WAITS: waited,
             UNCHANGED: all(map(torch.equal, layers.parameters(), before)),
             ELSEWHERE: watch.elsewhere, RAISES: raised}
    facts = {f"{name}{where}": value for name, value in found.items()} | now
    return facts | {BESIDE: {f"{RAISES}{where}": words}} if where == SECOND else facts


def side_by_side(attempt):
    """What comes of two objects whose steps lie one in the other, on four ranks one in a pair."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group(own_pair(each, ranks)) for each in range(2 if ranks == 4 else 1)]
    groups = {BESIDE_ANOTHER: dist.new_group(), IN_A_PAIR: pairs[rank % len(pairs)]}
    layers = {where: Layers(rank) for where in groups}
    facts = {}
    with naming(BESIDE_ANOTHER):
        objects = {where: attempt(layers[where].buckets(), groups[where]) for where in groups}
        for where in objects:
            layers[where].loss(where).backward()
        for where, overlapped in reversed(objects.items()):
            facts[f"{RAISES}{where}"], _ = raised_by(overlapped.finish)
            facts |= gradients(layers[where], where)
    return facts


def of_wrong_steps(attempt):
    """What `finish` raises after steps that are not as they should be, and in the step after."""
    overlapped, layers, _ = at_work(attempt)
    layers[2](torch.ones(1, 9)).sum().backward()
    facts = {UNUSED: raised_by(overlapped.finish)[0]}
    time.sleep(0.1)  # if it has not waited: what was launched comes to its end
    layers.zero_grad()
    layers.loss(FIRST).backward()
    facts[AFTER] = raised_by(overlapped.finish)[0]

    overlapped, layers, _ = at_work(attempt)
    for _ in range(2):
        layers.loss(FIRST).backward()
    facts[TWICE] = raised_by(overlapped.finish)[0]

    overlapped, layers, _ = at_work(attempt)
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)  # a bias has an old one, and gets none
    for _ in range(2):
        sum(layer.weight.sum() for layer in layers).backward()
    return facts | {IN_PLACE_OF: raised_by(overlapped.finish)[0]}


def raised_by(finish, where=""):
    """What `finish` raises, and what it says.

    In the first two steps, a failure is to be seen as it is: all but what the class itself says of
    the second.
    """
    try:
        finish()
    except Exception as error:
        own = {method.__code__.co_filename for kind in type(finish.__self__).__mro__
               for method in vars(kind).values() if inspect.isfunction(method)}
        is_own = traceback.extract_tb(error.__traceback__)[-1].filename in own
        if where == FIRST or (where == SECOND and not (isinstance(error, RuntimeError) and is_own)):
            raise
        return type(error).__name__, f"  it says    {error}"
    return "nothing", ""


@contextlib.contextmanager
def naming(where):
    """What is raised later says where: it is not the mistake that would raise it in step 1."""
    try:
        yield
    except Exception as error:
        if where != FIRST:
            error.args = (f"{error} ({where.strip()})",)
        raise


def until_two_are_sent(layers, loss, watch):
    """Backward; before the first layer it gives two buckets the time to be sent. How many were."""
    sent = 0

    def wait():
        nonlocal sent
        limit = time.monotonic() + 0.6 * (dist.get_world_size() > 1)
        while watch.all_reduces < 2 and time.monotonic() < limit:
            time.sleep(0.002)
        sent = min(2, int(watch.all_reduces))
        time.sleep(3 * watch.pause)  # until they have arrived

    layers.before_first_layer = wait
    back_from(loss, layers, watch)
    return EARLY, sent


def with_a_late_rank(layers, loss, watch):
    """The last rank begins when the others have ended; whether none of them waits for it."""
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    store = _get_default_store()
    keys = [f"backward of rank {other} is done" for other in range(others)]
    waits = "backward waits"
    done = True
    layers.before_first_layer = lambda: None
    if rank == others > 0:
        limit = time.monotonic() + 1.0
        while not (done := store.check(keys)) and not store.check([waits]) and (
                time.monotonic() < limit):
            time.sleep(0.002)
    elif others:
        watch.on_wait = lambda: store.set(waits, "")
    back_from(loss, layers, watch)
    watch.on_wait = lambda: None
    if rank < others:
        store.set(keys[rank], "")
    return GOES_ON, done


def back_from(loss, layers, watch):
    """Backward. After its first gradient it gives a thread the time to send what is not full."""
    pauses = [0.05] if watch.pause else []
    hooks = [parameter.register_post_accumulate_grad_hook(
        lambda _: time.sleep(pauses.pop() if pauses else 0)) for parameter in layers.parameters()]
    loss.backward()
    for hook in hooks:
        hook.remove()


class Watch:
    """In this block: this rank's sends and all-reduces, and which handles are waited for.

    ``on_wait`` is called before the thread of backward waits. ``slowly``: a send of another thread
    takes ``pause`` seconds longer, so who does not wait for that thread has no mean yet.
    """

    def __init__(self, group, slowly):
        self.group, self.calls, self.senders, self.works, self.asked = group, [], [], [], set()
        self.on_wait, self.pause = lambda: None, slowly * 0.04 / dist.get_world_size()
        self._patches = [mock.patch.object(dist.Work, name, self._noting(getattr(dist.Work, name)))
                         for name in ("wait", "get_future", "is_completed")]

    @property
    def all_reduces(self):
        return all_reduces(self.calls, dist.get_world_size())

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
            time.sleep(max(0.1, 5 * self.pause) * (dist.get_world_size() > 1))
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
