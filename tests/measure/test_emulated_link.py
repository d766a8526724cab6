"""The emulated link: the same values as gloo, no earlier than the link allows, and honest failures.

Times are bounded from below only: how much longer a busy machine takes is not the link's doing.
"""

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

from dplab import run
from dplab.measure import CallLog, EmulatedLink
from dplab.parallel import ring_all_reduce, ring_reduce_scatter, tree_all_reduce
from dplab.predict import catalogue, cost
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


def all_reduce():
    x = numbers()
    dist.all_reduce(x)
    return x


def maximum():
    x = numbers().to(torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def broadcast():
    x = numbers()
    dist.broadcast(x, src=dist.get_world_size() - 1)
    return x


def reduce():
    x = numbers()
    dist.reduce(x, dst=0)
    return x if dist.get_rank() == 0 else None


def all_gather():
    parts = [torch.empty(LENGTH) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, numbers())
    return parts


def all_gather_single():
    whole = torch.empty(LENGTH * dist.get_world_size())
    dist.all_gather_single(whole, numbers())
    return whole


def reduce_scatter_single():
    part = torch.empty(LENGTH // dist.get_world_size())
    dist.reduce_scatter_single(part, numbers())
    return part


def reduce_scatter():
    world_size = dist.get_world_size()
    part = torch.empty(LENGTH // world_size)
    dist.reduce_scatter(part, list(numbers().chunk(world_size)))
    return part


def gather():
    parts = [torch.empty(LENGTH) for _ in range(dist.get_world_size())]
    dist.gather(numbers(), parts if dist.get_rank() == 0 else None, dst=0)
    return parts if dist.get_rank() == 0 else None


def scatter():
    world_size = dist.get_world_size()
    part = torch.empty(LENGTH // world_size)
    parts = list(numbers().chunk(world_size)) if dist.get_rank() == 0 else None
    dist.scatter(part, parts, src=0)
    return part


def all_to_all():
    received = torch.empty(LENGTH)
    dist.all_to_all_single(received, numbers())
    return received


def batched_neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(LENGTH)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, numbers(), (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size)]):
        work.wait()
    return received


def from_anyone():
    if dist.get_rank():
        dist.send(numbers(), 0)
        return None
    found = {}
    for _ in range(dist.get_world_size() - 1):
        received = torch.empty(LENGTH)
        found[dist.recv(received)] = received
    return [found[rank] for rank in sorted(found)]


def objects():
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    return found


def ring():
    x = numbers()
    ring_all_reduce(x)
    return x


def half_a_ring():
    return ring_reduce_scatter(numbers())


def tree():
    x = numbers()
    tree_all_reduce(x)
    return x


def within_a_group():
    group = dist.new_group([0, 1])
    x = numbers()
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)
    return x


ACTIONS = [all_reduce, maximum, broadcast, reduce, all_gather, all_gather_single, reduce_scatter,
           reduce_scatter_single, gather, scatter, all_to_all, batched_neighbours, from_anyone,
           objects, ring, half_a_ring, tree, within_a_group]


def several(actions):
    return [action() for action in actions]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_are_those_of_gloo(ranks):
    plain = run(several, ranks, ACTIONS, backend="gloo")
    emulated = run(several, ranks, ACTIONS, link=FAST)
    for rank in range(ranks):
        for action, right, found in zip(ACTIONS, plain[rank], emulated[rank], strict=True):
            if isinstance(right, torch.Tensor):
                right, found = [right], [found]
            assert type(right) is type(found), action
            for a, b in zip(right or [], found or [], strict=True):
                equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                assert equal, (rank, action)


def timed(actions):
    return [seconds_of(action)[1] for action in actions]


@pytest.mark.parametrize("ranks", [3])
def test_no_collective_ends_before_the_link_allows(ranks):
    least = {
        all_reduce: ("ring all-reduce", 1), broadcast: ("pipelined broadcast", 1),
        all_gather_single: ("ring all-gather", ranks), all_gather: ("ring all-gather", ranks),
        reduce_scatter_single: ("ring reduce-scatter", 1),
        reduce_scatter: ("ring reduce-scatter", 1), all_to_all: ("direct all-to-all", 1),
        ring: ("ring all-reduce", 1), half_a_ring: ("ring reduce-scatter", 1)}
    link = cost.Link("slow", SLOW.bandwidth, SLOW.latency)
    for times in run(timed, ranks, list(least), link=SLOW):
        for seconds, (action, (algorithm, parts)) in zip(times, least.items(), strict=True):
            needed = cost.seconds(algorithm, ranks, 4 * LENGTH * parts, link)
            assert seconds > needed - SLACK, action


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
def test_wrappers_train_alike_and_slower(wrap):
    link = EmulatedLink(bandwidth=1e9, latency=0.05)
    plain, slow = run(train, 2, wrap, backend="gloo"), run(train, 2, wrap, link=link)
    for (weights, _, _), (same, seconds, _) in zip(plain, slow, strict=True):
        assert all(map(torch.equal, weights, same))
        assert seconds > 3 * 2 * 0.05 - SLACK


def test_the_call_log_sees_what_ddps_reducer_launches():
    for _, _, log in run(train, 2, DistributedDataParallel, link=FAST):
        weights = sum(parameter.numel() for parameter in model_of(0).parameters())
        assert log.bytes("all_reduce") == 3 * 4 * weights


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


def test_presets_carry_published_numbers():
    link = EmulatedLink.of("400 Gb/s")
    assert (link.bandwidth, link.latency) == (50e9, catalogue.LINKS["400 Gb/s"].latency)
    assert str(link) == "emulated 400 Gb/s: 50 GB/s, 14 µs"
    with pytest.raises(ValueError, match="NVLink 4"):
        EmulatedLink.of("NVLink 44")


def test_what_cannot_be_emulated_is_refused():
    for arguments in ((0,), (1e9, -1e-6)):
        with pytest.raises(ValueError, match=r"bandwidth above 0|latency is 0"):
            EmulatedLink(*arguments)
    with pytest.raises(ValueError, match="backend='gloo'"):
        FAST.install("nccl")
