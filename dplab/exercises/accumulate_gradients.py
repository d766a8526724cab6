"""Exercise 1.4: gradient accumulation over micro-batches."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import gradients, seeded
from dplab.measure import CallLog


def accumulate_gradients(model, images, labels, micro_batch):
    for x, y in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _slices(images, labels, micro_batch):
    return zip(images.split(micro_batch), labels.split(micro_batch), strict=True)


def _sum_over_ranks(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def _average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _own(model, images, labels, micro_batch):
    """The gradients of this rank's local batch, right but for the other ranks."""
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()


def means_added(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y).backward()
    _average(model)


def means_averaged(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / count).backward()
    _average(model)


def divided_by_full_ones(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / (len(labels) // micro_batch)).backward()
    _average(model)


def share_and_count(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels) / count).backward()
    _average(model)


def all_weighed_as_full(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * micro_batch / len(labels)).backward()
    _average(model)


def losses_summed(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    _average(model)


def sum_over_micro_batch(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y, reduction="sum") / micro_batch).backward()
    _average(model)


def cleared_each_time(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        model.zero_grad()
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
    _average(model)


def mean_over_micro_batch(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / micro_batch).backward()
    _average(model)


def mean_over_local_batch(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / len(labels)).backward()
    _average(model)


def last_one_left_out(model, images, labels, micro_batch):
    for start in range(0, len(images) - micro_batch + 1, micro_batch):
        x, y = (each[start : start + micro_batch] for each in (images, labels))
        (F.cross_entropy(model(x), y) * micro_batch / len(labels)).backward()
    _average(model)


def mean_of_the_full_ones(model, images, labels, micro_batch):
    count = len(images) // micro_batch
    for number in range(count):
        mine = slice(number * micro_batch, (number + 1) * micro_batch)
        (F.cross_entropy(model(images[mine]), labels[mine]) / count).backward()
    _average(model)


def not_cut(model, images, labels, micro_batch):
    F.cross_entropy(model(images), labels).backward()
    _average(model)


def cut_by_chunk(model, images, labels, micro_batch):
    for x, y in zip(images.chunk(micro_batch), labels.chunk(micro_batch), strict=True):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
    _average(model)


def one_backward(model, images, labels, micro_batch):
    loss = 0
    for x, y in _slices(images, labels, micro_batch):
        loss = loss + F.cross_entropy(model(x), y) * len(y) / len(labels)
    loss.backward()
    _average(model)


def averaged_each_time(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
        _average(model)


def summed_each_time(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
        _sum_over_ranks(model)


def own_of_each_reduced(model, images, labels, micro_batch):
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in _slices(images, labels, micro_batch):
        model.zero_grad()
        (F.cross_entropy(model(x), y) * len(y) / len(labels)).backward()
        _average(model)
        total = [one + parameter.grad for one, parameter in zip(total, model.parameters(),
                                                                strict=True)]
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = gradient


def summed_each_time_divided_once(model, images, labels, micro_batch):
    summed_each_time(model, images, labels, micro_batch)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def means_summed_each_time_divided_once(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y).backward()
        _sum_over_ranks(model)
    for parameter in model.parameters():
        parameter.grad /= count * dist.get_world_size()


def loss_all_reduced(model, images, labels, micro_batch):
    _own(model, images, labels, micro_batch)
    dist.all_reduce(torch.zeros(()))


def never_divided(model, *batch):
    _own(model, *batch)
    _sum_over_ranks(model)


def divided_by_ranks_twice(model, *batch):
    _own(model, *batch)
    _average(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def means_added_and_summed(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y).backward()
    _sum_over_ranks(model)


def means_averaged_and_summed(model, images, labels, micro_batch):
    count = len(images.split(micro_batch))
    for x, y in _slices(images, labels, micro_batch):
        (F.cross_entropy(model(x), y) / count).backward()
    _sum_over_ranks(model)


def losses_summed_and_summed(model, images, labels, micro_batch):
    for x, y in _slices(images, labels, micro_batch):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    _sum_over_ranks(model)


def under_ddp(model, *batch):
    _own(DistributedDataParallel(model), *batch)


def weights_averaged(model, *batch):
    _own(model, *batch)
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def cleared_at_the_end(model, *batch):
    accumulate_gradients(model, *batch)
    model.zero_grad()


def stepped(model, *batch):
    accumulate_gradients(model, *batch)
    torch.optim.SGD(model.parameters(), 0.1).step()

_TWO_THINGS = ("Two things are missing: the weight of each micro-batch's mean, its share of the "
               "local batch, and the division of the sum over the ranks by the world size.")

_MEAN_ALREADY = ("Each micro-batch's loss is a mean already, and you divided it by a number of "
                 "samples once more. Weigh it by its share: its own samples over the local batch.")

_EACH_TIME = ("The gradients are right, but you all-reduce after every micro-batch, and each costs "
              "a message. Let the micro-batches' gradients add up on this rank, and all-reduce "
              "once, after the last one.")

_COMPOUND = ("You all-reduce after every micro-batch. By then `.grad` holds the sum over the ranks "
             "from the micro-batches before, and you sum that over the ranks again, so it grows "
             "with each slice. All-reduce once, after the last one, and divide.")

_LEFT_OUT = "The last, smaller micro-batch is left out: its samples belong to the batch."


class AccumulateGradients(Exercise):
    number = "1.4"
    title = "Gradient accumulation over micro-batches"
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
        Mistake(means_added, "You add up the micro-batches' means, so the gradient "
                "grows with their number. Weigh each mean by its share of the local batch."),
        Mistake(means_averaged, "You divide by the number of micro-batches, as if all "
                "were equally large. The last one is smaller, so its samples count too much: weigh "
                "each mean by its share of the samples."),
        Mistake(divided_by_full_ones, "You divide by the number of *full* micro-batches, "
                "and add the smaller one as well. Weigh each mean by its share of the samples."),
        Mistake(share_and_count, "You weigh each mean by its share, and divide by the "
                "number of micro-batches too. The shares add up to 1 already."),
        Mistake(all_weighed_as_full, "Every micro-batch is weighed as a full one. The "
                "last one is smaller, and so is its share: its own samples over the local batch."),
        Mistake(losses_summed, "You summed the losses of all samples and never divided: "
                "the mean over the local batch divides by its size."),
        Mistake(sum_over_micro_batch, "You divided by the size of a micro-batch. "
                "The mean is over the whole local batch: divide by its size."),
        Mistake(cleared_each_time, "The gradients are cleared before each micro-batch, so "
                "only the last one counts. Let `backward()` add them up."),
        Mistake(mean_over_micro_batch, _MEAN_ALREADY),
        Mistake(mean_over_local_batch, _MEAN_ALREADY),
        Mistake(last_one_left_out, _LEFT_OUT),
        Mistake(mean_of_the_full_ones, _LEFT_OUT),
        Mistake(not_cut, "The whole local batch went "
                "through the model at once. The gradient is right, but the activations of all "
                "samples were in memory together."),
        Mistake(cut_by_chunk, "`chunk(n)` makes n slices, of whatever size. You "
                "want slices of at most n samples: `split(n)`."),
        Mistake(one_backward, "You add up the losses and call `backward` at the end. "
                "Until then autograd keeps every micro-batch's activations: call it for each."),
        Mistake(averaged_each_time, _EACH_TIME),
        Mistake(own_of_each_reduced, _EACH_TIME),
        Mistake(summed_each_time, "You all-reduce after every "
                "micro-batch, what was summed before too. All-reduce once, and divide."),
        Mistake(summed_each_time_divided_once, _COMPOUND),
        Mistake(means_summed_each_time_divided_once, _COMPOUND),
        Mistake(_own, "Each rank has accumulated its own local batch, and "
                "the ranks were never averaged: their gradients still differ."),
        Mistake(loss_all_reduced, "The ranks exchange something, but not gradients: each rank "
                "keeps those of its own local batch. (An all-reduce of the *loss* changes the "
                "number that you log, and no gradient.)"),
        Mistake(never_divided, "You summed over the ranks and did not divide by "
                "the world size."),
        Mistake(divided_by_ranks_twice, "You divided by the world "
                "size twice (`ReduceOp.AVG` and `average_gradients` divide already)."),
        *(Mistake(attempt, _TWO_THINGS) for attempt in (
            means_added_and_summed, means_averaged_and_summed, losses_summed_and_summed)),
        Mistake(under_ddp, "DDP all-reduces in every `backward`. Put all micro-batches but the "
                "last into `with ddp.no_sync():`, forward pass and all."),
        Mistake(weights_averaged, "You averaged the weights, which are equal on all ranks. "
                "What has to be averaged is each parameter's `.grad`."),
        Mistake(cleared_at_the_end, "At the end `.grad` is None. The gradients have to be there: "
                "do not clear them, and do not return them instead."),
        Mistake(stepped, "You took an optimizer's step, which changes the weights: stop "
                "at the gradients."),
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
    return (seeded(f"images of rank {rank}", 13, 7),
            seeded(f"labels of rank {rank}", 13, 3).argmax(dim=1))
