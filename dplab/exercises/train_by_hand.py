"""Exercise 4.3: a whole training loop that matches DDP."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.checks.composition import Held, made_of
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import optimizer_for
from dplab.exercises.average_gradients import average_gradients, sums_gradients
from dplab.exercises.broadcast_weights import (
    _WITHOUT_GROUP,
    IN_A_PAIR,
    average_weights,
    broadcast_weights,
    named,
    own_pair,
)
from dplab.measure import CallLog
from dplab.workloads.digits import digits_classifier, load_digits


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

_NOT_GIVEN = ("Your loop trains on the notebook's own `images` and `labels`, as `backward_on` "
              "does. Compute the loss from the arguments `images` and `labels`: they hold other "
              "samples.")

STEPS, GLOBAL_BATCH = 8, 24

SAMPLES_OF_ALL = STEPS * GLOBAL_BATCH


def one_device(model, optimizer, images, labels, batches):
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def starts_apart(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def broadcasts_last(model, optimizer, images, labels, batches, group=None):
    starts_apart(model, optimizer, images, labels, batches, group)
    broadcast_weights(model, group)


def trains_apart(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


def averages_too_late(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        average_gradients(model, group)


def broadcasts_after_each_step(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        broadcast_weights(model, group)


def broadcasts_before_each_step(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for batch in batches:
        broadcast_weights(model, group)
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


def divides_the_loss_too(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine]) / ranks
        loss.backward()
        average_gradients(model, group)
        optimizer.step()


def trains_with_ddp(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    replica = nn.parallel.DistributedDataParallel(model, process_group=group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(replica(images[mine]), labels[mine]).backward()
        optimizer.step()


def sums_in_the_loop(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        sums_gradients(model, group)
        optimizer.step()


def averages_the_loss(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        dist.all_reduce(loss.data, group=group)
        (loss / ranks).backward()
        optimizer.step()


def averages_weights_after_the_step(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        average_weights(model, group)


def never_clears(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def clears_too_late(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.zero_grad(set_to_none=False)
        average_gradients(model, group)
        optimizer.step()


def shares_out_the_batches(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    steps = len(batches) // ranks * ranks
    for batch in batches[rank:steps:ranks]:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_the_whole_batch(model, optimizer, images, labels, batches, group=None):
    broadcast_weights(model, group)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_the_first_part(model, optimizer, images, labels, batches, group=None):
    ranks = dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[: len(batch) // ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_neighbours(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def trains_among_all(model, optimizer, images, labels, batches, group=None):
    train_by_hand(model, optimizer, images, labels, batches)


def cuts_by_all_ranks(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def takes_its_rank_of_all(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


def calls_its_parts_without_the_group(model, optimizer, images, labels, batches, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model)
        optimizer.step()


def trains_on_the_notebooks_data(model, optimizer, images, labels, batches, group=None):
    digits = load_digits()
    train_by_hand(model, optimizer, digits.train_images, digits.train_labels, batches, group)


def both_cuts(attempt):
    """The attempt, which takes ``batch[rank::n]``, and the same with ``batch.chunk(n)[rank]``.

    Where the ranks' models differ, the weights depend on who computed which samples.
    """
    def in_pieces(model, optimizer, images, labels, batches, group=None):
        ranks = dist.get_world_size(group)
        dealt = [batch.view(ranks, -1).t().flatten() for batch in batches]
        attempt(model, optimizer, images, labels, dealt, group)

    return attempt, in_pieces

TAKEN = "the gradient of step 1", "the gradient of step 2"

SAMPLES = "the number of samples that this rank computed"

OF_ALL = "the number of different samples that all ranks together computed"

EVERY_STEP = "that you call a collective yourself in every step"

OWN_SAMPLES = "that rank r computes `batch[r::N]`"

_OVERWRITTEN = ("Rank 0's weights overwrite the others' in each step, so what the other ranks "
                "computed is lost. Average the gradients instead.")


class TrainByHand(Exercise):
    number = "4.3"
    title = "A whole training loop that matches DDP"
    minutes = 10
    seconds = 20.0
    with_groups = True
    tolerance = 1e-4
    communicates = False  # DDP, in an attempt's place, does so unseen
    hints = (
        "A loop of one device has four lines. Which one changes, what comes between `backward` and "
        "`step`, and what has to be done once, before the first step?",
        "Each rank passes to the model only its own part of each global batch, as in step 2, so "
        "that together they compute every sample once.",
        "Once: `broadcast_weights(model, group)`. In each step: `mine = batch[rank::ranks]`, "
        "`zero_grad`, forward on `mine`, `backward`, `average_gradients(model, group)`, `step`.",
    )
    solution = staticmethod(train_by_hand)
    mistakes = (
        *(Mistake(attempt, "The ranks started from different weights and never agreed: broadcast "
                  "rank 0's before the first step.") for attempt in both_cuts(starts_apart)),
        *(Mistake(attempt, "The broadcast comes after the training. The ranks start from different "
                  "weights, so their gradients do not belong to one model.")
          for attempt in both_cuts(broadcasts_last)),
        *(Mistake(attempt, "The ranks trained apart: each step was taken with this rank's own "
                  "gradients. Average them between `backward` and `step`.")
          for attempt in both_cuts(trains_apart)),
        *(Mistake(attempt, "You call collectives in each step, and still each step was taken with "
                  "this rank's own gradients. Average them between `backward` and `step`, not "
                  "before and not after, and in `parameter.grad` itself, not in a copy.")
          for attempt in both_cuts(averages_too_late)),
        *(Mistake(attempt, _OVERWRITTEN) for attempt in (
            *both_cuts(broadcasts_after_each_step), *both_cuts(broadcasts_before_each_step))),
        Mistake(divides_the_loss_too, "The gradients were divided by the world size twice: the "
                "mean over the ranks needs no smaller loss."),
        Mistake(trains_with_ddp, "The weights come out right, but PyTorch's DDP did the work. Here "
                "you write what it does: call the broadcast and the all-reduces yourself."),
        Mistake(sums_in_the_loop, "The gradients were summed and not divided by the world size: "
                "each step was too long."),
        *(Mistake(attempt, "You averaged the loss. `backward` follows only this rank's own graph, "
                  "so the gradients still differ: all-reduce the gradients.")
          for attempt in both_cuts(averages_the_loss)),
        *(Mistake(attempt, "You averaged the weights after each rank's own step. With this "
                  "optimizer that is not the step of the averaged gradient.")
          for attempt in both_cuts(averages_weights_after_the_step)),
        Mistake(never_clears, "The gradients of all steps so far add up: `zero_grad` is missing."),
        Mistake(clears_too_late, "The gradients are cleared between `backward` and `step`, so the "
                "optimizer sees zeros and the model never changes."),
        Mistake(shares_out_the_batches, "Each rank took other global batches. All ranks work on "
                "the same global batch at a time, each on its own part of it."),
        Mistake(takes_the_whole_batch, "Every rank computed the whole batch, so nothing is faster "
                "than on one rank: each has to take its own part."),
        Mistake(takes_the_first_part, "Every rank took the same part of the batch, so most of it "
                "was never seen: the part must depend on the rank."),
        Mistake(takes_neighbours, "The weights come out right, but each rank took other samples of "
                "the batch than it was asked to: rank r of the group takes `batch[r::N]`."),
        Mistake(trains_among_all, _WITHOUT_GROUP),
        Mistake(cuts_by_all_ranks, _WITHOUT_GROUP),
        Mistake(takes_its_rank_of_all, _WITHOUT_GROUP),
        Mistake(calls_its_parts_without_the_group, _WITHOUT_GROUP),
        Mistake(trains_on_the_notebooks_data, _NOT_GIVEN),
    )

    def prepare(self):
        """The training set, and batches as indices, which 1, 2, 3 and 4 ranks divide equally.

        The samples are in another order than the notebook's, so that an index is another sample.
        """
        digits = load_digits()
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(len(digits.train_labels), generator=generator)
        batches = list(order[: STEPS * GLOBAL_BATCH].split(GLOBAL_BATCH))
        return digits.train_images.flip(0), digits.train_labels.flip(0), batches

    def trial(self, attempt):
        facts = self._trained(attempt, None)
        if dist.get_world_size() == 4 and self.with_groups:
            facts |= named(self._trained(attempt, own_pair()), IN_A_PAIR)
        return facts

    def _trained(self, attempt, group):
        model, seen = digits_classifier(seed=dist.get_rank()), []  # each pair has its own model
        models, taken, optimizer = [], [], optimizer_for(model)
        looking = model.register_forward_pre_hook(
            lambda _, inputs: seen.extend(inputs[0].detach().clone()))
        # A closure computes the gradient within the step, from the weights before it.
        optimizer.register_step_pre_hook(
            lambda *_: models.append(copy.deepcopy(model)) if len(models) < 2 else None)
        optimizer.register_step_post_hook(
            lambda *_: taken.append(_gradient_of(model)) if len(taken) < 2 else None)
        with CallLog() as log:
            attempt(model, optimizer, *self.given, group)
        looking.remove()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        everybodys = [None] * ranks
        dist.all_gather_object(everybodys, _distinct(seen), group)
        images, _, batches = self.given
        asked = _distinct(images[torch.cat([batch[rank::ranks] for batch in batches])])
        return {SAMPLES: len(seen), OF_ALL: len(set.union(*everybodys)),
                **self._made_of_samples(models, taken), **_weights_of(model),
                OWN_SAMPLES: everybodys[rank] == asked,
                EVERY_STEP: dist.get_world_size() == 1 or log.count() >= STEPS}

    def _made_of_samples(self, models, taken):
        """How often the gradient of each sample is in what the first two steps are taken with.

        Gradients are those of the weights that this rank has in that step, right or wrong.
        """
        images, labels, batches = self.given
        facts, before = {}, {}
        for fact, model, gradient, batch in zip(TAKEN, models, taken, batches, strict=False):
            parts = dict(before)
            for number, index in enumerate(batch):
                model.zero_grad()
                F.cross_entropy(model(images[index, None]), labels[index, None]).backward()
                parts[_sample(number)] = _gradient_of(model)
            facts[fact] = made_of(gradient, parts)
            before = {"the gradient of step 1": gradient}
        return facts

    def expected(self, world_size):
        facts = self._right(0, world_size)
        if world_size < 4:
            return facts
        pairs = [named(self._right(seed, 2), IN_A_PAIR) for seed in (0, 1)]
        return [facts | pairs[rank % 2] for rank in range(4)]

    def _right(self, seed, ranks):
        images, _, batches = self.given
        model = digits_classifier(seed=seed)
        one_device(model, optimizer_for(model), *self.given)
        samples = [_sample(number) for number in range(GLOBAL_BATCH)]
        held = Held(dict.fromkeys(samples, 1 / GLOBAL_BATCH), {
            "each of the batch's samples": samples,
            **{f"each of rank {rank}'s samples": samples[rank::ranks] for rank in range(ranks)}})
        return {SAMPLES: SAMPLES_OF_ALL // ranks,
                OF_ALL: len(images[torch.cat(batches)].unique(dim=0)),
                **dict.fromkeys(TAKEN, held), **_weights_of(model), OWN_SAMPLES: True,
                EVERY_STEP: True}


def _sample(number):
    return f"sample {number} of the batch"


def _gradient_of(model):
    """All gradients in one tensor; zeros where there is none."""
    return torch.cat([torch.zeros_like(each).flatten() if each.grad is None
                      else each.grad.flatten() for each in model.parameters()])


def _distinct(images):
    return {image.numpy().tobytes() for image in images}


def _weights_of(model):
    return {f"`{name}` at the end": tensor.clone() for name, tensor in model.state_dict().items()}
