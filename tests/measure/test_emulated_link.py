"""The emulated link: the same values as gloo, no earlier than the link allows, and honest failures.

Times are bounded from below only: how much longer a busy machine takes is not the link's doing.
"""

import functools
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from dplab import run
from dplab.measure import CallLog, EmulatedLink
from dplab.parallel import ring_all_reduce, ring_reduce_scatter, tree_all_reduce
from dplab.predict import cost
from dplab.predict.step import COMMUNICATION, COMPUTE, Span

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTH = 1_200  # float32, which 1 to 4 ranks divide equally
FAST = EmulatedLink(bandwidth=1e9, latency=1e-5)
SLOW = EmulatedLink(bandwidth=1e6, latency=0.02)
SLACK = 1e-3  # seconds by which two looks at a clock may differ


def numbers():
    return torch.arange(float(LENGTH)) * (dist.get_rank() + 1) + dist.get_rank() ** 2


def seconds_of(action):
    dist.barrier()
    start = time.monotonic()
    value = action()
    return value, time.monotonic() - start


def neighbours(received, sent):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size)]):
        work.wait()


def from_anyone():
    if dist.get_rank():
        return dist.send(numbers(), 0)
    received = torch.empty(dist.get_world_size() - 1, LENGTH)
    return sorted((dist.recv(each), each.tolist()) for each in received)


def within_a_group(x):
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)


