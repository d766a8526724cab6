"""One all-reduce for all gradients of a bucket, in one flat tensor."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import AverageGradients, pack, unpack
from dplab.exercises.ring_all_gather import ring_all_reduce
from dplab.measure import CallLog


def average_in_buckets(buckets, group=None):
    """Replaces the gradients by their means over the ranks, with one all-reduce for each bucket."""
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        flat = pack(gradients, ranks)
        mean = ring_all_reduce(flat / ranks, group)
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)


def with_torch(buckets, group=None):
    """The same with torch's all-reduce, and without `pack` and `unpack`."""
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        dist.all_reduce(flat, group=group)
        mean = flat / dist.get_world_size(group)
        start = 0
        for parameter in bucket:
            end = start + parameter.numel()
            parameter.grad.copy_(mean[start:end].view_as(parameter))
            start = end


# Shapes by bucket. No number of ranks divides the elements of a bucket: 31, 17 and 41.
BUCKETS = ((torch.float32, ((3, 3), (1, 7), (2, 4), (1, 1), (2, 3))),
           (torch.float32, ((2, 5), (1, 7))),
           (torch.float64, ((3, 5), (2, 7), (3, 4))))


def drawn(what, rank, where=""):
    """A tensor of this rank for each parameter, by the name of the fact that tells its gradient."""
    return {f"the gradient of parameter {place} in bucket {number}{where}":
            seeded(f"{what} {place} in bucket {number} on rank {rank}", *shape, dtype=dtype)
            for number, (dtype, shapes) in enumerate(BUCKETS)
            for place, shape in enumerate(shapes)}


IN_A_PAIR = ", in a group of two ranks"


