"""A broadcast before the first step, an average in each, and the ranks train as one device."""

import copy
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.checks.composition import Held, made_of
from dplab.checks.exercise import WITHOUT_GROUP
from dplab.checks.mistakes import Slip
from dplab.checks.trials import optimizer_for, seeded
from dplab.exercises.average_gradients import average_gradients
from dplab.exercises.broadcast_weights import InPairsToo, broadcast_weights
from dplab.measure import CallLog
from dplab.workloads.digits import load_digits


def train_by_hand(model, optimizer, images, labels, batches, group=None):
    """Trains the same model on every rank; each rank computes its own part of each global batch."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def one_device(model, optimizer, images, labels, batches):
    """What the ranks together have to do."""
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


# As they stand in the right answer, and what comes in their place.
SENT, AVERAGED = "broadcast_weights(model, group)", "average_gradients(model, group)"
CLEARED, STEP = "optimizer.zero_grad()", "optimizer.step()"
LOSS = "F.cross_entropy(model(images[mine]), labels[mine])"
SENT_ALONE = "{}\n    dist.broadcast(each.data, group_src=0, group=group)"
FROM_THE_NOTEBOOK = "images, labels = load_digits()[:2]"
NOT_GIVEN = ("Your loop trains on the notebook's own `images` and `labels`, as `backward_on` "
             "does. Compute the loss from the arguments `images` and `labels`: they hold other "
             "samples.")

STEPS, GLOBAL_BATCH = 8, 12
SAMPLES = [f"sample {number} of the batch" for number in range(GLOBAL_BATCH)]


def _in_either_cut(edits):
    """Where the ranks' models differ, the weights depend on who computed which samples."""
    return edits, edits | {"batch[rank::ranks]": "batch.chunk(ranks)[rank]"}


