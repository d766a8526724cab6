"""All-reduce, reduce-scatter and all-gather from sends and receives, on real ranks.

No two ranks and no two elements of the inputs are equal, and most lengths do not divide.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

import dplab
from dplab import run
from dplab.measure import CallLog
from dplab.parallel import (
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)

LENGTHS = [0, 1, 3, 5, 13, 4099]
CASES = [(length, torch.float64) for length in LENGTHS] + [
    (13, dtype) for dtype in (torch.bfloat16, torch.int64, torch.complex64)]
MESSAGE = 840  # elements; up to eight ranks divide them


def ring_halves(tensor, group=None):
    ring_all_gather(ring_reduce_scatter(tensor, group), tensor, group)


def ring_halves_elsewhere(tensor, group=None):
    """The chunk lies outside of the output, in an odd shape."""
    chunk = ring_reduce_scatter(tensor.clone(), group)
    ring_all_gather(chunk.clone().unsqueeze(1), tensor.fill_(7), group)


WAYS = [naive_all_reduce, tree_all_reduce, ring_all_reduce, ring_halves, ring_halves_elsewhere]


def part(rank, length, dtype=torch.float64):
    """A rank's input (length,): of random size and sign, or whole numbers from 0 to 30."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(31, (length,), generator=generator).to(dtype)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def assert_is_sum(tensor, ranks, length):
    """Each element is off by no more than N−1 roundings in the tensor's own dtype can explain."""
    parts = torch.stack([part(rank, length, tensor.dtype) for rank in range(ranks)])
    wide = parts.to(torch.complex128 if tensor.is_complex() else torch.float64)
    inexact = tensor.is_floating_point() or tensor.is_complex()
    rounding = torch.finfo(tensor.dtype).eps if inexact else 0.0
    error = (tensor.to(wide.dtype) - wide.sum(0)).abs()
    assert bool((error <= (ranks - 1) * rounding * wide.abs().sum(0)).all()), (ranks, length)


def summed(cases):
    """By way, length and dtype, the sum; and the bytes that each way sends for one message."""
    rank, ranks, found, sent = dist.get_rank(), dist.get_world_size(), {}, {}
    for way, (length, dtype) in itertools.product(WAYS, cases):
        found[way.__name__, length, dtype] = tensor = part(rank, length, dtype).to(dplab.device())
        way(tensor)
        assert tensor.dtype == dtype
    for length, dtype in cases:
        chunk = ring_reduce_scatter(part(rank, length, dtype).to(dplab.device()))
        whole = found["ring_all_reduce", length, dtype]
        assert torch.equal(chunk, whole.tensor_split(ranks)[rank])
    for way in WAYS:
        with CallLog() as log:
            way(torch.ones(MESSAGE, dtype=torch.uint8, device=dplab.device()))
        sent[way.__name__] = log.bytes("send")
    return found, sent


def assert_sums(results):
    (first, _), *others = results
    for (way, length, dtype), tensor in first.items():
        assert_is_sum(tensor, len(results), length)
        for other, _ in others:
            assert torch.equal(other[way, length, dtype], tensor), (way, length, dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_has_the_sum_to_the_last_bit_and_sends_what_it_must(ranks):
    results = run(summed, ranks, CASES, backend="gloo")
    assert_sums(results)
    ring = 2 * (ranks - 1) * MESSAGE // ranks
    for _, sent in results:
        assert sent.pop("naive_all_reduce") == (ranks - 1) * MESSAGE
        assert sent.pop("tree_all_reduce") <= 3 * MESSAGE
        assert set(sent.values()) == {ring}


@pytest.mark.gpu
def test_on_every_gpu():
    assert_sums(run(summed, torch.cuda.device_count(), [(n, torch.float32) for n in LENGTHS]))


def odd_tensors(rank):
    """Name: (what is reduced, the memory that it is part of). No two share memory."""
    def memory(*shape):
        return part(rank, 154)[:torch.Size(shape).numel()].view(shape)

    wide, first, last = memory(7, 11, 2), memory(7, 11, 2), memory(7, 11, 2)
    images = memory(2, 3, 4, 6).to(memory_format=torch.channels_last)
    transposed, scalar = memory(14, 11).t(), memory(5)
    return {"every other column": (wide[:, ::2, 1], wide), "transposed": (transposed, transposed),
            "channels last": (images, images), "no dimension": (scalar[3], scalar),
            "no element": (first[:0], first), "three dimensions": (last[2:], last)}


def reduced_views(way):
    tensors = odd_tensors(dist.get_rank())
    if dist.get_rank() == 0:  # the same values in other strides, which must make no difference
        images = tensors["channels last"][0].contiguous()
        tensors["channels last"] = (images, images)
    for tensor, _ in tensors.values():
        way(tensor)
    return {name: memory for name, (_, memory) in tensors.items()}


def test_views_are_reduced_in_place_and_their_surroundings_stay():
    ranks = run(lambda: [reduced_views(way) for way in WAYS], 3, backend="gloo")
    inputs = [odd_tensors(rank) for rank in range(3)]
    sums = {name: sum(tensors[name][0] for tensors in inputs) for name in inputs[0]}
    for expected, memories_of in zip(inputs, ranks, strict=True):
        for name, (view, memory) in expected.items():
            view.copy_(sums[name])
            for way, memories in zip(WAYS, memories_of, strict=True):
                torch.testing.assert_close(memories[name], memory, msg=lambda text, name=name,
                                           way=way: f"{way.__name__}, {name}: {text}")


def in_two_groups(way):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3, 4])]
    tensor = part(rank, 11)
    ours, theirs = groups if rank in (0, 2) else reversed(groups)
    way(tensor, group=ours)
    with pytest.raises(ValueError, match=f"rank {rank} is not in this group"):
        way(tensor, group=theirs)
    return tensor


def test_in_a_group_only_its_ranks_take_part():
    results = run(lambda: [in_two_groups(way) for way in WAYS], 5, backend="gloo")
    for members in ([0, 2], [1, 3, 4]):
        expected = sum(part(rank, 11) for rank in members)
        for tensor in itertools.chain(*(results[rank] for rank in members)):
            torch.testing.assert_close(tensor, expected)


def what_is_refused():
    """What autograd would record, and a chunk of the wrong size or dtype."""
    rank = dist.get_rank()
    for way in [*WAYS, ring_reduce_scatter]:
        leaf = torch.full((3,), rank + 1.0, requires_grad=True)
        with pytest.raises(ValueError, match=r"requires grad.*detach"):
            way(leaf)
        with torch.no_grad():
            summed = way(leaf)
        assert set((leaf if summed is None else summed).tolist()) == {3.0}, way
    for chunk in (torch.ones(4), torch.ones(3 - rank, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"chunk of 5 elements .* on 2 ranks has [23]"):
            ring_all_gather(chunk, torch.empty(5))


def test_what_cannot_be_summed_is_refused():
    run(what_is_refused, 2, backend="gloo")
