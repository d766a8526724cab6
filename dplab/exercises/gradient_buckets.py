"""Exercise 5.2: the gradients of a bucket travel together."""

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import AverageGradients, pack, unpack
from dplab.exercises.ring_all_reduce import ring_all_reduce
from dplab.measure import CallLog


def average_in_buckets(buckets, group=None):
    """Replaces the gradients by their means over the ranks, with one all-reduce for each bucket."""
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)


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
    number = "5.2"
    title = "The gradients of a bucket travel together"
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