class TrainByHand(InPairsToo):
    number = "4.3"
    title = "A whole training loop that matches DDP"
    minutes = 5
    seconds = 20.0
    tolerance = 1e-4
    communicates = False  # DDP, in an attempt's place, does so unseen
    solution = staticmethod(train_by_hand)

    def prepare(self):
        """Samples in another order than the notebook's, so that an index is another one; and
        batches as indices, which 1, 2, 3 and 4 ranks divide equally.
        """
        digits = load_digits()
        generator = torch.Generator().manual_seed(3)
        batches = torch.randperm(100, generator=generator)[: STEPS * GLOBAL_BATCH]
        return (digits.train_images[-100:], digits.train_labels[-100:],
                list(batches.split(GLOBAL_BATCH)))

    def facts_of(self, attempt, group):
        model, seen, calls = classifier(seed=dist.get_rank()), [], []  # each pair has its own model
        optimizer = optimizer_for(model)
        steps = Steps(model, optimizer, of=(0, 1))
        looking = model.register_forward_pre_hook(
            lambda _, inputs: seen.extend(inputs[0].detach().clone()))
        with CallLog() as log:
            optimizer.register_step_post_hook(lambda *_: calls.append(log.count()))
            attempt(model, optimizer, *self.given, group)
        looking.remove()
        computed = len(seen)  # the copies in `steps` have the hook too
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        everybodys = [None] * ranks
        dist.all_gather_object(everybodys, _distinct(seen), group)
        images, labels, batches = self.given
        asked = _distinct(images[torch.cat([batch[rank::ranks] for batch in batches])])
        held = steps.made_of(images, labels, [dict(zip(SAMPLES, batch, strict=True))
                                              for batch in batches])
        return _facts(computed, len(set.union(*everybodys)), held, model,
                      # Of samples that are not the given ones this cannot be said.
                      everybodys[rank] == asked or not everybodys[rank] <= _distinct(images),
                      dist.get_world_size() == 1 or all(
                          before < after for before, after in itertools.pairwise([0, *calls])))

    def right(self, ranks):
        model = classifier(seed=ranks[0])
        one_device(model, optimizer_for(model), *self.given)
        held = Held(dict.fromkeys(SAMPLES, 1 / GLOBAL_BATCH), {
            "each of the batch's samples": SAMPLES,
            **{f"each of rank {rank}'s samples": SAMPLES[rank :: len(ranks)]
               for rank in range(len(ranks))},
            **{f"each of the samples of `batch.chunk(N)[{number}]`": [SAMPLES[i] for i in piece]
               for number, piece in enumerate(torch.arange(GLOBAL_BATCH).chunk(len(ranks)))}})
        return _facts(STEPS * GLOBAL_BATCH // len(ranks), STEPS * GLOBAL_BATCH,
                      {"the gradient of step 1": held, "the gradient of step 2": held},
                      model, True, True)

    hints = (
        "A loop of one device has four lines. Which one changes, what comes between `backward` and "
        "`step`, and what has to be done once, before the first step?",
        "Each rank passes to the model only its own part of each global batch, as in step 2, so "
        "that together they compute every sample once.",
        "Once: `broadcast_weights(model, group)`. In each step: `mine = batch[rank::ranks]`, "
        "`zero_grad`, forward on `mine`, `backward`, `average_gradients(model, group)`, `step`.",
    )
    slips = (
        Slip("The ranks started from different weights and never agreed: broadcast rank 0's before "
             "the first step.", *_in_either_cut({SENT: "pass"})),
        Slip("The broadcast comes after the training. The ranks start from different weights, so "
             "their gradients do not belong to one model.",
             *_in_either_cut({SENT: "pass",
                              STEP: f"{STEP}\nif batch is batches[-1]:\n    {SENT}"})),
        Slip("Rank 0's buffers or frozen parameters never reach the other ranks, and a forward "
             "pass reads them. `broadcast_weights(model, group)` sends them too.",
             {SENT: SENT_ALONE.format("for each in model.parameters():")},
             {SENT: SENT_ALONE.format("for each in [each for each in model.parameters() "
                                      "if each.requires_grad]:")}),
        Slip("The ranks trained apart: each step was taken with this rank's own gradients. Average "
             "them between `backward` and `step`.", *_in_either_cut({AVERAGED: "pass"})),
        Slip("You call collectives in each step, and still each step was taken with this rank's "
             "own gradients. Average them between `backward` and `step`, not before and not after, "
             "and in `parameter.grad` itself, not in a copy.",
             *_in_either_cut({AVERAGED: "pass", STEP: f"{STEP}\n{AVERAGED}"})),
        Slip("Rank 0's weights overwrite the others' in each step, so what the other ranks "
             "computed is lost. Average the gradients instead.",
             *_in_either_cut({AVERAGED: "pass", STEP: f"{STEP}\n{SENT}"}),
             *_in_either_cut({AVERAGED: "pass", CLEARED: f"{SENT}\n{CLEARED}"})),
        Slip("The gradients were divided by the world size twice: the mean over the ranks needs no "
             "smaller loss.", {LOSS: f"({LOSS} / ranks)"}),
        Slip("The weights come out right, but PyTorch's DDP did the work. Here you write what it "
             "does: call the broadcast and the all-reduces yourself.",
             {SENT: "model = nn.parallel.DistributedDataParallel(model, process_group=group)",
              AVERAGED: "pass"}),
        Slip("The gradients were summed and not divided by the world size: each step was too long.",
             {AVERAGED: f"{AVERAGED}\nfor each in model.parameters():\n"
                        "    each.grad is None or each.grad.mul_(ranks)"}),
        Slip("You averaged the loss. `backward` follows only this rank's own graph, so the "
             "gradients still differ: all-reduce the gradients.",
             *_in_either_cut({f"{LOSS}.backward()":
                              f"loss = {LOSS}\ndist.all_reduce(loss.data, group=group)\n"
                              "(loss / ranks).backward()", AVERAGED: "pass"})),
        Slip("You averaged the weights after each rank's own step. With this optimizer that is not "
             "the step of the averaged gradient.",
             *_in_either_cut({AVERAGED: "pass", STEP:
                              f"{STEP}\nfor each in model.parameters():\n    each.data /= ranks\n"
                              "    dist.all_reduce(each.data, group=group)"})),
        Slip("The gradients of all steps so far add up: `zero_grad` is missing.",
             {CLEARED: "pass"}),
        Slip("The gradients are cleared between `backward` and `step`, so the optimizer sees zeros "
             "and the model never changes.",
             *({CLEARED: "pass", AVERAGED: f"optimizer.zero_grad({how})\n{AVERAGED}"}
               for how in ("", "False"))),
        Slip("Each rank took other global batches. All ranks work on the same global batch at a "
             "time, each on its own part of it.",
             {"in batches:": "in batches[rank : len(batches) // ranks * ranks : ranks]:",
              "batch[rank::ranks]": "batch"}),
        Slip("Every rank computed the whole batch, so nothing is faster than on one rank: each has "
             "to take its own part.", {"batch[rank::ranks]": "batch"}),
        Slip("Every rank took the same part of the batch, so most of it was never seen: the part "
             "must depend on the rank.", {"batch[rank::ranks]": "batch[: len(batch) // ranks]"},
             {"batch[rank::ranks]": "batch[::ranks]"}),
        Slip("The ranks share out each batch in another way than asked: rank r of the group takes "
             "`batch[r::N]`.", {"batch[rank::ranks]": "batch.chunk(ranks)[rank]"}),
        Slip(WITHOUT_GROUP, {"(group)": "()", "(model, group)": "(model)"}, {"(group)": "()"},
             {"get_rank(group)": "get_rank()"}, {"(model, group)": "(model)"}),
        Slip(NOT_GIVEN, {SENT: f"{FROM_THE_NOTEBOOK}\n{SENT}"}),
    )


