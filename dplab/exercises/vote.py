"""A vote of checksums: which replica is no longer what the others are, for a few bytes a rank."""

import builtins
from unittest import mock

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog


def outvoted(tensors):
    import hashlib  # not in the chapter's imports: which checksum is part of the question

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    votes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(votes, mine)
    votes = [tuple(vote.tolist()) for vote in votes]
    most = max(votes, key=votes.count)
    if 2 * votes.count(most) <= len(votes):
        return list(range(len(votes)))
    return [rank for rank, vote in enumerate(votes) if vote != most]


def by_weighted_sums(tensors):
    """The same with a sum of the bits, each with the weight of its place, modulo 2⁶⁴."""
    total = torch.zeros(1, dtype=torch.int64)
    for tensor in tensors:
        bits = tensor.detach().flatten().view(torch.uint8).to(torch.int64)
        places = torch.arange(1, len(bits) + 1)
        total = total * 6364136223846793005 + (bits * (places * 2862933555777941757 + 1)).sum()
    votes = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(votes, total)
    votes = torch.cat(votes)
    agree = (votes[:, None] == votes).sum(dim=1)
    if 2 * agree.max() <= len(votes):
        return list(range(len(votes)))
    return (votes != votes[agree.argmax()]).nonzero().flatten().tolist()


KINDS = ("nothing is flipped", "the lowest bit of one number", "the sign of a zero",
         "the highest bit of the exponent", "two numbers that changed places",
         "one bit up and the same bit down", "a not-a-number on all ranks, a bit on one",
         "one rank of two, or all different")
_MIXED = ("total = total * 6364136223846793005 + "
          "(bits * (places * 2862933555777941757 + 1)).sum()")
FEW = "a checksum needs a few bytes, and the replica has 4,100"


class Vote(Exercise):
    number = "12.5"
    title = "A vote of checksums"
    minutes = 20
    solution = staticmethod(outvoted)
    also_right = (by_weighted_sums,)
    world_sizes = (1, 3, 2, 4)

    def trial(self, attempt):
        facts, most = {}, 0
        for kind in KINDS:
            tensors = replica(kind)
            before = [tensor.clone() for tensor in tensors]
            with CallLog() as log, mock.patch.object(builtins, "hash", salted):
                found = attempt(tensors)
            most = max(most, sum(elements(call.shape) * WIDTHS.get(call.dtype, 4)
                                 for call in log.calls))
            facts[f"the ranks that are outvoted: {kind}"] = listed(found)
            facts[f"that the tensors are left alone: {kind}"] = all(
                torch.equal(old.view(torch.int32), new.view(torch.int32))
                for old, new in zip(before, tensors, strict=True))
        facts["bytes that a rank gives to its calls"] = most
        return facts

    def expected(self, world_size):
        facts = {}
        for kind in KINDS:
            facts[f"the ranks that are outvoted: {kind}"] = listed(outvoted_in(kind, world_size))
            facts[f"that the tensors are left alone: {kind}"] = True
        return {**facts, "bytes that a rank gives to its calls": AtMost(256, FEW)}

    hints = (
        "A checksum is a small number that is made of all bits. What do the sum of the floats, or "
        "a comparison with `==`, do with the lowest bit, with −0.0, with two numbers that changed "
        "places, with not-a-number?",
        "Take the bits and not the numbers: `tensor.flatten().view(torch.uint8)`. "
        "`hashlib.sha256` makes 32 bytes of any bytes. All ranks need all checksums. And the "
        "majority is right, not rank 0.",
        "`digest.update(….numpy().tobytes())` for each tensor, then "
        "`torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)` and `dist.all_gather`. "
        "Without a checksum that more than half of the ranks have, return all ranks.",
    )
    slips = (
        Slip("Your checksum adds numbers as floats. A bit that is small against the sum is lost in "
             "rounding, two numbers that change places leave the sum as it is, and one "
             "not-a-number hides all others. Compare bits: make the checksum of them.",
             {"digest.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())":
              "digest.update(str(tensor.sum().item()).encode())"},
             {"total = torch.zeros(1, dtype=torch.int64)": "total = torch.zeros(1)", _MIXED:
              "total = total + tensor.sum()"},
             {"total = torch.zeros(1, dtype=torch.int64)":
              "total = torch.zeros(1, dtype=torch.float64)", _MIXED:
              "total = total + tensor.double().sum()"}),
        Slip("Your checksum adds bits without their places: two numbers that change places, or one "
             "bit up and the same bit down, leave the sum as it is.",
             {"digest.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())":
              "digest.update(str(tensor.view(torch.int32).long().sum().item()).encode())"},
             {"digest.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())":
              "digest.update(str(tensor.flatten().view(torch.uint8).long().sum().item())"
              ".encode())"}),
        Slip("`hash` of bytes or text gives each process another number, unless one process has "
             "forked them all: Python salts it. (The check does so too.) Under torchrun equal "
             "replicas would differ. Take a checksum that depends on the bytes alone.",
             {"mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)":
              "mine = torch.tensor([hash(digest.digest())])"}),
        Slip("You take rank 0's replica for the right one. Where rank 0 is the broken one, you "
             "send all the others away: the majority decides.",
             {"max(votes, key=votes.count)": "votes[0]",
              "if 2 * votes.count(most) <= len(votes)": "if len(set(votes)) == len(votes) > 1"},
             {"max(votes, key=votes.count)": "votes[0]",
              "if 2 * votes.count(most) <= len(votes)": "if False"}),
        Slip("Two ranks that differ cannot tell which of them is right. Without a majority of more "
             "than half, return all ranks.",
             {"if 2 * votes.count(most) <= len(votes)": "if False"},
             {"if 2 * votes.count(most) <= len(votes)":
              "if 2 * votes.count(most) < len(votes)"}),
        Slip("You send whole replicas. Each rank makes a checksum of its own, and sends that.",
             {"mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)":
              "mine = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors])"}),
        Slip("You vote with the first tensor alone. A bit may flip in any of them.",
             {"in tensors:": "in tensors[:1]:"}),
    )


