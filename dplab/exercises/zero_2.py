"""Gradients leave for their owners while backward computes: ZeRO's second stage."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import pack, unpack
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.exercises.scatter_gradients import scatter_gradients
from dplab.exercises.sharded_optimizer import HELD, OWN, VIEW, chunk_size, held_beside
from dplab.measure import CallLog, sent_bytes


class ZeRO2:
    """Each rank keeps state and gradients for its own chunk of each bucket."""

    def __init__(self, buckets, make_optimizer):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.buckets = buckets
        self.own = [pack(bucket, ranks).chunk(ranks)[rank].clone() for bucket in buckets]
        self.optimizer = make_optimizer(self.own)
        self.start_over()
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def start_over(self):
        self.missing = [set(bucket) for bucket in self.buckets]
        self.sent = 0

    def gradient_is_ready(self, parameter):
        for missing in self.missing:
            missing.discard(parameter)
        while self.sent < len(self.buckets) and not self.missing[self.sent]:
            self.own[self.sent].grad = scatter_gradients(self.buckets[self.sent])
            self.sent += 1

    def step(self):
        self.optimizer.step()
        for bucket, own in zip(self.buckets, self.own, strict=True):
            whole = ring_all_gather(own)
            for parameter, values in zip(bucket, unpack(whole, bucket), strict=True):
                parameter.data.copy_(values)
            own.grad = None
        self.start_over()


SHAPES = (((5, 7), (3,)), ((4, 9), (2,)), ((6, 6), (2,)))  # 38 elements in each bucket
STEPS = range(3)
SENDING = "how many times the bytes of DDP this rank sends in a step"
LEFT = "the bytes of whole gradients at the end of backward"
AT_ONCE = "the bytes of whole gradients after each hook, at most"
GONE = "that every bucket has left when backward ends"
GRADIENTS = "the bytes of memory behind this rank's gradients when backward ends"
STATE = "the bytes of optimizer state on this rank"
ELEMENTS = sum(nn.Parameter(torch.empty(shape)).numel() for shape in SHAPES[0])


class ShardGradients(Exercise):
    number = "8.4"
    title = "Gradients leave during backward"
    minutes = 20
    seconds = 8.0
    solution = ZeRO2

    def trial(self, attempt):
        buckets, made = _buckets(), []

        def make_optimizer(tensors):
            made.append(adam_of(tensors))
            return made[-1]

        sharded, most = attempt(buckets, make_optimizer), [0]
        facts = {OWN: held_beside([each for bucket in buckets for each in bucket], sharded, made)}
        for bucket in buckets:
            for parameter in bucket:  # after the attempt's own hooks
                parameter.register_post_accumulate_grad_hook(
                    lambda _: most.append(_held(buckets)))
        for step in STEPS:
            most[:] = [0]
            order = [0, 1, 2]
            if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
                order = [1, 0, 2]
            with CallLog() as log:
                _loss(buckets, dist.get_rank(), step, order).backward()
                sent = _sent(log)
                left = _held(buckets)
                own = _memory([each.grad for optimizer in made for group in optimizer.param_groups
                               for each in group["params"]])
                sharded.step()
            whole = _sent(log)
            facts |= _of_step(step, buckets, left, max(most), 2 * sent >= whole, own, whole)
        return facts | {STATE: sum(tensor.nbytes for optimizer in made
                                   for state in optimizer.state.values()
                                   for tensor in state.values())}

    def expected(self, world_size):
        buckets, facts = _buckets(), {}
        chunk = 4 * chunk_size(ELEMENTS, world_size)
        optimizer = adam_of([each for bucket in buckets for each in bucket])
        for step in STEPS:
            optimizer.zero_grad()
            for rank in range(world_size):
                (_loss(buckets, rank, step, [0, 1, 2]) / world_size).backward()
            optimizer.step()
            facts |= _of_step(
                step, buckets, AtMost(0, "after it has left, a gradient is of no use: set `.grad` "
                                      "to None"),
                AtMost(4 * ELEMENTS * (2 if step == 2 else 1),
                       "a bucket leaves as soon as it is complete", exact=False), True,
                AtMost(3 * chunk, "a rank needs the mean of its own chunks, ⌈n/N⌉ elements of "
                       "each bucket, in memory of their own"),
                AtMost(1, "a reduce-scatter and an all-gather of each bucket are enough"))
        return facts | {
            OWN: AtMost(3 * 2 * chunk, HELD),
            STATE: AtMost(3 * (2 * chunk + 4), "⌈n/N⌉ elements of each bucket have that much: no "
                          "rank keeps more")}

    hints = (
        "Three things happen at three times: at the beginning each rank cuts out its chunk of each "
        "bucket, for an optimizer that knows nothing else; in the hook a complete bucket leaves; "
        "in `step` the new values come back.",
        "How does a hook know that a bucket is complete? Keep for each bucket the set of the "
        "parameters that are missing. And send in the order of the list, whoever is ready first: "
        "as in exercise 5.3.",
        "In the hook: `own.grad = scatter_gradients(bucket)`, while the next bucket of the list is "
        "complete. In `step`: the optimizer's step, a `ring_all_gather` of each chunk, `unpack` "
        "into the parameters' `.data`, and all counts as at the beginning.",
    )
    slips = (
        Slip("A bucket leaves as soon as it is complete, and which one is first differs between "
             "ranks, so different buckets are added up. All ranks send in the order of the list: a "
             "complete bucket waits for those before it.",
             {"while self.sent < len(self.buckets) and not self.missing[self.sent]:":
              "for number in range(len(self.buckets)):\n    if self.missing[number]:\n"
              "        continue",
              "self.own[self.sent].grad = scatter_gradients(self.buckets[self.sent])":
              "self.own[number].grad = scatter_gradients(self.buckets[number])",
              "    self.sent += 1": "    self.missing[number] = {None}"}),
        Slip("The values are right, but the buckets leave after backward, all at once: whole "
             "gradients of the whole model are there together. Send from the hook.",
             {"missing.discard(parameter)": "pass",
              "self.optimizer.step()":
              "for bucket, own in zip(self.buckets, self.own):\n"
              "    own.grad = scatter_gradients(bucket)\nself.optimizer.step()"}),
        Slip("The counts of step 1 are still there in step 2: set them back at the end of `step`.",
             {"own.grad = None\n        self.start_over()": "pass"}),
        Slip("The new values never get into the parameters. Copy what has been gathered into each "
             "`parameter.data`.",
             {"parameter.data.copy_(values)": "parameter.data.clone().copy_(values)"}),
        Slip("Your optimizer has the buckets whole on every rank: no state is sharded. Give it "
             "this rank's chunk of each bucket.",
             {"self.optimizer = make_optimizer(self.own)":
              "self.whole = [pack(bucket, ranks) for bucket in buckets]\n"
              "self.own = [whole.chunk(ranks)[rank] for whole in self.whole]\n"
              "self.optimizer = make_optimizer(self.whole)",
              "self.optimizer.step()":
              "for whole, own in zip(self.whole, self.own):\n"
              "    whole.grad = ring_all_gather(own.grad)\nself.optimizer.step()"}),
        Slip("Each rank updates its chunk with its own gradient. What counts is the mean over the "
             "ranks, which `scatter_gradients` brings.",
             {"self.own[self.sent].grad = scatter_gradients(self.buckets[self.sent])":
              "bucket, ranks = self.buckets[self.sent], dist.get_world_size()\n"
              "flat = pack([each.grad for each in bucket], ranks)\n"
              "self.own[self.sent].grad = flat.chunk(ranks)[dist.get_rank()].clone()\n"
              "for each in bucket:\n    each.grad = None"}),
        Slip("You gather the owners' gradients. They have done their work: what the other ranks "
             "lack are the new *values* of the parameters.",
             {"ring_all_gather(own)": "ring_all_gather(own.grad)"}),
        Slip(VIEW, {".chunk(ranks)[rank].clone() for": ".chunk(ranks)[rank] for"}),
        Slip("Every rank owns the first chunk. Rank r owns chunk r.",
             {".chunk(ranks)[rank]": ".chunk(ranks)[0]"}),
    )


def _buckets():
    return [[nn.Parameter(seeded(f"parameter {number} of bucket {place}", *shape))
             for number, shape in enumerate(shapes)] for place, shapes in enumerate(SHAPES)]


def _loss(buckets, rank, step, order):
    """One whose gradients become ready bucket by bucket, in this order."""
    total = torch.zeros(())
    for place in reversed(order):  # autograd goes back from what was computed last
        flat = torch.cat([each.flatten() for each in buckets[place]])
        drawn = seeded(f"data of rank {rank} in step {step} for bucket {place}", len(flat))
        total = total + (flat * drawn).sum() + (flat.square() * drawn.square()).sum()
    return total


def adam_of(tensors):
    return torch.optim.Adam(tensors, lr=0.05, eps=0.01)


def _held(buckets):
    return sum(each.grad.nbytes for bucket in buckets for each in bucket if each.grad is not None)


def _memory(tensors):
    """The bytes of storage behind these tensors, each once."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
             for each in tensors if each is not None}
    return sum(found.values())


def _sent(log):
    return sum(map(sent_bytes, log.calls))


def _of_step(step, buckets, left, most, gone, own, sent):
    where, ranks = f" in step {step + 1}", dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(sent, AtMost):
        whole = 3 * 4 * ranks * chunk_size(ELEMENTS, ranks)
        sent = round(sent / (2 * (ranks - 1) / ranks * whole), 2) if ranks > 1 else 0
    with torch.no_grad():
        values = {f"bucket {place} after step {step + 1}": parameters_to_vector(bucket).clone()
                  for place, bucket in enumerate(buckets)}
    return values | {f"{LEFT}{where}": left, f"{AT_ONCE}{where}": most, f"{GONE}{where}": gone,
                     f"{GRADIENTS}{where}": own, f"{SENDING}{where}": sent}
