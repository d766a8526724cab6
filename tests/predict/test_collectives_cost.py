"""What the course's collectives cost: bytes on the wire, and who sends how much to whom."""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import MIB, least_on_the_wire, several, world_sizes

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import (
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)

SIZE = 24 * MIB


def metered():
    """Bytes that each rank sends in each of the collectives, of a tensor of SIZE."""
    tensor = torch.ones(SIZE // 4)
    calls = {
        "naive": lambda: naive_all_reduce(tensor), "tree": lambda: tree_all_reduce(tensor),
        "ring": lambda: ring_all_reduce(tensor), "scatter": lambda: ring_reduce_scatter(tensor),
        "gather": lambda: ring_all_gather(
            tensor.tensor_split(dist.get_world_size())[dist.get_rank()].clone(), tensor)}
    ring_all_reduce(torch.ones(8))  # connections are made on first use
    return {name: least_on_the_wire(call) for name, call in calls.items()}


@functools.cache
def measured_bytes(world_size):
    return run(metered, world_size, backend="gloo")[0]


@pytest.mark.slow
@pytest.mark.alone
@several
@pytest.mark.parametrize(("name", "factor"), [
    ("naive", lambda n: n - 1), ("tree", lambda n: 2 * (n - 1) / n),
    ("ring", lambda n: 2 * (n - 1) / n), ("scatter", lambda n: (n - 1) / n),
    ("gather", lambda n: (n - 1) / n)], ids=["naive", "tree", "ring", "scatter", "gather"])
def test_bytes_on_the_wire_are_what_arithmetic_says(name, factor, world_size):
    assert measured_bytes(world_size)[name] == pytest.approx(factor(world_size) * SIZE, rel=0.03)


def logged(function, length):
    tensor = torch.ones(length)
    with CallLog() as log:
        function(tensor)
    return log.calls


def sends(calls):
    """(receiver, bytes) of each send. Nothing but sends and receives may be among the calls."""
    assert {call.operation for call in calls} <= {"send", "recv"}
    return [(call.peer, call.bytes) for call in calls if call.operation == "send"]


@world_sizes
def test_a_ring_sends_one_chunk_a_step_to_its_right(world_size):
    length = 1003
    sizes = [4 * len(chunk) for chunk in torch.empty(length).tensor_split(world_size)]
    around = [[(rank - step) % world_size for step in range(world_size - 1)]
              for rank in range(world_size)]
    for rank, calls in enumerate(run(logged, world_size, ring_all_reduce, length, backend="gloo")):
        right = (rank + 1) % world_size
        scattered = [(right, sizes[chunk]) for chunk in around[(rank - 1) % world_size]]
        gathered = [(right, sizes[chunk]) for chunk in around[rank]]
        assert sends(calls) == scattered + gathered
        assert len(calls) == 4 * (world_size - 1)


def test_a_tree_sends_up_once_and_down_to_two_children():
    results = run(logged, 8, tree_all_reduce, 100, backend="gloo")
    assert [[peer for peer, nbytes in sends(calls) if nbytes == 400] for calls in results] == [
        [1, 2], [0, 3, 4], [0, 5, 6], [1, 7], [1], [2], [2], [3]]
