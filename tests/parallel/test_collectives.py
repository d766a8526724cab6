"""All-reduce, reduce-scatter and all-gather from sends and receives, on real ranks.

No two ranks and no two elements of the inputs are equal, and most lengths do not divide.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import world_sizes

import dplab
from dplab import run
from dplab.parallel import (
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)

LENGTHS = [0, 1, 3, 5, 8, 13, 4099]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.complex64]
ALL_REDUCES = [naive_all_reduce, tree_all_reduce, ring_all_reduce]


def part(rank, length, dtype=torch.float64):
    """A rank's input (length,): of random size and sign, or whole numbers from 0 to 30."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(31, (length,), generator=generator).to(dtype)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def exact_sum(world_size, length, dtype=torch.float64):
    """The sum of all ranks' inputs (length,), and of their absolute values, in float64."""
    parts = torch.stack([part(rank, length, dtype) for rank in range(world_size)])
    wide = parts.to(torch.complex128 if dtype.is_complex else torch.float64)
    return wide.sum(0), wide.abs().sum(0)


def assert_is_sum(tensor, world_size, length, cut=lambda tensor: tensor):
    """Each element is off by no more than N−1 roundings in the tensor's own dtype can explain."""
    exact, absolute = (cut(total) for total in exact_sum(world_size, length, tensor.dtype))
    assert tensor.shape == exact.shape
    is_inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    rounding = torch.finfo(tensor.dtype).eps if is_inexact else 0.0
    error = (tensor.to(exact.dtype) - exact).abs()
    assert bool((error <= (world_size - 1) * rounding * absolute).all()), (length, tensor, exact)


def assert_same_on_all_ranks(results):
    for others in results[1:]:
        for tensor, first in zip(others, results[0], strict=True):
            assert tensor.dtype == first.dtype
            assert torch.equal(tensor, first)


# --- one run of the ranks has all that follows --------------------------------------------------

def all_sums():
    """By dtype and all-reduce, the sums for each length; then the same of the ring's first half."""
    sums, rank = {}, dist.get_rank()
    for dtype in DTYPES:
        for all_reduce in ALL_REDUCES:
            sums[dtype, all_reduce.__name__] = [part(rank, length, dtype) for length in LENGTHS]
            for tensor in sums[dtype, all_reduce.__name__]:
                all_reduce(tensor)
    chunks = {dtype: [ring_reduce_scatter(part(rank, length, dtype)) for length in LENGTHS]
              for dtype in DTYPES}
    return sums, chunks, gathered()