WIDTHS = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}


_hash = hash


def salted(value):
    """`hash` as it is in a rank that torchrun starts, which has a salt of its own."""
    if isinstance(value, tuple):
        return _hash(tuple(map(salted, value)))
    is_salted = isinstance(value, str | bytes | memoryview)
    return _hash((value, dist.get_rank()) if is_salted else value)


def replica(kind):
    """This rank's tensors, where what the kind says has happened to one rank, or to more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = [seeded("a weight", 25, 40), seeded("a bias", 24), torch.zeros(1)]
    tensors[0][3, 3] = 0.0
    if kind.startswith("a not-a-number"):
        tensors[0][5, 5] = float("nan")
    if rank not in broken(kind, ranks):
        return tensors
    weight, bias = (tensor.view(torch.int32) for tensor in tensors[:2])
    flat = weight.view(-1)
    match KINDS.index(kind):
        case 1:
            flat[701] ^= 1
        case 2:
            tensors[0][3, 3] = -0.0
        case 3:
            bias[17] ^= 1 << 30
        case 4:
            flat[[10, 900]] = flat[[900, 10]]
        case 5:
            one, other = ((flat & 4) == 0).nonzero()[0], ((flat & 4) != 0).nonzero()[0]
            flat[one] |= 4
            flat[other] &= ~4
        case 6:
            bias[2] ^= 1 << 12
        case 7:
            bias[rank] ^= 1 << 9
    return tensors


def broken(kind, ranks):
    """The ranks to which it happens: each time another; none where there is one rank."""
    number = KINDS.index(kind)
    if number == 0 or ranks == 1:
        return []
    return list(range(1, ranks)) if number == 7 else [(number + 1) % ranks]


def outvoted_in(kind, ranks):
    found = broken(kind, ranks)
    return found if 2 * (ranks - len(found)) > ranks else list(range(ranks))


def elements(shape):
    return torch.Size(shape).numel()


def listed(ranks):
    """The ranks in words, so that whatever an attempt returns can be shown."""
    try:
        return ", ".join(str(int(rank)) for rank in ranks) or "none"
    except TypeError:
        return repr(ranks)