class _Scaled(nn.Module):
    """Multiplies each pixel by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.empty(64))

    def forward(self, images):
        return self.scale * images.flatten(1)


def classifier(seed):
    """A small one, which reads a frozen parameter and a buffer; ``seed`` decides all values."""
    model = nn.Sequential(_Scaled(), nn.Linear(64, 12), nn.GELU(), nn.Linear(12, 10))
    model[1].bias.requires_grad_(False)
    for name, tensor in model.state_dict().items():
        tensor.copy_(0.3 * seeded(f"{name} of {seed}", *tensor.shape))
    return model


def weights_of(model):
    """All values at the end, those first that training leaves alone."""
    values = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {f"`{name}` at the end": values[name].detach().clone()
            for name in sorted(values, key=lambda name: values[name].requires_grad)}


def _facts(own, of_all, taken, model, as_asked, communicated):
    return {"the number of samples that this rank computed": own,
            "the number of different samples that all ranks together computed": of_all,
            **taken, **weights_of(model),
            "that rank r computes `batch[r::N]`": as_asked,
            "that you call a collective yourself in every step": communicated}


class Steps:
    """What is in the gradients that some of the optimizer's steps are taken with.

    Gradients of samples are those of the weights that this rank has in that step, right or wrong.
    """

    def __init__(self, model, optimizer, of):
        self.model, self.of = model, of
        self.models, self.gradients = {}, []
        # A closure computes the gradient within the step, from the weights before it.
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_):
        if len(self.gradients) in self.of:
            self.models[len(self.gradients)] = copy.deepcopy(self.model)

    def _after(self, *_):
        self.gradients.append(_gradient_of(self.model))

    def made_of(self, images, labels, samples):
        """``samples``: by step, the indices of those that may be in it, by name.

        The fact is None, which is held against nobody, where that is unknown or no step was taken.
        """
        facts = dict.fromkeys(f"the gradient of step {step + 1}" for step in self.of)
        for step, model in self.models.items():
            parts = {f"the gradient of step {step}": self.gradients[step - 1]} if step else {}
            for name, index in samples[step].items():
                model.zero_grad()
                F.cross_entropy(model(images[index, None]), labels[index, None]).backward()
                parts[name] = _gradient_of(model)
            facts[f"the gradient of step {step + 1}"] = made_of(self.gradients[step], parts)
        return facts


def _gradient_of(model):
    """All gradients in one tensor; zeros where there is none."""
    return torch.cat([torch.zeros_like(each).flatten() if each.grad is None
                      else each.grad.flatten() for each in model.parameters()])


def _distinct(images):
    return {image.numpy().tobytes() for image in images}