def gathered():
    """From chunks that lie elsewhere, in an odd shape, and from chunks already in place."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outputs = []
    for length in LENGTHS:
        full = part(7, length)
        output = torch.full((length,), torch.nan, dtype=torch.float64)
        ring_all_gather(full.tensor_split(world_size)[rank].clone().unsqueeze(1), output)
        in_place = torch.full((length,), torch.nan, dtype=torch.float64)
        own = in_place.tensor_split(world_size)[rank]
        own.copy_(full.tensor_split(world_size)[rank])
        ring_all_gather(own, in_place)
        outputs += [output, in_place]
    return outputs


on_ranks = functools.cache(lambda world_size: run(all_sums, world_size, backend="gloo"))


@world_sizes
def test_an_all_reduce_sums_tensors_of_any_length_and_dtype(world_size):
    results = [sums for sums, _, _ in on_ranks(world_size)]
    for case in results[0]:
        assert_same_on_all_ranks([sums[case] for sums in results])
        for tensor, length in zip(results[0][case], LENGTHS, strict=True):
            assert tensor.dtype == case[0]
            assert_is_sum(tensor, world_size, length)


@world_sizes
def test_rank_r_gets_chunk_r_of_the_sum(world_size):
    for rank, (_, chunks, _) in enumerate(on_ranks(world_size)):
        for dtype in DTYPES:
            for chunk, length in zip(chunks[dtype], LENGTHS, strict=True):
                assert_is_sum(chunk, world_size, length,
                              lambda total, rank=rank: total.tensor_split(world_size)[rank])


@world_sizes
def test_all_gather_puts_the_chunks_together(world_size):
    expected = [part(7, length) for length in LENGTHS for _ in range(2)]
    assert_same_on_all_ranks([expected, *(outputs for _, _, outputs in on_ranks(world_size))])


def test_all_gather_refuses_a_chunk_that_is_no_part_of_the_output():
    def refused():
        for chunk in (torch.ones(4), torch.ones(3 - dist.get_rank(), dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"chunk of 5 elements .* on 2 ranks has [23]"):
                ring_all_gather(chunk, torch.empty(5))

    run(refused, 2, backend="gloo")


# --- shapes, strides, autograd, groups ----------------------------------------------------------

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


def reduced_views(all_reduce):
    tensors = odd_tensors(dist.get_rank())
    if dist.get_rank() == 0:  # the same values in other strides, which must make no difference
        images = tensors["channels last"][0].contiguous()
        tensors["channels last"] = (images, images)
    for tensor, _ in tensors.values():
        all_reduce(tensor)
    return {name: memory for name, (_, memory) in tensors.items()}


def test_views_are_reduced_in_place_and_their_surroundings_stay():
    ranks = run(lambda: [reduced_views(all_reduce) for all_reduce in ALL_REDUCES], 3,
                backend="gloo")
    for rank, by_each in enumerate(ranks):
        expected = odd_tensors(rank)
        others = [odd_tensors(other) for other in range(3)]
        for name, (view, memory) in expected.items():
            view.copy_(torch.stack([tensors[name][0] for tensors in others]).sum(0))
            for all_reduce, memories in zip(ALL_REDUCES, by_each, strict=True):
                torch.testing.assert_close(memories[name], memory,
                                           msg=lambda text, name=name, all_reduce=all_reduce:
                                           f"{all_reduce.__name__}, {name}: {text}")


def halves_of_a_view():
    wide = part(dist.get_rank(), 60).view(10, 6)
    chunk = ring_reduce_scatter(wide.t())
    output = torch.zeros(10, 12, dtype=torch.float64)
    ring_all_gather(chunk, output.t()[::2])
    return [output]


def test_the_halves_of_the_ring_take_views():
    results = run(halves_of_a_view, 4, backend="gloo")
    expected = torch.zeros(10, 12, dtype=torch.float64)
    expected[:, ::2] = exact_sum(4, 60)[0].view(10, 6)
    assert_same_on_all_ranks(results)
    torch.testing.assert_close(results[0][0], expected)


def test_what_autograd_would_record_is_refused():
    def refused(function):
        with pytest.raises(ValueError, match=r"requires grad.*detach"):
            function(torch.ones(3, requires_grad=True))
        leaf = torch.full((3,), dist.get_rank() + 1.0, requires_grad=True)
        with torch.no_grad():
            returned = function(leaf)
        return (leaf if returned is None else returned).detach()

    functions = [*ALL_REDUCES, ring_reduce_scatter]
    for tensors in run(lambda: [refused(function) for function in functions], 3, backend="gloo"):
        for function, tensor in zip(functions, tensors, strict=True):
            assert set(tensor.tolist()) == {6.0}, function


def in_two_groups(function):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3, 4])]
    tensor = part(rank, 11)
    ours, theirs = groups if rank in (0, 2) else reversed(groups)
    function(tensor, group=ours)
    with pytest.raises(ValueError, match=f"rank {rank} is not in this group"):
        function(tensor, group=theirs)
    return tensor


def ring_halves(tensor, group=None):
    ring_all_gather(ring_reduce_scatter(tensor.clone(), group), tensor, group)


def test_in_a_group_only_its_ranks_take_part():
    functions = [*ALL_REDUCES, ring_halves]
    results = run(lambda: [in_two_groups(function) for function in functions], 5, backend="gloo")
    for members in ([0, 2], [1, 3, 4]):
        expected = torch.stack([part(rank, 11) for rank in members]).sum(0)
        for rank in members:
            for tensor in results[rank]:
                torch.testing.assert_close(tensor, expected)


# --- elsewhere ----------------------------------------------------------------------------------

def on_gpus():
    results = []
    for all_reduce in [*ALL_REDUCES, ring_halves]:
        for length in LENGTHS:
            results.append(part(dist.get_rank(), length, torch.float32).to(dplab.device()))
            all_reduce(results[-1])
    return results


@pytest.mark.gpu
def test_on_every_gpu():
    count = torch.cuda.device_count()
    results = run(on_gpus, count)
    assert_same_on_all_ranks(results)
    for tensor, length in zip(results[0], LENGTHS * 4, strict=True):
        assert_is_sum(tensor, count, length)
