"""Exercises of chapter 01: split the batch, copy the model."""

import functools
import operator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.exercises.compare import BESIDE, AtMost
from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.trials import gradients
from dplab.measure import CallLog

# 1.1


def local_part(samples, rank, world_size):
    size, longer = divmod(samples, world_size)
    start = rank * size + min(rank, longer)
    return start, start + size + (rank < longer)


def _rounded_down(samples, rank, world_size):
    size = samples // world_size
    return rank * size, (rank + 1) * size


def _rounded_up(samples, rank, world_size):
    size = -(-samples // world_size)
    return rank * size, (rank + 1) * size


def _longer_but_not_moved(samples, rank, world_size, *, longer_ones=False):
    size, longer = divmod(samples, world_size)
    start = rank * (size + (longer_ones and rank < longer))
    return start, start + size + (rank < longer)


def _by_chunk(samples, rank, world_size):
    mine = torch.arange(samples).chunk(world_size)[rank]
    return mine[0], mine[-1] + 1


def _by_float(samples, rank, world_size):
    each = samples / world_size
    return int(rank * each), int((rank + 1) * each)


def _changed(change):
    """The right part, with something done to it."""
    return lambda samples, rank, world_size: change(*local_part(samples, rank, world_size))


_ONE_TAKES_THE_REST = ("One rank takes the whole remainder, and all others wait for it. Give one "
                       "sample of the remainder to each of as many ranks.")
_IN_TURN = ("You deal the samples out in turn, as `batch[rank::world_size]` does. Here a part is "
            "one piece, `batch[start:stop]`, and the parts follow one another.")
_NOT_MOVED = ("The first ranks take one more, as they should, but parts behind them start as if "
              "they did not: samples are taken twice, and the last ones by nobody. Move each "
              "start by the longer parts before it.")


class LocalPart(Exercise):
    slug = "local-part"
    number = "1.1"
    title = "This rank's part of a global batch"
    name = "local_part"
    minutes = 10
    hints = (
        "Try it on paper with 10 samples on 4 ranks. Sizes that differ by at most one are 2 and 3: "
        "how many ranks take 3?",
        "`divmod(samples, world_size)` gives the size that every rank takes at least, and how "
        "many samples are left. As many ranks take one more.",
        "A part starts where the one before it stops: each of the longer parts before this rank "
        "moves its start by one, so by `min(rank, longer)` in all.",
    )
    solution = staticmethod(local_part)
    mistakes = (
        Mistake(_rounded_down, "You dropped the remainder: `samples // world_size` for each "
                "rank leaves the last samples out, or all, if they are fewer than the ranks."),
        Mistake(lambda samples, rank, ranks: (rank * (samples // ranks), samples
                if rank == ranks - 1 else (rank + 1) * (samples // ranks)), _ONE_TAKES_THE_REST),
        Mistake(_rounded_up, "You rounded the size up, so that the last parts run past the end of "
                "the batch."),
        Mistake(lambda samples, *rest: tuple(min(end, samples) for end in _rounded_up(
                samples, *rest)), "You rounded the size up and cut off what lies behind the end: "
                "the last rank has too few samples, or none, as with `torch.chunk`."),
        Mistake(_by_chunk, "`torch.chunk` rounds the size up, so it may make fewer parts than "
                "there are ranks: with 1 sample for 2 ranks, rank 1 finds none in the list."),
        Mistake(_longer_but_not_moved, _NOT_MOVED),
        Mistake(functools.partial(_longer_but_not_moved, longer_ones=True), _NOT_MOVED),
        *(Mistake(attempt, _IN_TURN) for attempt in (
            lambda samples, rank, ranks: (rank, samples),
            lambda samples, rank, ranks: (rank, samples, ranks))),
        Mistake(lambda samples, rank, ranks: (0, samples // ranks), "Every rank takes the first "
                "part: where a part starts must depend on the rank."),
        Mistake(lambda samples, rank, ranks: (0, samples), "Every rank takes the whole batch, so "
                "nothing was split."),
        Mistake(_changed(lambda start, stop: (start, stop - 1)), "You return the last index of the "
                "part. `stop` is the one behind it, as in `batch[start:stop]`."),
        Mistake(_changed(lambda start, stop: (start, stop + 1)), "Each part goes one too far. "
                "`stop` itself is not in the part: the next one starts right there."),
        Mistake(_changed(lambda start, stop: (start, stop - start)), "You return the start and the "
                "*size*. The second number is where the part stops: the start plus the size."),
        Mistake(lambda samples, rank, ranks: local_part(samples, rank - 1, ranks), "You count the "
                "ranks from 1. They are numbered from 0, so rank 0 starts at sample 0."),
        Mistake(_changed(lambda start, stop: list(range(start, stop))), "You return the indices "
                "themselves. Return two numbers: where the part starts, and where it stops."),
        Mistake(lambda samples, rank, ranks: samples // ranks, "You return how many samples a rank "
                "takes. Where they start matters too: return `start, stop`."),
        Mistake(lambda samples, rank, ranks: (rank * samples / ranks, (rank + 1) * samples / ranks),
                "`/` makes a float, and a slice needs whole numbers. Divide with `//`."),
        Mistake(_by_float, "`samples / world_size` is a float, which is rounded: its multiple may "
                "come out just below the whole number that it should be, and `int` then cuts off "
                "one too many. Stay with whole numbers: `//` and `%`, or `divmod`."),
        Mistake(lambda samples, rank, ranks: local_part(
                samples, dist.get_rank(), dist.get_world_size()), "You asked `dist` for the rank "
                "and the number of ranks. The function is given both: use its arguments."),
    )
    batches = (12, 10, 7, 13, 5, 3, 2, 1)
    more = 61, 7  # samples and ranks of a larger job: 7 · (61 / 7) is below 61 in floats

    def trial(self, attempt):
        facts, beside = {}, {}
        for samples in self.batches:
            mine = attempt(samples, dist.get_rank(), dist.get_world_size())
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, _bounds_of(mine))
            of_parts = _facts_of_parts(samples, parts)
            beside |= dict.fromkeys(of_parts, _in_words(parts))
            facts |= of_parts
        samples, ranks = self.more  # which this process asks for all of them
        parts = [_bounds_of(attempt(samples, rank, ranks)) for rank in range(ranks)]
        of_parts = _facts_of_parts(samples, parts)
        beside |= dict.fromkeys(of_parts, _in_words(parts))
        return {**facts, **of_parts, BESIDE: beside}

    def expected(self, world_size):
        facts = {}
        for samples, ranks in (*((samples, world_size) for samples in self.batches), self.more):
            parts = [local_part(samples, rank, ranks) for rank in range(ranks)]
            facts |= {name: AtMost(1, "sizes may differ by one") if "minus" in name else fact
                      for name, fact in _facts_of_parts(samples, parts).items()}
        return facts


def _bounds_of(part):
    """Start and stop as plain numbers, or else in words what `part` is."""
    if isinstance(part, slice | range):
        part = part.start, part.stop
    try:
        start, stop = map(operator.index, part)
    except (TypeError, ValueError):
        each = part if isinstance(part, tuple | list) else [part]
        return ", ".join(type(one).__name__ for one in each)
    return start, max(start, stop)


def _in_words(parts):
    """All ranks' parts, as slices of the batch."""
    if any(isinstance(part, str) for part in parts):
        return ""
    return "  the parts " + ", ".join(f"{start}:{stop} on rank {rank}"
                                      for rank, (start, stop) in enumerate(parts))


def _facts_of_parts(samples, parts):
    """What holds for every fair split, whichever ranks take one sample more."""
    names = ("what is returned", "the list of samples that nobody takes", "the list of samples "
             "taken twice", "the list of indices outside the batch", "the largest part minus the "
             "smallest", "the sorted list of sizes", "whether parts follow in the order of the "
             "ranks")
    names = [f"with {samples} sample{'s' * (samples > 1)} on {len(parts)} "
             f"rank{'s' * (len(parts) > 1)}, {name}" for name in names]
    unusable = [part for part in parts if isinstance(part, str)]
    if unusable:
        return dict.fromkeys(names) | {names[0]: unusable[0]}
    taken = [index for start, stop in parts for index in range(start, stop)]
    sizes = sorted(stop - start for start, stop in parts)
    missing = [index for index in range(samples) if index not in taken]
    twice = sorted({index for index in taken if taken.count(index) > 1})
    outside = sorted({index for index in taken if not 0 <= index < samples})
    found = ("int, int", missing, twice, outside, sizes[-1] - sizes[0], sizes,
             taken == sorted(taken))
    return dict(zip(names, found, strict=True))


# 1.3


def accumulate_gradients(model, images, labels, micro_batch):
    for x, y in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


def _accumulate(*, weigh="by size", zero=False, reduce="at the end", divisor=dist.get_world_size,
                cut=torch.split, keep_last=True, at_once=False, of="grad"):
    """The accumulation with one thing wrong."""

    def attempt(model, images, labels, size):
        parts = list(zip(cut(images, size), cut(labels, size), strict=True))
        parts = parts if keep_last else [part for part in parts if len(part[1]) == size]
        losses = (F.cross_entropy(model(x), y) * {
            "by size": len(y) / len(labels), "full size": size / len(labels), "sum": len(y),
            "by micro-batch": len(y) / size, "equal": 1 / len(parts), "none": 1,
            "full ones": 1 / (len(labels) // size), "twice": len(y) / len(labels) / len(parts),
            "mean by micro-batch": 1 / size, "mean by local batch": 1 / len(labels),
        }[weigh] for x, y in parts)
        for loss in [sum(losses)] if at_once else losses:
            if zero:
                model.zero_grad()
            loss.backward()
            if reduce == "each time":
                _sum_divided(model, divisor(), of)
        if reduce == "at the end":
            _sum_divided(model, divisor(), of)

    return attempt


def _all_reduced_loss(model, *batch):
    _accumulate(reduce="never")(model, *batch)
    dist.all_reduce(torch.zeros(()))


def _sum_divided(model, divisor, of):
    for tensor in [getattr(parameter, of) for parameter in model.parameters()]:
        dist.all_reduce(tensor)
        tensor /= divisor


_TWO_THINGS = ("Two things are missing: the weight of each micro-batch's mean, its share of the "
               "local batch, and the division of the sum over the ranks by the world size.")
_MEAN_ALREADY = ("Each micro-batch's loss is a mean already, and you divided it by a number of "
                 "samples once more. Weigh it by its share: its own samples over the local batch.")
_LEFT_OUT = "The last, smaller micro-batch is left out: its samples belong to the batch."


class AccumulateGradients(Exercise):
    slug = "accumulate-gradients"
    number = "1.3"
    title = "Gradient accumulation over micro-batches"
    name = "accumulate_gradients"
    minutes = 15
    hints = (
        "`backward()` adds to the `.grad` that is there. So call it once for each micro-batch, and "
        "clear nothing in between: `images.split(micro_batch)` makes the slices.",
        "The mean over the local batch is not the sum of the micro-batches' means. Weigh each mean "
        "by its share of the samples, `len(x) / len(images)`, before its `backward()`: the last "
        "one may be smaller.",
        "Nothing has to be sent before the last micro-batch is done. Then average over the ranks: "
        "one all-reduce for each gradient, and a division by `dist.get_world_size()`.",
    )
    solution = staticmethod(accumulate_gradients)
    mistakes = (
        Mistake(_accumulate(weigh="none"), "You add up the micro-batches' means, so the gradient "
                "grows with their number. Weigh each mean by its share of the local batch."),
        Mistake(_accumulate(weigh="equal"), "You divide by the number of micro-batches, as if all "
                "were equally large. The last one is smaller, so its samples count too much: weigh "
                "each mean by its share of the samples."),
        Mistake(_accumulate(weigh="full ones"), "You divide by the number of *full* micro-batches, "
                "and add the smaller one as well. Weigh each mean by its share of the samples."),
        Mistake(_accumulate(weigh="twice"), "You weigh each mean by its share, and divide by the "
                "number of micro-batches too. The shares add up to 1 already."),
        Mistake(_accumulate(weigh="full size"), "Every micro-batch is weighed as a full one. The "
                "last one is smaller, and so is its share: its own samples over the local batch."),
        Mistake(_accumulate(weigh="sum"), "You summed the losses of all samples and never divided: "
                "the mean over the local batch divides by its size."),
        Mistake(_accumulate(weigh="by micro-batch"), "You divided by the size of a micro-batch. "
                "The mean is over the whole local batch: divide by its size."),
        Mistake(_accumulate(zero=True), "The gradients are cleared before each micro-batch, so "
                "only the last one counts. Let `backward()` add them up."),
        Mistake(_accumulate(weigh="mean by micro-batch"), _MEAN_ALREADY),
        Mistake(_accumulate(weigh="mean by local batch"), _MEAN_ALREADY),
        Mistake(_accumulate(keep_last=False), _LEFT_OUT),
        Mistake(_accumulate(keep_last=False, weigh="equal"), _LEFT_OUT),
        Mistake(_accumulate(cut=lambda tensor, size: [tensor]), "The whole local batch went "
                "through the model at once. The gradient is right, but the activations of all "
                "samples were in memory together."),
        Mistake(_accumulate(cut=torch.chunk), "`chunk(n)` makes n slices, of whatever size. You "
                "want slices of at most n samples: `split(n)`."),
        Mistake(_accumulate(at_once=True), "You add up the losses and call `backward` at the end. "
                "Until then autograd keeps every micro-batch's activations: call it for each."),
        Mistake(_accumulate(reduce="each time"), "You all-reduce after every micro-batch. What was "
                "averaged before is averaged again, which changes nothing but costs a message each "
                "time: all-reduce once, after the last one."),
        Mistake(_accumulate(reduce="each time", divisor=lambda: 1), "You all-reduce after every "
                "micro-batch, what was summed before too. All-reduce once, and divide."),
        Mistake(_accumulate(reduce="never"), "Each rank has accumulated its own local batch, and "
                "the ranks were never averaged: their gradients still differ."),
        Mistake(_all_reduced_loss, "The ranks exchange something, but not gradients: each rank "
                "keeps those of its own local batch. (An all-reduce of the *loss* changes the "
                "number that you log, and no gradient.)"),
        Mistake(_accumulate(divisor=lambda: 1), "You summed over the ranks and did not divide by "
                "the world size."),
        Mistake(_accumulate(divisor=lambda: dist.get_world_size() ** 2), "You divided by the world "
                "size twice (`ReduceOp.AVG` and `average_gradients` divide already)."),
        *(Mistake(_accumulate(weigh=weigh, divisor=lambda: 1), _TWO_THINGS)
          for weigh in ("none", "equal", "sum")),
        Mistake(lambda model, *batch: _accumulate(reduce="never")(DistributedDataParallel(model),
                *batch), "DDP all-reduces in every `backward`. Put all micro-batches but the last "
                "into `with ddp.no_sync():`, forward pass and all."),
        Mistake(_accumulate(of="data"), "You averaged the weights, which are equal on all ranks. "
                "What has to be averaged is each parameter's `.grad`."),
        Mistake(lambda model, *batch: (accumulate_gradients(model, *batch), model.zero_grad()),
                "At the end `.grad` is None: there the gradients have to be, neither cleared nor "
                "returned."),
        Mistake(lambda model, *batch: (accumulate_gradients(model, *batch), torch.optim.SGD(
                model.parameters(), 0.1).step()), "You took an optimizer's step, which changes "
                "the weights: stop at the gradients."),
    )
    micro_batch = 3

    def quantities(self, world_size, rank):
        return {"the ranks": world_size, "the samples of a micro-batch": 3, "the micro-batches": 5,
                "the samples of a local batch": 13}

    def trial(self, attempt):
        model, sizes, held, by_ddp = _classifier(), [], [], []

        def forward_hook(_, inputs, output):
            sizes.append(len(output))
            held.append(sum(held[-1:]) + len(output))
            ddp = DistributedDataParallel._get_active_ddp_module()
            by_ddp.append(ddp is not None and ddp.require_backward_grad_sync)
            if output.requires_grad:
                output.register_hook(lambda gradient: held.append(held[-1] - len(gradient)))

        model.register_forward_hook(forward_hook)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with CallLog() as log:
            attempt(model, *_labelled(dist.get_rank()), self.micro_batch)
        size = sum(parameter.nbytes for parameter in model.parameters())
        unchanged = all(map(torch.equal, before, model.parameters()))
        return {**gradients(model), "that the weights are not changed": unchanged,
                "the number of samples that this rank computed": sum(sizes),
                "the number of samples in a forward pass": max(sizes, default=0),
                "the number of samples whose activations are kept at a time": max(held, default=0),
                "how often the gradients travel": round(log.bytes() / size) + sum(by_ddp)}

    def expected(self, world_size):
        model = _classifier()
        parts = [_labelled(rank) for rank in range(world_size)]
        images, labels = map(torch.cat, zip(*parts, strict=True))
        F.cross_entropy(model(images), labels).backward()
        at_once = AtMost(self.micro_batch, "no more than a micro-batch")
        return {**gradients(model), "that the weights are not changed": True,
                "the number of samples that this rank computed": len(images) // world_size,
                "the number of samples in a forward pass": at_once,
                "the number of samples whose activations are kept at a time": at_once,
                "how often the gradients travel": AtMost(1, "once per step is enough")}


def _classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _labelled(rank):
    """Rank r's thirteen samples of seven features, with a class for each."""
    images = torch.sin(torch.arange(91.0) * 1.3 + 9 * rank).reshape(13, 7)
    return images, (torch.arange(13) * (rank + 2)) % 3


EXERCISES = (LocalPart, AccumulateGradients)