def actions():
    """By name, what all ranks do together: a function and its arguments, among them outputs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, part, whole = numbers, torch.zeros(LENGTH // ranks), torch.zeros(LENGTH * ranks)
    chunks, many = list(x().chunk(ranks)), torch.zeros(ranks, LENGTH)
    return {
        "all_reduce": (dist.all_reduce, x()),
        "maximum": (dist.all_reduce, x().double(), dist.ReduceOp.MAX),
        "broadcast": (dist.broadcast, x(), ranks - 1),
        "reduce": (lambda x: dist.reduce(x, dst=0) or (x.zero_() if rank else x), x()),
        "all_gather": (dist.all_gather, list(many.clone()), x()),
        "all_gather_single": (dist.all_gather_single, whole, x()),
        "reduce_scatter": (dist.reduce_scatter, part.clone(), chunks),
        "reduce_scatter_single": (dist.reduce_scatter_single, part.clone(), x()),
        "gather": (dist.gather, x(), None if rank else list(many.clone()), 0),
        "scatter": (dist.scatter, part.clone(), None if rank else chunks, 0),
        "all_to_all": (dist.all_to_all_single, torch.zeros(LENGTH), x()),
        "neighbours": (neighbours, torch.zeros(LENGTH), x()),
        "from_anyone": (from_anyone,),
        "objects": (dist.all_gather_object, [None] * ranks, {"rank": rank}),
        "ring": (ring_all_reduce, x()),
        "half a ring": (ring_reduce_scatter, x()),
        "tree": (tree_all_reduce, x()),
        "within a group": (within_a_group, x()),
    }


def run_all():
    """For each action its result and arguments, of which some are outputs; and its seconds."""
    found = {}
    for name, (action, *arguments) in actions().items():
        value, seconds = seconds_of(functools.partial(action, *arguments))
        found[name] = tree_leaves((value, arguments)), seconds
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_are_those_of_gloo(ranks):
    plain, emulated = (run(run_all, ranks, **how) for how in ({"backend": "gloo"}, {"link": FAST}))
    for rank, (right, found) in enumerate(zip(plain, emulated, strict=True)):
        for name in right:
            for a, b in zip(right[name][0], found[name][0], strict=True):
                equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                assert equal, (rank, name)


def test_no_collective_ends_before_the_link_allows():
    least = {
        "all_reduce": ("ring all-reduce", 1), "broadcast": ("pipelined broadcast", 1),
        "all_gather_single": ("ring all-gather", 3), "all_gather": ("ring all-gather", 3),
        "reduce_scatter_single": ("ring reduce-scatter", 1),
        "reduce_scatter": ("ring reduce-scatter", 1), "all_to_all": ("direct all-to-all", 1),
        "ring": ("ring all-reduce", 1), "half a ring": ("ring reduce-scatter", 1)}
    link = cost.Link("slow", SLOW.bandwidth, SLOW.latency)
    for found in run(run_all, 3, link=SLOW):
        for name, (algorithm, parts) in least.items():
            needed = cost.seconds(algorithm, 3, 4 * LENGTH * parts, link)
            assert found[name][1] > needed - SLACK, name


def wait_for_a_late_rank():
    """When this rank came, and when it went on, by the clock that all processes share."""
    dist.barrier()
    time.sleep(0.3 * dist.get_rank())
    came = time.monotonic()
    dist.all_reduce(numbers())
    return came, time.monotonic()


def test_the_time_counts_from_the_last_rank_on():
    link = EmulatedLink(bandwidth=1e9, latency=0.1)
    came, went_on = zip(*run(wait_for_a_late_rank, 3, link=link), strict=True)
    assert max(came) - min(came) > 0.1
    assert min(went_on) - max(came) > 0.1 * 4 - SLACK


def three_at_once():
    dist.barrier()
    start = time.monotonic()
    works = [dist.all_reduce(numbers(), async_op=True) for _ in range(3)]
    launched = time.monotonic() - start
    pending = works[-1].is_completed()
    works[-1].wait()
    last = time.monotonic() - start
    return launched, pending, last, all(work.is_completed() for work in works)


@pytest.mark.slow
def test_collectives_in_flight_share_the_link_and_block_nobody():
    link = EmulatedLink(bandwidth=1e12, latency=0.4)
    for launched, pending, last, complete in run(three_at_once, 2, link=link):
        assert launched < 0.8 and not pending
        assert last > 3 * 2 * 0.4 - SLACK and complete


def test_a_receive_that_comes_late_holds_no_collective_up():
    def work():
        received, rank = torch.empty(LENGTH), dist.get_rank()
        if rank == 0:
            pending = dist.irecv(received, 1)
        dist.all_reduce(numbers())
        if rank == 0:
            dist.send(numbers(), 1)
            pending.wait()
        else:
            dist.recv(received, 0)
            dist.send(numbers(), 0)
        return received[5].item()

    assert run(work, 2, link=FAST, timeout=20) == [11.0, 5.0]


def model_of(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 3))


def train(wrap, steps=3):
    model = wrap(model_of(dist.get_rank() if wrap is DistributedDataParallel else 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CallLog() as log:
        dist.barrier()
        start = time.monotonic()
        for step in range(steps):
            torch.manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(7, 31)).square().mean().backward()
            optimizer.step()
        seconds = time.monotonic() - start
    weights = [parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
               for parameter in model.parameters()]
    return [weight.detach() for weight in weights], seconds, log


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrappers_train_alike_and_slower_and_calls_of_ddps_reducer_are_seen(wrap):
    link = EmulatedLink(bandwidth=1e9, latency=0.05)
    plain, slow = run(train, 2, wrap, backend="gloo"), run(train, 2, wrap, link=link)
    numbers_sent = 3 * sum(parameter.numel() for parameter in model_of(0).parameters())
    for (weights, _, _), (same, seconds, log) in zip(plain, slow, strict=True):
        assert all(map(torch.equal, weights, same))
        assert seconds > 3 * 2 * 0.05 - SLACK
        assert wrap is fully_shard or log.bytes("all_reduce") == 4 * numbers_sent


def disagrees():
    dist.all_reduce(numbers()[: LENGTH - dist.get_rank()])


def test_a_mismatch_is_reported_as_without_it():
    error = failure(disagrees, 2, link=FAST)
    assert error.kind == "mismatched" and "the shapes do not agree" in str(error)


def test_threads_that_wake_late_change_nothing_of_what_the_link_carries():
    def step(late):
        return [[Span("backward", COMPUTE, 0, 0.014),
                 Span("all_reduce", COMMUNICATION, 0.014, 0.5 + late * rank, 22_000, 0.002 * rank),
                 Span("optimizer", COMPUTE, 0.6, 0.7)] for rank in range(2)]

    on_time, late = (SLOW.carried(step(late)) for late in (0, 0.011))
    assert on_time == late
    assert on_time[1][1].start == pytest.approx(0.016)
    assert on_time[1][1].seconds == pytest.approx(SLOW.seconds("all_reduce", 2, 22_000))


def test_what_cannot_be_emulated_is_refused():
    for arguments in ((0,), (1e9, -1e-6)):
        with pytest.raises(ValueError, match=r"bandwidth above 0|latency is 0"):
            EmulatedLink(*arguments)
    with pytest.raises(ValueError, match="backend='gloo'"):
        FAST.install("nccl")