class AverageInBuckets(Exercise):
    number = "5.2"
    title = "The gradients of a bucket travel together"
    minutes = 6
    with_groups = True
    too_long = AverageGradients.too_long
    world_sizes = (2, 3, 4, 1)  # one rank last: a ring of one sends nothing
    seconds = 8.0
    solution = staticmethod(average_in_buckets)
    also_right = (with_torch,)

    def trial(self, attempt):
        facts = self._facts(attempt, "", None)
        if dist.get_world_size() == 4 and self.with_groups:
            pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
            facts |= self._facts(attempt, IN_A_PAIR, pair)
        return facts

    def expected(self, world_size):
        right = self._right("", range(world_size))
        if world_size < 4:
            return right
        return [right | self._right(IN_A_PAIR, [rank % 2, rank % 2 + 2]) for rank in range(4)]

    def _facts(self, attempt, where, group):
        rank = dist.get_rank()
        weights, gradients = drawn("weights", rank), drawn("gradient", rank, where)
        parameters = [nn.Parameter(tensor.clone()) for tensor in weights.values()]
        memory = []
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            parameter.grad = gradient
            memory.append(gradient.data_ptr())
        left = iter(parameters)
        buckets = [[next(left) for _ in shapes] for _, shapes in BUCKETS]
        with CallLog() as log:
            attempt(buckets, group)
        now = [parameter.grad for parameter in parameters]
        in_place = all(mine is before and mine.data_ptr() == place for mine, before, place
                       in zip(now, gradients.values(), memory, strict=True))
        return self._named(
            where, all(map(torch.equal, parameters, weights.values())),
            dict(zip(gradients, now, strict=True)), not all(map(rounded, now)),
            all_reduces(log.calls, dist.get_world_size(group)), in_order(log.calls), in_place)

    def _right(self, where, ranks):
        every = [drawn("gradient", rank, where) for rank in ranks]
        means = {fact: sum(each[fact] for each in every) / len(every) for fact in every[0]}
        number = len(BUCKETS) if len(ranks) > 1 else 0
        right = self._named(where, True, means, True, number, True, True)
        if not number:  # a ring of one rank sends nothing, and torch's all-reduce may be called
            del right["the number of all-reduces"]
        return right

    def _named(self, where, untouched, gradients, digits, number, ordered, in_place):
        return {f"that the parameters are as they were{where}": untouched, **gradients,
                f"that a float64 gradient keeps its digits{where}": digits,
                f"the number of all-reduces{where}": number,
                f"that the buckets are sent in the order of the list{where}": ordered,
                f"that each `.grad` is the tensor that it was{where}": in_place}

    def parts(self, world_size, rank):
        """Of each gradient, in the group of two as well: all ranks' gradients and parameters."""
        found = {}
        for each, where in itertools.product(range(world_size), ("", IN_A_PAIR)):
            for what, name in (("gradient", "gradient"), ("weights", "parameter")):
                for fact, tensor in drawn(what, each, where).items():
                    found.setdefault(fact, {})[f"rank {each}'s {name}"] = tensor
        return found

    def quantities(self, world_size, rank):
        return {"the ranks": world_size, "the buckets": len(BUCKETS),
                "the parameters of bucket 0": len(BUCKETS[0][1])}

    hints = (
        "What does `pack` make of the gradients of one bucket, and where must the numbers be when "
        "your function returns?",
        "For one bucket: pack its gradients, divide, run your ring on the flat tensor. The ring "
        "returns a *new* flat tensor. `unpack` gives a view into that for each gradient.",
        "`mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)`; then, for each gradient "
        "and its part in `unpack(mean, gradients)`, `gradient.copy_(part)`.",
    )
    slips = (
        Slip("You summed and did not divide by the world size: every rank has to end with the "
             "mean.", {"flat / ranks": "flat"}, {"flat / dist.get_world_size(group)": "flat"}),
        Slip("You divided by the world size twice.", {"copy_(part)": "copy_(part / ranks)"},
             {"= flat /": "= flat / dist.get_world_size(group) /"}),
        Slip("You divide the whole bucket once for each of its parameters. Once is enough.",
             {"flat / ranks": "flat / ranks ** len(bucket)"},
             {"flat / dist": "flat / dist.get_world_size(group) ** (len(bucket) - 1) / dist"}),
        Slip("You divided by the number of parameters in the bucket. The mean is over the ranks.",
             {"flat / ranks": "flat / len(bucket)"},
             {"flat / dist.get_world_size(group)": "flat / len(bucket)"}),
        Slip("The sum over the ranks does not come back into `.grad`. `pack` makes a copy, and the "
             "ring returns a new tensor: write each part of what it returns into its `.grad`.",
             {"gradient.copy_(part)": "pass"},
             {"mean = ring_all_reduce(flat / ranks": "mean = flat / ranks\nring_all_reduce(flat"},
             {"parameter.grad.copy_(": "("}),
        Slip("Each gradient travels by itself: there is one all-reduce for each parameter. Send a "
             "bucket as one flat tensor.",
             {"bucket in buckets": "bucket in [[parameter] for each in buckets for parameter in "
                                   "each]"}),
        Slip("You made fewer buckets than you were given. Send each bucket by itself, in the order "
             "of the list.",
             {"bucket in buckets": "bucket in [sum(buckets, [])]"},
             {"bucket in buckets": "bucket in [sum(buckets[:2], []), buckets[2]]"}),
        Slip("The means are right, and each `.grad` is a new tensor. Who kept the tensor from "
             "before, as an optimizer or a bucket may, does not see them. Write into it: "
             "`parameter.grad.copy_(part)`.",
             {"parameter.grad.copy_(": "parameter.grad = parameter.grad.clone().copy_("}),
        Slip("Every rank gets rank 0's gradients, and what the others computed is lost. Sum over "
             "the ranks.",
             {"dist.all_reduce(flat": "dist.broadcast(flat, group_src=0",
              "flat / dist.get_world_size(group)": "flat"},
             {"dist.all_reduce(flat": "dist.broadcast(flat, group_src=0"}),
        Slip("`reduce` gives the sum to rank 0 alone. Every rank needs the mean.",
             {"dist.all_reduce(flat": "dist.reduce(flat, group_dst=0"}),
        Slip("The last bucket is never sent.", {"bucket in buckets": "bucket in buckets[:-1]"}),
        Slip("Each parameter of a bucket gets the first numbers of it: its part begins where the "
             "one before it ends.", {"start = end": "start = 0"}),
        Slip("The parts are written back in another order than they were put together: parameters "
             "get the gradients of others.",
             {"zip(gradients, unpack(mean, gradients)":
              "zip(gradients[::-1], unpack(mean, gradients[::-1])"}),
        Slip("The bucket holds the parameters' values; what has to be averaged are their "
             "gradients, `.grad`.", {"pack(gradients": "pack(bucket"}),
        Slip("You averaged the parameters, and the gradients are as they were. What has to be "
             "averaged is `.grad`.", {"[parameter.grad for": "[parameter.data for"}),
        Slip("The ring cuts the flat tensor into N equal chunks, and N does not divide the length "
             "of every bucket. `pack` adds the zeros that it takes.",
             {"pack(gradients, ranks)": "torch.cat([each.flatten() for each in gradients])"}),
    )


def all_reduces(calls, ranks):
    """How many all-reduces these calls make up; a ring of N ranks has 2(N-1) sends on each."""
    rings = sum(call.operation == "send" for call in calls) / max(1, 2 * (ranks - 1))
    number = sum(call.operation == "all_reduce" for call in calls) + rings
    return int(number) if number == int(number) else number


def rounded(tensor):
    """Whether it holds nothing that float32 does not hold."""
    return tensor is not None and torch.equal(tensor, tensor.float().to(tensor.dtype))


def in_order(calls):
    """Whether the second bucket, the smallest one, is the second to be sent, and the largest last.

    Where not just three sizes are sent, one after another, there is no telling.
    """
    sizes = [size for size, _ in itertools.groupby(
        call.bytes for call in calls if call.operation in ("send", "all_reduce"))]
    return len(sizes) != 3 or len(set(sizes)) != 3 or sizes[1] < sizes[0] < sizes[2]
