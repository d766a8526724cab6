"""The gradient of a batch that goes through the model in slices."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import gradients, seeded
from dplab.measure import CallLog


def accumulate_gradients(model, images, labels, micro_batch):
    slices = zip(images.split(micro_batch), labels.split(micro_batch), strict=True)
    for x, y in slices:
        share = len(x) / len(images)
        loss = F.cross_entropy(model(x), y) * share
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


SAMPLES = 13  # of a local batch: four micro-batches of three, and a smaller one
SHARE, EACH, BACKWARD = "len(x) / len(images)", "for x, y in slices:", "loss.backward()"
REDUCED, DIVIDED = "dist.all_reduce(parameter.grad)", "parameter.grad /= dist.get_world_size()"
REDUCED_EACH_TIME = {REDUCED: "pass", BACKWARD: f"{BACKWARD}\nfor each in model.parameters():\n"
                                                "    dist.all_reduce(each.grad)"}
LATE = {EACH: f"losses = []\n{EACH}", BACKWARD: "losses.append(loss)",
        "for parameter in model": "sum(losses).backward()\nfor parameter in model"}


class AccumulateGradients(Exercise):
    number = "1.2"
    title = "Gradient accumulation over micro-batches"
    minutes = 15
    solution = staticmethod(accumulate_gradients)
    micro_batch = 3

    def trial(self, attempt):
        model, sizes, held, by_ddp = classifier(), [], [], []

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
            attempt(model, *labelled(dist.get_rank()), self.micro_batch)
        size = sum(parameter.nbytes for parameter in model.parameters())
        unchanged = all(map(torch.equal, before, model.parameters()))
        return {**gradients(model), "that the weights are as they were": unchanged,
                "the number of samples that this rank computed": sum(sizes),
                "the number of samples in a forward pass": max(sizes, default=0),
                "the number of samples whose activations are kept at a time": max(held, default=0),
                "the number of backward passes in which DDP all-reduces": sum(by_ddp),
                "how often the gradients travel": round(log.bytes() / size) + sum(by_ddp)}

    def expected(self, world_size):
        model = classifier()
        local = [labelled(rank) for rank in range(world_size)]
        images, labels = map(torch.cat, zip(*local, strict=True))
        F.cross_entropy(model(images), labels).backward()
        return {**gradients(model), "that the weights are as they were": True,
                "the number of samples that this rank computed": len(images) // world_size,
                "the number of samples in a forward pass": AtMost(
                    self.micro_batch, "no more than `micro_batch` samples may go through the model "
                    "at once"),
                "the number of samples whose activations are kept at a time": AtMost(
                    self.micro_batch, "autograd keeps them from a forward pass until its "
                    "`backward`, so call that for each micro-batch"),
                "the number of backward passes in which DDP all-reduces": AtMost(
                    1, "it does in each. Put all micro-batches but the last into `with "
                    "ddp.no_sync():`, forward pass and all", exact=False),
                "how often the gradients travel": AtMost(
                    1, "once per step is enough. Let the micro-batches' gradients add up on this "
                    "rank, and all-reduce after the last one", exact=False)}

    def parts(self, world_size, rank):
        """On one rank, its micro-batches' shares of the gradient; on several, each rank's."""
        size = self.micro_batch if world_size == 1 else SAMPLES
        held = {}
        for other in range(world_size):
            slices = zip(*(each.split(size) for each in labelled(other)), strict=True)
            for number, (images, labels) in enumerate(slices):
                model = classifier()
                loss = F.cross_entropy(model(images), labels, reduction="sum")
                (loss / SAMPLES / world_size).backward()
                name = f"micro-batch {number}" if world_size == 1 else f"rank {other}'s gradient"
                held[name] = gradients(model)
        return {fact: {name: each[fact] for name, each in held.items()}
                for fact in gradients(classifier())}

    def quantities(self, world_size, rank):
        ranks = {"the ranks": world_size} if world_size > 1 else {}
        return ranks | {"the samples of a micro-batch": self.micro_batch, "the micro-batches": 5,
                        "the samples of a local batch": SAMPLES}

    hints = (
        "`backward()` adds to the `.grad` that is there. So call it once for each micro-batch, and "
        "clear nothing in between: `images.split(micro_batch)` makes the slices.",
        "The mean over the local batch is not the sum of the micro-batches' means. Weigh each mean "
        "by its share of the samples, `len(x) / len(images)`, before its `backward()`: the last "
        "one may be smaller.",
        "Nothing has to be sent before the last micro-batch is done. Then average over the ranks: "
        "one all-reduce for each gradient, and a division by `dist.get_world_size()`.",
    )
    slips = (
        Slip("You add up the micro-batches' means, so the gradient grows with their number. Weigh "
             "each mean by its share of the local batch.", {SHARE: "1"}),
        Slip("You divide by the number of micro-batches, as if all were equally large. The last "
             "one is smaller, so its samples count too much: weigh each mean by its share of the "
             "samples.", {SHARE: "1 / len(images.split(micro_batch))"}),
        Slip("You divide by the number of *full* micro-batches, and add the smaller one as well. "
             "Weigh each mean by its share of the samples.",
             {SHARE: "1 / (len(images) // micro_batch)"}),
        Slip("You weigh each mean by its share, and divide by the number of micro-batches too. The "
             "shares add up to 1 already.",
             {SHARE: f"{SHARE} / len(images.split(micro_batch))"}),
        Slip("Every micro-batch is weighed as a full one. The last one is smaller, and so is its "
             "share: its own samples over the local batch.",
             {SHARE: "micro_batch / len(images)"}),
        Slip("You summed the losses of all samples and never divided: the mean over the local "
             "batch divides by its size.", {SHARE: "len(x)"}),
        Slip("You divided by the size of a micro-batch. The mean is over the whole local batch: "
             "divide by its size.", {SHARE: "len(x) / micro_batch"}),
        Slip("Each micro-batch's loss is a mean already, and you divided it by a number of samples "
             "once more. Weigh it by its share: its own samples over the local batch.",
             {SHARE: "1 / micro_batch"}, {SHARE: "1 / len(images)"}, {SHARE: "1 / len(x)"}),
        Slip("Only the last micro-batch is in the gradient: those before it are cleared, or no "
             "backward reaches them. Let each one's `backward()` add to `.grad`.",
             {BACKWARD: f"model.zero_grad()\n{BACKWARD}"}),
        Slip("The last, smaller micro-batch is left out: its samples belong to the batch.",
             {EACH: "for x, y in list(slices)[:-1]:"},
             {EACH: "for x, y in list(slices)[:-1]:", SHARE: "1 / (len(images) // micro_batch)"}),
        Slip("You call one `backward()`, after all micro-batches, so the activations of all "
             "samples are kept until then. Call it for each micro-batch: `.grad` adds up.", LATE),
        Slip("`chunk(n)` makes n slices, of whatever size. You want slices of at most n samples: "
             "`split(n)`.", {"split(": "chunk("}),
        Slip("You all-reduce after every micro-batch. By then `.grad` holds the sum over the ranks "
             "from the micro-batches before, and you sum that over the ranks again, so it grows "
             "with each slice. All-reduce once, after the last one, and divide.",
             REDUCED_EACH_TIME, REDUCED_EACH_TIME | {DIVIDED: "pass"}),
        Slip("Each rank has accumulated its own local batch, and the ranks were never averaged: "
             "their gradients still differ.", {REDUCED: "pass", DIVIDED: "pass"}),
        Slip("The ranks exchange something, and no sum over the ranks gets into `.grad`: each rank "
             "keeps the gradients of its own local batch. To all-reduce the loss, a copy, or the "
             "weights, which are equal, changes no gradient.",
             {REDUCED: "dist.all_reduce(torch.zeros(()))", DIVIDED: "pass"},
             {"parameter.grad": "parameter.data"}),
        Slip("You summed over the ranks, and `.grad` is not divided by the world size.",
             {DIVIDED: "pass"}),
        Slip("You divided by the world size twice (`ReduceOp.AVG` and `average_gradients` divide "
             "already).", {"/= dist.get_world_size()": "/= dist.get_world_size() ** 2"}),
        Slip("At the end `.grad` is None. The gradients have to be there: do not clear them, and "
             "do not return them instead.", {DIVIDED: "parameter.grad = None"}),
    )


def classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def labelled(rank):
    """Rank r's samples of seven features, with a class for each."""
    return (seeded(f"images of rank {rank}", SAMPLES, 7),
            seeded(f"labels of rank {rank}", SAMPLES, 3).argmax(dim=1))
